"""What model.py, train.py, sample.py and data/prepare.py do not need: it makes them faster, or talks to the outside.

generation.py  what sample.py does with the flags of this folder
training.py    what train.py takes from this folder
targets.py     auxiliary targets of a training run
text.py        text of tokens that are parts of characters
tokenizer.py   the tokenizer of a checkpoint: characters, those of a tokenizer.json, or ids
checkpoint.py  models with such a tokenizer, in a Hugging Face folder, or with nanoGPT's meta.pkl
bpe.py         tokens that are words or parts of words
foreign.py     files and folders that are no checkpoint: what each is
nanogpt.py     nanoGPT's meta.pkl and data folders
cores.py       threads that yield on a busy machine
decoding/      speculation with n-grams, the C backend, the CUDA graph, int8 weights, batches of prompts, --explain
interop/       Hugging Face folders, ONNX and the web page
bench.py       python -m extras.bench: how fast each way to generate is
baselines.py   transformers and llama2.c, for bench.py
export.py      python -m extras.export: ONNX, Hugging Face folders, the web page
plot.py        python -m extras.plot: the losses of a run as a picture
cli.py         their flags, and messages in one line
extras.py      what python extras/export.py says
web/           the page
tests/         the tests of all this
"""

import sys


def without_traceback(kind, error, traceback):
    """The excepthook of our commands: silence after Ctrl-C, and one line if the environment is missing."""
    if kind is KeyboardInterrupt:
        sys.exit(130)
    if kind is ModuleNotFoundError and error.name in ("torch", "numpy", "tqdm"):
        sys.exit(f"{error}: activate the environment, or install it as README.md says")
    sys.__excepthook__(kind, error, traceback)


if sys.argv[0] == "-m":  # python -m extras.export: this runs first, before the imports that take long or fail
    sys.excepthook = without_traceback
