"""Is my KV cache right? One call that says so, for any decoder, and names the first wrong key.

    from check_cache import check_cache

    report = check_cache(model)  # a model of transformers, a GPT of this kit, or an adapter
    assert not report, report  # in a pytest

    python -m check_cache FOLDER             a folder that transformers wrote
    python -m check_cache module:function    a function of yours that returns a model or an adapter

A right cache changes no logit. So we compute the logits of a few random texts without a cache, feed the same texts
through the cache in many ways, and compare. Each way differs from plain decoding in one thing. At the first wrong logit
we look at what each layer gave to its cache and got back, to find where it begins.

The package needs only torch, so you can copy its folder. An adapter for a decoder of your own is an object with

    vocab_size                     the number of token ids
    full(ids)                      the logits (B, T, V) of ids (B, T), without a cache
    new(kind, length)              an empty cache for `length` tokens. kind is "own" or "static": raise
                                   NotImplementedError, with a reason, for one that you do not have
    step(ids, cache, mask, pos)    the logits (B, T, V) of the next T tokens, which also go into the cache. pos (B, T)
                                   has their positions. mask is None, or (B, t) over all t tokens so far, where 0 is
                                   padding. If the step makes a new cache, return (logits, cache)

An nn.Module that is an attribute of the adapter runs in float64 too, which tells us what rounding does. We try crop,
reorder_cache, batch_repeat_interleave, batch_select_indices and reset if the cache has methods of these names, with the
arguments of transformers. We can watch a cache that has a method update, if it gets new keys and values and returns all
of them, of the shape (B, heads, t, head size).
"""

from check_cache.check import check_cache
from check_cache.report import Report, Result

__all__ = ["Report", "Result", "check_cache"]
