#!/bin/sh
# lightning 2.6.6 with torchdata 0.11.0: resumed from the last step of an epoch, the whole next epoch is skipped.
#
# With torchdata's StatefulDataLoader, lightning saves the place in the data, and a run killed in the middle of an epoch
# resumes to the bit. But a checkpoint by steps that falls on the last batch of an epoch holds a loader that has just
# ended: the resumed run enters the next epoch, gets no batch, counts the epoch as done, and goes on with the one after.
# A checkpoint by epochs keeps the epoch, but loses the order: with the seed set at the start, as in the first run,
# epoch 1 has the order of epoch 0. Neither gives an error.
#
# It matters because a save every so many steps does fall on the end of an epoch at times, and the run is then an epoch
# short, with a learning rate schedule that no longer fits. Count the steps after a resumed run.
#
# Seen (Linux x86-64, Python 3.11), 3 epochs of 12 steps, killed, and resumed with the same seed:
#                                      batches in each epoch     steps
#   saved at step 11                   12 12 12                     36   to the bit
#   saved at step 12                   12 0 12                      24   other weights
#   saved at step 12, end of epoch     12 12 12                     36   other weights; epoch 1 like epoch 0
#   saved at step 13                   12 12 12                     36   to the bit
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 torchdata==0.11.0 lightning==2.6.6 numpy==2.4.6 setuptools
venv/bin/python -W ignore - <<'END'
import contextlib
import logging
import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader

EPOCHS, STEPS, BATCH = 3, 12, 2
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)
        self.batches = [[] for _ in range(EPOCHS)]

    def training_step(self, batch, i):
        self.batches[self.current_epoch].append(batch.flatten().tolist())
        return self.linear(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)


class Kill(lightning.Callback):
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == self.after:
            raise ConnectionAbortedError


def train(*callbacks, checkpoint=None):
    lightning.seed_everything(0, verbose=False)
    model = Model()
    loader = StatefulDataLoader(torch.arange(STEPS * BATCH).float()[:, None] / 24, BATCH, shuffle=True)
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", callbacks=list(callbacks), enable_checkpointing=bool(callbacks), **quiet
    )
    with contextlib.suppress(ConnectionAbortedError):
        trainer.fit(model, loader, ckpt_path=checkpoint)
    return model, trainer.global_step


unbroken, _ = train()
runs = {
    "saved at step 11": (11, {"every_n_train_steps": 11}),
    "saved at step 12": (12, {"every_n_train_steps": 12}),
    "saved at step 12, end of epoch": (12, {"every_n_epochs": 1, "save_on_train_epoch_end": True}),
    "saved at step 13": (13, {"every_n_train_steps": 13}),
}
seen = []
print(f"{'':35}batches in each epoch     steps")
for name, (after, when) in runs.items():
    kill = Kill()
    kill.after = after
    save = ModelCheckpoint(name, filename="saved", **when)
    killed, _ = train(save, kill)
    model, steps = train(checkpoint=save.best_model_path)
    batches = [a + b for a, b in zip(killed.batches, model.batches)]
    counts = [len(epoch) for epoch in batches]
    verdict = "other weights; epoch 1 like epoch 0" if batches[1] == batches[0] else "other weights"
    if torch.equal(model.linear.weight, unbroken.linear.weight):
        verdict = "to the bit"
    print(f"{name:35}{' '.join(map(str, counts)):22}{steps:9}   {verdict}")
    seen.append((counts, verdict[-7:]))
whole = [STEPS] * EPOCHS
if seen != [(whole, "the bit"), ([12, 0, 12], "weights"), (whole, "epoch 0"), (whole, "the bit")]:
    sys.exit("changed: how lightning resumes a StatefulDataLoader at the end of an epoch")
END
