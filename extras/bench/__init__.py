"""Measure how fast each way to decode is, compared with other implementations: python -m extras.bench."""
