# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "numpy==2.4.6", "transformers==5.24.0"]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# [tool.elsewhere]
# versions = ["transformers==5.23.0"]
# ///
"""transformers 5.23.0 and 5.24.0: in generate, a model of your own can forget its prompt.

Since 5.24, generate() passes the cache as cache, before that as past_key_values. A forward of yours that has one of
them, and **kwargs for the rest, finds the other one in kwargs, and goes on without a cache. But from the second step
on it gets one token, so it sees one token, at position 0. 5.24 warns that the old name is deprecated, as if it still
worked. Accept both names, and compare with use_cache=False.
"""

from report import report

import torch
import transformers
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

BATCH, PROMPT, NEW, HEADS, SIZE = 4, 6, 20, 2, 16


class Config(PreTrainedConfig):
    model_type, num_hidden_layers, num_attention_heads, hidden_size = "own", 1, HEADS, HEADS * SIZE


class GPT(PreTrainedModel, GenerationMixin):
    """One layer of attention with learned positions."""

    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.wte, self.wpe = nn.Embedding(40, HEADS * SIZE), nn.Embedding(64, HEADS * SIZE)
        self.qkv, self.lm_head = nn.Linear(HEADS * SIZE, 3 * HEADS * SIZE), nn.Linear(HEADS * SIZE, 40)
        self.post_init()

    def attend(self, input_ids, past):
        (B, T), before = input_ids.shape, past.get_seq_length() if past is not None else 0
        x = self.wte(input_ids) + self.wpe(torch.arange(before, before + T))
        q, k, v = self.qkv(x).view(B, T, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = past.update(k, v, 0)
        visible = torch.ones(T, before + T, dtype=torch.bool).tril(before)
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return CausalLMOutputWithPast(logits=self.lm_head(x + y.transpose(1, 2).flatten(2)))


class Old(GPT):
    def forward(self, input_ids, past_key_values=None, **kwargs):
        return self.attend(input_ids, past_key_values)


class New(GPT):
    def forward(self, input_ids, cache=None, **kwargs):
        return self.attend(input_ids, cache)


class Both(GPT):
    def forward(self, input_ids, past_key_values=None, cache=None, **kwargs):
        return self.attend(input_ids, past_key_values if cache is None else cache)


@torch.no_grad()
def run(make):
    """Return whether greedy text differs from that without a cache, and what its last token has seen."""
    torch.manual_seed(0)
    model = make(Config()).eval()
    for p in model.parameters():
        p.normal_(std=0.5)
    ids = torch.randint(1, 40, (BATCH, PROMPT))
    expected = ids
    for _ in range(NEW):
        expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], dim=1)
    scores = dict(output_logits=True, return_dict_in_generate=True)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, **scores)
    text = out.sequences[:, :-1]
    candidates = {"the whole text": model(text), "one token": model(text[:, -1:])}
    seen = [name for name, o in candidates.items() if torch.allclose(out.logits[-1], o.logits[:, -1], atol=1e-4)]
    return [(out.sequences != expected).any().item(), *seen]


version = transformers.__version__
wrong = New if version == "5.23.0" else Old
print("greedy text differs from that without a cache, and what its last token has seen")
report(
    {
        f"transformers {version}, forward({names})": (
            run(make),
            [True, "one token"] if make is wrong else [False, "the whole text"],
        )
        for make, names in ((Old, "past_key_values"), (New, "cache"), (Both, "past_key_values, cache"))
    }
)
