"""What model.py, train.py, sample.py and data/prepare.py do not need: it makes them faster, or talks to the outside.

decoding/      speculation with n-grams, the C backend, int8 weights, batches of prompts, --explain
interop/       Hugging Face folders, transformers, ONNX and the web page
checkpoint.py  models with a tokenizer, in a Hugging Face folder, or with nanoGPT's meta.pkl
bpe.py         tokens that are words or parts of words
nanogpt.py     nanoGPT's meta.pkl, and what to type instead of its flags
cores.py       threads that yield on a busy machine
bench.py       python -m extras.bench: how fast each way to generate is
baselines.py   transformers and llama2.c, for bench.py
export.py      python -m extras.export: ONNX, Hugging Face folders, the web page
holdout.py     python -m extras.holdout: split the training text again
plot.py        python -m extras.plot: the losses of a run as a picture
cli.py         their flags, and messages in one line
web/           the page
tests/         the tests of all this
"""
