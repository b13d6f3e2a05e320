# /// script
# requires-python = ">=3.11"
# dependencies = ["tinygrad==0.14.0"]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# ///
"""tinygrad 0.14.0: a clone of a cache that is first read after the next step has that step's keys.

clone() promises a separate buffer, but it is lazy: it copies when it is first read. An assign that was realized in
between, by a step inside or outside TinyJit, has then already written the new key. contiguous() and x + 0 do the
same. It matters if you keep a cache before draft tokens are checked. Write cache.clone().realize().
"""

from report import report

from tinygrad import Tensor, TinyJit

keep = {
    "cache.clone()": lambda cache: cache.clone(),
    "cache.contiguous()": lambda cache: cache.contiguous(),
    "cache + 0": lambda cache: cache + 0,
    "cache.clone().realize()": lambda cache: cache.clone().realize(),
}


def kept_after_step(how, jit):
    cache = Tensor.zeros(4).contiguous().realize()

    def step(key):
        return cache[0:1].assign(key).realize()

    if jit:
        step = TinyJit(step)
        for _ in range(3):  # the second call captures
            step(Tensor([0.0]).realize())
    kept = how(cache)
    step(Tensor([1.0]).realize())
    assert cache.tolist() == [1, 0, 0, 0]
    return int(kept.tolist()[0])


print("a kept cache of zeros, read after a step that writes 1: with assign, with TinyJit")
kept = {name: [kept_after_step(how, jit) for jit in (False, True)] for name, how in keep.items()}
report({name: (values, [0, 0] if "realize" in name else [1, 1]) for name, values in kept.items()})
