"""Decoding beyond the plain loop of model.py: speculation, the C backend, int8, batches of prompts, --explain."""
