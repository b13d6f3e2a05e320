"""What step.c gets of a model: its shape as macros, and its weights packed into the structures that it reads."""

import math
import mmap
import sys

import torch
from torch import nn
from torch.nn import functional as F

from extras.decode.c_library import CompileError, Layer, Params, model_struct
from extras.decode.ngrams import MAX_ORDER
from extras.decode.quantize import BLOCK, quantize

MAX_TOKENS = 64  # per forward, so that the activations of a small model stay in the cache of a core
LARGE = 2**25  # bytes of a cache, about what the L3 cache holds
# the norms that `norm` of step.c computes; guard.py makes sure that a model has only one kind
NORMS = {nn.LayerNorm}


def shape_macros(model, min_chance, layout):
    """Return the macros that tell step.c the shape of the model. layout: panels or int8_panels."""
    config = model.config
    return dict(
        N_LAYER=config.n_layer,
        N_HEAD=config.n_head,
        N_KV_HEAD=config.n_kv_head,
        N_EMBD=config.n_embd,
        HIDDEN=model.transformer["h"][0].mlp.c_proj.in_features,
        VOCAB_SIZE=config.vocab_size,
        BLOCK_SIZE=config.block_size,
        GATED=int(config.activation == "swiglu"),
        GELU_TANH=int(config.activation == "gelu_tanh"),
        POST_LN=int(not config.norm_first),
        NORM=type(model.transformer["h"][0].ln_1).__name__,
        MAX_ORDER=MAX_ORDER,
        MAX_TOKENS=MAX_TOKENS,
        MIN_CHANCE=f"{min_chance}f",
        INT8=int(layout is int8_panels),
        BLOCK=BLOCK,
    )


def pack_weights(model, library, layout):
    """Return the weights as the Model of step.c, compiled as `library`. layout: panels or int8_panels.

    Raises CompileError for a weight whose shape does not fit the config, or whose dtype is not float32.
    """
    config = model.config
    lanes = library.lanes()
    tile = library.tile_panels()
    net = model.transformer
    blocks = net["h"]
    C = config.n_embd
    hs = config.head_size
    hidden = blocks[0].mlp.c_proj.in_features

    def check(x, *shape):
        if x is not None and x.shape != shape:
            raise CompileError(f"the model has a weight of shape {tuple(x.shape)}, but its config says {shape}")
        if x is not None and x.dtype != torch.float32:  # the rotary table is no parameter
            raise CompileError(f"the C backend runs in float32, and the model has a weight in {x.dtype}")

    # more than enough: tied weights become two matrices, and zeros fill the last panel of each
    tables = () if model.rope is None else model.rope
    place = placer(huge_pages(4 * sum(tensor.nbytes for tensor in (*model.parameters(), *tables)) + 2**24))

    def own(x, *shape):
        check(x, *shape)
        return None if x is None else place(x.detach())

    def linear(layer, N, K):
        check(layer.weight, N, K)
        check(layer.bias, N)
        bias = None if layer.bias is None else place(whole_panels(layer.bias.detach(), lanes))
        return Params(weight=place(layout(layer.weight.detach(), lanes, tile)), bias=bias)

    def norm(layer, n):
        return Params(weight=own(layer.weight, n), bias=own(getattr(layer, "bias", None), n))

    identity = Params(weight=None, bias=None)
    norms = [norm(layer, C) for block in blocks for layer in (block.ln_1, block.ln_2)]
    cos, sin = (None, None) if model.rope is None else model.rope
    return model_struct(config.n_layer)(
        wte=own(net["wte"].weight, config.vocab_size, C),
        wpe=own(net["wpe"].weight, config.block_size, C) if config.pos_emb == "learned" else None,
        cos=own(cos, config.block_size, hs),
        sin=own(sin, config.block_size, hs),
        lm_head=linear(model.lm_head, config.vocab_size, C),
        norm=[*norms, norm(net["ln_f"], C)] if config.norm_first else [identity, *norms],
        layer=[
            Layer(
                c_attn=linear(block.attn.c_attn, C + 2 * config.n_kv_head * hs, C),
                q_norm=norm(block.attn.q_norm, hs) if config.qk_norm else identity,
                k_norm=norm(block.attn.k_norm, hs) if config.qk_norm else identity,
                attn_proj=linear(block.attn.c_proj, C, C),
                c_fc=linear(block.mlp.c_fc, 2 * hidden if config.activation == "swiglu" else hidden, C),
                mlp_proj=linear(block.mlp.c_proj, C, hidden),
            )
            for block in blocks
        ],
    )


def huge_pages(size):
    """Return `size` bytes of memory in pages of 2 MB, a uint8 tensor. The chip looks them up faster than small ones.

    Pages that nobody writes to cost nothing. None: this is not Linux, the kernel has no such pages, or too few.
    """
    try:
        memory = mmap.mmap(-1, size + 2**21, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except (AttributeError, OSError):
        return None
    return torch.frombuffer(memory, dtype=torch.uint8)


def placer(memory):
    """Return place(tensor), which copies tensors into `memory`, one after the other. None: into memory of their own."""
    end = 0

    def place(tensor):
        nonlocal end
        if memory is None:
            return tensor.clone(memory_format=torch.contiguous_format)
        copy = memory[end : end + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        end += -(-tensor.nbytes // 64) * 64  # a line of the cache
        return copy.copy_(tensor)

    return place


def empty_cache(shape, count):
    """Return `count` float32 tensors of a shape on the CPU, for keys and values.

    The cache of a large batch comes from memory, and from huge pages 14% faster. In a small one they gain nothing, and
    their zeros take longer to write.
    """
    size = 4 * math.prod(shape)
    memory = huge_pages(count * size) if count * size > LARGE else None
    with torch.inference_mode(False):  # a tensor made in inference mode cannot be written outside of it
        if memory is None:  # whatever torch's default dtype and device are
            return [torch.empty(shape, dtype=torch.float32, device="cpu") for _ in range(count)]
        return [part.view(torch.float32).view(shape) for part in memory[: count * size].split(size)]


# -- layouts: the weight of a Linear layer as step.c reads it, which describes both ------------------------------------


def panels(weight, lanes, tile):
    weight = whole_panels(weight, lanes).transpose(1, 2)  # (panels, K, lanes)
    single = weight[len(weight) // tile * tile :]
    tiles = weight[: len(weight) - len(single)].unflatten(0, (-1, tile)).transpose(1, 2)  # (tiles, K, tile, lanes)
    return torch.cat((tiles.flatten(), single.flatten()))


def int8_panels(weight, lanes, tile):
    if sys.byteorder != "little":
        raise CompileError("the C backend reads int8 weights on little-endian processors only")

    def pack(rows):
        numbers, scales = quantize(rows)
        scales = whole_panels(scales, lanes).transpose(1, 2).contiguous().view(torch.int8)
        words = whole_panels(numbers, lanes).unflatten(3, (-1, 4)).permute(0, 2, 3, 1, 4)
        return torch.cat((scales, words.flatten(2)), 2)  # (panels, blocks, bytes of a block)

    return torch.cat([pack(rows) for rows in weight.split(4096)])  # because packing needs a few times their memory


def whole_panels(x, lanes):
    """Return x `(N, ...)` as `(panels, lanes, ...)`. Zeros fill the last panel."""
    padding = [0, 0] * (x.dim() - 1) + [0, -len(x) % lanes]
    return F.pad(x, padding).unflatten(0, (-1, lanes))
