"""A pretend GPU: tensors that say they are elsewhere, compute on the CPU, and refuse to meet tensors of the CPU."""

import contextlib
import copy
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from helpers import random_model
from model import GPTConfig

_setup_privateuseone_for_python_backend("pretend")
torch.get_device_module("pretend").__name__ = "pretend.cpu"  # transformers asks for it
# autocast is there, but computes in float32
torch.pretend.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
AUTOCAST = torch.library.Library("_", "IMPL")
AUTOCAST.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
DEVICE = torch.device("pretend:0")
aten = torch.ops.aten
MOVES = (aten._to_copy.default, aten.copy_.default)  # may have tensors of both devices


class PretendTensor(torch.Tensor):
    """A tensor on DEVICE. Its numbers are in `cpu_tensor`."""

    @staticmethod
    def __new__(cls, cpu_tensor):
        size, strides, dtype = cpu_tensor.size(), cpu_tensor.stride(), cpu_tensor.dtype
        kind = dict(strides=strides, storage_offset=cpu_tensor.storage_offset(), dtype=dtype, device=DEVICE)
        return torch.Tensor._make_wrapper_subclass(cls, size, **kind)

    def __init__(self, cpu_tensor):
        self.cpu_tensor = cpu_tensor

    def tolist(self):  # PyTorch has none for subclasses
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} outside of PretendDevice")


class PretendDevice(TorchDispatchMode):
    """Inside the block DEVICE works.

    reads  the sizes of the tensors that were copied from DEVICE to the CPU
    """

    def __init__(self):
        super().__init__()
        self.reads = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        here = [x for x in tensors if isinstance(x, PretendTensor)]
        elsewhere = [x for x in tensors if not isinstance(x, PretendTensor) and x.dim()]  # a number may be anywhere
        if here and elsewhere and function not in MOVES:
            raise RuntimeError(f"{function}: tensors of {DEVICE} and of the CPU")
        asked = kwargs.get("device")
        to_device = torch.device(asked).type == DEVICE.type if asked is not None else bool(here)
        if asked is not None:
            kwargs["device"] = torch.device("cpu")
        if (here and asked is not None and not to_device) or function is aten._local_scalar_dense.default:
            self.reads += [x.numel() for x in here]
        if function is aten._fused_sdp_choice.default:
            return 0  # plain mathematics
        unwrapped = tree_map(lambda x: x.cpu_tensor if isinstance(x, PretendTensor) else x, (args, kwargs))
        result = function(*unwrapped[0], **unwrapped[1])
        if not to_device:
            return result
        of = {id(x.cpu_tensor): x for x in here}  # an operation in place returns the tensor that it got

        def wrap(x):
            if not isinstance(x, torch.Tensor):
                return x
            if id(x) in of:
                return of[id(x)]
            with torch.inference_mode(False):  # of a wrapper, PyTorch would ask what an inference tensor cannot do
                return PretendTensor(x)

        return tree_map(wrap, result)


@contextlib.contextmanager
def pretend_device():
    """Inside the block DEVICE works for torch.tensor and torch.as_tensor too. Yields the PretendDevice."""
    with contextlib.ExitStack() as stack:
        for name in ("tensor", "as_tensor"):  # they move their result where no mode sees it
            make = getattr(torch, name)
            moved = lambda x, device=None, make=make, **kw: make(x, **kw).to(device or "cpu")  # noqa: E731
            stack.enter_context(patch.object(torch, name, moved))
        yield stack.enter_context(PretendDevice())


# -- models ------------------------------------------------------------------------------------------------------------

# untied, because moving a model to the pretend device makes two parameters of a shared one
LEARNED = dict(n_kv_head=1, bias=True, tie_weights=False)
ROPE = dict(pos_emb="rope", activation="swiglu", qk_norm=True, tie_weights=False)
IDX = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])


def both(network):
    """Return a random model on the CPU, and the same model on DEVICE."""
    model = random_model(GPTConfig(block_size=24, vocab_size=65, n_layer=2, n_head=4, n_embd=32, **network))
    return model, copy.deepcopy(model).to(DEVICE)
