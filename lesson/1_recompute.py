"""A GPT that generates the slow way: it rereads the whole text for each new character."""

import json
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

block_size, n_layer, n_head, n_embd = 200, 2, 4, 64
head_size = n_embd // n_head
steps, batch_size, learning_rate = 800, 4, 6e-3


class Head(nn.Module):
    """One head of causal self-attention: each position looks at itself and to its left."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(n_embd, head_size, bias=False)
        self.key = nn.Linear(n_embd, head_size, bias=False)
        self.value = nn.Linear(n_embd, head_size, bias=False)

    def forward(self, x):
        T = x.size(1)
        q, k, v = self.query(x), self.key(x), self.value(x)  # (B, T, head_size)
        visible = torch.ones(T, T, dtype=torch.bool).tril()
        scores = q @ k.transpose(-2, -1) / head_size**0.5
        return scores.masked_fill(~visible, -torch.inf).softmax(dim=-1) @ v


class MultiHeadAttention(nn.Module):
    """All heads, one after the other, and a matrix that mixes their outputs."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(Head() for _ in range(n_head))
        self.proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        y = torch.cat([head(x) for head in self.heads], dim=-1)  # (B, T, n_embd)
        return self.proj(y)


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

    def forward(self, x):
        x = x + self.attention(self.ln1(x))
        return x + self.feed_forward(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.token_embedding = nn.Embedding(vocab_size, n_embd)
        self.position_embedding = nn.Embedding.from_pretrained(waves(), freeze=False)
        self.blocks = nn.ModuleList(Block() for _ in range(n_layer))
        self.ln = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size)

    def forward(self, idx):
        """Return logits (B, T, vocab_size) for tokens idx (B, T)."""
        x = self.token_embedding(idx) + self.position_embedding(torch.arange(idx.size(1)))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln(x))

    @torch.no_grad()
    def generate(self, idx, max_new_tokens):
        """Append max_new_tokens to idx (B, T). The model reads block_size tokens at most."""
        for _ in range(max_new_tokens):
            logits = self(idx)
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
    times = []
    for _ in range(5):  # their median, because another program may slow one of them down
        torch.manual_seed(1337)
        start = time.perf_counter()
        idx = model.generate(torch.zeros(1, 1, dtype=torch.long), max_new_tokens=200)
        times.append(time.perf_counter() - start)
    print("".join(chars[i] for i in idx[0]))
    print(f"200 characters in {sorted(times)[2]:.2f} seconds")
