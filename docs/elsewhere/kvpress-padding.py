# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "numpy==2.4.6", "transformers==5.2.0", "kvpress==0.5.5"]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# ///
"""kvpress 0.5.5 with transformers 5.2.0: with left padding, the mask hides the best of the tokens that a press keeps.

A press keeps half of the keys of the prompt, the best first. generate() goes on with the mask of the uncompressed
prompt: if a row begins with ten pads, its first ten slots are hidden, and these now hold its ten best tokens. The
pads take part in the competition, too, and what they win further back is visible. Put only prompts of one length in a
batch.
"""

from report import report

import torch
from kvpress import KeyDiffPress, KnormPress, SnapKVPress, StreamingLLMPress, TOVAPress
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

TEXT, PADS, NEW = 60, 10, 20
torch.manual_seed(0)
tokens = dict(vocab_size=40, pad_token_id=None, bos_token_id=None, eos_token_id=None)
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.2)
model = LlamaForCausalLM(LlamaConfig(**tokens, **sizes)).eval()
batch = torch.randint(1, 40, (2, PADS + TEXT))
batch[1, :PADS] = 0
mask = torch.ones_like(batch)
mask[1, :PADS] = 0
alone = batch[1:, PADS:]


def generate(press, ids, mask, new=NEW):
    cache = DynamicCache()
    options = dict(do_sample=False, output_logits=True, return_dict_in_generate=True)
    with press(model):
        out = model.generate(ids, attention_mask=mask, max_new_tokens=new, past_key_values=cache, **options)
    return out.sequences[-1, -new:], out.logits, cache


def kept_slots(whole, kept):
    """For each layer and head of the padded row, the slots of the whole cache that the press kept, in its order."""
    pairs = [(w.keys[1], k.keys[1]) for w, k in zip(whole.layers, kept.layers)]
    return torch.cat([torch.cdist(k, w).argmin(-1) for w, k in pairs])


def run(press):
    """Return for the padded row how much text is hidden and padding visible, and whether the two checks hold."""
    whole, kept = (generate(press(ratio), batch, mask, 1)[2] for ratio in (0, 0.5))
    slots = kept_slots(whole, kept)
    _, logits, _ = generate(press(0.5), batch, mask)
    # The second step by hand: the compressed cache, with as many of its first slots hidden as there was padding.
    first = logits[0].argmax(-1, keepdim=True)
    visible = torch.ones(2, 1, 1, slots.size(1) + 1, dtype=torch.bool)
    visible[1, ..., :PADS] = False
    position = torch.tensor([[PADS + TEXT], [TEXT]])
    by_hand = model(first, attention_mask=visible, position_ids=position, past_key_values=kept).logits[:, -1]
    hidden_text = (slots[:, :PADS] >= PADS).sum(-1).float().mean().item()
    visible_padding = (slots[:, PADS:] < PADS).sum(-1).float().mean().item()
    unpadded = generate(press(0), alone, torch.ones_like(alone))[0]
    same = torch.equal(generate(press(0), batch, mask)[0], unpadded)
    return hidden_text, visible_padding, torch.allclose(by_hand, logits[1], atol=1e-4), same


presses = {
    "KnormPress": KnormPress,
    "KeyDiffPress": KeyDiffPress,
    "TOVAPress": TOVAPress,
    "StreamingLLMPress": StreamingLLMPress,
    "SnapKVPress": lambda ratio: SnapKVPress(ratio, window_size=8),
}
print("of 35 kept tokens, hidden text and visible padding; is the mask the reason; exact without a press")
expected = {
    "KnormPress": [9.9, 4.8],
    "KeyDiffPress": [10.0, 0.0],
    "TOVAPress": [10.0, 6.0],
    "StreamingLLMPress": [10.0, 4.0],
    "SnapKVPress": [10.0, 2.1],
}
with torch.no_grad():
    rows = {name: (list(run(press)), [*expected[name], True, True]) for name, press in presses.items()}
    norms = torch.stack([layer.keys.norm(dim=-1) for layer in generate(KnormPress(0.5), batch, mask, 1)[2].layers])
rows["the slots are in the order of their scores"] = (norms.diff() >= 0).all().item(), True
report(rows)
