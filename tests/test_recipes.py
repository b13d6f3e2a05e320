"""train.py: flags, presets and recipes, and which of them wins."""

import argparse
import itertools
import re
from collections import ChainMap
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import here, load, log, ok
from model import GPT, GPTConfig
from train import (
    FLAGS,
    PAIRS,
    PRESETS,
    RECIPES,
    TrainConfig,
    lr_multiplier,
    make_parser,
    parse_flags,
    resolve_config,
    shown,
)

NANOGPT = """out_dir eval_interval log_interval init_from gradient_accumulation_steps batch_size block_size n_layer
n_head n_embd dropout bias learning_rate max_iters weight_decay beta1 beta2 grad_clip warmup_iters lr_decay_iters min_lr
device dtype compile""".split()  # the settings of nanoGPT's train.py that mean something here


def test_nanogpts_settings_are_flags_of_the_same_names():
    parser = make_parser()
    parser.format_help()  # which fails on a stray % in a help text
    assert {action.dest for action in parser._actions} >= set(NANOGPT)


def test_a_folder_of_yours_may_begin_like_openais_models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("gpt2-mine").mkdir()
    assert parse_flags(["--init_from", "gpt2-mine"]) == {"init_from": "gpt2-mine"}


BAD = [f"--{name}={value}" for name in ("n_layer", "batch_size", "patience") for value in ("0", "-1", "1.5", "x", "")]
BAD += [f"--{name}={value}" for name in ("learning_rate", "beta1", "mlp_ratio") for value in ("-0.1", "nan", "inf")]
BAD += ["--dropout=1", "--warmup_iters=-1", "--compile=maybe", "--preset=huge", "--activation=relu", "--out_dir="]
BAD += ["--n_layer -1", "--n_layers 3", "--n_lay 3", "stray", "--max_iters"]


@pytest.mark.parametrize("argv", BAD)
def test_an_unknown_flag_or_impossible_value_is_one_line_that_names_it(argv, capsys):
    with pytest.raises(SystemExit) as error:
        parse_flags(argv.split())
    out, err = capsys.readouterr()
    assert error.value.code == 2 and out == "" and len(err.splitlines()) == 1
    assert argv.split("=")[0].split()[0] in err


# -- presets and recipes -----------------------------------------------------------------------------------------------

FROM_SCRATCH = [preset for preset in PRESETS if preset != "finetune"]
every_pair = pytest.mark.parametrize("preset, recipe", [*itertools.product(FROM_SCRATCH, RECIPES)])


@given(st.sampled_from([*FROM_SCRATCH, None]), st.sampled_from([*RECIPES, None]), st.booleans(), st.data())
def test_a_flag_beats_an_override_beats_a_preset_beats_a_recipe(preset, recipe, on_gpu, data):
    decided = {name for settings in (*PRESETS.values(), *RECIPES.values()) for name in settings}
    numbers = {name for name in decided if type(FLAGS[name].default) in (int, float)} - {"min_lr", "learning_rate"}
    flags = data.draw(st.dictionaries(st.sampled_from(sorted(numbers)), st.integers(1, 3)))
    named = {name: value for name, value in dict(preset=preset, recipe=recipe).items() if value}
    config = resolve_config(flags | named, on_gpu=on_gpu)
    preset, recipe = preset or ("gpu" if on_gpu else "cpu"), recipe or "modern"
    override = PAIRS.get((preset, recipe), {})
    expected = ChainMap(flags, override, PRESETS[preset], RECIPES[recipe], asdict(TrainConfig()))
    assert asdict(config) == dict(expected) | dict(preset=preset, recipe=recipe)


SIZES = {"lecture": (0.20, 2_560_000), "nanogpt-cpu": (0.80, 1_536_000), "cpu": (0.80, 1_638_400)}
SIZES |= {"laptop": (0.80, 3_584_000), "gpu": (10.65, 81_920_000)}


@pytest.mark.parametrize("preset", FROM_SCRATCH)
def test_no_recipe_wins_by_size(preset):
    """nanoGPT prints 0.80M for its CPU setting and 10.65M for its GPU setting, without position embeddings.

    A new preset may need a different mlp_ratio for one of the recipes, to be as large with both.
    """
    count = {}
    for recipe in RECIPES:
        config = resolve_config(dict(preset=preset, recipe=recipe), on_gpu=False)
        shapes = dict(GPT(GPTConfig(vocab_size=65, **config.model_args())).named_parameters())
        count[recipe] = sum(p.numel() for p in shapes.values())
        if recipe == "nanogpt" and preset in SIZES:
            millions = (count[recipe] - shapes["transformer.wpe.weight"].numel()) / 1e6
            assert (round(millions, 2), config.max_iters * config.tokens_per_step) == SIZES[preset]
    assert abs(count["modern"] / count["nanogpt"] - 1) < 0.03


@every_pair
def test_help_shows_the_settings_that_a_run_would_have(preset, recipe):
    """Each flag shows the default of a run on a CPU, and the end of --help what a preset and a recipe change."""
    parser, config = make_parser(), resolve_config(dict(preset=preset, recipe=recipe), on_gpu=False)
    text = f" {' '.join(parser.epilog.split())} "
    chosen = {}
    for name in (recipe, preset, f"{preset} with {recipe}"):  # the later one wins
        settings = re.search(rf" {name}: ((\w+=\S+ )+)", text)
        chosen |= dict(pair.split("=") for pair in settings[1].split()) if settings else {}
    for action in parser._actions:
        if action.dest not in ("help", "preset", "recipe"):
            default = shown(action.dest, FLAGS[action.dest].default)
            assert chosen.get(action.dest, default) == shown(action.dest, getattr(config, action.dest)), action.dest
            assert action.help == argparse.SUPPRESS or action.help.endswith(f"(default: {default})")
    assert resolve_config({}, on_gpu=False) == TrainConfig(preset="cpu")


def test_a_run_has_the_network_of_its_preset_and_of_its_flags(data_dir, tmp_path):
    flags = "--preset lecture --n_layer 1 --n_embd 24 --max_iters 1 --device cpu --data_dir".split()
    result = ok(here(*flags, data_dir, "--out_dir", tmp_path))
    weights = load(tmp_path / "last.pt")["model"]
    assert {name.split(".")[2] for name in weights if ".h." in name} == {"0"}
    assert weights["transformer.wte.weight"].size(1) == 24
    assert int(log(tmp_path)[0]["tokens"]) == 16 * 32  # batch_size and block_size of the preset
    assert result.stdout.startswith("training preset lecture, recipe modern, on cpu")


# -- an earlier run or model -------------------------------------------------------------------------------------------


def test_a_folders_model_decides_the_network_and_needs_no_help_to_begin():
    args = GPTConfig(block_size=16, vocab_size=7, n_layer=1, n_head=2, n_embd=16, tie_weights=False)
    source = dict(path=Path("out/hf"), model={}, model_args=asdict(args), chars="abcdefg")
    config = resolve_config(dict(init_from="out/hf", dropout=0.1), on_gpu=False, source=source)
    assert (config.n_layer, config.block_size, config.tie_weights, config.dropout) == (1, 16, False, 0.1)
    assert config.ngram_targets is config.mtp_weight is None
    assert resolve_config(dict(init_from="out/hf", mtp_weight=0.3), on_gpu=False, source=source).mtp_weight == 0.3
    with pytest.raises(ValueError, match=r"--n_embd 32 conflicts with the model in out.hf \(n_embd 16\)"):
        resolve_config(dict(init_from="out/hf", n_embd=32), on_gpu=False, source=source)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_folder_is_finetuned_with_nanogpts_settings_for_gpt2(recipe):
    """Those of its config/finetune_shakespeare.py, and of its train.py where that is silent, whatever the recipe."""
    source = dict(path=Path("gpt2"), model={}, model_args=asdict(GPTConfig(activation="gelu_tanh")))
    for flags in ({}, {"preset": "finetune"}):
        config = resolve_config(flags | dict(init_from="gpt2", recipe=recipe), on_gpu=True, source=source)
        expected = dict(batch_size=1, gradient_accumulation_steps=32, max_iters=20, eval_interval=5, block_size=1024)
        expected |= dict(optimizer="adamw", learning_rate=3e-5, weight_decay=0.1, beta1=0.9, beta2=0.95, grad_clip=1.0)
        expected |= dict(dropout=0.0, n_layer=12, activation="gelu_tanh", pos_emb="learned", preset="finetune")
        assert {name: getattr(config, name) for name in expected} == expected
        assert {lr_multiplier(step, config) for step in range(20)} == {1.0}
        assert not config.mtp_weight and not config.ngram_targets
    config = resolve_config(dict(init_from="gpt2", block_size=256), on_gpu=False, source=source)
    assert config.block_size == 256
    with pytest.raises(ValueError, match="--block_size 2048 conflicts with the model in gpt2"):
        resolve_config(dict(init_from="gpt2", block_size=2048), on_gpu=False, source=source)
    with pytest.raises(ValueError, match=r"--preset finetune starts from a trained model: .* --init_from"):
        resolve_config(dict(preset="finetune"), on_gpu=False)
