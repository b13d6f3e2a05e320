"""Random calls of the scripts, with odd flags, odd environments, damaged files and kills at any moment.

python tests/fuzz.py --minutes 30         rounds of new calls; `make fuzz` does this
python tests/fuzz.py --seed 7 --rounds 1  a round again

The rule for each call: exit code 0 and the right thing done, or one line on stderr and nothing changed. A traceback, a
hang and a wrong text are findings. Hypothesis draws the calls and reduces a finding to a small one.
"""

import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # kvgpt is beside this script's folder

from hypothesis import HealthCheck, given, seed, settings

from fuzzing.calls import calls
from fuzzing.forks import Forks
from fuzzing.rule import check
from fuzzing.world import World
from kvgpt.cli import Parser, number, run_main

CALLS = 60  # per round
ONE = dict(report_multiple_bugs=False, print_blob=False)  # finding per round


def make_round(world, number):
    """Draw and make CALLS calls. The number decides which. Raises the AssertionError of a call that breaks the rule."""

    @seed(number)
    @settings(max_examples=CALLS, deadline=None, database=None, suppress_health_check=list(HealthCheck), **ONE)
    @given(calls)
    def body(call):
        check(world, call)

    body()


def parse_args():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--minutes", type=number(float, "(0, 1e6]"), default=30.0, help="begin no round after these (default: 30)")
    add("--rounds", type=number(int, f"[1, {2**31})"), help="end after these (default: no end)")
    add("--seed", type=number(int, f"[0, {2**64})"), help="of the first round (default: random)")
    return parser.parse_args()


def main():
    args = parse_args()
    first = random.SystemRandom().randrange(2**32) if args.seed is None else args.seed
    began, forks = time.monotonic(), Forks()
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            world, number = World(forks, folder), first
            while (time.monotonic() - began) / 60 < args.minutes and number - first != args.rounds:
                try:
                    make_round(world, number)
                except AssertionError as error:
                    sys.exit(f"\nFOUND: python tests/fuzz.py --seed {number} --rounds 1\n{error}")
                minutes = (time.monotonic() - began) / 60
                print(f"seed {number}: {forks.num_calls} calls so far, in {minutes:.1f} minutes", flush=True)
                number += 1
    finally:
        forks.close()
    print("nothing found")


if __name__ == "__main__":
    run_main(main)
