# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "numpy==2.4.6", "onnx==1.23.2", "onnxscript==0.7.2", "onnxruntime==1.32.0"]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# ///
"""torch 2.13.0: exported to ONNX with the default opset, a query that sees no key gets the mean or NaN, not zeros.

torch returns zeros for such a query. With opset 20 a boolean mask gives the mean of all values, because False becomes
the lowest float, and a mask with -inf gives NaN. In the next layer the pads have a weight of 0, but 0 * NaN is NaN,
so every token of a left-padded row is lost. With opset 23, where attention is one operator, both give zeros. Let each
query see its own slot, even if that is padding.
"""

from report import report

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


def results(name, mask):
    """Yield what the pads get after one layer, and the last token after two."""
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
            kind = "mean"
        same = "NaN" if np.isnan(last).any() else "different"
        yield f"{name}, {title}", [kind, "as in torch" if np.allclose(last, expected, atol=1e-5) else same]


seen = dict(row for mask in masks.items() for row in results(*mask))
other = {"boolean, opset 20": ["mean", "as in torch"], "-inf, opset 20": ["NaN", "NaN"]}
print("the pads after one layer, and the last token after two")
report({name: (kinds, other.get(name, ["zeros", "as in torch"])) for name, kinds in seen.items()})
