"""Checks whether the KV cache of a PyTorch decoder is correct, and names the first wrong key.

    from check_cache import check_cache

    def test_cache():
        check_cache(model).assert_correct()

README.md describes the adapter that a decoder outside transformers needs.
"""

from check_cache.adapters import copies_of
from check_cache.check import check_cache
from check_cache.report import Report, Result

__all__ = ["Report", "Result", "check_cache", "copies_of"]
