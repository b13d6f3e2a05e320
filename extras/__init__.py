"""What model.py, train.py, sample.py and data/prepare.py do not need: it makes them faster, or talks to the outside.

decoding/      speculation with n-grams, the C backend, int8 weights, batches of prompts, --explain
interop/       Hugging Face folders, transformers, ONNX and the web page
checkpoint.py  models with a tokenizer, in a Hugging Face folder, or with nanoGPT's meta.pkl
bpe.py         tokens that are words or parts of words
nanogpt.py     nanoGPT's meta.pkl, and what to type instead of its flags
cores.py       threads that yield on a busy machine
holdout.py     prepare.py --hold_out
plot.py        train.py --plot
baselines.py   the baselines of bench.py
cli.py         messages in one line
"""
