"""Decoding beyond the plain loop of model.py: sampling, drafts, the compiled step, comparison, timing."""
