"""bench.py and extras/bench/baselines.py: what is measured computes the same network, and gives the same tokens."""

import json
import re
import sys
from importlib.util import find_spec

import pytest
import torch

from extra_helpers import needs_compiler
from extras.bench.__main__ import VARIANTS, compare_tokens, network, summary, timed, warm_runs
from extras.bench.baselines import llama2c_run
from helpers import CONTEXT, MODELS, ROOT, V, assert_one_line, here, ok, prompts, run
from model import GPTConfig
from train import make_config

SIZES = ("n_layer", "n_head", "n_embd", "block_size")
SAME = "the same tokens as a forward without a cache, up to rounding: "


@pytest.mark.parametrize("name", ["uncached", "eager"])
def test_one_wrong_token_ends_the_benchmark(name, capsys):
    model = MODELS[0]
    idx = prompts(2, 3)
    *_, new = timed(warm_runs([name], model, None, idx)[0][name], idx, CONTEXT - 3, seed=0)
    compare_tokens(name, model, idx, [new])
    new[1, 4] = (new[1, 4] + 1) % V
    with pytest.raises(SystemExit) as error:
        compare_tokens(name, model, idx, [new])
    assert error.value.code == 1
    assert f"DIFFERENT from a forward without a cache: {name}, seed 0, row 1, new token 4" in capsys.readouterr().err


def test_a_variant_that_needs_too_much_memory_is_left_out_with_a_line(monkeypatch, capsys):
    monkeypatch.setattr("extras.bench.__main__.MOST_MEMORY", 1e-6)
    assert warm_runs(["eager"], MODELS[0], None, prompts(2, 3)) == ({}, 0.0)
    assert "no eager row: it takes more than 0% of the memory" in capsys.readouterr().err


@needs_compiler
def test_the_parts_of_a_step_add_up():
    result = ok(here("--parts", "--shapes", "1/2/16/32", "--repeats", 1, script="extras/bench/__main__.py"))
    rows = [re.match(r"(.+?)  +([\d,]+)  +(\d+)%", line) for line in result.stdout.splitlines()[1:] if line]
    rows = [(name, int(us.replace(",", "")), int(share)) for name, us, share in map(re.Match.groups, rows)]
    *kinds, whole, _, _ = rows
    assert kinds[0][0] == "products" and whole[0] == "the whole step" and whole[1] > 0
    assert abs(sum(us for _, us, _ in kinds) - whole[1]) <= len(kinds)
    assert 95 <= sum(share for *_, share in kinds) <= 105


# -- the baselines ----------------------------------------------------------------------------------------------------


LLAMA2C = """
#include <stdio.h>
typedef struct { int sizes[5], vocab_size, seq_len; } Config;
typedef struct { Config config; float logits[1]; } Transformer;
typedef struct { float temperature; } Sampler;
static void build_transformer(Transformer *t, char *path) {
    FILE *file = fopen(path, "rb");
    if (fread(&t->config, 4, 7, file) != 7) t->config.vocab_size = 0;
    fclose(file);
}
static void build_sampler(Sampler *s, int vocab_size, float temperature, float topp, int seed) {
    s->temperature = temperature;
}
static float *forward(Transformer *t, int token, int pos) {
    t->logits[0] = token + pos + t->config.vocab_size;
    return t->logits;
}
static int sample(Sampler *s, float *logits) { return (int)logits[0] % 7; }
"""


@needs_compiler
def test_llama2c_feeds_each_token_at_its_position(tmp_path):
    """A stand-in with llama2.c's functions counts tokens and positions. The header holds the sizes of the model."""
    (tmp_path / "run.c").write_text(LLAMA2C, encoding="utf-8")
    config = GPTConfig(block_size=16, vocab_size=5, n_layer=1, n_head=2, n_embd=8)
    text = [3]
    *_, new = timed(llama2c_run(config, tmp_path), torch.tensor([text]), 4, seed=0)
    for pos in range(4):
        text.append((text[-1] + pos + 5) % 7)
    assert new.tolist() == [text[1:]]
    assert sys.float_info.min / 2 > 0, "the library makes the process round subnormal numbers to 0"


@pytest.mark.parametrize(("preset", "recipe"), [("cpu", "modern"), ("gpu", "modern"), ("lecture", "nanogpt")])
def test_a_shape_is_the_network_that_train_py_makes(preset, recipe):
    for flags in (dict(preset=preset), dict(preset="cpu", n_layer=7)):
        expected = make_config(flags | dict(recipe=recipe))
        ours = vars(network(recipe, {name: getattr(expected, name) for name in SIZES}))
        same = ours.keys() & vars(expected).keys() - {"dropout", "n_kv_head"}
        assert {name: ours[name] for name in same} == {name: getattr(expected, name) for name in same}


# -- the figures of serving --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "times, sizes, num_tokens, expected",
    [
        # one token per step in 3 rows. Gaps of 4, 10 and 8 ms: the 99th percentile is 98% of the way from 8 to 10
        (
            [0.010, 0.014, 0.024, 0.032],
            [1, 1, 1, 1],
            12,
            dict(ttft_ms=10, tpot_ms=22 / 3, itl_p50_ms=8, itl_p99_ms=9.96, tokens_per_s=375),
        ),
        # one step only: there is no gap, and no token after the first step
        ([0.25], [1], 2, dict(ttft_ms=250, tpot_ms=0, itl_p50_ms=0, itl_p99_ms=0, tokens_per_s=8)),
        # blocks of several tokens: 300 ms for the 6 tokens after the first block, in gaps of 100 and 200 ms
        (
            [0.1, 0.2, 0.4],
            [1, 4, 2],
            7,
            dict(ttft_ms=100, tpot_ms=50, itl_p50_ms=150, itl_p99_ms=199, tokens_per_s=17.5),
        ),
    ],
    ids=["three rows", "one step", "blocks"],
)
def test_the_figures_are_those_computed_by_hand(times, sizes, num_tokens, expected):
    assert summary(times, sizes, num_tokens) == pytest.approx(expected, rel=1e-9)


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_variant_of_a_trained_model_is_measured_and_written(trained, tmp_path):
    files = ["--json", tmp_path / "new" / "b.json", "--plot", tmp_path / "b.png"]
    result = ok(
        run("-m", "extras.bench", "--ckpt", trained / "ckpt.pt", "--batch", 2, "--repeats", 2, *files, timeout=400)
    )
    rows = json.loads((tmp_path / "new" / "b.json").read_text(encoding="utf-8"))
    left_out = ["llama2c", "ctranslate2", *([] if find_spec("openvino") else ["openvino"])]
    variants = [name for name in VARIANTS if name not in left_out]
    assert "no ctranslate2 row: " in result.stderr
    assert [row["variant"] for row in rows] == variants, result.stderr
    assert SAME + ", ".join(name for name in variants if name != "hf") + "\n" in result.stdout
    assert "medians of 2 runs; --llama2c adds a row for llama2.c" in result.stdout
    for row in rows:
        assert row["shape"] == "2/2/32/32" and row["batch"] == 2 and row["tokens_per_s"] > 0 and row["ttft_ms"] > 0
        assert list(row["ms_per_token"])[-1] == "32"
        assert (row["speedup_over_uncached"] == 1) == (row["variant"] == "uncached")
    for picture in ("b.png", "b-dark.png"):
        assert (tmp_path / picture).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ("--shapes 4/4/64", "4/4/64"),
        ("--shapes 4/3/64/32", "n_head=3: must be a divisor of n_embd=64"),
        ("--ckpt assets/shakespeare.pt /nowhere.pt", "/nowhere.pt"),  # before the first minutes pass
        ("--variants fastest", "fastest"),
        ("--recipe nanogpt", "--shapes"),
        ("--plot a.xyz", "a.xyz: name a file that ends with .png"),
        ("--batch 0", "--batch 0 is not from 1 to 4096"),
    ],
)
def test_mistakes_are_one_line(flags, word, monkeypatch):
    monkeypatch.chdir(ROOT)
    result = here(*flags.split(), script="extras/bench/__main__.py")
    assert_one_line(result, word)
    assert result.stdout == ""
