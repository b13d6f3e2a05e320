#!/bin/sh
# keras 3.15.1: BackupAndRestore with save_freq=N restores the weights of batch N, and starts the epoch over.
#
# The callback is made for runs that are killed, and with the default, a backup per epoch, the resumed run is exact to
# the bit. With a backup every N batches, weights and optimizer come back as they were in the middle of the epoch. The
# file next to them says which batch it was, but nothing reads it: fit starts the epoch over, so the model is trained
# twice on the batches before the backup. A backup at the last batch of an epoch repeats the whole epoch. The learning
# rate schedule, which counts steps, is ahead from then on.
#
# It matters because frequent backups are what a long epoch needs, and every restart trains more steps than were asked
# for, on the same part of the data. Use save_freq="epoch" and make the epoch shorter with steps_per_epoch.
#
# Seen (Linux x86-64, Python 3.11), 4 epochs of 6 steps, killed after 16 or 18, without shuffling or dropout:
#   save_freq   killed after   steps trained   trained twice      weights of an unbroken run
#   "epoch"               16              24                      to the bit
#   "epoch"               18              24                      to the bit
#   2                     16              28   4 steps            off by 0.03
#   6                     18              30   6 steps            off by 0.03
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq keras==3.15.1 jax==0.10.2 numpy==2.4.6
KERAS_BACKEND=jax venv/bin/python -W ignore - <<'END'
import contextlib
import sys

import keras
import numpy as np

EPOCHS, STEPS, BATCH = 4, 6, 16
rng = np.random.default_rng(0)
inputs, targets = (rng.standard_normal((STEPS * BATCH, size), dtype=np.float32) for size in (8, 4))


class Kill(keras.callbacks.Callback):
    def __init__(self, after):
        super().__init__()
        self.left = after

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def train(*callbacks):
    """Train a new model, as a new process would. Return it."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "gelu"), keras.layers.Dense(4)])
    model.compile(keras.optimizers.AdamW(1e-2), "mse")
    model.fit(inputs, targets, BATCH, EPOCHS, verbose=0, callbacks=list(callbacks), shuffle=False)
    return model


unbroken = train().get_weights()
print("save_freq   killed after   steps trained   trained twice      weights of an unbroken run")
seen = []
for save_freq, after in (("epoch", 16), ("epoch", 18), (2, 16), (6, 18)):
    folder = f"backup-{save_freq}-{after}"
    with contextlib.suppress(KeyboardInterrupt):
        train(keras.callbacks.BackupAndRestore(folder, save_freq=save_freq), Kill(after))
    model = train(keras.callbacks.BackupAndRestore(folder, save_freq=save_freq))
    steps = int(model.optimizer.iterations)  # restored with the weights, so it counts all that they were trained on
    error = max(np.abs(a - b).max() for a, b in zip(unbroken, model.get_weights()))
    twice = f"{steps - EPOCHS * STEPS} steps" if steps > EPOCHS * STEPS else ""
    name = f'"{save_freq}"' if save_freq == "epoch" else save_freq
    print(f"{name:<12}{after:12}{steps:16}   {twice:19}{f'off by {error:.2f}' if error else 'to the bit'}")
    seen.append((steps, bool(error)))
if seen != [(24, False), (24, False), (28, True), (30, True)]:
    sys.exit("changed: where fit continues after BackupAndRestore")
END
