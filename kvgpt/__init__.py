"""What the scripts need beside model.py. Skip it on a first reading.

cli.py         the command line: parser, argument types, one-line errors, signals
cores.py       how our threads share a busy machine
recipes.py     the settings of train.py, and its presets and recipes
checkpoint.py  read and write a model; files.py writes any file whole, tokenizer.py and bpe.py turn text into ids
peers.py       what bench.py compares us with
decoding/      guesses, the step in C, stop texts, comparison, timing, --explain
interop/       Hugging Face folders, transformers, ONNX and the web page: what export.py writes, and what runs it
training/      data, loss, optimizers, the run folder, several processes
"""
