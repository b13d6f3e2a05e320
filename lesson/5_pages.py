"""The same GPT with its KV cache in pages of 16 slots, which texts with the same start share."""

import json
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

block_size, n_layer, n_head, n_embd = 200, 2, 4, 64
head_size, page_size, num_pages = n_embd // n_head, 16, 100
steps, batch_size, learning_rate = 800, 4, 6e-3


class MultiHeadAttention(nn.Module):
    """All heads at once. The rows of qkv: query, key and value of head 0, then of head 1, ..."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.pool, self.used = torch.zeros(2, n_head, num_pages, page_size, head_size), 0
        self.proj = nn.Linear(n_embd, n_embd)

    def forward(self, x, pos):
        B, T, _ = x.shape
        qkv = self.qkv(x).view(B, T, n_head, 3, head_size).permute(3, 0, 2, 1, 4)
        q, k, v = qkv  # (B, n_head, T, head_size)
        if not self.training:  # write the new keys and values, and use all of them so far
            for i in range(pos // page_size, len(self.table)):  # the pages we are about to write to
                if self.table[i] in self.shared:  # other texts read it: write to a copy
                    self.pool[:, :, self.used] = self.pool[:, :, self.table[i]]
                    self.table[i], self.used = self.used, self.used + 1
            while len(self.table) * page_size < pos + T:  # all pages are full: take one more
                self.table, self.used = [*self.table, self.used], self.used + 1
            slots = [page * page_size + i for page in self.table for i in range(page_size)]
            flat = self.pool.flatten(2, 3)  # (2, n_head, all slots, head_size), the same memory
            flat[:, :, slots[pos : pos + T]] = qkv[1:, 0]  # there is one text in a batch
            k, v = flat[:, None, :, slots[: pos + T]]
        visible = torch.ones(T, k.size(-2), dtype=torch.bool).tril(k.size(-2) - T)
        scores = q @ k.transpose(-2, -1) / head_size**0.5
        y = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1) @ v
        return self.proj(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Sequential):
    """What each position computes by itself from what it found."""

    def __init__(self):
        super().__init__(nn.Linear(n_embd, 4 * n_embd), nn.ReLU(), nn.Linear(4 * n_embd, n_embd))


class Block(nn.Module):
    """Attention and feed-forward, each with a norm before it and a residual connection."""

    def __init__(self):
        super().__init__()
        self.ln1, self.attention = nn.LayerNorm(n_embd), MultiHeadAttention()
        self.ln2, self.feed_forward = nn.LayerNorm(n_embd), FeedForward()

    def forward(self, x, pos):
        x = x + self.attention(self.ln1(x), pos)
        return x + self.feed_forward(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.token_embedding = nn.Embedding(vocab_size, n_embd)
        self.position_embedding = nn.Embedding.from_pretrained(waves(), freeze=False)
        self.blocks = nn.ModuleList(Block() for _ in range(n_layer))
        self.ln = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size)

    def forward(self, idx, pos=0):
        """Return logits (B, T, vocab_size) for tokens idx (B, T)."""
        x = self.token_embedding(idx) + self.position_embedding(pos + torch.arange(idx.size(1)))
        for block in self.blocks:
            x = block(x, pos)
        return self.lm_head(self.ln(x))

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, pos=0, shared=()):
        """Append max_new_tokens to idx (1, T). The pages `shared` hold its first pos tokens."""
        for block in self.blocks:  # each has its own pool, and all pools fill alike
            block.attention.table, block.attention.shared = list(shared), shared
        for _ in range(max_new_tokens):
            logits = self(idx[:, pos:], pos)
            pos = idx.size(1)
            probs = logits[:, -1].softmax(dim=-1)
            idx = torch.cat((idx, torch.multinomial(probs, num_samples=1)), dim=1)
        return idx


def waves():
    """Return sines and cosines (block_size, n_embd), a better start than random positions."""
    angle = torch.arange(block_size)[:, None] * 0.003 ** (torch.arange(0, n_embd, 2) / n_embd)
    return torch.cat((angle.sin(), angle.cos()), dim=1)


def read_text():
    """Return the text that data/prepare.py downloaded, or the stand-in that comes with the code."""
    data = Path(__file__).resolve().parent.parent / "data"
    meta = data / "meta.json"
    chars = json.loads(meta.read_bytes()).get("chars") if meta.exists() else None
    if not chars:
        return (data / "sample.txt").read_text(encoding="utf-8")
    return "".join(chars[i] for i in memoryview((data / "train.bin").read_bytes()).cast("H"))


if __name__ == "__main__":
    text = read_text()
    chars = sorted(set(text))
    data = torch.tensor([chars.index(char) for char in text])

    torch.set_default_dtype(torch.float64)  # so that rounding never changes a character
    torch.manual_seed(1337)
    model = GPT(len(chars))
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
    for step in range(steps):
        at = torch.randint(len(data) - block_size, (batch_size, 1)) + torch.arange(block_size)
        loss = F.cross_entropy(model(data[at]).flatten(0, 1), data[at + 1].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 99:
            print(f"step {step + 1} of {steps}: loss {loss.item():.2f}", flush=True)

    model.eval()
    times, pos, shared = [], 0, []
    for seed in range(8):  # eight texts with the same 40 characters at the beginning
        torch.manual_seed(seed)
        start = time.perf_counter()
        idx = model.generate(data[None, :40], 100, pos, shared)
        times.append(time.perf_counter() - start)
        pos, shared = 39, model.blocks[0].attention.table[:3]  # we need the logits of the 40th
    print("".join(chars[i] for i in idx[0]))
    print(f"8 texts in {sum(times):.2f} seconds")
    used, unshared = model.blocks[0].attention.used, 8 * -(-idx.size(1) // page_size)
    print(f"{used} pages of {page_size} slots, where 8 texts without sharing take {unshared}")
