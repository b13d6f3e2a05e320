"""What the scripts in this folder share. They import it first, because it prepares the environment of other libraries.

Exit codes of a script: 0 if it saw what its docstring says, 1 if that has changed, 2 if it could not run here.
"""

import numbers
import os
import sys
import tempfile
import traceback
import warnings

for name, setting in {
    "CUDA_VISIBLE_DEVICES": "",  # everything was measured on a CPU
    "DEV": "PYTHON",  # tinygrad, without a compiler
    "GLOG_v": "3",
    "HF_HUB_OFFLINE": "1",
    "KERAS_BACKEND": "jax",
    "OPENVINO_TELEMETRY": "0",
    "ORT_DISABLE_TELEMETRY": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}.items():
    os.environ.setdefault(name, setting)
warnings.simplefilter("ignore")
folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)  # for what a script writes
os.chdir(folder.name)


def could_not_run(kind, error, trace):
    """Exit with 2 after an exception: a package that does not load here, for example, is not a change."""
    traceback.print_exception(kind, error, trace)
    sys.stdout.flush()
    os.chdir(os.path.dirname(__file__))
    folder.cleanup()
    os._exit(2)


sys.excepthook = could_not_run


def same(seen, expected):
    """Return whether two results agree. A float may be off by a fifth, because CPUs and random numbers differ."""
    if isinstance(expected, float):
        return isinstance(seen, numbers.Real) and abs(seen - expected) <= max(1e-3, 0.2 * abs(expected))
    if isinstance(expected, list):
        return isinstance(seen, list) and len(seen) == len(expected) and all(map(same, seen, expected))
    return seen == expected


def shown(result):
    if isinstance(result, list):
        return f"[{', '.join(map(shown, result))}]"
    return f"{result:.2g}" if isinstance(result, numbers.Real) and not isinstance(result, int) else str(result)


def report(rows):
    """Print rows `{name: (seen, expected)}`, and exit with 0, or with 1 if a result is not as expected."""
    width = max(map(len, rows)) + 2
    for name, (seen, _) in rows.items():
        print(f"{name:{width}}{shown(seen)}")
    changed = {name: row for name, row in rows.items() if not same(*row)}
    for name, (seen, expected) in changed.items():
        print(f"changed: {name}: expected {shown(expected)}, got {shown(seen)}")
    sys.exit(1 if changed else 0)


def sees(attend, queries, keys=5):
    """Return how many keys each query sees. All scores are equal, and key j has the value 5**j.

    attend(q, k, v) gets numpy arrays (1, 1, tokens, 16) in float32, and its result has the shape of q.
    """
    import numpy as np  # not every script has it

    q, k = np.zeros((1, 1, queries, 16), np.float32), np.zeros((1, 1, keys, 16), np.float32)
    values = 5.0 ** np.arange(keys, dtype=np.float32)
    y = np.asarray(attend(q, k, np.broadcast_to(values[:, None], k.shape).copy()))
    means = values.cumsum() / np.arange(1, keys + 1)
    return [int(np.abs(means / value - 1).argmin()) + 1 for value in y.reshape(queries, 16)[:, 0]]


def layout(y):
    """Name the RoPE layout that turns 1 2 3 4 at position 1, with a base of 10,000, into y."""
    import numpy as np

    x, y = np.arange(1.0, 5), np.asarray(y, np.float64).reshape(4)
    cos, sin = np.cos([1, 0.01]), np.sin([1, 0.01])
    for name, a, b in (("halves", [0, 1], [2, 3]), ("pairs", [0, 2], [1, 3])):
        if np.allclose([y[a], y[b]], [x[a] * cos - x[b] * sin, x[b] * cos + x[a] * sin], atol=1e-3):
            return name


def cache_in_buffers(keys, length=0):
    """Return a torch module with a cache: a call writes its key to the next of the slots, and returns all of them."""
    import torch

    class Cache(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("keys", keys)
            self.register_buffer("length", torch.tensor([length]))

        def forward(self, key):
            self.keys.index_copy_(0, self.length, key)
            self.length.add_(1)
            return self.keys.clone()

    return Cache()


def onnx_model(op, inputs, outputs=("y",), opset=24, names=None, domain="", **attributes):
    """Return an ONNX model of one node with the inputs {name: array}. In names, "" stands for one that is left out."""
    from onnx import TensorProto, helper

    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node(op, names or list(inputs), outputs, domain=domain, **attributes)],
        op,
        [value(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape) for name, array in inputs.items()],
        [value(name, TensorProto.FLOAT, None) for name in outputs],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=11)


def in_onnxruntime(model, inputs):
    """Return the first output of an ONNX model."""
    import onnxruntime

    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, inputs)[0]
