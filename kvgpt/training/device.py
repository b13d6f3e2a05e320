"""The dtype of the forward, and the compiled training step."""

import sys

import torch


def pick_dtype(name, device):
    """Return the dtype of the forward. Raises ValueError for a dtype that the device cannot train in.

    auto takes bfloat16 only if the chip computes in it. is_bf16_supported() alone also counts emulation.
    """
    if name == "auto":
        if device.type != "cuda":
            return torch.float32
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    if name == "float16" and device.type != "cuda":
        raise ValueError(f"--dtype float16 trains on CUDA only, not on {device.type}: use float32 or bfloat16")
    return getattr(torch, name)


def compile_module(module):
    """Return torch.compile(module). Without a working compiler, print the reason and return the module."""
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(2, device=next(module.parameters()).device))
    except Exception as error:  # a missing compiler shows in many ways
        print(f"--compile: no working compiler ({str(error).splitlines()[0]}): training uncompiled", file=sys.stderr)
        return module
    print("--compile: compiling the training step; the first steps take a while", file=sys.stderr)
    return torch.compile(module)
