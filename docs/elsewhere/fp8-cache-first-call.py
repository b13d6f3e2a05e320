# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "numpy==2.4.6", "transformers==5.24.0"]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# ///
"""transformers 5.24.0: an fp8 cache has the scale of its first call, so text that begins with one token suffers.

QuantizedCache("fp8", config) has one scale for the keys of a layer and one for its values, chosen so that the largest
number of the first call just fits. Larger numbers are cut off later. After a start token alone the scale is too
small, and the same tokens in the same cache have a KL divergence 30 times as large. Begin with a longer call. A Llama
of 4 layers is trained for 2,000 steps, which takes a few minutes.
"""

from report import report

from pydoc_data.topics import topics

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, QuantizedCache

TOKENS, FIRST = 64, (1, 4, 16, 48)
text = "".join(topics[name] for name in sorted(topics))
vocabulary = sorted(set(text))
data = torch.tensor([1 + vocabulary.index(character) for character in text])  # 0 is the start token
split = len(data) * 9 // 10
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=1 + len(vocabulary),
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=1,
    bos_token_id=None,
    eos_token_id=None,
)
model = LlamaForCausalLM(config)


def batch(data):
    """Return 16 texts that begin with the start token."""
    starts = torch.randint(len(data) - TOKENS, (16, 1))
    return torch.cat((torch.zeros_like(starts), data[starts + torch.arange(TOKENS - 1)]), dim=1)


torch.set_num_threads(1)  # small operations gain nothing from a second, and on a busy machine it costs a lot
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(2000):
    optimizer.zero_grad()
    tokens = batch(data[:split])
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
texts = batch(data[split:])


@torch.no_grad()
def log_probabilities(cache, first):
    """Return those of the last 16 tokens, if the first call has that many tokens and every other call one."""
    pieces = texts.split([first] + [1] * (TOKENS - first), dim=1)
    return torch.cat([model(piece, past_key_values=cache).logits for piece in pieces], dim=1)[:, -16:].log_softmax(-1)


exact = log_probabilities(DynamicCache(config=config), 1)
other = [log_probabilities(QuantizedCache("fp8", config), first) for first in FIRST]
kl = [((exact.exp() * (exact - fp8)).sum(-1)).mean().item() for fp8 in other]
argmax = [(exact.argmax(-1) != fp8.argmax(-1)).float().mean().item() for fp8 in other]
print("tokens in the first call  ", *FIRST)
print("KL divergence             ", *(f"{value:.4f}" for value in kl))
print("most likely token differs ", *(f"{value:.1%}" for value in argmax))
report(
    {
        "KL divergence with 1 token first, more than 5 times that with 48": (kl[0] > 5 * kl[-1], True),
        "KL divergence with 48 tokens first, below 0.02": (kl[-1] < 0.02, True),
    }
)
