"""Decoding beyond the plain loop of model.py: guesses, the step in C, int8, batches of prompts, --explain."""
