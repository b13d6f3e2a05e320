"""Checks whether the KV cache of a PyTorch decoder is correct: check_cache(model).assert_correct(). See README.md."""

from check_cache.attention import show_attention
from check_cache.check import check_cache
from check_cache.report import Report, Result
from check_cache.report import __version__ as __version__
from check_cache.scenarios import Scenario, scenario
from check_cache.testing import parametrize_with_scenarios

__all__ = ["Report", "Result", "Scenario", "check_cache", "parametrize_with_scenarios", "scenario", "show_attention"]
