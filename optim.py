"""How the weights are moved: Muon for the matrices of the blocks, AdamW for everything else, and the learning rate.

A matrix takes part in a product, and what matters about a step of it is what it does to every direction of its input.
Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) makes the step orthogonal: all singular values near 1, so
that directions which the gradient hardly shows are learned as fast as the loud ones. Embeddings, the head, norms and
biases are no such maps; AdamW moves them.
"""

import math

import torch


def orthogonalize(x, steps=5):
    """The matrices `(n, rows, cols)` with their singular values moved to about 1, by Newton-Schulz steps.

    Each step applies a s + b s^3 + c s^5 to every singular value s, by matrix products alone. The coefficients are
    Jordan's: they lift small values fastest, and leave all between about 0.7 and 1.2, near enough to 1.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = x if x.size(-2) <= x.size(-1) else x.mT  # the product below is then the smaller of the two
    wide = wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)  # no singular value above 1
    for _ in range(steps):
        gram = wide @ wide.mT
        wide = torch.baddbmm(wide, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide if x.size(-2) <= x.size(-1) else wide.mT


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal. In float32, and for all matrices of a size in one batch.

    torch.optim.Muon takes one matrix after the other in bfloat16: right for a GPU that multiplies bfloat16, and an
    emulation elsewhere.
    params  groups; a group's "parts" are the sizes along dim 0 of the matrices that lie in one parameter, as q, k and v
            do in c_attn: each is made orthogonal by itself
    A step of lr moves a matrix by lr * sqrt(max(1, rows / cols)) in every direction.
    """

    def __init__(self, params, lr, momentum=0.95, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay, parts=None))

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
                p.mul_(1 - group["lr"] * group["weight_decay"])
                parts = group["parts"] or [len(p)]
                for matrix, update in zip(p.split(parts), ahead.split(parts)):
                    by_size.setdefault(matrix.shape, []).append((matrix, update, group["lr"]))
        for (rows, cols), entries in by_size.items():
            matrices, updates, rates = zip(*entries)
            scale = math.sqrt(max(1, rows / cols))
            for matrix, update, lr in zip(matrices, orthogonalize(torch.stack(updates)).unbind(), rates):
                matrix.add_(update, alpha=-lr * scale)


def configure_optimizers(model, config, device):
    """[AdamW] or [AdamW, Muon], every parameter in exactly one group; a group's "peak" is its learning rate's.

    Weight decay is for what is a matrix or an embedding, not for biases and norms.
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
        attns = [block.attn for block in model.transformer["h"]]
        joined = {id(attn.c_attn.weight) for attn in attns}
        kv = attns[0].n_kv_head * attns[0].head_size
        groups = [
            dict(params=[p for p in matrices if id(p) in joined], peak=peak, parts=(model.config.n_embd, kv, kv)),
            dict(params=[p for p in matrices if id(p) not in joined], peak=peak),
        ]
        native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        optimizers.append((torch.optim.Muon if native else Muon)(groups, lr=peak, weight_decay=0.0))
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
