#!/bin/sh
# torch 2.13.0, ema-pytorch 0.8.3, lightning 2.6.6: averaging the weights of a model turns a causal mask of 0 and -inf
# into NaN.
#
# The average of a mask that never changes should be the mask. But an average is computed as old + share * (new - old),
# and -inf minus -inf is NaN. With use_buffers=True, torch's AveragedModel does so by default and with
# get_ema_multi_avg_fn. get_ema_avg_fn is the same average as a sum of products, and correct. ema-pytorch and
# lightning's WeightAveraging include the buffers by default, and at the end of fit() lightning copies the NaN into your
# model. A mask of booleans helps only in part: torch's default and WeightAveraging then raise an error.
#
# It matters because nn.Transformer.generate_square_subsequent_mask makes such a mask, and many a small GPT keeps it in
# a buffer. The loss of the training is fine, and the averaged model, the one that you keep, returns only NaN. Use
# is_causal, or leave out the buffers: use_buffers=False, or param_or_buffer_names_no_ema={"mask"} in ema-pytorch.
#
# Seen (Linux x86-64, Python 3.11), logits of the averaged model after 3 steps of training:
#                                           mask of 0 and -inf      mask of booleans
#   torch AveragedModel                     finite                  finite
#   torch, use_buffers=True                 NaN                     RuntimeError
#   torch, the same, get_ema_multi_avg_fn   NaN                     finite
#   torch, the same, get_ema_avg_fn         finite                  finite
#   ema-pytorch EMA                         NaN                     finite
#   lightning WeightAveraging               NaN                     RuntimeError
#   lightning EMAWeightAveraging            finite                  finite
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 numpy==2.4.6 ema-pytorch==0.8.3 pytorch-lightning==2.6.6
venv/bin/python -W ignore - <<'END'
import logging
import sys

import pytorch_lightning as lightning
import torch
from ema_pytorch import EMA
from pytorch_lightning.callbacks import EMAWeightAveraging, WeightAveraging
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
TOKENS, VOCABULARY, SIZE, STEPS = 8, 16, 8, 3


class GPT(lightning.LightningModule):
    def __init__(self, boolean):
        super().__init__()
        self.wte, self.lm_head = nn.Embedding(VOCABULARY, SIZE), nn.Linear(SIZE, VOCABULARY)
        self.layers = nn.ModuleList(nn.Linear(SIZE, 3 * SIZE) for _ in range(2))
        mask = nn.Transformer.generate_square_subsequent_mask(TOKENS)
        self.register_buffer("mask", mask == 0 if boolean else mask)

    def forward(self, ids):
        x = self.wte(ids)
        for qkv in self.layers:
            q, k, v = qkv(x).chunk(3, dim=-1)
            x = x + nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        return self.lm_head(x)

    def training_step(self, ids, _=0):
        return nn.functional.cross_entropy(self(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def batches():
    torch.manual_seed(1)
    return torch.randint(VOCABULARY, (STEPS, 4, TOKENS))


def by_hand(average, update, averaged):
    def train(model):
        optimizer, averager = model.configure_optimizers(), average(model)
        for ids in batches():
            optimizer.zero_grad()
            loss = model.training_step(ids)
            loss.backward()
            optimizer.step()
            update(averager, model)
        assert loss.isfinite()
        return averaged(averager)

    return train


def by_torch(**options):
    return by_hand(
        lambda model: AveragedModel(model, **options), AveragedModel.update_parameters, lambda averager: averager.module
    )


def by_lightning(callback):
    def train(model):
        quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, callbacks=[callback()], **quiet)
        trainer.fit(model, torch.utils.data.DataLoader(batches(), batch_size=None))
        return model

    return train


multi, single = get_ema_multi_avg_fn(0.9), get_ema_avg_fn(0.9)
ways = {
    "torch AveragedModel": by_torch(),
    "torch, use_buffers=True": by_torch(use_buffers=True),
    "torch, the same, get_ema_multi_avg_fn": by_torch(use_buffers=True, multi_avg_fn=multi),
    "torch, the same, get_ema_avg_fn": by_torch(use_buffers=True, avg_fn=single),
    "ema-pytorch EMA": by_hand(
        lambda model: EMA(model, beta=0.9, update_after_step=0, update_every=1),
        lambda averager, model: averager.update(),
        lambda averager: averager.ema_model,
    ),
    "lightning WeightAveraging": by_lightning(WeightAveraging),
    "lightning EMAWeightAveraging": by_lightning(lambda: EMAWeightAveraging(decay=0.9)),
}


def logits(train, boolean):
    torch.manual_seed(0)
    try:
        averaged = train(GPT(boolean))
    except RuntimeError as error:
        return type(error).__name__
    with torch.no_grad():
        seen = averaged(batches()[0])
    return "NaN" if seen.isnan().all() else "finite" if seen.isfinite().all() else "both"


seen = {name: (logits(train, False), logits(train, True)) for name, train in ways.items()}
print(f"{'':38}  {'mask of 0 and -inf':22}  mask of booleans")
for name, (infinite, boolean) in seen.items():
    print(f"{name:38}  {infinite:22}  {boolean}")
expected = {
    "torch AveragedModel": ("finite", "finite"),
    "torch, use_buffers=True": ("NaN", "RuntimeError"),
    "torch, the same, get_ema_multi_avg_fn": ("NaN", "finite"),
    "torch, the same, get_ema_avg_fn": ("finite", "finite"),
    "ema-pytorch EMA": ("NaN", "finite"),
    "lightning WeightAveraging": ("NaN", "RuntimeError"),
    "lightning EMAWeightAveraging": ("finite", "finite"),
}
if seen != expected:
    sys.exit(f"changed: {[name for name in seen if seen[name] != expected[name]]}")
END
