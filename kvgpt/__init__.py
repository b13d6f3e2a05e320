"""Support code for the scripts. Skip it on a first reading.

cli.py        command line: parser, argument types, errors in one line, signals
baselines.py  other implementations that bench.py measures
decoding/     sampling, threads, n-grams and drafts, the compiled step, stop texts, comparison, timing, --explain
training/     settings, data, optimizers, the run folder, several processes
storage/      checkpoints, Hugging Face folders, ONNX files, vocabularies

The scripts import kvgpt. kvgpt imports model.py. model.py imports decoding/sampling.py and decoding/threads.py, and
nothing else from here. No module here imports a script.
"""
