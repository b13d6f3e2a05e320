"""Is my KV cache right? One call that says so, for any decoder in PyTorch, and names the first wrong key.

    from check_cache import check_cache

    def test_cache():
        check_cache(model).assert_right()  # a model of transformers, a GPT of this kit, or an adapter
        check_cache(
            full=model,
            new=lambda rows, length: KVCache(rows, length),
            step=lambda ids, cache: model(ids, kv_cache=cache),
        ).assert_right()

    python -m check_cache FOLDER             a folder that transformers wrote
    python -m check_cache module:function    a function of yours that returns a model or an adapter

A right cache changes no logit. So we compute the logits of a few random texts without a cache, feed the same texts
through the cache in many ways, and compare. Each way differs from plain decoding in one thing. At the first wrong logit
we look at what each call of attention reads, to find where it begins.

The package needs only torch, so you can also copy its folder. An adapter has three functions, as arguments of
check_cache or as methods of an object:

    full(ids)              the logits (B, T, V) of ids (B, T), without a cache. It may take mask and pos, too
    new(rows, length)      an empty cache for a batch of `rows`, with room for `length` tokens. With an argument kind it
                           is asked for "own" and for "static": raise NotImplementedError for one that you do not have
    step(ids, cache)       the logits of the next T tokens, or of the last alone, (B, 1, V). Keys and values go into the
                           cache; if the step makes a new one, return (logits, cache). Refuse what you cannot do, such
                           as chunks, with NotImplementedError. It may also take
                               pos   (B, T), the positions of these tokens
                               mask  (B, t) over all t tokens so far, where 0 is left padding; None: there is none

and what else it has:

    crop(cache, length)    keep the first `length` tokens
    reorder(cache, rows)   let row i go on from rows[i], as beam search does
    reset(cache)           forget everything
    fork(cache)            return a copy that goes its own way; otherwise we use copy.deepcopy
    generate(ids, count, use_cache)   the tokens (B, count) that your own greedy loop or beam search adds to three
                           prompts, with the cache or without. They may follow the prompts
    vocab_size, context, window, pad  the number of ids, the longest text, the sliding window, the id of padding

crop, reorder, reset and fork may return a new cache. Without them we try the methods crop(-removed), reorder_cache and
reset of the cache, and batch_repeat_interleave and batch_select_indices, as transformers calls them.

A decoder that keeps the cache inside is copied for each cache:

    new=copies_of(model, lambda model, rows, length: model.setup_caches(rows, length)),
    step=lambda ids, cache, pos: cache(ids, pos[0]),
"""

from check_cache.adapters import copies_of
from check_cache.check import check_cache
from check_cache.report import Report, Result

__all__ = ["Report", "Result", "check_cache", "copies_of"]
