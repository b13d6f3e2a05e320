"""Support code for the scripts. Skip it on a first reading.

cli.py        command line: parser, argument types, error messages
baselines.py  other implementations that bench.py measures
decoding/     sampling, n-grams and drafts, the compiled step, comparison, timing, --explain
training/     settings, data, optimizers, the run folder, signals, several processes
storage/      checkpoints, Hugging Face folders, ONNX files

The scripts import kvgpt. kvgpt imports model.py. model.py imports the sampler, decoding/sampling.py, and nothing else
from here. No module here imports a script.
"""
