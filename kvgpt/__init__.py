"""What the scripts need besides model.py. Skip it on a first reading.

cli.py         the command line: parser, argument types, one-line errors, signals
cores.py       threads that share a busy machine
recipes.py     the settings of train.py, and its presets and recipes
checkpoint.py  read and write a model; blank.py builds one without weights, files.py writes files atomically
tokenizer.py   text to ids and back, by character; bpe.py, by word piece
nanogpt.py     nanoGPT's meta.pkl, and what to type instead of its flags
baselines.py   the baselines of bench.py
decoding/      guesses, the step in C, int8, stop strings, --verify, timing, --explain
interop/       Hugging Face folders, transformers, ONNX and the web page
training/      data, loss, optimizers, the run folder, several processes
"""
