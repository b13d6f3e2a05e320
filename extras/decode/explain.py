"""The tensor shapes of one layer during a real generation, and its attention weights."""

import math
from contextlib import contextmanager

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from model import generate


class AttentionCalls(TorchFunctionMode):
    """Inside the block, every call of attention first calls see(q, k, v, mask)."""

    def __init__(self, see):
        super().__init__()
        self.see = see

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            q, k, v = args
            mask = kwargs.get("attn_mask")
            if kwargs.get("is_causal"):
                mask = torch.ones(q.size(2), k.size(2), dtype=torch.bool, device=q.device).tril()
            self.see(q, k, v, mask)
        return function(*args, **kwargs)


@contextmanager
def watch(model, layer=0):
    """Yield a dict that every forward inside the block fills with the tensors of one layer.

    "wte", "c_attn", "attention", "mlp" and "lm_head" are outputs. "q" `(B, nh, T, hs)`, "k" and "v" `(B, nkv, t, hs)`
    and "mask" `(T, t)` or None are what attention really computes with. "pos" `(T,)` are the positions.
    """
    block = model.transformer["h"][layer]
    modules = {
        "wte": model.transformer["wte"],
        "c_attn": block.attn.c_attn,
        "attention": block.attn,
        "mlp": block.mlp,
        "lm_head": model.lm_head,
    }
    seen = {}
    last = {}  # call of attention

    def after(module, args, out):  # args: x, rope, pos, mask, cache
        seen.update(last, pos=args[2])

    hooks = [block.attn.register_forward_hook(after)]
    for name, module in modules.items():
        hooks.append(module.register_forward_hook(lambda module, args, out, name=name: seen.update({name: out})))
    try:
        with AttentionCalls(lambda q, k, v, mask: last.update(q=q, k=k, v=v, mask=mask)):
            yield seen
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def layer_weights(q, k, mask):
    """Return the attention weights `(B, nh, T, t)` of queries and keys from `watch`."""
    k = k.repeat_interleave(q.size(1) // k.size(1), dim=1)  # each Head serves several query heads
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(dim=-1)


@torch.no_grad()
def attention_weights(model, idx, layer=0):
    """Return the attention weights of one layer over the text idx `(B, T)`, `(B, nh, T, T)`."""
    with watch(model, layer) as seen:
        model(idx, pos=torch.arange(idx.size(1), device=idx.device), cache=model.new_cache(len(idx)))
    return layer_weights(seen["q"], seen["k"], seen["mask"])


def explain_flags(model, tokenizer, args, sampling):
    """sample.py --explain, for the flags `args`. Raises ValueError."""
    plain = args.engine == "torch" and args.kv_cache and args.num_samples == len(args.prompt) == 1
    if not plain or args.draft or args.compile or args.verify or args.stop:
        raise ValueError("--explain shows one prompt with the plain cache: leave out flags that change that")
    text = args.prompt[0] or tokenizer.default_prompt
    explain(model, tokenizer, text, args.max_new_tokens, sampling)


def explain(model, tokenizer, text, max_new_tokens, sampling):
    """Print the shapes in the first layer while it prefills the text, and in two decode steps after it.

    max_new_tokens  None: until the context is full
    sampling        a Sampling
    Raises ValueError.
    """
    idx = torch.tensor([tokenizer.encode(text)], device=model.device)
    length = idx.size(1)
    steps = min(3, max_new_tokens or 3, model.config.block_size - length)
    if steps < 1:
        raise ValueError(f"the prompt has {length} {tokenizer.unit}, which fill the context: use fewer")
    unit = tokenizer.unit
    print(f"prompt {text!r}: {length} {unit}, layer 1 of {model.config.n_layer}\n")
    held = None  # the shape of a Head's key_cache before the step
    with watch(model) as seen:
        for step, new in enumerate(generate(model, idx, steps, sampling)):
            if "q" not in seen:
                raise ValueError("--explain watches F.scaled_dot_product_attention, which this model.py does not call")
            q, k, mask, pos = (seen[name] for name in ("q", "k", "mask", "pos"))
            weights = layer_weights(q, k, mask)
            T = len(pos)
            first = pos[0].item()
            last = pos[-1].item()
            slots = f"slot {first}" if first == last else f"slots {first} .. {last}"
            what = f"decode {step}, pos {first}" if step else f"prefill, pos {first} .. {last}"
            token = tokenizer.decode(new[0].tolist())
            key_cache = model.kv_cache.heads[0][0].key_cache
            print(f"{what}: idx {(1, T)}")
            for name, value, remark in (
                ("wte", seen["wte"], "token embeddings"),
                ("c_attn", seen["c_attn"], "q, k and v of all heads, side by side"),
                ("new k, v", k[:, :, -T:], f"written to {slots} of the cache"),
                ("key_cache", key_cache, f"per Head, was {held}; value_cache has the same shape"),
                ("queries", q, f"of the {unit} fed in this step"),
                ("keys, values", k, f"of all {unit} so far, read from the cache"),
                ("mask", mask, "no mask: the query sees every slot" if mask is None else "slot <= pos of the query"),
                ("weights", weights, "softmax of queries times keys"),
                ("attention", seen["attention"], "weights times values, heads side by side, through c_proj"),
                ("mlp", seen["mlp"], ""),
                ("lm_head", seen["lm_head"], f"logits, of the last {unit[:-1]} only"),
                ("sampled", new[:, 0], f"{token!r}, fed at the next step" if step + 1 < steps else repr(token)),
            ):
                shape = "none" if value is None else str(tuple(value.shape))
                print(f"    {name:14}{shape:20}{remark}".rstrip())
            print()
            held = tuple(key_cache.shape)
    if length + steps == model.config.block_size:
        print("the context is full")
