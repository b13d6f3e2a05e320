"""kvgpt.check_cache: right caches pass, and broken ones are found, with their cause."""

import pytest

from cache_bugs import BUGS
from kvgpt.check_cache import check_cache

pytestmark = pytest.mark.filterwarnings("ignore:check_cache could check nothing")


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_a_broken_cache_is_found_and_its_cause_named(name, monkeypatch):
    function, cause, _ = BUGS[name]
    report = check_cache(function(monkeypatch.setattr), length=96)
    assert report, "not found"
    causes = [result.why for result in report.results if result.status == "wrong"]
    assert any(all(words in said for words in cause.split("|")) for said in causes), report
