# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0", "jax==0.10.2", "flax==0.12.8", "keras==3.15.1", "onnx==1.23.2", "onnxruntime==1.32.0",
#     "openvino==2026.4.1", "tinygrad==0.14.0", "numpy==2.4.6",
# ]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# ///
"""jax 0.10.2, flax 0.12.8, keras 3.15.1, openvino 2026.4.1, tinygrad 0.14.0: the row after the last of a table.

Asked for row 4 of a learned table with rows 1, 2, 3 and 4, torch 2.13.0 and onnxruntime 1.32.0 raise an error. jax
indexing returns the last row, jnp.take (and with it the Embed layers of flax and of Keras on jax) NaN, and openvino
and tinygrad return zeros. So a model that runs past its context goes on with a repeated position, with none, or with
NaN.
"""

from report import in_onnxruntime, onnx_model, report

import jax.numpy as jnp
import keras
import numpy as np
import onnxruntime
import openvino
import tinygrad
import torch
from flax import nnx

table = np.arange(1, 5, dtype=np.float32)[:, None]
i = np.array([4])
onnxruntime.set_default_logger_severity(4)
inputs = {"table": table, "i": i}
model = onnx_model("Gather", inputs, opset=20)


def with_openvino():
    core = openvino.Core()
    return core.compile_model(core.read_model(model.SerializeToString()), "CPU")([table, i])[0]


def with_flax():
    layer = nnx.Embed(4, 1, rngs=nnx.Rngs(0))
    layer.embedding[...] = jnp.asarray(table)
    return layer(jnp.asarray(i))


def with_keras():
    layer = keras.layers.Embedding(4, 1)
    layer.build((1,))
    layer.embeddings.assign(table)
    return layer(i)


def row(call):
    try:
        return f"{np.asarray(call()).item():g}"
    except Exception as error:
        return type(error).__name__


def with_torch():
    return torch.nn.functional.embedding(torch.tensor(i), torch.tensor(table))


report(
    {
        "torch embedding": (row(with_torch), "IndexError"),
        "onnxruntime Gather": (row(lambda: in_onnxruntime(model, inputs)), "InvalidArgument"),
        "jax table[i]": (row(lambda: jnp.asarray(table)[jnp.asarray(i)]), "4"),
        "jax.numpy.take": (row(lambda: jnp.take(jnp.asarray(table), i, axis=0)), "nan"),
        "flax nnx.Embed": (row(with_flax), "nan"),
        "keras Embedding (jax)": (row(with_keras), "nan"),
        "openvino Gather": (row(with_openvino), "0"),
        "tinygrad table[i]": (row(lambda: tinygrad.Tensor(table)[tinygrad.Tensor(i)].numpy()), "0"),
    }
)
