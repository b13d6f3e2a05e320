"""Checks whether the KV cache of a PyTorch decoder is correct: check_cache(model).assert_correct(). See README.md."""

import sys

try:
    from check_cache.attention import show_attention
    from check_cache.check import check_cache
    from check_cache.report import Report, Result
    from check_cache.scenarios import scenario
except ModuleNotFoundError as error:
    if sys.argv[0] != "-m":  # python -m check_cache imports this first
        raise
    sys.exit(f"check-cache: {error}: activate the environment, or pip install torch")

__version__ = "0.4.0"
__all__ = ["Report", "Result", "check_cache", "scenario", "show_attention"]
