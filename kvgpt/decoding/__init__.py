"""Decoding beyond the plain loop of model.py: guesses, the step in C, stop strings, --verify, timing."""
