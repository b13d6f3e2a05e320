"""No tensor meets one of another device: shown without a GPU, on the device of pretend.py."""

import pytest
import torch
from torch.utils._pytree import tree_map_only

from helpers import tiny_run
from pretend import DEVICE, IDX, LEARNED, ROPE, both, pretend_device
from train import TrainState, train_step


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_training_and_a_resume(dtype, device):
    """float16 has a scaler, whose first steps may be skipped. Muon leaves vectors and embeddings to AdamW."""

    def new_state(where):
        config, data, state = tiny_run(optimizer="muon", tie_weights=False)
        return config, data, TrainState(state.model.to(where), config, where, dtype)

    def steps(config, data, state):
        return [x for _ in range(3) for x in (train_step(config, data, state).item(), state.loss_sum.item())]

    here, there = new_state(torch.device("cpu")), new_state(DEVICE)
    assert steps(*there) == pytest.approx(steps(*here), rel=1e-4 if dtype == torch.float32 else 0.05)

    content = there[2].state_dict(with_optimizers=True)
    content = tree_map_only(torch.Tensor, lambda x: x.cpu().clone(), content)  # as a checkpoint loads it
    resumed = new_state(DEVICE)
    resumed[2].model.load_state_dict(content.pop("model"))
    resumed[2].resume(content)
    assert steps(*resumed) == steps(*there)
