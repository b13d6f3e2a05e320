#!/bin/sh
# torch 2.13.0, onnxscript 0.7.2, onnxruntime 1.32.0: exported to ONNX, a query that sees no key gets something else.
#
# torch returns zeros for such a query, if the mask is boolean or has -inf. Exported with opset 20, the default, a
# boolean mask gives the mean of all values, because False becomes the lowest float instead of -inf, and a mask with
# -inf gives NaN. With opset 23, where attention is one operator, both give zeros again.
#
# It matters for left padding, where the pads see nothing. NaN does not stay there: the next layer gives the pads a
# weight of 0, but 0 * NaN is NaN, so every token of the row is lost, and its cache, too. In torch the same mask works.
# Let each query see its own slot, even if that is padding.
#
# Seen (Linux x86-64, Python 3.11), two layers of attention, the first two of four tokens are padding:
#                         the pads after one layer   the last token after two
#   boolean, torch        zeros                      as in torch
#   boolean, opset 20     mean of all values         as in torch
#   boolean, opset 23     zeros                      as in torch
#   -inf, torch           zeros                      as in torch
#   -inf, opset 20        NaN                        NaN
#   -inf, opset 23        zeros                      as in torch
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 numpy==2.4.6 onnx==1.23.2 onnxscript==0.7.2 onnxruntime==1.32.0
ORT_DISABLE_TELEMETRY=1 venv/bin/python -W ignore - <<'END' 2> log || { tail -n 1 log; exit 1; }
import sys

import numpy as np
import onnxruntime
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa


class TwoLayers(torch.nn.Module):
    def forward(self, x, mask):
        first = sdpa(x, x, x, attn_mask=mask)
        return first, sdpa(first, first, first, attn_mask=mask)


def exported(x, mask, opset):
    program = torch.onnx.export(TwoLayers(), (x, mask), opset_version=opset, dynamo=True, verbose=False)
    model = program.model_proto
    assert model.opset_import[0].version == (opset or 20)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {i.name: a.numpy() for i, a in zip(session.get_inputs(), (x, mask))})


torch.manual_seed(0)
x = torch.randn(1, 2, 4, 8)  # batch, heads, tokens, head size
visible = torch.ones(4, 4, dtype=torch.bool).tril()
visible[:, :2] = False
masks = {"boolean": visible, "-inf": torch.zeros(4, 4).masked_fill(~visible, -torch.inf)}
seen = {}
for name, mask in masks.items():
    expected = TwoLayers()(x, mask)[1][0, :, 3].numpy()
    for title, result in {
        "torch": TwoLayers()(x, mask),
        "opset 20": exported(x, mask, None),
        "opset 23": exported(x, mask, 23),
    }.items():
        first, second = (np.asarray(a) for a in result)
        pads, last = first[0, :, :2], second[0, :, 3]
        kind = "NaN" if np.isnan(pads).any() else "something else" if pads.any() else "zeros"
        if np.allclose(pads, x[0].mean(dim=1, keepdim=True), atol=1e-5):
            kind = "mean of all values"
        same = "NaN" if np.isnan(last).any() else "different"
        if np.allclose(last, expected, atol=1e-5):
            same = "as in torch"
        seen[f"{name}, {title}"] = kind, same
print(f"{'':22}the pads after one layer   the last token after two")
for name, (kind, same) in seen.items():
    print(f"{name:22}{kind:27}{same}")
zeros = ("zeros", "as in torch")
expected = [zeros, ("mean of all values", "as in torch"), zeros, zeros, ("NaN", "NaN"), zeros]
if changed := [name for (name, a), b in zip(seen.items(), expected) if a != b]:
    sys.exit(f"changed: {changed}")
END
