"""Is an exported model still the same model? We compare its logits and its greedy text with PyTorch's."""

import torch

from model import NEAR_TIE


def own_text(model):
    """Return text that the model generates, `(2, block_size)` ids, on which to compare logits."""
    start = torch.zeros(2, 1, dtype=torch.int64)
    return model.generate(start, model.config.block_size - 1, temperature=1, seed=0)


@torch.no_grad()
def compare_with_pytorch(name, model, ids, logits, greedy):
    """Print how far the logits of an exported model are from those of `model`. Raises ValueError if that is too far.

    name    what to call the exported model
    ids     own_text(model)
    logits  the exported model's for ids, `(2, block_size, V)`
    greedy  a function that continues a prompt `(1, T)` with the exported model: a list of block_size ids
    """
    block_size = model.config.block_size
    T = max(1, block_size // 16)  # tokens of the prompt
    difference = (model(ids)[0] - logits).abs().max().item()

    # each token of its text must have PyTorch's largest logit, up to rounding
    text = torch.tensor([greedy(ids[:1, :T])])
    ours = model(text[:, :-1])[0][0, T - 1 :]
    new = text[0, T:]
    behind = (ours.amax(1) - ours.gather(1, new[:, None])[:, 0]).tolist()
    same = sum(gap <= NEAR_TIE for gap in behind)
    found = f"logits within {difference:.1e} of PyTorch's; greedy text: {same} of {block_size - T} tokens match"
    if not difference <= NEAR_TIE or same < block_size - T:  # NaN is not below
        raise ValueError(f"{name} differs from the model by more than {NEAR_TIE}: {found}")
    print(f"{name}: {found}", flush=True)
