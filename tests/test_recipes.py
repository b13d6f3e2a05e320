"""kvgpt/recipes.py: flags, presets and recipes, and how they become the settings of a run."""

import argparse
import contextlib
import copy
import itertools
import re
import tempfile
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import train
from helpers import SMALL, assert_one_line, assert_refused, child, here, load, log, ok, run, same, write_data
from kvgpt.checkpoint import Checkpoint, load_checkpoint
from kvgpt.cli import boolean
from kvgpt.recipes import FLAGS, TrainConfig, make_parser, parse_flags, resolve_config
from kvgpt.training.optim import lr_multiplier
from model import GPT, GPTConfig

TABLES = train.PRESETS, train.RECIPES, train.OVERRIDES

# -- flags -------------------------------------------------------------------------------------------------------------

FIGURES = """out_dir eval_interval log_interval init_from gradient_accumulation_steps batch_size block_size n_layer
n_head n_embd dropout bias learning_rate max_iters weight_decay beta1 beta2 grad_clip warmup_iters lr_decay_iters min_lr
device dtype compile""".split()  # of nanoGPT's train.py, those that mean something here


def test_every_figure_is_a_flag_with_nanogpts_name_and_a_help_text():
    parser = make_parser("", *TABLES)
    flags = {option: action for action in parser._actions for option in action.option_strings}
    for name in [*FIGURES, "preset", "save_interval", "seed", "data_dir"]:
        assert flags[f"--{name}"].help.partition("(default")[0].strip(), name
        assert f"--{name}" in parser.format_help()  # which also fails on a stray % in a help text


@pytest.mark.parametrize(
    "argv, flags",
    [
        ("--eval_interval 500", {"eval_interval": 500}),
        ("--eval_interval=500", {"eval_interval": 500}),
        ("--compile", {"compile": True}),
        ("--compile=False", {"compile": False}),
        ("--compile False --bias=True", {"compile": False, "bias": True}),
        ("--compile --eval_interval 500", {"compile": True, "eval_interval": 500}),
        ("--learning_rate 1e-3 --seed=7", {"learning_rate": 1e-3, "seed": 7}),
        ("--grad_clip 0 --warmup_iters 0 --dropout 0", {"grad_clip": 0, "warmup_iters": 0, "dropout": 0}),
        ("", {}),
    ],
)
def test_flags_parse_as_nanogpts_do(argv, flags):
    assert parse_flags("", *TABLES, argv.split()) == flags


COUNTS = """eval_interval save_interval log_interval n_layer n_head n_kv_head n_embd block_size batch_size max_iters
lr_decay_iters gradient_accumulation_steps patience sample_interval""".split()


REALS = "dropout mlp_ratio learning_rate muon_learning_rate min_lr weight_decay beta1 beta2 grad_clip".split()
BAD_FLAGS = [
    *(f"--{name}={value}" for name in COUNTS for value in ("0", "-1", "nan", "inf", "1.5", "x", "")),
    *(f"--{name}={value}" for name in ["warmup_iters", "seed"] for value in ("-1", "nan", "inf", "1.5", "x", "")),
    *(f"--{name}={value}" for name in REALS for value in ("-0.1", "nan", "inf", "-inf", "1e999", "x", "")),
    *(f"--{name}=1" for name in ["dropout", "beta1", "beta2"]),
    *(f"--{name}=maybe" for name in ["compile", "bias", "norm_first", "tie_weights", "preset", "dtype"]),
    f"--warmup_iters={'9' * 309}",  # more than a float holds
    *("--activation=relu", "--pos_emb=none", f"--seed={2**63}", "--n_layer -1", "--learning_rate -1"),
    *("--n_layers 3", "--n_lay 3", "--unknown", "stray", "--max_iters", "--preset", "--n_embd 1 2", "--compile 1 2"),
]


@pytest.mark.parametrize("argv", BAD_FLAGS)
def test_an_unknown_flag_or_impossible_value_is_one_line_that_names_it(argv, capsys):
    with pytest.raises(SystemExit) as error:
        parse_flags("", *TABLES, argv.split())
    out, err = capsys.readouterr()
    assert error.value.code == 2 and out == ""
    assert len(err.splitlines()) == 1
    name = argv.split("=")[0].split()[0]
    assert (name if " 2" not in argv else "unrecognized arguments: 2") in err


@pytest.mark.parametrize(
    "flags",
    [
        "--n_embd 65 --n_head 4",
        "--n_kv_head 3 --n_head 4",
        "--n_embd 12 --n_head 4 --pos_emb rope",
        "--mlp_ratio 0",
        "--mlp_ratio 1e20",
        "--mlp_ratio 1e300",
        f"--n_embd {10**18} --n_head 1",
        f"--batch_size {10**15}",
    ],
)
def test_a_network_or_batch_that_cannot_be_is_one_line_with_exit_code_2(flags, data_dir, tmp_path):
    """Not a traceback from inside torch. Some figures are fine by themselves, but no memory holds the network."""
    try:
        result = here(*SMALL, "--data_dir", data_dir, "--out_dir", tmp_path, "--max_iters", 1, *flags.split())
    except Exception as error:
        pytest.fail(f"{type(error).__name__}: {str(error)[:100]}")
    assert_one_line(result, flags.split()[0], code=2)
    assert not list(tmp_path.iterdir())


def test_argument_errors_of_real_processes():
    """What the cases above see inside one process holds from a shell, too."""
    assert_one_line(run("train.py", "--eval_interval", "-5"), "--eval_interval", "-5", code=2)


# -- presets and recipes -----------------------------------------------------------------------------------------------

SHAPES = {"lecture": (4, 4, 64, 32), "nanogpt-cpu": (4, 4, 128, 64), "cpu": (4, 4, 128, 256), "gpu": (6, 6, 384, 256)}
SHAPES["laptop"] = SHAPES["cpu"]
# in millions, as nanoGPT counts them
PARAMETERS = {"lecture": 0.20, "nanogpt-cpu": 0.80, "cpu": 0.80, "laptop": 0.80, "gpu": 10.65}
CHARACTERS = {  # of a whole run
    "lecture": {"modern": 2_560_000, "nanogpt": 2_560_000},
    "nanogpt-cpu": {"modern": 1_536_000, "nanogpt": 1_536_000},
    "cpu": {"modern": 1_638_400, "nanogpt": 1_638_400},
    "laptop": {"modern": 3_584_000, "nanogpt": 3_584_000},
    "gpu": {"modern": 32_768_000, "nanogpt": 81_920_000},
}
every_preset = pytest.mark.parametrize("preset", train.PRESETS)
every_recipe = pytest.mark.parametrize("recipe", train.RECIPES)


def resolved(on_gpu=False, **flags):
    return resolve_config(flags, *TABLES, on_gpu=on_gpu)


def count_parameters(config):
    """Return the parameters of the network on Shakespeare's 65 characters: all, and without position embeddings."""
    sizes = {name: p.numel() for name, p in GPT(GPTConfig(vocab_size=65, **config.model_args())).named_parameters()}
    return sum(sizes.values()), sum(sizes.values()) - sizes.get("transformer.wpe.weight", 0)


def test_without_flags_the_size_suits_the_device_and_is_said(data_dir, tmp_path):
    result = ok(child("--data_dir", data_dir, "--out_dir", tmp_path / "a", "--max_iters", 1, timeout=300))
    expected = ("gpu", "cuda", 6, 384) if torch.cuda.is_available() else ("cpu", "cpu", 4, 128)
    config = load(tmp_path / "a" / "last.pt")["config"]
    seen = [config[name] for name in ("preset", "n_layer", "n_embd", "block_size")]
    assert seen == [expected[0], expected[2], expected[3], 256]
    first = result.stdout.splitlines()[0]
    assert f"preset {expected[0]}, recipe modern, on {expected[1]}" in first
    assert f"{expected[2]} layers" in first
    assert f"{expected[3]} wide" in first
    assert "context 256" in first


@every_preset
def test_a_presets_network_is_as_large_as_nanogpts(preset):
    """nanoGPT prints 0.80M for its CPU setting and 10.65M for its GPU setting, without position embeddings."""
    count, without_positions = count_parameters(resolved(preset=preset, recipe="nanogpt"))
    assert round(without_positions / 1e6, 2) == PARAMETERS[preset]
    modern, _ = count_parameters(resolved(preset=preset, recipe="modern"))
    assert abs(modern / count - 1) < 0.03  # a recipe must not win by size
    assert preset == "gpu" or max(modern, count) < 0.83e6


@every_recipe
@pytest.mark.parametrize(
    "preset", ["lecture", "nanogpt-cpu", "cpu", "laptop", pytest.param("gpu", marks=pytest.mark.slow)]
)
def test_a_run_has_the_network_and_the_characters_of_its_preset(preset, recipe, data_dir, tmp_path):
    """Read from the weights and from log.csv, not from the settings that the run has written down."""
    batch = {"gpu": ["--batch_size", 2]}.get(preset, [])  # a GPU's batch takes a CPU too long
    flags = ["--preset", preset, "--recipe", recipe, *batch, "--device", "cpu", "--data_dir", data_dir]
    result = ok(here(*flags, "--max_iters", 1, "--out_dir", tmp_path))
    weights, (layers, heads, width, context) = load(tmp_path / "last.pt")["model"], SHAPES[preset]
    assert {name.split(".")[2] for name in weights if ".h." in name} == {str(layer) for layer in range(layers)}
    assert weights["transformer.wte.weight"].size(1) == width
    if recipe == "nanogpt":
        assert len(weights["transformer.wpe.weight"]) == context
    else:
        assert len(weights["transformer.h.0.attn.q_norm.weight"]) == width / heads
    count = sum(p.numel() for name, p in weights.items() if name != "lm_head.weight")  # the matrix of wte
    assert f"context {context}, {count / 1e6:.2f}M parameters" in result.stdout

    (row,) = log(tmp_path)
    per_step = int(row["chars"]) * (32 if batch else 1)
    assert per_step * resolved(preset=preset, recipe=recipe).max_iters == CHARACTERS[preset][recipe]


@pytest.mark.parametrize(
    "preset, figures",
    [
        ("lecture", dict(n_layer=4, n_head=4, n_embd=64, block_size=32)),
        ("nanogpt-cpu", dict(n_layer=4, n_head=4, n_embd=128, block_size=64, batch_size=12, max_iters=2000)),
        ("cpu", dict(n_layer=4, n_head=4, n_embd=128, block_size=256)),
        ("gpu", dict(n_layer=6, n_head=6, n_embd=384, block_size=256)),
    ],
)
def test_a_presets_figures_reach_the_run_and_flags_override_them(preset, figures, data_dir, tmp_path):
    small = dict(n_layer=1, n_embd=24, max_iters=1, batch_size=1)
    flags = [x for name, value in small.items() for x in (f"--{name}", value)]
    result = ok(here("--preset", preset, *flags, "--device", "cpu", "--data_dir", data_dir, "--out_dir", tmp_path))
    ckpt = load(tmp_path / "last.pt")
    for name, value in (figures | small).items():
        assert ckpt["config"][name] == value
        assert ckpt["model_args"].get(name, value) == value
    assert f"preset {preset}, " in result.stdout.splitlines()[0]


def test_the_preset_auto_follows_the_device():
    assert resolved(on_gpu=True) == resolved(on_gpu=True, preset="auto") == resolved(preset="gpu")
    assert resolved() == resolved(preset="auto") == resolved(on_gpu=True, preset="cpu")
    assert resolved().recipe == "modern"


def read_tables(text):
    """Return {name: {(preset, recipe): default}} as a reader of --help reads the two tables at its end."""
    defaults, table = {}, None
    for line in text[text.index("defaults per preset") :].splitlines():
        first, *cells = re.split(r" {2,}", line.strip())
        if first.startswith("defaults per "):
            table, columns, usual = first.split()[2], cells, first.partition("(recipe ")[2].rstrip(")")
        for column, cell in zip(columns, cells if first.startswith("--") else []):
            shown, others = re.match(r"([^(]*[^( ])((?: \(\w+: [^)]*\))*)$", cell).groups()
            others = dict(re.findall(r"\((\w+): ([^)]*)\)", others))
            row = defaults.setdefault(first.removeprefix("--"), {})
            if table == "preset":
                assert usual not in others
                row |= {(column, recipe): others.get(recipe, shown) for recipe in train.RECIPES}
            else:
                row |= {(preset, column): cell for preset in train.PRESETS}
    return defaults


NONE = dict(
    n_kv_head="n_head", lr_decay_iters="max_iters", min_lr="learning_rate / 10", patience="off", sample_interval="off"
)
NONE |= dict(data_dir="data, beside train.py", threads="PyTorch's choice", ngram_targets="off", mtp_weight="off")


def test_help_shows_the_settings_that_a_run_would_have(capsys):
    """For every preset with every recipe, and every flag: in the tables, or as the default in its help text."""
    with pytest.raises(SystemExit):
        parse_flags("", *TABLES, ["--help"])
    tables = read_tables(capsys.readouterr().out)
    helps = {action.dest: action.help for action in make_parser("", *TABLES)._actions}
    for preset, recipe in itertools.product(train.PRESETS, train.RECIPES):
        config = resolved(preset=preset, recipe=recipe)
        for name in FLAGS:
            if name not in ("preset", "recipe"):
                value = getattr(config, name)
                expected = NONE[name] if value is None else str(value)
                if name in tables:
                    assert tables[name][preset, recipe] == expected, name
                    assert helps[name].endswith(", see below)")
                else:
                    assert helps[name].endswith(f"(default: {expected})"), name
    assert helps["preset"].endswith("(default: auto)") and helps["recipe"].endswith("(default: modern)")


# -- settings from flags -----------------------------------------------------------------------------------------------

NUMBERS = "0 5e-324 1e-9 1e-4 0.1 0.5 0.9999999999999999 1 2 3 16 100 1e30 1e39 2147483647 9223372036854775807".split()
SIZES = dict(n_layer="1 2", n_head="1 2 3", n_kv_head="1 2", n_embd="2 6 16 2147483647", block_size="1 2 16 2147483647")
SIZES |= dict(batch_size="1 3", gradient_accumulation_steps="1 3", max_iters="1 2", mlp_ratio="0 0.01 0.1 4 1e30")
SIZES |= dict(device="cpu meta nonsense")


def possible_texts():
    """Return {flag: texts that its argparse type takes}. Sizes are small enough for a step, or far too large."""
    texts = {}
    for action in make_parser("", *TABLES)._actions:
        if action.dest in ("help", "init_from", "data_dir", "out_dir", "compile", "plot"):
            continue
        numbers = SIZES[action.dest].split() if action.dest in SIZES else NUMBERS
        for text in action.choices or (["True", "False"] if action.type is boolean else numbers):
            with contextlib.suppress(ValueError, argparse.ArgumentTypeError):
                if action.type:
                    action.type(text)
                texts.setdefault(action.dest, []).append(text)
    return texts


TEXTS = possible_texts()
some_flags = st.lists(st.sampled_from(sorted(TEXTS)), min_size=1, max_size=2, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: st.sampled_from(TEXTS[name]) for name in names})
)


def as_argv(texts):
    return [f"--{name}={text}" for name, text in texts.items()]


@pytest.fixture(scope="module")
def sources(trained):
    """What a run may start from: nothing, an earlier run, the model of a Hugging Face folder."""
    args = GPTConfig(block_size=16, vocab_size=7, n_layer=1, n_head=2, n_embd=16, bias=False)
    folder = Checkpoint(path=Path("out/hf"), weights={}, model_args=asdict(args), chars="abcdefg", best_val_loss=1.0)
    return {"scratch": None, "resume": load_checkpoint(trained / "last.pt"), "out/hf": folder}


@settings(max_examples=400)
@given(
    texts=some_flags,
    init_from=st.sampled_from(["scratch", "resume", "out/hf"]),
    on_gpu=st.booleans(),
    step=st.integers(0, 300) | st.integers(0, 2**40),
)
@example(texts={"learning_rate": "0"}, init_from="scratch", on_gpu=False, step=0)
@example(texts={"learning_rate": "0", "min_lr": "1e-4"}, init_from="scratch", on_gpu=False, step=0)
def test_flags_become_settings_or_one_line(texts, init_from, on_gpu, step, sources):
    """A pure function: the same arguments give the same settings, or the same error, and stay as they are.

    The learning rate of every step is a share of its peak: --learning_rate 0 with a --min_lr was an infinite one.
    """
    flags = parse_flags("", *TABLES, as_argv(texts)) | {"init_from": init_from}
    source = sources[init_from]
    arguments = [flags, *TABLES, vars(source) if source else None]
    before, results = copy.deepcopy(arguments), []
    for _ in range(2):
        try:
            results.append(resolve_config(flags, *TABLES, on_gpu=on_gpu, source=source))
        except ValueError as error:
            results.append(str(error))
    assert results[0] == results[1]
    assert same(arguments, before)
    config = results[0]
    if isinstance(config, str):
        assert config and len(config.splitlines()) == 1
        assert any(f"--{name}" in config for name in texts)
    else:
        assert isinstance(config, TrainConfig)
        assert all(getattr(config, name) == value for name, value in flags.items() if value != "auto")
        assert 0 <= lr_multiplier(step, config) <= 1
        if init_from == "out/hf":  # n-grams would pull a trained model back
            assert config.ngram_targets == flags.get("ngram_targets")
            assert config.mtp_weight == flags.get("mtp_weight")


@pytest.fixture(scope="module")
def little_data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("little") / "data", "the quick brown fox\n" * 9)


@given(texts=some_flags)
@example(texts={"muon_learning_rate": "1e30"})
@example(texts={"muon_learning_rate": "1e39"})
def test_any_two_flags_train_or_end_in_one_line(texts, little_data):
    """A --muon_learning_rate of 1e39 ended in a traceback from inside torch."""
    sizes = dict(n_layer=1, n_head=2, n_embd=16, block_size=16, batch_size=2, device="cpu", max_iters=1)
    with tempfile.TemporaryDirectory() as folder:
        result = here(*as_argv(sizes | texts), "--data_dir", little_data, "--out_dir", folder)
        if result.returncode:
            assert_one_line(result)
        else:
            assert len(log(Path(folder))) == 1 or "max_iters" in texts


@pytest.mark.parametrize("recipe", ["modern", "nanogpt"])
def test_a_min_lr_above_the_learning_rate_is_one_line_that_names_both(recipe, data_dir, tmp_path):
    flags = ["--recipe", recipe, "--learning_rate", 0, "--min_lr", "1e-4", "--data_dir", data_dir]
    result = here(*flags, "--device", "cpu", "--out_dir", tmp_path / "out")
    assert_one_line(result, "--min_lr 0.0001", "--learning_rate 0.0", code=1)
    assert not (tmp_path / "out").exists()


# -- settings of a run to resume ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    ["--n_layer 3", "--n_head 4", "--n_embd 64", "--block_size 16", "--bias", "--pos_emb rope", "--tie_weights=False"],
)
def test_a_resume_cannot_change_the_models_shape(flags, out):
    assert_refused(out, *flags.split(), words=[flags.lstrip("-").replace("=", " ").split()[0]])


@pytest.mark.parametrize(
    "field, value",
    [("dtype", "foo"), ("batch_size", 0), ("learning_rate", "x"), ("n_head", 1), ("beta1", None), ("seed", [1])],
)
def test_a_resume_of_impossible_settings_is_refused(field, value, out):
    ckpt = torch.load(out / "last.pt", weights_only=True)
    ckpt["config"][field] = value
    torch.save(ckpt, out / "last.pt")
    assert_refused(out, words=[field, value])


@pytest.mark.parametrize(
    "change",
    ["optimizer", "iter_num", "scaler", "config", "evals_since_best", "data_sha256"]
    + ["config.n_layer", "config.recipe"],
)
def test_a_checkpoint_that_lacks_what_a_run_needs_is_refused(change, out):
    """One of nanoGPT, or of an older version of this kit."""
    ckpt = load(out / "last.pt")
    *outer, name = change.split(".")
    del (ckpt[outer[0]] if outer else ckpt)[name]
    torch.save(ckpt, out / "last.pt")
    assert_refused(out, words=[out / "last.pt", "version of this kit"])


def test_a_run_from_before_a_flag_existed_goes_on(out):
    ckpt = load(out / "last.pt")
    del ckpt["config"]["sample_interval"]
    torch.save(ckpt, out / "last.pt")
    ok(here("--init_from", "resume", "--out_dir", out, "--max_iters", 61))
    assert load(out / "last.pt")["config"]["sample_interval"] is None


@pytest.mark.parametrize("value", [None, 5, "text", []])
def test_a_checkpoint_whose_settings_are_no_dict_is_refused(value, out):
    torch.save(load(out / "last.pt") | {"config": value}, out / "last.pt")
    assert_refused(out, words=[out / "last.pt"])
