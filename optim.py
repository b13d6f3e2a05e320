"""How the weights are updated: Muon for the matrices of the blocks, AdamW for everything else, and the learning rate.

A matrix takes part in a product, and what matters about a step of it is what it does to every direction of its input.
Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) makes the step orthogonal: all singular values near 1, so
that directions which the gradient hardly shows are learned as fast as the loud ones. Embeddings, the head, norms and
biases are no such maps; AdamW moves them.
"""

import math

import torch

# a s + b s^3 + c s^5, one step after the other, brings every s in (1e-3, 1] near 1 as fast as any such polynomials can:
# the first steps of the Polar Express (Amsel et al. 2025, arXiv:2505.16932)
POLYNOMIALS = ((8.2872, -23.5959, 17.3004), (4.1071, -2.9478, 0.5448), (3.9487, -2.9089, 0.5518))


def orthogonalize(x):
    """The matrices `(n, rows, cols)` with their singular values moved towards 1, by matrix products alone.

    The polynomials are applied to gram = x x^T, the smaller of the two ways to multiply, and x is multiplied by what
    came of it once, at the end: two thirds of the work of multiplying x in each step.
    """
    wide = x if x.size(-2) <= x.size(-1) else x.mT
    wide = wide / (1.01 * wide.norm(dim=(-2, -1), keepdim=True)).clamp(min=1e-30)  # no singular value above 1
    gram, result = wide @ wide.mT, None
    for a, b, c in POLYNOMIALS:
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        result = factor if result is None else factor @ result
        gram = factor @ (gram @ factor)
    wide = result @ wide
    return wide if x.size(-2) <= x.size(-1) else wide.mT


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal. In float32, and for all matrices of a size in one batch.

    torch.optim.Muon takes one matrix after the other, in bfloat16, which most CPUs only emulate, and knows nothing of
    matrices that lie in one parameter, as q, k and v do in c_attn: orthogonal together they learn less.
    params  groups; a group's "parts" are the sizes of such matrices along dim 0
    A step of lr moves a matrix by lr * sqrt(max(1, rows / cols)) in every direction.
    """

    def __init__(self, params, lr, momentum=0.9):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self):
        by_size = {}  # (rows, cols): [(matrix, its momentum, lr), ...]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                momentum = state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                ahead = p.grad.lerp(momentum, group["momentum"])  # Nesterov's
                for matrix, update in zip(p.split(group["parts"]), ahead.split(group["parts"])):
                    by_size.setdefault(matrix.shape, []).append((matrix, update, group["lr"]))
        for (rows, cols), entries in by_size.items():
            matrices, updates, rates = zip(*entries)
            scale = math.sqrt(max(1, rows / cols))
            for matrix, update, lr in zip(matrices, orthogonalize(torch.stack(updates)).unbind(), rates):
                matrix.add_(update, alpha=-lr * scale)


def configure_optimizers(model, config, device):
    """[AdamW] or [AdamW, Muon], every parameter in exactly one group; a group's "peak" is its learning rate's.

    Weight decay is AdamW's, on matrices and embeddings, not on biases and norms; Muon has none.
    """
    matrices = []
    if config["optimizer"] == "muon":
        matrices = [p for p in model.transformer["h"].parameters() if p.dim() == 2]
    taken = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in taken]
    peak, decay = config["learning_rate"], config["weight_decay"]
    groups = [
        dict(params=[p for p in others if p.dim() >= 2], weight_decay=decay, peak=peak),
        dict(params=[p for p in others if p.dim() < 2], weight_decay=0.0, peak=peak),
    ]
    betas, fused = (config["beta1"], config["beta2"]), device.type in ("cpu", "cuda")
    optimizers = [torch.optim.AdamW([group for group in groups if group["params"]], lr=peak, betas=betas, fused=fused)]
    if matrices:
        peak = config["muon_learning_rate"]
        by_parts = {}
        for block in model.transformer["h"]:
            kv = block.attn.n_kv_head * block.attn.head_size
            for p in (p for p in block.parameters() if p.dim() == 2):
                parts = (len(p),)
                if p is block.attn.c_attn.weight:
                    parts = (len(p) - 2 * kv, kv, kv)
                elif p is block.mlp.c_fc.weight and block.mlp.gated:
                    parts = (len(p) // 2,) * 2
                by_parts.setdefault(parts, []).append(p)
        optimizers.append(Muon([dict(params=ps, peak=peak, parts=parts) for parts, ps in by_parts.items()], lr=peak))
    grouped = [id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert sorted(grouped) == sorted(map(id, model.parameters())), "a parameter is in no group, or in two"
    return optimizers


def get_lr(step, config):
    """AdamW's learning rate: linear warm-up, level for the share `lr_level` of what is left until lr_decay_iters, then
    down to min_lr, along a cosine or a line. Muon's goes the same way."""
    peak, warmup = config["learning_rate"], config["warmup_iters"]
    floor = peak / 10 if config["min_lr"] is None else config["min_lr"]
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    left = max(1, (config["lr_decay_iters"] or config["max_iters"]) - warmup)
    progress = min(1.0, max(0.0, ((step - warmup) / left - config["lr_level"]) / (1 - config["lr_level"])))
    if config["lr_decay"] == "cosine":
        progress = 0.5 - 0.5 * math.cos(math.pi * progress)
    return floor + (1 - progress) * (peak - floor)
