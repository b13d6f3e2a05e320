"""Is my KV cache right? One call answers that for any PyTorch decoder, and names the first wrong key.

    from check_cache import check_cache

    def test_cache():
        check_cache(model).assert_right()  # a transformers model, a GPT of kvGPT, or an adapter
        check_cache(
            full=model,
            new=lambda rows, length: KVCache(rows, length),
            step=lambda ids, cache: model(ids, kv_cache=cache),
        ).assert_right()

    python -m check_cache FOLDER             a folder saved by transformers
    python -m check_cache module:function    your function that returns a model or an adapter

A right cache changes no logit. So we compute the logits of a few random sequences without a cache, feed the same tokens
through the cache in many ways, and compare. Each way differs from plain decoding in one thing. At the first wrong logit
we look at what each call of attention reads, to find the cause.

The package needs only torch, so you can also copy its folder. An adapter has three functions, as arguments of
check_cache or as methods of an object:

    full(ids)              the logits (B, T, V) of ids (B, T), without a cache. It may also accept mask and pos
    new(rows, length)      an empty cache for a batch of `rows`, with room for `length` tokens. If it accepts kind, we
                           pass "own" and then "static": raise NotImplementedError for the one you do not have
    step(ids, cache)       the logits of the next T tokens, or of the last one only, (B, 1, V). It adds keys and values
                           to the cache. If that makes a new cache, return (logits, cache). Raise NotImplementedError
                           for what it cannot do, such as chunks. It may also accept
                               pos   (B, T), the positions of these tokens
                               mask  (B, t) over all t tokens so far, where 0 is left padding, or None without padding

The rest is optional:

    crop(cache, length)    keep the first `length` tokens
    reorder(cache, rows)   let row i continue from rows[i], as in beam search
    reset(cache)           empty the cache
    fork(cache)            return an independent copy; without it we use copy.deepcopy
    generate(ids, count, use_cache)   the tokens (B, count) that your own greedy loop or beam search adds to three
                           prompts, with or without the cache. The prompts may be included
    vocab_size, context, window, pad  the number of ids, the longest sequence, the sliding window, the padding id

crop, reorder, reset and fork may return a new cache. Without them we try the cache's own methods crop(-removed),
reorder_cache and reset, and also batch_repeat_interleave and batch_select_indices, with the arguments of transformers.

For a decoder that keeps the cache inside, make a copy of it per cache:

    new=copies_of(model, lambda model, rows, length: model.setup_caches(rows, length)),
    step=lambda ids, cache, pos: cache(ids, pos[0]),
"""

from check_cache.adapters import copies_of
from check_cache.check import check_cache
from check_cache.report import Report, Result

__all__ = ["Report", "Result", "check_cache", "copies_of"]
