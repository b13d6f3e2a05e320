# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0", "torchao==0.18.0", "numpy==2.4.6", "onnx==1.23.2", "onnx-ir==1.1.0", "onnxruntime==1.32.0",
# ]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# ///
"""onnxruntime 1.32.0, torch 2.13.0, torchao 0.18.0: with dynamic int8, a token's logits depend on its neighbours.

quantize_dynamic of onnxruntime and of torch take one scale for the whole tensor, in each call. So an output moves
when another row of the batch, or an earlier token of the same call, has larger activations, and the cache changes the
text, because a prefill has other neighbours than a single token. torchao takes a scale per token, and MatMulNBits of
onnxruntime rounds only the weights.
"""

from report import report

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import quantize_dynamic
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

torch.manual_seed(0)
weight = torch.nn.Linear(64, 64, bias=False).weight.detach()
x, neighbour = torch.randn(1, 1, 64), 10 * torch.randn(1, 1, 64)


def linear():
    layer = torch.nn.Linear(64, 64, bias=False)
    layer.weight.data.copy_(weight)
    return torch.nn.Sequential(layer)


def session(file):
    made = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return lambda x: made.run(None, {"x": x.numpy()})[0]


value = helper.make_tensor_value_info
shape = ["rows", "tokens", 64]
graph = helper.make_graph(
    [helper.make_node("MatMul", ["x", "weight"], ["y"])],
    "g",
    [value("x", TensorProto.FLOAT, shape)],
    [value("y", TensorProto.FLOAT, shape)],
    [numpy_helper.from_array(weight.T.contiguous().numpy(), "weight")],
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
onnx.save(model, "float.onnx")
quantize_dynamic("float.onnx", "dynamic.onnx")
nbits = MatMulNBitsQuantizer(model, bits=8, block_size=32)
nbits.process()
onnx.save(nbits.model.model, "nbits.onnx")
in_torch = torch.ao.quantization.quantize_dynamic(linear(), {torch.nn.Linear}, dtype=torch.qint8)
in_torchao = linear()
quantize_(in_torchao, Int8DynamicActivationInt8WeightConfig())
exact = (x.double() @ weight.double().T)[0, 0].numpy()


def errors(layer):
    """Return how far one token is off alone, and how far it moves with another row and with an earlier token."""
    with torch.no_grad():
        alone, batch, chunk = (
            np.asarray(layer(a)) for a in (x, torch.cat((x, neighbour)), torch.cat((neighbour, x), dim=1))
        )
    alone, batch, chunk = alone[0, 0], batch[0, 0], chunk[0, 1]
    return [float(abs(a - b).max()) for a, b in ((alone, exact), (batch, alone), (chunk, alone))]


print("off alone, and moved by another row or by an earlier token; the outputs have a standard deviation of 0.6")
report(
    {
        "onnxruntime quantize_dynamic": (errors(session("dynamic.onnx")), [0.0081, 0.05, 0.05]),
        "torch.ao quantize_dynamic": (errors(in_torch), [0.019, 0.18, 0.18]),
        "torchao Int8DynamicActivation": (errors(in_torchao), [0.015, 0.0, 0.0]),
        "onnxruntime MatMulNBits, 8 bits": (errors(session("nbits.onnx")), [0.0052, 0.0, 0.0]),
    }
)
