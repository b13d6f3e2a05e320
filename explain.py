"""The cache at work: the shape of every tensor on its way through the first layer, as a generation makes them.

Nothing here knows what the shapes should be: hooks look at the tensors of a real prefill and of real decode steps.
"""

import math
from contextlib import ExitStack, contextmanager

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class OnAttention(TorchFunctionMode):
    """Inside, `see(q, k, v, mask)` is called before every attention that torch computes."""

    def __init__(self, see):
        super().__init__()
        self.see = see

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            mask, T = kwargs.get("attn_mask"), args[0].size(-2)
            if kwargs.get("is_causal"):
                mask = torch.ones(T, T, dtype=torch.bool, device=args[0].device).tril()
            self.see(*args, mask)
        return func(*args, **kwargs)


@contextmanager
def attention_weights(model, layer):
    """Inside, the list that this gives grows by each forward's attention weights in that layer, `(B, nh, T, slots)`."""
    calls, weights = [], []

    def see(q, k, v, mask):
        if len(calls) % model.config.n_layer == layer:
            scores = q @ k.repeat_interleave(q.size(1) // k.size(1), dim=1).mT / math.sqrt(q.size(-1))
            weights.append(scores.masked_fill(~mask, -math.inf).softmax(-1) if mask is not None else scores.softmax(-1))
        calls.append(True)

    with OnAttention(see):
        yield weights


@contextmanager
def watching(model, say):
    """Inside, `say(name, shape, remark)` is called for every tensor of the embedding, the first layer and the head.

    Gives a function to call before each forward.
    """
    layer = model.transformer["h"][0]
    attn, seen = layer.attn, []

    def shape(tensor):
        return tuple(tensor.shape)

    def see(q, k, v, mask):
        if not seen:  # the first layer's
            say("queries", shape(q), "of the characters fed only")
            say("keys, values", shape(k), "of all the characters so far, from the cache")
            say("scores", (*shape(q)[:3], k.size(2)), "queries times keys, inside one call that never stores them")
            rule = "slot <= pos: no character sees a later one"
            say("mask", shape(mask) if mask is not None else "none", rule if mask is not None else "all is visible")
        seen.append(True)

    write = attn.cache.write

    def spy(pos, k, v, end):
        slots = pos.flatten().tolist()
        say("new k, v", shape(k), f"written to slot {slots[0]}" + (f" .. {slots[-1]}" if len(slots) > 1 else ""))
        held, lengths = attn.heads[0].key_cache, attn.cache.lengths
        result = write(pos, k, v, end)
        attn.cache.lengths = [end] * len(k)  # what the whole forward leaves behind
        was = "was None" if held is None else f"was {shape(held)}"
        say("key_cache", shape(attn.heads[0].key_cache), f"of each of {len(attn.heads)} Heads, {was}; value_cache too")
        attn.cache.lengths = lengths
        return result

    def after(name, remark):
        return lambda module, args, out: say(name, shape(out), remark)

    with ExitStack() as stack:
        for module, name, remark in (
            (model.transformer["wte"], "wte", "embedded"),
            (attn.c_attn, "c_attn", "q, k and v of all heads, side by side"),
            (attn, "attention", "values collected, heads side by side, projected by c_proj"),
            (layer.mlp, "mlp", ""),
            (model.lm_head, "lm_head", "logits, of the last character only"),
        ):
            stack.callback(module.register_forward_hook(after(name, remark)).remove)
        stack.callback(attn.cache.__dict__.pop, "write", None)
        attn.cache.write = spy
        stack.enter_context(OnAttention(see))
        yield seen.clear


def explain(model, chars, idx, steps=3, **sampling):
    """Print what becomes of the prompt idx `(1, T)` in the prefill and in the decode steps after it, `steps` in all.

    sampling is GPT.stream's. Prints fewer steps if the context ends before.
    """

    def say(name, shape, remark):
        print(f"    {name:14}{shape!s:20}{remark}")

    T = idx.size(1)
    steps = min(steps, model.config.block_size - T)
    print(f"prompt {''.join(chars[i] for i in idx[0])!r}: {T} characters, layer 1 of {model.config.n_layer}\n")
    stream, fed = model.stream(idx, steps, **sampling), T
    with watching(model, say) as again:
        for step in range(steps):
            again()
            begin = T + step - fed
            what = f"prefill, pos 0 .. {T - 1}" if step == 0 else f"decode {step}, pos {begin}"
            print(f"{what}: idx (1, {fed})")
            token = next(stream)
            then = ", fed at the next step" if step + 1 < steps else ""
            print(f"    {'sampled':14}{tuple(token.shape)!s:20}{chars[token.item()]!r}{then}\n")
            fed = 1
    if T + steps == model.config.block_size:
        print("the context is full")
