"""No tensor meets one of another device, and few are copied back: shown without a GPU, on the device of pretend.py."""

import copy

import pytest
import torch
from torch.utils._pytree import tree_map_only

import train
from extras.decoding.decoder import Decoder
from extras.decoding.ngrams import count_ngrams
from helpers import random_model, tiny_run
from model import GPTConfig
from pretend import DEVICE, PretendDevice
from train import TrainState

# untied, because moving a model to the pretend device makes two parameters of a shared one
LEARNED = dict(n_kv_head=1, bias=True, tie_weights=False)
ROPE = dict(pos_emb="rope", activation="swiglu", qk_norm=True, tie_weights=False)
IDX = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])


@pytest.fixture
def device(monkeypatch):
    for name in ("tensor", "as_tensor"):  # they move their result where no mode sees it
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda x, device=None, make=make, **kw: make(x, **kw).to(device or "cpu"))
    with PretendDevice() as mode:
        yield mode


def both(network):
    """Return a random model on the CPU, and the same model on DEVICE."""
    model = random_model(GPTConfig(block_size=24, vocab_size=65, n_layer=2, n_head=4, n_embd=32, **network))
    return model, copy.deepcopy(model).to(DEVICE)


def test_the_pretend_device_refuses_tensors_of_the_cpu(device):
    ours = torch.ones(3, device=DEVICE)
    assert (ours + 1).device == DEVICE and ours.tolist() == [1, 1, 1] and device.reads == [3]
    with pytest.raises(RuntimeError, match="of the CPU"):
        ours + torch.ones(3)


@pytest.mark.parametrize(
    "network, settings",
    [(LEARNED, dict(seed=1, top_p=0.8, temperature=1.2)), (ROPE, dict(seed=2, overflow="slide", top_k=9))],
)
def test_every_loop_stays_on_its_device(network, settings, device):
    here, there = both(network)
    expected = here.generate(IDX, 30, **settings).tolist()
    for kv_cache in (True, False):
        got = there.generate(IDX.to(DEVICE), 30, kv_cache=kv_cache, **settings)
        assert got.device == DEVICE and got.tolist() == expected
    for ngrams in (None, count_ngrams(IDX.flatten().tolist() * 9, 65, 100)):
        device.reads.clear()
        got = Decoder(there, "ngram", ngrams).generate(IDX.to(DEVICE), 30, **settings)
        assert got.device == DEVICE
        assert max(device.reads) <= (2 * 4 * 65 if ngrams else 2 * 4)  # tokens, and noise for the table
        assert got.tolist() == expected


def test_prompts_of_different_lengths(device):
    here, there = both(ROPE)
    ragged = [IDX[0], IDX[1, :2]]
    got = Decoder(there).generate([row.to(DEVICE) for row in ragged], 10, seed=1)
    assert [row.tolist() for row in got] == [row.tolist() for row in Decoder(here).generate(ragged, 10, seed=1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_training_and_a_resume(dtype, device):
    """float16 has a scaler, whose first steps may be skipped. Muon leaves vectors and embeddings to AdamW."""

    def new_state(where):
        config, data, state = tiny_run(optimizer="muon", tie_weights=False, mtp_weight=0.3)
        return config, data, TrainState(state.model.to(where), config, where, dtype)

    def steps(config, data, state):
        results = [train.train_step(config, data, state, measure=True) for _ in range(3)]
        state.step += 3
        return [x.item() for result in results for x in result]

    here, there = new_state(torch.device("cpu")), new_state(DEVICE)
    assert steps(*there) == pytest.approx(steps(*here), rel=1e-4 if dtype == torch.float32 else 0.05)

    content = there[2].state_dict(with_optimizers=True)
    content = tree_map_only(torch.Tensor, lambda x: x.cpu().clone(), content)  # as a checkpoint loads it
    resumed = new_state(DEVICE)
    resumed[2].model.load_state_dict(content.pop("model"))
    resumed[2].load_training(content | {"path": "last.pt"})
    assert steps(*resumed) == steps(*there)
