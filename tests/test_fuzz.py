"""Random calls and kills, the same ones on every run. `make fuzz` makes others."""

import random
from dataclasses import replace

import pytest

from fuzz import make_round
from fuzzing.calls import EXPORTS, KILLABLE, Call
from fuzzing.forks import Forks
from fuzzing.rule import check
from fuzzing.world import World
from helpers import linux

pytestmark = [linux, pytest.mark.slow]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    forks = Forks()
    yield World(forks, tmp_path_factory.mktemp("fuzz"))
    forks.close()


@pytest.mark.parametrize("number", range(5))
def test_random_calls_do_the_right_thing_or_say_why_not(number, world):
    make_round(world, number)


def test_thirty_kills_lose_nothing(world):
    """Training, resuming, setting aside, preparing and exporting, killed at a file's change or at any moment."""
    rng, killed = random.Random(0), 0
    commands = [*KILLABLE * 4, *EXPORTS]
    while killed < 30:
        call = commands[killed % len(commands)]
        most = 3 if call in EXPORTS else 0.4
        at = {"kill_after": rng.uniform(0, most)} if rng.random() < 0.4 else {"kill_at": rng.randint(1, 12)}
        killed += check(world, replace(call, request=at)) == -9


# -- the rule itself ---------------------------------------------------------------------------------------------------

FAULTY = {
    "a traceback": "raise KeyError('x')",
    "two lines": "sys.exit('one\\ntwo')",
    "no line": "sys.exit(1)",
    "an escape code": "sys.exit('\\x1b[2J')",
    "a crash": "os.kill(os.getpid(), 11)",
    "a hang": "time.sleep(60)",
    "a wrong text": "print('text'); sys.exit('--verify' in sys.argv)",
    "a lost file": "os.remove('out/last.pt'); sys.exit('one line')",
    "a changed file": "open('data/meta.json', 'a').write(' '); sys.exit('one line')",
    "a file that is left": "open('data/x', 'w'); sys.exit('one line')",
}


@pytest.mark.parametrize("fault", FAULTY)
def test_a_script_that_breaks_the_rule_is_found(fault, world, tmp_path, monkeypatch):
    """Without this test the rule could pass everything."""
    script = tmp_path / "sample.py"
    script.write_text(f"import os, sys, time\n{FAULTY[fault]}\n", encoding="utf-8")
    run = world.forks.run

    def run_faulty(name, args, folder, **request):
        faulty = "--no-kv_cache" not in args
        return run(script if faulty else name, args, folder, **({"timeout": 2} if faulty else {}), **request)

    monkeypatch.setattr(world.forks, "run", run_faulty)
    with pytest.raises(AssertionError):
        check(world, Call("sample.py", ["--prompt", "the ", "--device", "cpu"]))
