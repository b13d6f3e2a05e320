"""Checks whether the KV cache of a PyTorch decoder is correct: check_cache(model).assert_correct(). See README.md."""

from check_cache.attention import show_attention
from check_cache.check import check_cache
from check_cache.report import Report, Result
from check_cache.scenarios import scenario

__version__ = "0.4.0"
__all__ = ["Report", "Result", "check_cache", "scenario", "show_attention"]
