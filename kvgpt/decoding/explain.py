"""The tensor shapes of one layer during a real generation, and its attention weights."""

from contextlib import contextmanager

import torch

from model import stream_tokens


@contextmanager
def watch(model, layer=0):
    """Yield a dict that every forward inside the block fills with its tensors.

    "wte", "c_attn", "attention", "mlp" and "lm_head" are outputs. "attn_args" are the arguments of the layer's
    attention: x, rope, pos, mask, cache.
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
    hooks = [block.attn.register_forward_pre_hook(lambda module, args: seen.update(attn_args=args))]
    for name, module in modules.items():
        hooks.append(module.register_forward_hook(lambda module, args, out, name=name: seen.update({name: out})))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def layer_weights(attn, x, rope, pos):
    """Return the attention weights of a layer's queries, `(B, nh, T, t)`, computed by Head.forward over its caches.

    x, rope, pos  the arguments of the layer's attention in a cached forward
    """
    q, _, _ = attn.project(x, rope)  # (B, nh, T, hs)
    queries_per_head = attn.n_head // attn.n_kv_head
    weights = [attn.heads[i // queries_per_head](q[:, i], pos)[1] for i in range(attn.n_head)]
    return torch.stack(weights, dim=1)


@torch.no_grad()
def attention_weights(model, idx, layer=0):
    """Return the attention weights of one layer over the text idx `(B, T)`, `(B, nh, T, T)`."""
    with watch(model, layer) as seen:
        model(idx, pos=torch.arange(idx.size(1), device=idx.device), cache=model.new_cache(len(idx)))
    return layer_weights(model.transformer["h"][layer].attn, *seen["attn_args"][:3])


def explain(model, tokenizer, idx, steps, sampling):
    """Print the shapes in the first layer during the prefill of idx `(1, T)` and the decode steps after it.

    steps     prefill and decode steps together, at most up to the end of the context
    sampling  a Sampling
    """
    T, attn = idx.size(1), model.transformer["h"][0].attn
    steps = min(steps, model.config.block_size - T)
    text, unit = tokenizer.decode(idx[0].tolist()), tokenizer.unit
    print(f"prompt {text!r}: {T} {unit}, layer 1 of {model.config.n_layer}\n")
    held = None  # the shape of a Head's key_cache before the step
    with watch(model) as seen:
        for step, block in enumerate(stream_tokens(model, idx, steps, sampling)):
            x, rope, pos, mask, _ = seen["attn_args"]
            with torch.inference_mode():
                q, k, _ = attn.project(x, rope)
                weights = layer_weights(attn, x, rope, pos)
            first, last = pos[0, 0].item(), pos[0, -1].item()
            slots = f"slot {first}" if first == last else f"slots {first} .. {last}"
            what = f"decode {step}, pos {first}" if step else f"prefill, pos {first} .. {last}"
            token, key_cache = tokenizer.show(block.item()), attn.heads[0].key_cache
            keys = torch.stack([head.key_cache for head in attn.heads], dim=1)  # (1, nkv, t, hs)
            print(f"{what}: idx {(1, pos.size(1))}")
            for name, value, remark in (
                ("wte", seen["wte"], "token embeddings"),
                ("c_attn", seen["c_attn"], "q, k and v of all heads, side by side"),
                ("new k, v", k, f"written to {slots} of the cache"),
                ("key_cache", key_cache, f"per Head, was {held}; value_cache has the same shape"),
                ("queries", q, f"of the {unit} fed in this step"),
                ("keys, values", keys, f"of all {unit} so far, read from the cache"),
                ("mask", mask, "no mask: the query sees every slot" if mask is None else "slot <= pos of the query"),
                ("weights", weights, "softmax of queries times keys"),
                ("attention", seen["attention"], "weights times values, heads side by side, through c_proj"),
                ("mlp", seen["mlp"], ""),
                ("lm_head", seen["lm_head"], f"logits, of the last {unit[:-1]} only"),
                ("sampled", block[:, 0], f"{token!r}, fed at the next step" if step + 1 < steps else repr(token)),
            ):
                shape = "none" if value is None else str(tuple(value.shape))
                print(f"    {name:14}{shape:20}{remark}".rstrip())
            print()
            held = tuple(key_cache.shape)
    if T + steps == model.config.block_size:
        print("the context is full")
