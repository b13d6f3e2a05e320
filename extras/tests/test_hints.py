"""What people type who come from nanoGPT, or guess: one line that says what to type instead."""

import shutil

import pytest

from helpers import assert_one_line, run
from model import PRETRAINED

HINTS = [
    ("sample.py {file}", "type --ckpt {file}"),
    ("sample.py --init_from=gpt2-xl", "type --ckpt for a model from elsewhere"),
    ("sample.py --init_from resume", "nothing for your last run"),
    ("sample.py --temp 0.5", "did you mean --temperature?"),
    ("sample.py --num-sample 2", "did you mean --num_samples?"),
    ("sample.py hello", 'type --prompt "TEXT"'),
    ("sample.py --start=a\\nb", "in a shell, $'\\n' is a newline"),
    ("sample.py --data_dir data", "the checkpoint has the vocabulary"),
    ("sample.py --ckpt {other}", "pass the file, such as {other}/mine.pt"),
    ("train.py {file}", "type --init_from {file}"),
    ("train.py --resume", "type --init_from resume"),
    ("train.py --input a.txt", "run python data/prepare.py --input FILE first"),
    ("train.py --ckpt {file}", "type --init_from FILE"),
    ("train.py extra", "docs/interop.md lists what nanoGPT's flags are called here"),
    ("train.py --max-iter 9", "did you mean --max_iters?"),
    ("train.py --init_from resume --out_dir {only}", "--init_from {only} starts a new run from its weights"),
    ("data/prepare.py {file}", "type --input FILE"),
    ("data/prepare.py --input https://example.com/a.txt", "(download it first)"),
]


@pytest.mark.parametrize("command, hint", HINTS, ids=[command for command, _ in HINTS])
def test_a_near_miss_is_one_line_with_the_way_out(command, hint, tmp_path):
    only, other = tmp_path / "only", tmp_path / "other"
    only.mkdir()
    other.mkdir()
    shutil.copy(PRETRAINED, only / "ckpt.pt")
    shutil.copy(PRETRAINED, other / "mine.pt")
    places = dict(file=PRETRAINED, only=only, other=other)
    script, *words = (word.format(**places) for word in command.split())
    assert_one_line(run(script, *words), hint.format(**places))
