"""One test per scenario, for pytest. Nothing here runs before the first of them."""

from collections.abc import Callable, Iterable
from functools import cache, partial

from check_cache.check import check_cache, choose
from check_cache.report import as_list


def parametrize_with_scenarios(load: Callable[[], object], *, require: str | Iterable[str] = (), **options: object):
    """Return pytest.mark.parametrize for a test that calls its argument `check`: once for each scenario.

    load      returns a model, or a dict of arguments of check_cache. The first test calls it
    require   names of scenarios: one that cannot run skips its test, unless it is required
    options   more arguments of check_cache, such as length and skip

    Raises ValueError for a name or a word that no scenario has.
    """
    import pytest

    load, required = cache(load), as_list(require)
    chosen = choose(options.pop("scenarios", ()), options.pop("skip", ()))
    names = [one.name for one in chosen]
    if unknown := [name for name in required if name not in names]:
        raise ValueError(f"require: no scenario is called {unknown[0]!r}. There are {', '.join(names)}")

    def check(one):
        __tracebackhide__ = True
        model = load()
        adapter = model if isinstance(model, dict) else dict(model=model)
        report = check_cache(**adapter, **options | dict(scenarios=[one]))
        absent = {result.status for result in report.results} == {"not run"} and not report.missing
        if absent and one.name not in required:
            pytest.skip(report.results[0].why)
        report.assert_correct(one.name if one.name in required else ())

    return pytest.mark.parametrize("check", [pytest.param(partial(check, one), id=one.name) for one in chosen])
