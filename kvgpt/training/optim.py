"""Optimizers and learning rate: Muon for the matrices of the blocks, AdamW for everything else.

Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) makes the update of a matrix nearly orthogonal: it moves
all singular values towards 1, so that directions with small gradients are learned as fast as those with large ones.
"""

import math

import torch

# A polynomial maps a singular value s to a s + b s^3 + c s^5. One after the other, these three bring every s in
# (1e-3, 1] close to 1, as fast as possible: the first steps of the Polar Express (Amsel et al. 2025, arXiv:2505.16932).
POLYNOMIALS = ((8.2872, -23.5959, 17.3004), (4.1071, -2.9478, 0.5448), (3.9487, -2.9089, 0.5518))


def orthogonalize(x):
    """Move the singular values of the matrices x `(n, rows, cols)` towards 1, with matrix products alone.

    We apply the polynomials to gram = x x^T, which is smaller, and multiply x only once at the end.
    """
    wide = x if x.size(-2) <= x.size(-1) else x.mT
    wide = wide / (1.01 * wide.norm(dim=(-2, -1), keepdim=True)).clamp(min=1e-30)  # no singular value above 1
    gram, factor, product = wide @ wide.mT, None, None
    for a, b, c in POLYNOMIALS:
        if factor is not None:  # the gram of factor @ x, because all factors commute
            gram = factor @ (gram @ factor)
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        product = factor if product is None else factor @ product
    wide = product @ wide
    return wide if x.size(-2) <= x.size(-1) else wide.mT


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonal updates, in float32, with one batched computation per matrix shape.

    params  groups; group["parts"] are the sizes along dim 0 of the matrices in one parameter, such as q, k and v in
            c_attn. Each gets its own orthogonal update, because a joint one learns less
    A step of size lr moves a matrix by lr * sqrt(max(1, rows / cols)) in every direction. We do not use
    torch.optim.Muon, because it works in bfloat16, which most CPUs emulate, and cannot split a parameter.
    """

    def __init__(self, params, lr, momentum=0.9):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self):
        # update the momentum; collect the matrices by shape
        by_shape = {}  # (rows, cols): [(matrix, its update, lr), ...]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                momentum = state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(momentum, group["momentum"])  # Nesterov's momentum
                for matrix, part in zip(p.split(group["parts"]), update.split(group["parts"])):
                    by_shape.setdefault(matrix.shape, []).append((matrix, part, group["lr"]))
        # make the updates orthogonal, one batch per shape
        for (rows, cols), entries in by_shape.items():
            matrices, updates, rates = zip(*entries)
            scale = math.sqrt(max(1, rows / cols))
            for matrix, update, lr in zip(matrices, orthogonalize(torch.stack(updates)).unbind(), rates):
                matrix.add_(update, alpha=-lr * scale)


def configure_optimizers(objective, config, device):
    """Return [AdamW] or [AdamW, Muon], with every parameter of an Objective in exactly one group.

    group["peak_lr"] is the learning rate that the schedule scales. Weight decay applies to AdamW's matrices and
    embeddings, but not to biases and norms, and not to Muon.
    """
    muon = []
    if config.optimizer == "muon":
        muon = [Muon(muon_groups(objective.model, config.muon_learning_rate), lr=config.muon_learning_rate)]
    of_muon = {id(p) for optimizer in muon for group in optimizer.param_groups for p in group["params"]}
    rest = [p for p in objective.parameters() if id(p) not in of_muon]
    peak_lr = config.learning_rate
    groups = [
        dict(params=[p for p in rest if p.dim() >= 2], weight_decay=config.weight_decay, peak_lr=peak_lr),
        dict(params=[p for p in rest if p.dim() < 2], weight_decay=0.0, peak_lr=peak_lr),
    ]
    betas, fused = (config.beta1, config.beta2), device.type in ("cpu", "cuda")
    return [torch.optim.AdamW(groups, lr=peak_lr, betas=betas, fused=fused), *muon]


def muon_groups(model, peak_lr):
    """Return Muon's parameter groups: the matrices of the blocks, grouped by their parts."""
    by_parts = {}
    for block in model.transformer["h"]:
        kv = block.attn.n_kv_head * block.attn.head_size
        for p in (p for p in block.parameters() if p.dim() == 2):
            parts = (len(p),)
            if p is block.attn.c_attn.weight:
                parts = (len(p) - 2 * kv, kv, kv)  # q, k, v
            elif p is block.mlp.c_fc.weight and block.mlp.gated:
                parts = (len(p) // 2,) * 2  # gate, up
            by_parts.setdefault(parts, []).append(p)
    return [dict(params=params, peak_lr=peak_lr, parts=parts) for parts, params in by_parts.items()]


def lr_multiplier(step, config):
    """Return the learning rate of a step as a fraction of its peak, 0 to 1.

    It warms up linearly over warmup_iters. Of the remaining steps until lr_decay_iters, it stays at the peak for the
    fraction lr_stable_frac, and then falls to min_lr / learning_rate along a cosine or a line, or not at all.
    """
    if not config.learning_rate:  # 0 turns Muon off too
        return 0.0
    floor = 0.1 if config.min_lr is None else config.min_lr / config.learning_rate
    if step < config.warmup_iters:
        return (step + 1) / (config.warmup_iters + 1)
    if config.lr_decay == "none":
        return 1.0
    remaining = max(1, (config.lr_decay_iters or config.max_iters) - config.warmup_iters)
    stable = config.lr_stable_frac
    progress = min(1.0, max(0.0, ((step - config.warmup_iters) / remaining - stable) / (1 - stable)))
    if config.lr_decay == "cosine":
        progress = 0.5 - 0.5 * math.cos(math.pi * progress)
    return floor + (1 - progress) * (1 - floor)


def set_lr(optimizers, multiplier):
    """Set the learning rate of every group to its peak times the multiplier."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * multiplier
