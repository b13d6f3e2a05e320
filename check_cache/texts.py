"""The random sequences that the scenarios feed, and how many tokens at a time."""

from dataclasses import dataclass
from functools import cached_property

import torch

ROWS = 8  # sequences
TWIN = 3  # row i + TWIN begins like row i, for i < TWIN, and differs from `fork` on
LEAST = 24  # tokens per row
PADS = (0, 3, 5)  # padding tokens of each row, fewer than a third of the shortest length


@dataclass(frozen=True)
class Sizes:
    """How many tokens scenarios feed. `window` is of sliding attention, `seed` draws the sizes of chunks."""

    length: int
    window: int | None = None
    seed: int = 0

    @property
    def third(self):
        return self.length // 3

    @property
    def fork(self):
        return self.third | 1  # odd, so that it is within a page of a paged cache

    @property
    def short(self):
        return min(self.third, 16)  # where the length does not matter

    @property
    def page(self):
        return 1 << self.fork.bit_length()  # where pages begin, of up to that many tokens

    @property
    def ones(self):
        return [1] * min(8, self.length // 4)  # enough single tokens to see a mistake

    @cached_property
    def mixed(self):
        """Chunks of 1, 2, ... tokens in random order, which add up to the length."""
        largest = int(((8 * self.length + 1) ** 0.5 - 1) / 2)
        return (torch.randperm(largest, generator=generator(self.seed), device="cpu") + 1).tolist()

    @property
    def doubling(self):
        return [len(self.ones) * 2**i for i in range(self.length.bit_length())]

    @property
    def prefill(self):
        """The prefill of `decode`: it nearly fills the window, if there is one."""
        full = self.window if self.window and self.window < self.length else 0
        return max(2, full - len(self.ones)) if full else self.third


def generator(seed):
    return torch.Generator().manual_seed(seed)


def draw_texts(sizes, vocab_size, pad, draw):
    """Return ids (ROWS, length).

    Rows 3 to 5 begin like rows 0 to 2. Rows 6 and 7 begin differently from rows 0 and 1 and then go on like them, so
    what is kept under its tokens alone is wrong for them. Some tokens have the padding id, because a cache must not
    mistake them for padding.
    """
    ids = torch.randint(vocab_size, (ROWS, sizes.length), generator=draw, device="cpu")
    ids[torch.rand(ids.shape, generator=draw, device="cpu") < 0.05] = pad
    ids[TWIN : 2 * TWIN, : sizes.fork] = ids[:TWIN, : sizes.fork]
    for row, begins in ((0, 3), (1, min(7, sizes.fork - 4))):
        ids[row + 2 * TWIN] = ids[row]
        ids[row + 2 * TWIN, :begins] = (ids[row, :begins] + 1) % vocab_size
    return torch.tensor(ids.tolist())  # on the device
