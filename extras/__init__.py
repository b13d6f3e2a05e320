"""What model.py, train.py, sample.py and data/prepare.py do not need: it makes them faster, or talks to the outside.

generation.py  what sample.py does with the flags of this folder
text.py        text of tokens that are parts of characters
tokenizer.py   the tokenizer of a checkpoint: characters, or those of a tokenizer.json
checkpoint.py  models with such a tokenizer, in a Hugging Face folder, or with nanoGPT's meta.pkl
bpe.py         tokens that are words or parts of words
nanogpt.py     nanoGPT's meta.pkl
cores.py       threads that yield on a busy machine
decoding/      speculation with n-grams, the C backend, int8 weights, batches of prompts, --explain
interop/       Hugging Face folders, ONNX and the web page
bench.py       python -m extras.bench: how fast each way to generate is
baselines.py   transformers and llama2.c, for bench.py
export.py      python -m extras.export: ONNX, Hugging Face folders, the web page
plot.py        python -m extras.plot: the losses of a run as a picture
cli.py         their flags, and messages in one line
web/           the page
tests/         the tests of all this
"""
