# /// script
# requires-python = ">=3.11"
# dependencies = ["tinygrad==0.14.0", "paddlepaddle==3.3.1", "numpy==2.4.6", "setuptools==84.2.1"]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# ///
"""tinygrad 0.14.0, paddlepaddle 3.3.1: causal attention starts in the top left.

Shown as the keys that each of 1 and of 3 queries sees, of 5.
"""

from report import report, sees

import paddle
import tinygrad


def with_tinygrad(*arrays):
    q, k, v = map(tinygrad.Tensor, arrays)
    return q.scaled_dot_product_attention(k, v, is_causal=True).numpy()


def with_paddle(*arrays):
    q, k, v = (paddle.to_tensor(array.swapaxes(1, 2)) for array in arrays)  # batch, tokens, heads, head size
    y = paddle.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.numpy().swapaxes(1, 2)


libraries = {"tinygrad": with_tinygrad, "paddle": with_paddle}
report({name: ([sees(attend, 1), sees(attend, 3)], [[1], [1, 2, 3]]) for name, attend in libraries.items()})
