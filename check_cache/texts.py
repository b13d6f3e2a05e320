"""The random sequences that the scenarios feed, and how many tokens at a time."""

import torch

ROWS = 8  # sequences
TWIN = 3  # row i + TWIN begins like row i, for i < TWIN, and differs from `fork` on
LEAST = 24  # tokens per row
PADS = (0, 3, 5)  # padding tokens of each row, fewer than a third of the shortest length


class Sizes:
    """How many tokens scenarios feed. `window` is of sliding attention, `seed` draws the sizes of chunks."""

    def __init__(self, length, window=None, seed=0):
        self.length, self.window, self.seed, self.third = length, window, seed, length // 3
        self.fork = self.third | 1  # odd, so that it is within a page of a paged cache
        self.page = 1 << self.fork.bit_length()  # where pages begin, of up to that many tokens
        self.short = min(self.third, 16)  # where the length does not matter
        self.ones = [1] * min(8, length // 4)  # enough single tokens to see a mistake
        largest = int(((8 * length + 1) ** 0.5 - 1) / 2)  # chunks of 1, 2, ... up to it fit into the length
        self.mixed = (torch.randperm(largest, generator=generator(seed), device="cpu") + 1).tolist()
        self.doubling = [len(self.ones) * 2**i for i in range(length.bit_length())]
        # the prefill of `decode` nearly fills the window, if there is one
        self.prefill = max(2, window - len(self.ones)) if window and window < length else self.third


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
