"""train.py: flags, presets and recipes, and which of them wins."""

import re
from collections import ChainMap
from dataclasses import asdict, fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import SAMPLE, assert_one_line, here, load, needs_extras, ok
from model import GPT, GPTConfig
from train import FLAGS, PRESETS, RECIPES, lr_multiplier, make_config, parse_flags

DEFAULTS = {name: default for name, (default, *_) in FLAGS.items()}

# -- the command line --------------------------------------------------------------------------------------------------

NANOGPT = """out_dir eval_interval log_interval init_from gradient_accumulation_steps batch_size block_size n_layer
n_head n_embd dropout bias learning_rate max_iters weight_decay beta1 beta2 grad_clip warmup_iters lr_decay_iters min_lr
device dtype compile""".split()  # the settings of nanoGPT's train.py that mean something here


def test_nanogpts_settings_are_flags_of_the_same_names():
    assert FLAGS.keys() >= set(NANOGPT)


def test_help_has_every_flag_with_its_default():
    """A stray % in a help text would make --help fail."""
    text = " ".join(ok(here("--help")).stdout.partition("show this help message and exit")[2].split())
    defaults = {name: str(value) for name, value in vars(make_config({})).items()}
    assert dict(re.findall(r"--(\w+) .*?\(default: (.*?)\)", text)) == defaults | dict(preset="auto")


def test_flags_are_read_as_their_types(monkeypatch):
    """A boolean needs no value. A folder of yours may begin like OpenAI's models, and its name is not a choice."""
    words = "--init_from gpt2-mine --bias --tie_weights=False --n_layer=3 --n_kv_head 1 --dropout 0 --min_lr 1e-4"
    monkeypatch.setattr("sys.argv", ["train.py", *words.split(), "--qk_norm", "0", "--optimizer", "adamw"])
    flags = parse_flags()
    expected = dict(init_from="gpt2-mine", bias=True, tie_weights=False, n_layer=3, n_kv_head=1, dropout=0.0)
    assert flags == expected | dict(min_lr=1e-4, qk_norm=False, optimizer="adamw")
    assert [type(flags[name]) for name in ("bias", "n_layer", "dropout")] == [bool, int, float]


UNREADABLE = [f"--{name}={value}" for name in ("n_layer", "batch_size", "patience") for value in ("1.5", "x", "")]
UNREADABLE += ["--learning_rate=fast", "--compile=maybe", "--preset=huge"]
UNREADABLE += ["--n_layers 3", "--n_lay 3", "stray", "--max_iters"]
IMPOSSIBLE = [f"--{name}=-1" for name in ("n_layer", "batch_size", "patience", "threads")]
IMPOSSIBLE += ["--n_layer=0", "--batch_size=0", "--max_iters=0", "--seed=99999999999999999999"]
IMPOSSIBLE += [f"--{name}={value}" for name in ("learning_rate", "beta1", "mlp_ratio") for value in ("-0.1", "nan")]
IMPOSSIBLE += "--dropout=1 --warmup_iters=-1 --mtp_weight=-1 --seed=-1 --grad_clip=nan".split()
IMPOSSIBLE += "--n_kv_head=3 --activation=relu --data_dir=".split()
IMPOSSIBLE += [pytest.param(flag, marks=needs_extras) for flag in ("--loss=", "--out_dir=")]


@pytest.mark.parametrize("words", UNREADABLE + IMPOSSIBLE)
def test_an_unknown_flag_or_impossible_value_is_one_line_that_names_it(words, data_dir, tmp_path, monkeypatch):
    """And nothing is written."""
    monkeypatch.chdir(tmp_path)
    result = here("--data_dir", data_dir, "--device", "cpu", *words.split(" "))
    assert_one_line(result, "train.py: ", words.split("=")[0].split()[0].lstrip("-"))
    assert result.stdout == "" and not [*tmp_path.iterdir()]


# -- presets and recipes -----------------------------------------------------------------------------------------------

FROM_SCRATCH = [preset for preset in PRESETS if preset != "finetune"]


@given(st.sampled_from([*FROM_SCRATCH, None]), st.sampled_from([*RECIPES, None]), st.booleans(), st.data())
def test_a_flag_beats_a_preset_beats_a_recipe(preset, recipe, on_gpu, data):
    decided = {name for settings in (*PRESETS.values(), *RECIPES.values()) for name in settings}
    fractions = {"min_lr", "learning_rate", "beta2", "lr_stable_frac"}
    numbers = {name for name in decided if type(DEFAULTS[name]) in (int, float)} - fractions
    flags = data.draw(st.dictionaries(st.sampled_from(sorted(numbers)), st.integers(1, 3)))
    named = {name: value for name, value in dict(preset=preset, recipe=recipe).items() if value}
    config = make_config(flags | named, on_gpu=on_gpu)
    preset, recipe = preset or ("gpu" if on_gpu else "cpu"), recipe or "modern"
    expected = ChainMap(flags, PRESETS[preset], RECIPES[recipe], DEFAULTS)
    assert vars(config) == dict(expected) | dict(preset=preset, recipe=recipe)


SIZES = {"lecture": (0.20, 2_560_000), "nanogpt-cpu": (0.80, 1_536_000), "cpu": (0.80, 1_638_400)}
SIZES |= {"laptop": (0.80, 3_584_000), "gpu": (10.65, 32_768_000)}


@pytest.mark.parametrize("preset", FROM_SCRATCH)
def test_no_recipe_wins_by_size(preset):
    """nanoGPT prints 0.80M for its CPU setting and 10.65M for its GPU setting, without position embeddings.

    A new preset may need a different mlp_ratio for one of the recipes, to be as large with both.
    """
    count = {}
    for recipe in RECIPES:
        config = make_config(dict(preset=preset, recipe=recipe))
        shape = {f.name: getattr(config, f.name) for f in fields(GPTConfig) if f.name in FLAGS} | dict(n_kv_head=None)
        shapes = dict(GPT(GPTConfig(vocab_size=65, **shape)).named_parameters())
        count[recipe] = sum(p.numel() for p in shapes.values())
        if recipe == "nanogpt" and preset in SIZES:
            millions = (count[recipe] - shapes["transformer.wpe.weight"].numel()) / 1e6
            tokens = config.max_iters * config.batch_size * config.block_size
            assert (round(millions, 2), tokens) == SIZES[preset]
    assert abs(count["modern"] / count["nanogpt"] - 1) < 0.03


def test_a_run_has_the_network_of_its_preset_and_of_its_flags(data_dir, tmp_path):
    flags = "--preset lecture --n_layer 1 --n_embd 24 --max_iters 1 --device cpu --data_dir".split()
    result = ok(here(*flags, data_dir, "--out_dir", tmp_path, "--loss", "cross_entropy"))
    weights = load(tmp_path / "last.pt")["model"]
    assert {name.split(".")[2] for name in weights if ".h." in name} == {"0"}
    assert weights["transformer.wte.weight"].size(1) == 24
    line = result.stdout.splitlines()[0]
    assert line.startswith("training preset lecture, recipe modern, 0.01M parameters, on 1 x cpu in float32")
    assert line.endswith(f"steps 0..1 of {16 * 32} characters from {SAMPLE}")  # batch_size and block_size of the preset


# -- an earlier run or model -------------------------------------------------------------------------------------------


def checkpoint_of(args, path):
    """What read_checkpoint returns for a model at `path`, as far as make_config reads it."""
    return dict(path=path, model_args=asdict(args))


def test_a_folders_model_decides_the_network_and_needs_no_help_to_begin():
    args = GPTConfig(block_size=16, vocab_size=7, n_layer=1, n_head=2, n_embd=16, tie_weights=False)
    checkpoint = checkpoint_of(args, path=Path("out/hf"))
    config = make_config(dict(init_from="out/hf", dropout=0.1), checkpoint=checkpoint)
    assert (config.n_layer, config.block_size, config.tie_weights, config.dropout) == (1, 16, False, 0.1)
    assert config.loss == "cross_entropy"
    config = make_config(dict(init_from="out/hf", loss="extras.targets"), checkpoint=checkpoint)
    assert (config.loss, config.mtp_weight, config.ngram_targets) == ("extras.targets", 0.3, 1.0)
    run = checkpoint | dict(config=dict(loss="cross_entropy"))
    with pytest.raises(ValueError, match=r"need --loss extras\.targets"):
        make_config(dict(init_from="resume", ngram_targets=0.5), checkpoint=run)
    for heads in (0, 2):  # 0 is n_head
        make_config(dict(init_from="resume", n_kv_head=heads), checkpoint=run)
    with pytest.raises(ValueError, match="--n_kv_head 1 conflicts"):
        make_config(dict(init_from="resume", n_kv_head=1), checkpoint=run)
    with pytest.raises(ValueError, match=r"--n_embd 32 conflicts with out.hf \(n_embd 16\)"):
        make_config(dict(init_from="out/hf", n_embd=32), checkpoint=checkpoint)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_folder_is_finetuned_with_nanogpts_settings_for_gpt2(recipe, tmp_path, monkeypatch):
    """Those of its config/finetune_shakespeare.py, and of its train.py where that is silent, whatever the recipe."""
    monkeypatch.chdir(tmp_path)
    Path("gpt2").mkdir()
    checkpoint = checkpoint_of(GPTConfig(activation="gelu_tanh"), path=Path("gpt2"))
    for flags in ({}, {"preset": "finetune"}):
        config = make_config(flags | dict(init_from="gpt2", recipe=recipe), on_gpu=True, checkpoint=checkpoint)
        expected = dict(batch_size=1, gradient_accumulation_steps=32, max_iters=20, eval_interval=5, block_size=1024)
        expected |= dict(optimizer="adamw", learning_rate=3e-5, weight_decay=0.1, beta1=0.9, beta2=0.95, grad_clip=1.0)
        expected |= dict(dropout=0.0, n_layer=12, activation="gelu_tanh", pos_emb="learned", preset="finetune")
        assert {name: getattr(config, name) for name in expected} == expected
        assert {lr_multiplier(step, config) for step in range(20)} == {1.0}
        assert config.loss == "cross_entropy"
    file = checkpoint | dict(path=Path("model.pth"))  # a checkpoint under any name is not a folder
    assert make_config(dict(init_from="model.pth"), checkpoint=file).preset == "cpu"
    config = make_config(dict(init_from="gpt2", block_size=256), checkpoint=checkpoint)
    assert config.block_size == 256
    with pytest.raises(ValueError, match="--block_size 2048 conflicts with gpt2"):
        make_config(dict(init_from="gpt2", block_size=2048), checkpoint=checkpoint)
    with pytest.raises(ValueError, match=r"--preset finetune, .* need a trained model: .* --init_from"):
        make_config(dict(preset="finetune"))
