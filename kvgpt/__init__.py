"""What the scripts need beside model.py. Skip it on a first reading.

cli.py         the command line: parser, argument types, one-line errors, signals
cores.py       how our threads share a busy machine
recipes.py     the settings of train.py, and its presets and recipes
checkpoint.py  read and write a model; blank.py makes one that waits for its weights, files.py writes any file whole
tokenizer.py   text to ids and back, by characters; bpe.py by parts of words
nanogpt.py     what is nanoGPT's: meta.pkl, its flags and what to type instead
baselines.py   what bench.py compares us with
decoding/      guesses, the step in C, int8, stop texts, comparison, timing, --explain
interop/       Hugging Face folders, transformers, ONNX and the web page: what export.py writes, and what runs it
training/      data, loss, optimizers, the run folder, several processes
"""
