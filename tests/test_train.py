"""train.py: its settings, data, arithmetic, checkpoints and resumes, and what becomes of a run when things go wrong."""

import contextlib
import csv
import hashlib
import io
import itertools
import json
import math
import os
import pickle
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, assert_one_line, run
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn import functional as F

import train
from checkpoint import save_checkpoint
from model import GPT, GPTConfig
from optim import POLYNOMIALS, configure_optimizers, get_lr, orthogonalize

SMALL = "--recipe nanogpt --n_layer 1 --n_head 2 --n_embd 16 --block_size 16 --batch_size 2 --device cpu".split()
# what a resume has to carry over, all at once: dropout's random numbers, micro-steps, warm-up and the way down, and the
# state of both optimizers
STATEFUL = [*SMALL, *"--recipe modern --dropout 0.2 --gradient_accumulation_steps 2 --warmup_iters 4".split()]
BROKEN = "--learning_rate 1e30 --min_lr 1e30 --warmup_iters 0 --grad_clip 0".split()  # one such step ends in NaN
HEADER = "step,chars,seconds,train_loss,val_loss,lr,tokens_per_s".split(",")
CPU = torch.device("cpu")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
stop_signals = pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)], ids=["SIGINT", "SIGTERM"]
)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def child(*flags, **kwargs):
    """train.py in a process of its own, done."""
    return run("train.py", *flags, env=ONE_THREAD | kwargs.pop("env", {}), **kwargs)


def start(*flags, **kwargs):
    """train.py in a process of its own, running."""
    kwargs = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8") | kwargs
    env = {**os.environ, **ONE_THREAD, "PYTHONIOENCODING": "utf-8"}
    return subprocess.Popen([sys.executable, "train.py", *map(str, flags)], cwd=ROOT, env=env, **kwargs)


def here(*flags):
    """As child, but in this process, which saves the seconds that importing torch takes; still run as __main__."""
    out, err, code = (*(io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in "12"), 0)
    argv, handlers = sys.argv, {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        sys.argv = ["train.py", *map(str, flags)]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    except SystemExit as error:
        code = error.code or 0
        if isinstance(code, str):
            err.write(f"{code}\n")
            code = 1
    finally:
        sys.argv = argv
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return subprocess.CompletedProcess(flags, code, *(stream.buffer.getvalue().decode() for stream in (out, err)))


def ok(result):
    assert result.returncode == 0, result.stderr
    return result


def load(path):
    return torch.load(path, map_location="cpu", weights_only=True)


def log(out_dir):
    with open(out_dir / "log.csv", encoding="utf-8", newline="") as f:
        reader = csv.DictReader(f)
        rows = list(reader)
    assert reader.fieldnames == HEADER
    steps = [int(row["step"]) for row in rows]
    assert all(a < b for a, b in itertools.pairwise(steps)), steps
    return rows


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != ".lock"}


def same(a, b):
    """Equal to the last bit: tensors, and whatever plain values hold tensors."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def assert_same_run(a, b):
    a, b = load(a / "last.pt"), load(b / "last.pt")
    assert a["iter_num"] == b["iter_num"]
    assert same(a["model"], b["model"])
    assert same(a["optimizer"], b["optimizer"])


def write_data(folder, text):
    """What data/prepare.py writes for `text`."""
    chars = "".join(sorted(set(text)))
    ids = np.array([chars.index(char) for char in text], dtype="<u2")
    splits = {"train": ids[: int(0.9 * len(ids))].tobytes(), "val": ids[int(0.9 * len(ids)) :].tobytes()}
    folder.mkdir()
    for split, content in splits.items():
        (folder / f"{split}.bin").write_bytes(content)
    hashes = {name: hashlib.sha256(raw).hexdigest() for name, raw in {**splits, "chars": chars.encode()}.items()}
    (folder / "meta.json").write_text(json.dumps({"chars": chars, "sha256": hashes}), encoding="utf-8")
    return folder


@pytest.fixture
def out(trained, tmp_path):
    """A copy of the trained out_dir, at step 60."""
    return Path(shutil.copytree(trained, tmp_path / "out"))


def plain_val_loss(model, ids, block_size):
    """The mean over all characters but the first, in double precision, of windows that are taken one by one."""
    losses = []
    for begin in range(0, len(ids) - 1, block_size):
        window = torch.tensor(ids[begin : begin + block_size + 1].tolist())
        with torch.no_grad():
            logits = model.eval()(window[None, :-1])[0][0].double()
        losses += F.cross_entropy(logits, window[1:], reduction="none").tolist()
    assert len(losses) == len(ids) - 1
    return sum(losses) / len(losses)


# -- the settings ------------------------------------------------------------------------------------------------------

FIGURES = """out_dir eval_interval log_interval init_from gradient_accumulation_steps batch_size block_size n_layer
n_head n_embd dropout bias learning_rate max_iters weight_decay beta1 beta2 grad_clip warmup_iters lr_decay_iters min_lr
device dtype compile""".split()  # of nanoGPT's train.py, those that mean something here


def test_every_figure_is_a_flag_with_nanogpts_name_and_a_help_text():
    parser, _ = train.parse_args([])
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
    assert train.parse_args(argv.split())[1] == flags


COUNTS = """eval_interval save_interval log_interval n_layer n_head n_kv_head n_embd block_size batch_size max_iters
lr_decay_iters gradient_accumulation_steps""".split()
REALS = "dropout mlp_ratio learning_rate min_lr weight_decay beta1 beta2 grad_clip".split()
BAD_FLAGS = [
    *(f"--{name}={value}" for name in COUNTS for value in ("0", "-1", "nan", "inf", "1.5", "x", "")),
    *(f"--{name}={value}" for name in ["warmup_iters", "seed"] for value in ("-1", "nan", "inf", "1.5", "x", "")),
    *(f"--{name}={value}" for name in REALS for value in ("-0.1", "nan", "inf", "-inf", "1e999", "x", "")),
    *(f"--{name}=1" for name in ["dropout", "beta1", "beta2"]),
    *(f"--{name}=maybe" for name in ["compile", "bias", "norm_first", "tie_weights", "preset", "dtype"]),
    *("--activation=relu", "--pos_emb=none", f"--seed={2**63}", "--n_layer -1", "--learning_rate -1"),
    *("--n_layers 3", "--n_lay 3", "--unknown", "stray", "--max_iters", "--preset", "--n_embd 1 2", "--compile 1 2"),
]


@pytest.mark.parametrize("argv", BAD_FLAGS)
def test_an_unknown_flag_or_impossible_value_is_one_line_that_names_it(argv, capsys):
    with pytest.raises(SystemExit) as error:
        train.parse_args(argv.split())
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
        "--mlp_ratio 1e300",
        f"--n_embd {10**18} --n_head 1",
        f"--batch_size {10**15}",
    ],
)
def test_a_network_or_batch_that_cannot_be_is_one_line_with_exit_code_2(flags, data_dir, tmp_path):
    """Not a traceback from the depths of torch, also where a figure is fine by itself but no memory holds it."""
    try:
        result = here(*SMALL, "--data_dir", data_dir, "--out_dir", tmp_path, "--max_iters", 1, *flags.split())
    except Exception as error:
        pytest.fail(f"{type(error).__name__}: {str(error)[:100]}")
    assert_one_line(result, flags.split()[0], code=2)
    assert not list(tmp_path.iterdir())


def test_argument_errors_of_real_processes():
    """What the cases above see inside one process holds from a shell, too."""
    assert_one_line(run("train.py", "--eval_interval", "-5"), "--eval_interval", "-5", code=2)


def test_without_flags_the_size_suits_the_device_and_is_said(data_dir, tmp_path):
    result = ok(child("--data_dir", data_dir, "--out_dir", tmp_path / "a", "--max_iters", 1, timeout=300))
    expected = ("gpu", "cuda", 6, 384) if torch.cuda.is_available() else ("cpu", "cpu", 4, 128)
    config = load(tmp_path / "a" / "last.pt")["config"]
    assert (config["preset"], config["n_layer"], config["n_embd"], config["block_size"]) == (
        *(expected[0], expected[2], expected[3]),
        256,
    )
    first = result.stdout.splitlines()[0]
    for words in (
        f"preset {expected[0]}, recipe modern, on {expected[1]}",
        f"{expected[2]} layers",
        f"{expected[3]} wide",
        "context 256",
    ):
        assert words in first


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
    assert {name: train.PRESETS[preset][name] for name in figures} == figures
    small = dict(n_layer=1, n_embd=24, max_iters=1, batch_size=1)
    flags = [x for name, value in small.items() for x in (f"--{name}", value)]
    result = ok(here("--preset", preset, *flags, "--device", "cpu", "--data_dir", data_dir, "--out_dir", tmp_path))
    ckpt = load(tmp_path / "last.pt")
    for name, value in (figures | small).items():
        assert ckpt["config"][name] == value
        assert ckpt["model_args"].get(name, value) == value
    assert f"preset {preset}, " in result.stdout.splitlines()[0]


@pytest.mark.parametrize(
    "name", ["nonsense", "", "cuda:99", "meta", "cuda" if not torch.cuda.is_available() else "cuda:98"]
)
def test_a_device_that_is_not_there_is_one_line(name, data_dir, tmp_path):
    result = here(*SMALL, "--data_dir", data_dir, "--out_dir", tmp_path / "out", f"--device={name}")
    assert_one_line(result, "--device", name)
    assert not (tmp_path / "out").exists()


def test_a_dtype_that_the_device_cannot_train_in_is_one_line(data_dir, tmp_path):
    assert_one_line(
        here(*SMALL, "--data_dir", data_dir, "--out_dir", tmp_path, "--dtype", "float16"), "--dtype float16"
    )


# -- data --------------------------------------------------------------------------------------------------------------


def test_a_batch_is_a_pure_function_of_the_seed_and_its_number():
    """Not of a generator's state: whatever was drawn before, in whatever order, the batch is the same."""
    ids, keys = np.arange(3000, dtype="<u2"), list(itertools.product((0, 1, 2**40), (0, 1, 2, 500, 10**9)))
    batches = {}
    for key in keys:
        batches[key] = train.get_batch(ids, *key, 8, 16, CPU)
    torch.rand(3), np.random.rand(3)
    for key in keys[::-1]:
        assert same(train.get_batch(ids, *key, 8, 16, CPU), batches[key])
    distinct = {tuple(x[:, 0].tolist()) for x, y in batches.values()}
    assert len(distinct) == len(keys)
    for x, y in batches.values():
        assert x.shape == y.shape == (8, 16) and x.dtype == y.dtype == torch.int64
        assert torch.equal(x, x[:, :1] + torch.arange(16)) and torch.equal(y, x + 1)


@pytest.mark.parametrize("length", [9, 10, 20])
def test_batches_start_everywhere_up_to_the_last_whole_window(length):
    """An off-by-one would never show the last character, or read past the end of the text."""
    ids = np.arange(length, dtype="<u2")
    starts = {i for number in range(60) for i in train.get_batch(ids, 3, number, 8, 8, CPU)[0][:, 0].tolist()}
    assert starts == set(range(length - 8))


@given(
    length=st.integers(10, 400),
    block_size=st.integers(1, 9),
    batch_size=st.integers(1, 6),
    world=st.integers(1, 3),
    epoch=st.integers(0, 5),
)
def test_an_epoch_predicts_every_character_once_whoever_draws_the_batches(length, block_size, batch_size, world, epoch):
    """But for less than a window at either end of the text."""
    ids, an_epoch, batch_size = np.arange(length, dtype="<u2"), (length - 1) // block_size, batch_size * world
    rows = {}
    for number in range(epoch * an_epoch // batch_size, ((epoch + 1) * an_epoch - 1) // batch_size + 1):
        ranks = [train.get_batch(ids, 7, number, batch_size, block_size, CPU, rank, world) for rank in range(world)]
        whole = torch.empty(batch_size, block_size, dtype=torch.int64)
        for rank, (_, y) in enumerate(ranks):
            whole[rank::world] = y
        assert torch.equal(whole, train.get_batch(ids, 7, number, batch_size, block_size, CPU)[1])
        rows |= {number * batch_size + i: row.tolist() for i, row in enumerate(whole)}
    predicted = [tuple(rows[i]) for i in range(epoch * an_epoch, (epoch + 1) * an_epoch)]
    characters = sorted(character for row in set(predicted) for character in row)
    assert (
        len(set(characters)) == len(characters) >= length - 2 * block_size and len(predicted) - len(set(predicted)) <= 1
    )


@given(length=st.integers(2, 80), block_size=st.integers(1, 40), seed=st.integers(0, 9))
@example(length=8192, block_size=32, seed=0)  # a forward takes 8192 characters at most, in whole windows
@example(length=8193, block_size=32, seed=0)
@example(length=8194, block_size=32, seed=0)
@example(length=20001, block_size=100, seed=0)
@example(length=40, block_size=9000, seed=0)
def test_evaluation_is_one_exact_pass_over_the_text(length, block_size, seed):
    """Not a mean of means: the short last window counts by its characters. And it leaves the model and rng alone."""
    torch.manual_seed(seed)
    config = GPTConfig(block_size=block_size, vocab_size=7, n_layer=1, n_head=1, n_embd=8, dropout=0.5)
    model = GPT(config).train()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.7)  # so that every character has a loss of its own
    ids = np.random.default_rng(seed).integers(7, size=length).astype("<u2")
    before = torch.get_rng_state()
    loss = train.evaluate(model, ids, block_size, CPU, contextlib.nullcontext())
    assert model.training and torch.equal(before, torch.get_rng_state())
    assert loss == pytest.approx(plain_val_loss(model, ids, block_size), rel=1e-5)


@pytest.mark.parametrize("missing", ["folder", "meta.json", "train.bin", "val.bin"])
def test_data_that_is_not_prepared_is_one_line_that_says_what_to_run(missing, data_dir, tmp_path):
    data = tmp_path / "data"
    if missing != "folder":
        shutil.copytree(data_dir, data)
        (data / missing).unlink()
    result = here(*SMALL, "--data_dir", data, "--out_dir", tmp_path / "out")
    assert_one_line(result, data, "data/prepare.py")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: b"",
        lambda raw: raw[: len(raw) // 2],
        lambda raw: b"\xff\xfe" + raw,
        lambda raw: b"[]",
        lambda raw: b"null",
        lambda raw: b'{"chars": "ab"}',
        lambda raw: raw.replace(b'"sha256": {', b'"sha256": null, "x": {'),
        lambda raw: raw.replace(b'"chars": "', b'"chars": 5, "x": "'),
        lambda raw: raw.replace(b'"chars": "', b'"chars": null, "x": "'),
        lambda raw: raw.replace(b'"chars": "', b'"chars": "ab", "x": "'),
    ],
    ids="empty half no-utf8 list null no-sha256 null-sha256 int-chars null-chars two-chars".split(),
)
def test_a_damaged_meta_json_is_one_line_that_names_it(damage, data_dir, tmp_path):
    data = Path(shutil.copytree(data_dir, tmp_path / "data"))
    raw = (data / "meta.json").read_bytes()
    assert damage(raw) != raw
    (data / "meta.json").write_bytes(damage(raw))
    try:
        result = here(*SMALL, "--data_dir", data, "--out_dir", tmp_path / "out", "--max_iters", 1)
    except Exception as error:
        pytest.fail(f"{type(error).__name__}: {error}")
    assert_one_line(result, "meta.json")


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_bin_file_changed_behind_meta_jsons_back_is_refused(split, data_dir, tmp_path):
    data = Path(shutil.copytree(data_dir, tmp_path / "data"))
    raw = bytearray((data / f"{split}.bin").read_bytes())
    raw[100] ^= 1
    (data / f"{split}.bin").write_bytes(raw)
    assert_one_line(here(*SMALL, "--data_dir", data, "--out_dir", tmp_path / "out"), f"{split}.bin", "prepare.py")
    assert not (tmp_path / "out").exists()


def test_a_text_shorter_than_the_context_is_one_line_and_one_just_long_enough_trains(tmp_path):
    data, flags = write_data(tmp_path / "data", "abcdefghij" * 2), [*SMALL, "--max_iters", "1"]  # 18 to train on
    result = here(*flags, "--data_dir", data, "--out_dir", tmp_path / "out", "--block_size", "18")
    assert_one_line(result, "18 characters", "block_size")
    assert not (tmp_path / "out").exists()
    ok(here(*flags, "--data_dir", data, "--out_dir", tmp_path / "out", "--block_size", "17"))


# -- optimization ------------------------------------------------------------------------------------------------------


@given(
    peak=st.floats(1e-5, 1),
    share=st.floats(0, 1),
    warmup=st.integers(0, 50),
    length=st.integers(1, 200),
)
def test_the_learning_rate_warms_up_falls_as_a_cosine_and_stays_at_min_lr(peak, share, warmup, length):
    end, floor = warmup + length, peak * share
    config = dict(learning_rate=peak, warmup_iters=warmup, lr_decay_iters=end, min_lr=floor, max_iters=10)
    config |= dict(lr_level=0.0, lr_decay="cosine")
    lr = [get_lr(step, config) for step in range(end + 50)]
    assert lr[:warmup] == pytest.approx([peak * (i + 1) / (warmup + 1) for i in range(warmup)])
    assert lr[warmup] == pytest.approx(peak)
    cosine = [floor + (peak - floor) * math.cos(math.pi / 2 * i / length) ** 2 for i in range(length)]
    assert lr[warmup:end] == pytest.approx(cosine, abs=1e-12)
    assert lr[end:] == pytest.approx([floor] * 50)


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_a_level_learning_rate_falls_after_its_share_of_the_steps(decay):
    config = dict(learning_rate=2.0, warmup_iters=10, lr_decay_iters=None, min_lr=0.0, max_iters=110)
    config |= dict(lr_level=0.4, lr_decay=decay)
    lr = [get_lr(step, config) for step in range(120)]
    assert (
        lr[10:51] == pytest.approx([2.0] * 41)
        and lr[80] == pytest.approx(1.0)
        and lr[110:] == pytest.approx([0.0] * 10)
    )
    falls = [a - b for a, b in itertools.pairwise(lr[50:111])]
    assert all(fall > 0 for fall in falls)
    assert (max(falls) - min(falls) < 1e-9) == (decay == "linear")


def test_the_learning_rates_defaults_end_at_a_tenth_after_max_iters():
    config = dict(learning_rate=0.5, warmup_iters=0, lr_decay_iters=None, min_lr=None, max_iters=100)
    config |= dict(lr_level=0.0, lr_decay="cosine")
    assert get_lr(100, config) == get_lr(1000, config) == pytest.approx(0.05)
    assert get_lr(99, config) > 0.05
    assert get_lr(100, config | {"min_lr": 0.0}) == 0  # given as 0 is not: not given


@pytest.mark.parametrize(
    "change", [{}, {"bias": True}, {"tie_weights": False}, {"pos_emb": "rope"}, {"norm_first": False, "bias": True}]
)
def test_every_parameter_is_in_one_group_and_biases_and_norms_do_not_decay(change):
    model = GPT(GPTConfig(**(dict(block_size=8, vocab_size=7, n_layer=2, n_head=2, n_embd=8, bias=False) | change)))
    config = dict(optimizer="adamw", weight_decay=0.3, learning_rate=1e-3, beta1=0.8, beta2=0.95)
    (optimizer,) = configure_optimizers(model, config, CPU)
    groups = optimizer.param_groups
    where = [(id(p), group["weight_decay"]) for group in groups for p in group["params"]]
    assert sorted(i for i, _ in where) == sorted({id(p) for p in model.parameters()})
    assert all(group["betas"] == (0.8, 0.95) for group in groups)
    expected = {}
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            decays = name == "weight" and isinstance(module, (torch.nn.Linear, torch.nn.Embedding))
            expected[id(p)] = 0.3 if decays else 0.0
    assert dict(where) == expected


@given(
    rows=st.integers(1, 24),
    cols=st.integers(1, 24),
    n=st.integers(1, 3),
    size=st.floats(1e-6, 1e6),
    seed=st.integers(0, 99),
)
def test_an_orthogonalized_matrix_keeps_its_directions_and_loses_its_lengths(rows, cols, n, size, seed):
    """Against the singular value decomposition, in float64: U S V^T becomes U p(S) V^T, whose loud values are alike."""
    x = torch.randn(n, rows, cols, generator=torch.Generator().manual_seed(seed)) * size
    u, s, vt = torch.linalg.svd(x.double(), full_matrices=False)
    moved = s / (1.01 * s.norm(dim=-1, keepdim=True))
    loud = moved > 0.1
    for a, b, c in POLYNOMIALS:
        moved = a * moved + b * moved**3 + c * moved**5
    core = u.mT @ orthogonalize(x).double() @ vt.mT
    torch.testing.assert_close(core, torch.diag_embed(moved), atol=2e-3, rtol=0)
    assert 0.1 < moved[loud].min() <= moved.max() < 1.9


@pytest.mark.parametrize("kv_heads", [None, 1])
def test_muon_is_momentum_made_orthogonal_for_q_k_and_v_apart(kv_heads):
    """Three steps of both optimizers, with Muon's step written out for one matrix after the other."""
    torch.manual_seed(0)
    sizes = dict(block_size=8, vocab_size=7, n_layer=2, n_head=2, n_embd=8, n_kv_head=kv_heads)
    model = GPT(GPTConfig(**sizes, qk_norm=True, activation="swiglu" if kv_heads else "gelu"))
    config = dict(optimizer="muon", weight_decay=0.1, learning_rate=1e-2, beta1=0.9, beta2=0.95)
    optimizers = configure_optimizers(model, config | dict(muon_learning_rate=0.03), CPU)
    matrices = {name: p for name, p in model.transformer.h.named_parameters() if p.dim() == 2}
    muons = {id(p) for group in optimizers[1].param_groups for p in group["params"]}
    assert muons == set(map(id, matrices.values()))
    kv = (kv_heads or 2) * 4
    expected = {name: p.detach().clone() for name, p in matrices.items()}
    momenta = {name: torch.zeros_like(p) for name, p in matrices.items()}
    for step in range(3):
        idx = torch.randint(7, (4, 9), generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        model(idx[:, :-1], idx[:, 1:])[1].backward()
        for name, p in matrices.items():
            momenta[name] = 0.9 * momenta[name] + 0.1 * p.grad
            ahead = 0.1 * p.grad + 0.9 * momenta[name]
            sizes = [8, kv, kv] if "c_attn" in name else [len(p) // 2] * 2 if kv_heads and "c_fc" in name else [len(p)]
            new = []
            for part, update in zip(expected[name].split(sizes), ahead.split(sizes)):
                rows, cols = part.shape
                new.append(part - 0.03 * max(1, rows / cols) ** 0.5 * orthogonalize(update[None])[0])
            expected[name] = torch.cat(new)
        for optimizer in optimizers:
            optimizer.step()
        for name, p in matrices.items():
            torch.testing.assert_close(p.detach(), expected[name], atol=1e-4, rtol=1e-3)


def test_a_modern_run_begins_at_the_uniform_guess_and_has_every_parameter_in_one_group(data_dir, tmp_path):
    flags = [*SMALL, "--recipe", "modern", "--data_dir", data_dir, "--out_dir", tmp_path, "--log_interval", 1]
    ok(here(*flags, "--max_iters", 2))
    rows, ckpt = log(tmp_path), load(tmp_path / "last.pt")
    assert ckpt["model_args"]["pos_emb"] == "rope" and ckpt["model_args"]["qk_norm"]
    states = [len(state["state"]) for state in ckpt["optimizer"]]
    assert len(states) == 2 and sum(states) == len(list(GPT(GPTConfig(**ckpt["model_args"])).parameters()))
    assert float(rows[0]["train_loss"]) == pytest.approx(math.log(len(ckpt["chars"])), rel=0.02)


def gradient_of_one_step(data_dir, out_dir, *flags):
    """{name: gradient} that AdamW saw in a run of one step, whose weights (lr 0) are still those it began with."""
    flags = [*flags, "--learning_rate", "0", "--max_iters", "1", "--data_dir", data_dir, "--out_dir", out_dir]
    ok(here(*SMALL, "--gradient_accumulation_steps", "2", "--batch_size", "4", *flags))
    ckpt = load(out_dir / "last.pt")
    model = GPT(GPTConfig(**ckpt["model_args"]))
    model.load_state_dict(ckpt["model"])
    (optimizer,) = configure_optimizers(model, ckpt["config"], CPU)
    optimizer.load_state_dict(*ckpt["optimizer"])
    return model, {name: optimizer.state[p]["exp_avg"] / 0.1 for name, p in model.named_parameters()}


def test_micro_steps_make_the_gradient_of_one_large_batch_and_clipping_bounds_it(data_dir, tmp_path):
    """2 micro-steps of 4 sequences: their mean, neither their sum nor the last one; clipped as a whole, once."""
    model, seen = gradient_of_one_step(data_dir, tmp_path / "a", "--grad_clip", "0")
    ids = np.fromfile(data_dir / "train.bin", dtype="<u2")
    x, y = (torch.cat(parts) for parts in zip(*(train.get_batch(ids, 1337, i, 4, 16, CPU) for i in (0, 1))))
    model(x, y)[1].backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(seen[name], p.grad, rtol=1e-4, atol=1e-6)

    whole = torch.cat([g.flatten() for g in seen.values()])
    _, seen = gradient_of_one_step(data_dir, tmp_path / "b", "--grad_clip", "0.01")
    clipped = torch.cat([g.flatten() for g in seen.values()])
    assert whole.norm() > 0.1
    torch.testing.assert_close(clipped, whole / whole.norm() * 0.01, rtol=1e-3, atol=1e-7)


def test_a_run_is_a_plain_loop_of_adamw_steps(data_dir, tmp_path):
    """Six steps from the run's own first weights, with AdamW, clipping and the schedule written out here."""
    flags = (
        "--bias --grad_clip 0.5 --weight_decay 0.3 --beta1 0.8 --beta2 0.95 --warmup_iters 2 --log_interval 1".split()
    )
    flags = [*SMALL, *flags, "--lr_decay_iters", 5, "--min_lr", 1e-3, "--data_dir", data_dir]
    ok(here(*flags, "--learning_rate", 0, "--weight_decay", 0, "--max_iters", 1, "--out_dir", tmp_path / "first"))
    ok(here(*flags, "--learning_rate", 1e-2, "--max_iters", 6, "--out_dir", tmp_path / "out"))

    first, last = load(tmp_path / "first" / "last.pt"), load(tmp_path / "out" / "last.pt")
    model = GPT(GPTConfig(**first["model_args"]))
    model.load_state_dict(first["model"])
    ids = np.fromfile(data_dir / "train.bin", dtype="<u2")
    params, losses = list(model.parameters()), []
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in params]
    rates = [1e-2 / 3, 2e-2 / 3, 1e-2, 7.75e-3, 3.25e-3, 1e-3]
    for step, lr in enumerate(rates):
        loss = model(*train.get_batch(ids, 1337, step, 2, 16, CPU))[1]
        losses.append(loss.item())
        grads = torch.autograd.grad(loss, params)
        scale = min(1.0, 0.5 / math.sqrt(sum(g.double().pow(2).sum().item() for g in grads)))
        assert step or scale < 1
        with torch.no_grad():
            for p, g, (m, v) in zip(params, grads, moments):
                m += 0.2 * (g * scale - m)
                v += 0.05 * ((g * scale) ** 2 - v)
                p *= 1 - lr * (0.3 if p.dim() > 1 else 0)
                p -= lr * (m / (1 - 0.8 ** (step + 1))) / ((v / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8)
    for name, p in model.named_parameters():
        torch.testing.assert_close(last["model"][name], p.detach(), rtol=1e-3, atol=1e-5)
    rows = log(tmp_path / "out")
    assert [float(row["train_loss"]) for row in rows] == pytest.approx(losses, rel=1e-4)
    assert [float(row["lr"]) for row in rows] == pytest.approx(rates)


# -- the run -----------------------------------------------------------------------------------------------------------


def test_intervals_change_nothing_and_a_run_has_as_many_steps_as_it_says(data_dir, tmp_path):
    """An evaluation that drew random numbers, or left the model in eval mode, would change the weights."""
    for i, (evals, saves, logs) in enumerate([(1, 1, 1), (3, 2, 5), (1000, 1000, 1000)]):
        intervals = ["--eval_interval", evals, "--save_interval", saves, "--log_interval", logs]
        flags = [*STATEFUL, "--max_iters", 7, "--data_dir", data_dir, "--out_dir", tmp_path / str(i)]
        ok((here if i else child)(*flags, *intervals))
        ckpt = load(tmp_path / str(i) / "last.pt")
        assert ckpt["iter_num"] == 7
        assert {state["step"].item() for state in ckpt["optimizer"][0]["state"].values()} == {7}
        assert_same_run(tmp_path / str(i), tmp_path / "0")
        expected = [step for step in range(1, 8) if step == 7 or not (step % evals and step % saves and step % logs)]
        assert [int(row["step"]) for row in log(tmp_path / str(i))] == expected
        assert [bool(row["val_loss"]) for row in log(tmp_path / str(i))] == [s == 7 or s % evals == 0 for s in expected]


def test_the_seed_decides_the_weights(data_dir, tmp_path):
    """Those the run begins with (lr 0 keeps them), too, not only the batches."""
    flags = [*SMALL, "--learning_rate", 0, "--max_iters", 1, "--data_dir", data_dir]
    weights = []
    for i, seed in enumerate((1, 2, 1)):
        ok(here(*flags, "--seed", seed, "--out_dir", tmp_path / str(i)))
        weights.append(load(tmp_path / str(i) / "last.pt")["model"])
    assert same(weights[0], weights[2]) and not same(weights[0], weights[1])


def test_the_log_says_what_was_trained(data_dir, tmp_path):
    """A row's train_loss is the mean of the steps since the last row; chars are those of all micro-steps."""
    ok(here(*STATEFUL, "--max_iters", 6, "--log_interval", 1, "--data_dir", data_dir, "--out_dir", tmp_path / "1"))
    ok(here(*STATEFUL, "--max_iters", 6, "--log_interval", 3, "--data_dir", data_dir, "--out_dir", tmp_path / "3"))
    each = [float(row["train_loss"]) for row in log(tmp_path / "1")]
    rows = log(tmp_path / "3")
    assert [row["step"] for row in rows] == ["3", "6"]
    assert [float(row["train_loss"]) for row in rows] == pytest.approx([sum(each[:3]) / 3, sum(each[3:]) / 3], rel=1e-5)
    assert [int(row["chars"]) for row in rows] == [3 * 2 * 2 * 16, 6 * 2 * 2 * 16]
    assert all(float(row["seconds"]) > 0 and float(row["tokens_per_s"]) > 0 and float(row["lr"]) > 0 for row in rows)


def test_a_pipe_gets_plain_lines_and_a_sample(data_dir, tmp_path):
    flags = [*SMALL, "--max_iters", 4, "--log_interval", 2, "--data_dir", data_dir, "--out_dir", tmp_path]
    result = ok(child(*flags))
    assert "\r" not in result.stdout + result.stderr and "\x1b" not in result.stdout + result.stderr
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert [line.split(":")[0] for line in lines[1:3]] == ["step 2/4", "step 4/4"]
    ckpt = load(tmp_path / "last.pt")
    text = result.stdout.split("A sample:\n\n")[1]
    assert len(text.removesuffix("\n")) == 16 and set(text) <= set(ckpt["chars"])  # a full context


@pytest.mark.parametrize("size", [(24, 120), (0, 0)], ids=["terminal", "notebook"])
def test_a_terminal_gets_a_progress_bar_and_stdout_stays_plain(size, data_dir, tmp_path):
    pty, termios = pytest.importorskip("pty"), pytest.importorskip("termios")
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, size)
    flags = [*SMALL, "--max_iters", 4, "--log_interval", 1, "--data_dir", data_dir, "--out_dir", tmp_path]
    process = start(*flags, stderr=follower)
    os.close(follower)
    shown = b""
    with contextlib.suppress(OSError):  # Linux says EIO, others an empty read, when the process is gone
        while part := os.read(leader, 4096):
            shown += part
    stdout = process.communicate(timeout=60)[0]
    os.close(leader)
    assert process.returncode == 0
    assert b"\r" in shown and b"4/4" in shown and b"%|" in shown and b"loss" in shown
    assert "\r" not in stdout and "step 1/4" not in stdout and "A sample:" in stdout


@pytest.mark.slow
def test_the_sample_at_the_end_prints_where_the_terminal_has_another_encoding(tmp_path):
    """A Windows console or LANG=C: hours of training must not end in a UnicodeEncodeError."""
    data = write_data(tmp_path / "data", "αβγδε ζηθ\n" * 40)
    flags = [*SMALL, "--max_iters", "1", "--data_dir", data, "--out_dir", tmp_path / "out"]
    result = child(*flags, env={"PYTHONIOENCODING": "cp1252"})
    assert result.returncode == 0 and "Traceback" not in result.stderr, result.stderr


@pytest.mark.slow
def test_a_compiled_run_trains_or_says_why_not(data_dir, tmp_path):
    """Its checkpoint has no trace of torch.compile: the names are the model's own, and a plain run resumes it."""
    flags = [*SMALL, "--data_dir", data_dir, "--out_dir", tmp_path]
    result = ok(child(*flags, "--max_iters", 3, "--compile", timeout=600))
    assert "--compile" in result.stderr
    assert not any(key.startswith("_orig_mod") for key in load(tmp_path / "last.pt")["model"])
    ok(here("--init_from", "resume", "--out_dir", tmp_path, "--max_iters", 4, "--compile=False"))


def test_bfloat16_trains_on_the_cpu_and_keeps_float32_weights(data_dir, tmp_path):
    ok(here(*SMALL, "--dtype", "bfloat16", "--max_iters", 3, "--data_dir", data_dir, "--out_dir", tmp_path))
    assert {p.dtype for p in load(tmp_path / "last.pt")["model"].values()} == {torch.float32}
    assert math.isfinite(float(log(tmp_path)[-1]["val_loss"]))


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_checkpoints_hold_tensors_and_plain_values_under_the_promised_keys(trained, data_dir):
    plain = (dict, list, tuple, str, int, float, bool, type(None), torch.Tensor)

    def walk(value):
        assert type(value) in (*plain, torch.Tensor) or type(value).__name__ == "OrderedDict", type(value)
        for part in (
            (*value.keys(), *value.values()) if isinstance(value, dict) else value if type(value) is list else ()
        ):
            walk(part)

    for name in ("ckpt.pt", "last.pt"):
        ckpt = load(trained / name)
        assert set(ckpt) == set(
            "model model_args optimizer iter_num best_val_loss stale config chars ngrams scaler".split()
        )
        walk(ckpt)
        weights = sum(p.nbytes for p in GPT(GPTConfig(**ckpt["model_args"])).parameters())
        assert 0 < sum(part.nbytes for part in ckpt["ngrams"].values()) <= weights / 8
        text = np.fromfile(data_dir / "train.bin", dtype="<u2")
        most = int(ckpt["ngrams"]["counts"].argmax())
        digits = [
            int(ckpt["ngrams"]["codes"][most]) // len(ckpt["chars"]) ** i % len(ckpt["chars"]) for i in (3, 2, 1, 0)
        ]
        times = sum(text[i : i + 4].tolist() == digits for i in range(len(text) - 3))
        assert times == ckpt["ngrams"]["counts"][most]
        assert ckpt["chars"] == json.loads((data_dir / "meta.json").read_text(encoding="utf-8"))["chars"]
        assert ckpt["iter_num"] == 60


def test_ckpt_has_the_best_loss_and_last_the_latest(out, data_dir):
    """A worse evaluation must not replace the best weights; both files' losses are checked against the plain loop."""
    ids = np.fromfile(data_dir / "val.bin", dtype="<u2")
    before = contents(out)
    worse = "--learning_rate 0.5 --min_lr 0.5 --warmup_iters 0 --max_iters 70".split()
    ok(here("--init_from", "resume", "--out_dir", out, *worse))
    assert (out / "ckpt.pt").read_bytes() == before["ckpt.pt"] != (out / "last.pt").read_bytes()
    best, worst = (float(row["val_loss"]) for row in log(out) if row["val_loss"])
    assert best < worst
    for name, loss in (("ckpt.pt", best), ("last.pt", worst)):
        ckpt = load(out / name)
        model = GPT(GPTConfig(**ckpt["model_args"]))
        model.load_state_dict(ckpt["model"])
        assert ckpt["best_val_loss"] == best
        assert plain_val_loss(model, ids, 32) == pytest.approx(loss, rel=1e-5)


@pytest.mark.slow
def test_last_is_written_at_every_save_interval(data_dir, tmp_path):
    """With save_interval 3 and no evaluation before step 8, a run that breaks at step 8 leaves step 6 behind."""
    flags = [*SMALL, "--data_dir", data_dir, "--out_dir", tmp_path, "--save_interval", 3, "--eval_interval", 1000]
    process = start(*flags, "--max_iters", 10**6, "--log_interval", 1)
    for line in process.stdout:
        if line.startswith("step 8/"):
            process.kill()
            break
    process.communicate(timeout=60)
    assert load(tmp_path / "last.pt")["iter_num"] % 3 == 0 and load(tmp_path / "last.pt")["iter_num"] >= 6
    assert not (tmp_path / "ckpt.pt").exists()


def test_a_checkpoint_is_written_beside_synced_and_renamed(tmp_path):
    """Synced before the rename, or a power cut can leave an empty file under the good name."""
    path, calls = tmp_path / "last.pt", []
    save_checkpoint(path, {"x": torch.zeros(3)})
    sys.setprofile(lambda frame, event, arg: event == "c_call" and calls.append(getattr(arg, "__name__", "")))
    with open(path, "rb") as old:
        try:
            save_checkpoint(path, {"x": torch.ones(3)})
        finally:
            sys.setprofile(None)
        assert torch.equal(load(old)["x"], torch.zeros(3))  # whoever has the old file open still reads it whole
    assert torch.equal(load(path)["x"], torch.ones(3))
    assert contents(tmp_path).keys() == {"last.pt"}
    calls = [call for call in calls if call in ("fsync", "replace", "rename")]
    assert calls.index("fsync") < calls.index("replace")


def test_a_full_disk_while_saving_leaves_the_older_checkpoints(out):
    resource = pytest.importorskip("resource")

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    before = contents(out)
    assert len(before["last.pt"]) > 100_000
    result = child("--init_from", "resume", "--out_dir", out, "--max_iters", 65, preexec_fn=limit)
    assert_one_line(result, "checkpoint")
    after = contents(out)
    assert after.keys() == before.keys()  # no temporary file
    assert (after["ckpt.pt"], after["last.pt"]) == (before["ckpt.pt"], before["last.pt"])
    ok(here("--init_from", "resume", "--out_dir", out, "--max_iters", 65))  # the disk has room again


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    """Environment for a process whose at-th write, of whatever kind, below `folder` fails or kills it."""
    if not sys.platform.startswith("linux") or not shutil.which("cc"):
        pytest.skip("needs Linux and a C compiler")
    library = tmp_path_factory.mktemp("faults") / "faults.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, ROOT / "tests" / "faults.c", "-ldl"], check=True)

    def faults(folder, at, kills):
        env = {"LD_PRELOAD": str(library), "FAULT_DIR": str(folder.resolve()), "FAULT_AT": str(at)}
        return env | ({"FAULT_KILLS": "1"} if kills else {})

    return faults


@pytest.mark.slow
@pytest.mark.parametrize("kills", [False, True], ids=["I/O error", "kill"])
def test_a_save_that_ends_at_any_write_leaves_checkpoints_to_go_on_from(kills, faults, data_dir, tmp_path):
    """One write after the other, until a run has fewer of them: of log.csv, ckpt.pt and last.pt."""
    flags = [*STATEFUL, "--lr_decay_iters", 6, "--log_interval", 2, "--eval_interval", 2, "--data_dir", data_dir]
    ok(here(*flags, "--max_iters", 6, "--out_dir", tmp_path / "whole"))
    ok(here(*flags, "--max_iters", 4, "--out_dir", tmp_path / "half"))
    for at in itertools.count(1):
        out = tmp_path / f"out {at}"
        shutil.copytree(tmp_path / "half", out)
        resume = ["--init_from", "resume", "--out_dir", out, "--max_iters", 6]
        result = child(*resume, env=faults(out, at, kills))
        if result.returncode == 0:
            break
        if kills:
            assert result.returncode == -signal.SIGKILL
        else:
            assert_one_line(result, "older checkpoints are whole")
        assert load(out / "ckpt.pt") and load(out / "last.pt")["iter_num"] in (4, 6)
        ok(here(*resume))
        assert_same_run(tmp_path / "whole", out)
    assert at > 12  # an open, a write, a sync and a rename at least, for every file


@pytest.mark.parametrize("name", ["file/out", "file"])
def test_an_out_dir_that_cannot_be_made_is_one_line(name, data_dir, tmp_path):
    (tmp_path / "file").write_text("here first")
    result = here(*SMALL, "--data_dir", data_dir, "--out_dir", tmp_path / name, "--max_iters", "1")
    assert_one_line(result, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "here first"


# -- resuming ----------------------------------------------------------------------------------------------------------


def test_ten_steps_and_ten_after_a_resume_are_twenty_to_the_last_bit(data_dir, tmp_path):
    """Weights, optimizer and random numbers, with dropout and micro-steps; the settings come from the checkpoint."""
    flags = [*STATEFUL, "--lr_decay_iters", 20, "--data_dir", data_dir]
    ok(child(*flags, "--max_iters", 20, "--out_dir", tmp_path / "whole"))
    ok(child(*flags, "--max_iters", 10, "--out_dir", tmp_path / "halves"))
    config = load(tmp_path / "halves" / "last.pt")["config"]
    result = ok(child("--init_from", "resume", "--out_dir", tmp_path / "halves", "--max_iters", 20))
    assert "resuming" in result.stdout and "steps 10..20" in result.stdout
    assert_same_run(tmp_path / "whole", tmp_path / "halves")
    assert [int(row["step"]) for row in log(tmp_path / "halves")] == [10, 20]
    resumed = load(tmp_path / "halves" / "last.pt")["config"]
    assert resumed == config | {"max_iters": 20, "init_from": "resume"}


@pytest.fixture(scope="module")
def interrupt(data_dir, tmp_path_factory):
    """signal number -> (out_dir, exit code, stdout, stderr) of a long run that got it while it was at work."""
    done = {}

    def interrupt(number):
        if number not in done:
            out = tmp_path_factory.mktemp("interrupted") / "my run"
            flags = [*STATEFUL, "--lr_decay_iters", 300, "--log_interval", 5, "--data_dir", data_dir, "--out_dir", out]
            process = start(*flags, "--max_iters", 10**6)
            stdout = ""
            while "\nstep 15/" not in stdout and (line := process.stdout.readline()):
                stdout += line
            process.send_signal(number)
            rest, stderr = process.communicate(timeout=60)
            done[number] = out, process.returncode, stdout + rest, stderr
        return done[number]

    return interrupt


@stop_signals
def test_a_run_stopped_by_a_signal_and_resumed_is_the_undisturbed_run(number, interrupt, data_dir, tmp_path):
    """The step in progress is finished and saved, not lost or torn; nothing is drawn or trained twice."""
    out, code, stdout, stderr = interrupt(number)
    assert code == 128 + number, stderr
    assert stderr == "" and "--init_from resume" in stdout.splitlines()[-1]
    out = Path(shutil.copytree(out, tmp_path / "out"))
    stopped = load(out / "last.pt")["iter_num"]
    assert stopped >= 15 and f"step {stopped} " in stdout.splitlines()[-1]
    ok(child("--init_from", "resume", "--out_dir", out, "--max_iters", stopped + 8))
    flags = [*STATEFUL, "--lr_decay_iters", 300, "--data_dir", data_dir, "--out_dir", tmp_path / "whole"]
    ok(here(*flags, "--max_iters", stopped + 8))
    assert_same_run(out, tmp_path / "whole")
    assert [int(row["step"]) for row in log(out)][-1] == stopped + 8


@stop_signals
def test_the_line_that_says_how_to_resume_can_be_pasted(number, interrupt):
    """An out_dir with a space needs quotes."""
    out, _, stdout, _ = interrupt(number)
    words = shlex.split(stdout.splitlines()[-1].partition("python train.py ")[2])
    assert words == ["--init_from", "resume", "--out_dir", str(out)]


@pytest.mark.slow
def test_a_signal_that_comes_while_a_line_is_printed_is_a_saved_stop_too(data_dir, tmp_path):
    """Whoever waits for a line and then sends the signal, as Ctrl-C after a glance does, hits the end of a step, after
    it was decided whether to save. Here nobody reads the pipe, so the process stands still in its print."""
    never = [x for name in ("save_interval", "eval_interval", "max_iters") for x in (f"--{name}", 10**6)]
    flags = [*SMALL, "--data_dir", data_dir, "--out_dir", tmp_path, "--log_interval", 1, *never]
    process = start(*flags, pipesize=4096)
    path, size, since = tmp_path / "log.csv", 0, time.monotonic()
    while time.monotonic() - since < (1 if size > 1000 else 60):
        time.sleep(0.05)
        if path.exists() and path.stat().st_size != size:
            size, since = path.stat().st_size, time.monotonic()
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, stderr
    assert (tmp_path / "last.pt").exists(), stdout.splitlines()[-1]
    assert f"step {load(tmp_path / 'last.pt')['iter_num']} " in stdout.splitlines()[-1]


def test_a_new_run_sets_an_earlier_one_aside(out, data_dir):
    """Forgetting --init_from resume must not cost the run; and what stays must be able to go on."""
    before = contents(out)
    result = run("train.py", "--data_dir", data_dir, "--out_dir", out, *TINY, "--max_iters", "5")
    assert result.returncode == 0 and "previous" in result.stdout, result.stderr
    kept = contents(out / "previous")
    assert {name: kept[name] for name in ("ckpt.pt", "last.pt", "log.csv")} == {
        name: before[name] for name in ("ckpt.pt", "last.pt", "log.csv")
    }
    resumed = run("train.py", "--init_from", "resume", "--out_dir", out / "previous", "--max_iters", "61")
    assert resumed.returncode == 0, resumed.stderr


@pytest.mark.parametrize("field, value", [("dtype", "foo"), ("batch_size", 0), ("learning_rate", "x"), ("n_head", 1)])
def test_a_resume_of_impossible_settings_is_refused(field, value, out):
    ckpt = torch.load(out / "last.pt", weights_only=True)
    ckpt["config"][field] = value
    torch.save(ckpt, out / "last.pt")
    assert_refused(out, words=[field, value])


def test_previous_holds_one_run_and_a_run_that_saved_nothing_is_none(out, data_dir):
    """A run that broke before its first save leaves a log alone: no part of the run before, and nothing to plot."""
    flags = [*SMALL, "--data_dir", data_dir, "--out_dir", out, "--max_iters", 2]
    first = contents(out)
    assert here(*flags, *BROKEN).returncode != 0
    assert contents(out).keys() == {"log.csv"}
    assert contents(out / "previous") == first
    ok(here(*flags, "--plot"))
    assert contents(out / "previous") == first and (out / "loss.png").stat().st_size > 0
    second = {name: content for name, content in contents(out).items() if name in first}
    (out / "log.csv").unlink()
    ok(here(*flags))
    assert contents(out / "previous") == {name: second[name] for name in ("ckpt.pt", "last.pt")}


def test_a_damaged_log_stops_no_resume(out):
    before = log(out)
    with open(out / "log.csv", "ab") as f:
        f.write(b"\xff\xfe\n6,1,abc,1,1,1,1\r\n")
    ok(here("--init_from", "resume", "--out_dir", out, "--max_iters", 61))
    after = log(out)
    assert after[: len(before)] == before and int(after[-1]["step"]) == 61


def test_rows_past_the_checkpoint_are_cut_on_resume(out):
    """A run that was killed had logged steps that its last.pt does not have; they come again."""
    before = log(out)
    assert [row["step"] for row in before] == ["20", "40", "60"]
    with open(out / "log.csv", "a", encoding="utf-8", newline="") as f:
        f.write("80,10240,9.5,3.0,,0.001,1000\r\n100,12800,9.9,2.9,2.9,0.001,1000\r\n")
    ok(here("--init_from", "resume", "--out_dir", out, "--max_iters", 90))
    rows = log(out)
    assert rows[:3] == before
    assert [row["step"] for row in rows] == ["20", "40", "60", "80", "90"] and rows[3]["seconds"] != "9.5"
    seconds = [float(row["seconds"]) for row in rows]
    assert seconds == sorted(seconds)


def test_a_row_that_a_full_disk_cut_short_does_not_stop_a_resume(tmp_path):
    """Wherever it was cut: a whole row is kept as it is, a torn one is no row."""
    whole = ",".join(HEADER) + "\r\n20,2560,0.031,4.1,,0.001,47711\r\n40,5120,0.054,3.7,3.6,0.002,85681\r\n"
    rows, path = whole.splitlines(), tmp_path / "log.csv"
    for cut in range(whole.index("\r\n40,") + 2, len(whole) + 1):
        path.write_bytes(whole[:cut].encode())
        try:
            train.trim_log(path, 60)
        except Exception as error:
            pytest.fail(f"after {whole[:cut].splitlines()[-1]!r}: {type(error).__name__}: {error}")
        kept = path.read_bytes().decode().splitlines()
        assert kept in (rows[:2], rows), whole[:cut].splitlines()[-1]


def test_max_iters_reached_already_is_said_and_changes_nothing(out):
    before, times = contents(out), {path: path.stat().st_mtime_ns for path in out.glob("[!.]*")}
    for flags in ([], ["--max_iters", "60"], ["--max_iters", "10"]):
        result = ok(here("--init_from", "resume", "--out_dir", out, *flags))
        assert "60" in result.stdout and "already" in result.stdout and len(result.stdout.splitlines()) == 1
    assert contents(out) == before
    assert {path: path.stat().st_mtime_ns for path in out.glob("[!.]*")} == times


@pytest.mark.parametrize("flag, values", [("weight_decay", (0, 0.9)), ("beta1", (0.1, 0.99)), ("beta2", (0.1, 0.999))])
def test_a_resume_with_another_optimizer_setting_uses_it(flag, values, out, tmp_path):
    """Not the checkpoint's: optimizer.load_state_dict brings the old weight_decay and betas back."""
    for value in values:
        copy = shutil.copytree(out, tmp_path / str(value))
        ok(here("--init_from", "resume", "--out_dir", copy, "--max_iters", 63, f"--{flag}", value))
    a, b = (load(tmp_path / str(value) / "last.pt") for value in values)
    assert (a["config"][flag], b["config"][flag]) == values
    assert not same(a["model"], b["model"])


def test_a_resume_with_another_dropout_or_learning_rate_uses_it(out, tmp_path):
    results = []
    for flags in ([], ["--dropout", "0.5"], ["--learning_rate", "0.01"], ["--grad_clip", "0.001"], ["--seed", "1"]):
        copy = shutil.copytree(out, tmp_path / "-".join(["copy", *flags]))
        ok(here("--init_from", "resume", "--out_dir", copy, "--max_iters", 63, *flags))
        results.append(load(copy / "last.pt"))
    assert all(not same(a["model"], b["model"]) for a, b in itertools.combinations(results, 2))
    assert results[1]["model_args"]["dropout"] == 0.5


def assert_refused(out_dir, *flags, words=()):
    """One line, exit code not 0, nothing changed."""
    before = contents(out_dir) if out_dir.exists() else None
    try:
        result = here("--init_from", "resume", "--out_dir", out_dir, "--max_iters", 61, *flags)
    except Exception as error:
        pytest.fail(f"{type(error).__name__}: {error}")
    assert_one_line(result, *words)
    assert result.stdout == ""
    assert (contents(out_dir) if out_dir.exists() else None) == before


def test_resume_of_nothing_is_refused(tmp_path):
    assert_refused(tmp_path / "nowhere", words=[tmp_path / "nowhere", "no checkpoint"])
    assert_refused(tmp_path, words=["no checkpoint"])


@pytest.mark.parametrize(
    "flags",
    ["--n_layer 3", "--n_head 4", "--n_embd 64", "--block_size 16", "--bias", "--pos_emb rope", "--tie_weights=False"],
)
def test_a_resume_cannot_change_the_models_shape(flags, out):
    assert_refused(out, *flags.split(), words=[flags.lstrip("-").replace("=", " ").split()[0]])


def test_a_resume_on_changed_data_is_refused(out, data_dir, tmp_path):
    """The same characters in another order, whole files with their right hashes: another text nevertheless."""
    chars = load(out / "last.pt")["chars"]
    write_data(tmp_path / "data", chars * 40)
    assert_refused(out, "--data_dir", tmp_path / "data", words=[tmp_path / "data", "changed"])


def test_a_resume_on_another_vocabulary_is_refused(out, data_dir, tmp_path):
    """The same ids, meaning other characters: the .bin files and their hashes are the same."""
    data = Path(shutil.copytree(data_dir, tmp_path / "data"))
    meta = json.loads((data / "meta.json").read_text(encoding="utf-8"))
    meta["chars"] = meta["chars"][:-1] + "é"
    meta["sha256"]["chars"] = hashlib.sha256(meta["chars"].encode()).hexdigest()
    (data / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    assert_refused(out, "--data_dir", data, words=[data, "characters"])


@pytest.mark.parametrize("share", [0, 0.001, 0.5, 0.99])
def test_a_truncated_last_checkpoint_is_refused(share, out):
    raw = (out / "last.pt").read_bytes()
    (out / "last.pt").write_bytes(raw[: int(share * len(raw))])
    assert_refused(out, words=[out / "last.pt"])


@pytest.mark.parametrize(
    "raw",
    [
        b"hello\n",
        b"\x00" * 100,
        b"\x80\x02.",
        b"\x80\x02]q\x00.",
        b"0" * 50,
        b"\xff" * 50,
        b"Q.",
        b"PK\x03\x04" + b"\x00" * 60,
    ],
    ids=range(8),
)
def test_a_last_checkpoint_that_is_something_else_is_refused(raw, out):
    (out / "last.pt").write_bytes(raw)
    assert_refused(out, words=[out / "last.pt"])


@pytest.mark.parametrize(
    "change", ["optimizer", "iter_num", "config", "stale", "config.n_layer", "config.recipe", "config.data_sha256"]
)
def test_a_checkpoint_that_lacks_what_a_run_needs_is_refused(change, out):
    """One of nanoGPT, or of an older version of this kit."""
    ckpt = load(out / "last.pt")
    *outer, name = change.split(".")
    del (ckpt[outer[0]] if outer else ckpt)[name]
    torch.save(ckpt, out / "last.pt")
    assert_refused(out, words=[out / "last.pt"])


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("kind", ["pickle", "torch", "in the config of a good run"])
def test_a_malicious_last_checkpoint_is_refused_and_runs_nothing(kind, out, tmp_path):
    ckpt, trap = load(out / "last.pt"), tmp_path / "trap"
    if kind == "pickle":
        (out / "last.pt").write_bytes(pickle.dumps(Evil(trap), protocol=2))
    elif kind == "torch":
        torch.save(Evil(trap), out / "last.pt")
    else:
        ckpt["config"]["trap"] = Evil(trap)
        torch.save(ckpt, out / "last.pt")
    assert_refused(out, words=[out / "last.pt"])
    assert not trap.exists()
    with contextlib.suppress(Exception):
        torch.load(out / "last.pt", weights_only=False)
    assert trap.exists()  # the trap works


# -- more than one process ---------------------------------------------------------------------------------------------


def torchrun(*flags, processes=2, **kwargs):
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", "train.py", *flags]
    return run(*command, env=ONE_THREAD, **kwargs)


@pytest.mark.parametrize("recipe", [pytest.param("nanogpt", marks=pytest.mark.slow), "modern"])
def test_two_processes_train_as_one_does_on_the_same_global_batch(recipe, data_dir, tmp_path):
    """Losses, gradients (those that AdamW has seen) and weights; and one resumes what the other began."""
    flags = [*SMALL, "--gradient_accumulation_steps", 2, "--batch_size", 4, "--log_interval", 1, "--data_dir", data_dir]
    flags += ["--recipe", recipe, "--max_iters", 5, "--eval_interval", 2]
    two, one = tmp_path / "two", tmp_path / "one"
    result = ok(torchrun(*flags, "--out_dir", two))
    assert result.stdout.count("step 5/5") == 1 and "and 1 more" in result.stdout
    ok(here(*flags, "--out_dir", one))
    a, b = load(two / "last.pt"), load(one / "last.pt")
    for ours, theirs in zip(a["optimizer"], b["optimizer"], strict=True):
        for i, state in theirs["state"].items():
            for name in state:
                torch.testing.assert_close(ours["state"][i][name], state[name], rtol=1e-2, atol=1e-5)
    for name in b["model"]:
        torch.testing.assert_close(a["model"][name], b["model"][name], rtol=1e-3, atol=1e-4)
    for name in ("train_loss", "val_loss"):
        losses = [[float(row[name] or 0) for row in log(folder)] for folder in (two, one)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert contents(two).keys() == contents(one).keys()
    ok(torchrun("--init_from", "resume", "--out_dir", one, "--max_iters", 7))
    ok(here("--init_from", "resume", "--out_dir", two, "--max_iters", 7))
    assert [int(row["step"]) for row in log(one)] == [int(row["step"]) for row in log(two)] == list(range(1, 8))


@pytest.mark.slow
def test_two_processes_resume_to_the_bit_with_dropout(data_dir, tmp_path):
    flags = [*STATEFUL, "--lr_decay_iters", 8, "--data_dir", data_dir]
    ok(torchrun(*flags, "--max_iters", 8, "--out_dir", tmp_path / "whole"))
    ok(torchrun(*flags, "--max_iters", 4, "--out_dir", tmp_path / "halves"))
    ok(torchrun("--init_from", "resume", "--out_dir", tmp_path / "halves", "--max_iters", 8))
    assert_same_run(tmp_path / "whole", tmp_path / "halves")


def test_a_batch_that_cannot_be_shared_is_named_once(data_dir, tmp_path):
    result = torchrun(*SMALL, "--batch_size", 3, "--data_dir", data_dir, "--out_dir", tmp_path / "out")
    assert result.returncode != 0 and not (tmp_path / "out").exists()
    lines = [line for line in result.stderr.splitlines() if line.startswith("train.py:")]
    assert len(lines) == 1 and "--batch_size 3" in lines[0], result.stderr


@pytest.mark.slow
def test_sigterm_to_the_launcher_saves(data_dir, tmp_path):
    flags = [*STATEFUL, "--max_iters", 10**6, "--log_interval", 5, "--data_dir", data_dir, "--out_dir", tmp_path]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py", *flags]
    process = subprocess.Popen(
        list(map(str, command)),
        cwd=ROOT,
        env=os.environ | ONE_THREAD,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    stdout = ""
    while "\nstep 15/" not in stdout and (line := process.stdout.readline()):
        stdout += line
    process.send_signal(signal.SIGTERM)
    rest, stderr = process.communicate(timeout=90)
    stopped = load(tmp_path / "last.pt")["iter_num"]
    assert stopped >= 15 and f"stopped at step {stopped} " in rest, stderr
    ok(torchrun("--init_from", "resume", "--out_dir", tmp_path, "--max_iters", stopped + 2))


# -- one run in an out_dir, and its death ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_second_run_in_an_out_dir_is_refused_until_the_first_is_dead(data_dir, tmp_path):
    """By a lock that needs no cleaning up: kill -9 frees it."""
    flags = [*SMALL, "--data_dir", data_dir, "--out_dir", tmp_path, "--max_iters", 10**6, "--log_interval", 1]
    process = start(*flags, "--save_interval", 2)
    with process:
        for line in process.stdout:
            if line.startswith("step 4/"):
                break
        for more in (flags, ["--init_from", "resume", "--out_dir", tmp_path]):
            assert_one_line(child(*more), tmp_path, "another run")
        assert not (tmp_path / "previous").exists()
        process.kill()
    ok(child("--init_from", "resume", "--out_dir", tmp_path, "--max_iters", load(tmp_path / "last.pt")["iter_num"] + 2))


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_with_the_weights_of_an_undisturbed_one(data_dir, tmp_path):
    """kill -9, at least 20 times, from the first import to the last save; whatever is there then loads and goes on."""
    flags = [*STATEFUL, "--save_interval", 7, "--eval_interval", 11, "--log_interval", 3, "--data_dir", data_dir]
    steps, out, rng = 1500, tmp_path / "out", np.random.default_rng(0)
    ok(child(*flags, "--max_iters", steps, "--out_dir", tmp_path / "whole"))
    kills, progress = 0, set()
    while not (out / "last.pt").exists() or load(out / "last.pt")["iter_num"] < steps:
        assert kills < 300, "it gets nowhere"
        resume = ["--init_from", "resume"] if (out / "last.pt").exists() else []
        process = start(*flags, *resume, "--max_iters", steps, "--out_dir", out)
        if kills < 25 or not resume:
            for line in process.stdout:  # past the imports, most times; they take longer than anything else
                if line.startswith("step") or rng.random() < 0.1:
                    break
            time.sleep(rng.uniform(0, 0.25))
            process.kill()
            kills += 1
        _, stderr = process.communicate(timeout=120)
        assert "Traceback" not in stderr and "train.py:" not in stderr, stderr
        if (out / "last.pt").exists():
            progress.add(load(out / "last.pt")["iter_num"])
            log(out)
    assert kills >= 20 and len(progress) > 5
    assert_same_run(tmp_path / "whole", out)
    assert [row["step"] for row in log(out)] == [row["step"] for row in log(tmp_path / "whole")]
    assert not [path for path in out.iterdir() if path.suffix == ".tmp"]


def test_patience_ends_a_run_that_no_longer_gets_better_and_keeps_its_best(data_dir, tmp_path):
    flags = [*SMALL, "--learning_rate", 0, "--max_iters", 50, "--eval_interval", 2, "--patience", 3]
    result = ok(here(*flags, "--data_dir", data_dir, "--out_dir", tmp_path))
    assert load(tmp_path / "last.pt")["iter_num"] == 8  # the first evaluation is the best, three more are no better
    assert load(tmp_path / "ckpt.pt")["iter_num"] == 2 and "--patience" in result.stdout


def test_plot_draws_this_run_and_the_one_before(data_dir, tmp_path):
    flags = [*SMALL, "--max_iters", 6, "--eval_interval", 2, "--data_dir", data_dir, "--out_dir", tmp_path, "--plot"]
    ok(here(*flags))
    alone = (tmp_path / "loss.png").read_bytes()
    ok(here(*flags))
    both = (tmp_path / "loss.png").read_bytes()
    assert alone[:8] == both[:8] == b"\x89PNG\r\n\x1a\n" and alone != both


# -- a loss that is no number ------------------------------------------------------------------------------------------


def assert_stopped(result, out, before):
    assert result.returncode not in (0, 2), result.stdout
    assert len(result.stderr.splitlines()) == 1 and "stopped at step" in result.stderr
    assert "nan" in result.stderr or "inf" in result.stderr or "finite" in result.stderr
    after = contents(out)
    assert (after["ckpt.pt"], after["last.pt"]) == (before["ckpt.pt"], before["last.pt"])
    assert all(math.isfinite(float(row[name] or 0)) for row in log(out) for name in HEADER)
    ok(here("--init_from", "resume", "--out_dir", out, "--max_iters", "62"))  # and a sane rate goes on from there
    assert math.isfinite(float(log(out)[-1]["val_loss"]))


@pytest.mark.parametrize("intervals", ["", "--log_interval 1", "--save_interval 10 --log_interval 1000"])
def test_a_loss_that_becomes_nan_stops_the_run_before_it_is_saved(intervals, out):
    """Also one that appears between two saves and that no line of progress has shown."""
    before = contents(out)
    result = here("--init_from", "resume", "--out_dir", out, "--max_iters", 200, *BROKEN, *intervals.split())
    assert_stopped(result, out, before)


@pytest.mark.parametrize(
    "flags", ["--max_iters 61", "--max_iters 200 --eval_interval 61", "--max_iters 200 --save_interval 1"]
)
def test_a_checkpoint_is_not_replaced_by_weights_whose_loss_is_nan(flags, out):
    """The last update before a save broke the weights; they are finite, huge numbers, but their val loss is NaN."""
    before = contents(out)
    result = here("--init_from", "resume", "--out_dir", out, *BROKEN, *flags.split())
    assert_stopped(result, out, before)


def test_a_run_that_breaks_from_the_start_says_so(data_dir, tmp_path):
    """From a real process, and with nothing saved before."""
    flags = [*TINY, *BROKEN, "--max_iters", 50, "--data_dir", data_dir, "--out_dir", tmp_path]
    result = child(*flags)
    assert_one_line(result, "stopped at step", "--learning_rate")
    assert not (tmp_path / "last.pt").exists() and not (tmp_path / "ckpt.pt").exists()


def test_a_gpu_that_only_emulates_bfloat16_gets_float16(monkeypatch):
    """A T4 answers as this stand-in does: yes, unless it is asked for more than emulation."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert train.pick_dtype("auto", torch.device("cuda")) == torch.float16
