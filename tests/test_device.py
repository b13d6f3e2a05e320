"""No tensor meets one of another device: shown without a GPU, on the device of pretend.py."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from pretend import DEVICE, IDX, LEARNED, ROPE, both, pretend_device
from train import TrainingLoss, configure_optimizers, evaluate, get_batch, make_config


@pytest.fixture
def device():
    with pretend_device() as mode:
        yield mode


def test_the_pretend_device_refuses_tensors_of_the_cpu(device):
    ours = torch.ones(3, device=DEVICE)
    assert (ours + 1).device == DEVICE and ours.tolist() == [1, 1, 1] and device.reads == [3]
    with pytest.raises(RuntimeError, match="of the CPU"):
        ours + torch.ones(3)


@pytest.mark.parametrize(
    "network, settings",
    [(LEARNED, dict(seed=1, top_p=0.8, temperature=1.2)), (ROPE, dict(seed=2, overflow="slide", top_k=9))],
)
def test_the_loop_stays_on_its_device(network, settings, device):
    here, there = both(network)
    expected = here.generate(IDX, 30, **settings).tolist()
    for kv_cache in (True, False):
        got = there.generate(IDX.to(DEVICE), 30, kv_cache=kv_cache, **settings)
        assert got.device == DEVICE and got.tolist() == expected


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_training(optimizer, device):
    """Muon leaves vectors and embeddings to AdamW."""
    config = make_config(dict(optimizer=optimizer, batch_size=2, block_size=16, grad_clip=1.0))
    ids = np.random.default_rng(0).integers(65, size=500)

    def losses(model):
        where = model.lm_head.weight.device
        loss = TrainingLoss(model.train(), config, ids)
        optimizers = configure_optimizers(loss.parameters(), model, config, where)
        for step in range(3):
            total, reported = loss(*get_batch(ids, config, step, where), torch.tensor(1.0))
            total.backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
            yield reported.item()
        yield evaluate(model, ids, 99, nullcontext())

    here, there = both(ROPE)
    assert list(losses(there)) == pytest.approx(list(losses(here)), rel=1e-4)
