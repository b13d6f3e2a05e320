"""train.py: what a checkpoint holds, resumes to the last bit, and the dtype of the forward."""

import itertools
import math
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers import (
    SMALL,
    assert_one_line,
    assert_refused,
    assert_same_run,
    contents,
    here,
    load,
    log,
    ok,
    plain_val_loss,
    same,
    write_ids,
)
from model import GPT, CharTokenizer, GPTConfig
from train import make_config, set_up_device

WORSE = "--learning_rate 0.5 --min_lr 0.5 --warmup_iters 0 --max_iters 70".split()  # ends with a higher val loss

# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_checkpoints_hold_what_is_promised(trained):
    keys = "model model_args config chars data_sha256 special_tokens iter_num".split()
    keys += "best_val_loss seconds evals_since_best".split()
    for name, more in (("ckpt.pt", []), ("last.pt", ["optimizer", "scaler", "loss"])):
        ckpt = load(trained / name)  # as tensors and plain values
        assert set(ckpt) == {*keys, *more} and ckpt["iter_num"] == 60
    assert ckpt["evals_since_best"] == 0
    (row,) = [row for row in log(trained) if row["val_loss"]]
    assert ckpt["best_val_loss"] == float(row["val_loss"]) and 0 <= ckpt["seconds"] - float(row["seconds"]) < 1


def test_ckpt_has_the_best_loss_and_last_the_latest(out, data_dir):
    """A worse evaluation must not replace the best weights. A plain loop checks the losses of both files."""
    ids = np.fromfile(data_dir / "val.bin", dtype="<u2")
    before = contents(out)
    ok(here("--init_from", "resume", "--out_dir", out, *WORSE))
    assert (out / "ckpt.pt").read_bytes() == before["ckpt.pt"] != (out / "last.pt").read_bytes()
    best, worst = (float(row["val_loss"]) for row in log(out) if row["val_loss"])
    assert best < worst
    for name, loss in (("ckpt.pt", best), ("last.pt", worst)):
        ckpt = load(out / name)
        model = GPT(GPTConfig(**ckpt["model_args"]))
        model.load_state_dict(ckpt["model"])
        assert ckpt["best_val_loss"] == best
        assert plain_val_loss(model, ids, 32) == pytest.approx(loss, rel=1e-5)


def test_a_resume_without_the_best_checkpoint_writes_one_again(out):
    """As on another machine, to which only last.pt was copied. Else the run would end with the path of no file."""
    best = load(out / "ckpt.pt")["best_val_loss"]
    (out / "ckpt.pt").unlink()
    ok(here("--init_from", "resume", "--out_dir", out, *WORSE))
    assert load(out / "ckpt.pt")["best_val_loss"] > best


# -- resuming ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_resume_computes_on_the_threads_of_its_run(data_dir, tmp_path):
    """Another number of threads adds the gradients of 512 positions in another order."""
    flags = ["--batch_size", 8, "--block_size", 64, "--n_layer", 1, "--lr_decay_iters", 6, "--data_dir", data_dir]
    out, whole, other = (tmp_path / name for name in ("out", "whole", "other"))
    ok(here(*flags, "--max_iters", 6, "--threads", 2, "--out_dir", whole))
    ok(here(*flags, "--max_iters", 6, "--out_dir", other))
    assert not same(load(whole / "last.pt")["model"], load(other / "last.pt")["model"])
    ok(here(*flags, "--max_iters", 3, "--threads", 2, "--out_dir", out))
    ok(here("--init_from", "resume", "--max_iters", 6, "--out_dir", out))
    assert load(out / "last.pt")["config"]["threads"] == 2
    assert_same_run(whole, out)


def test_a_folder_that_was_renamed_is_resumed_under_its_new_name(out, monkeypatch):
    """Its checkpoints remember the old name. Here the new one is the default of --out_dir, which nobody types."""
    monkeypatch.chdir(out.parent)
    old = Path(load(out / "last.pt")["config"]["out_dir"])
    before = contents(old)
    ok(here("--init_from", "resume", "--max_iters", 61))
    assert load(out / "last.pt")["iter_num"] == 61 and contents(old) == before


CHANGES = "--dropout 0.5,--learning_rate 0.01,--seed 1,--weight_decay 0.9,--beta2 0.5"


def test_a_resume_takes_other_settings_from_its_flags(out, tmp_path):
    """load_state_dict would bring the optimizer's old weight_decay and betas back."""
    results = []
    for i, change in enumerate(["", *CHANGES.split(",")]):
        copy = shutil.copytree(out, tmp_path / str(i))
        ok(here("--init_from", "resume", "--out_dir", copy, "--max_iters", 63, *change.split()))
        results.append(load(copy / "last.pt")["model"])
    assert all(not same(a, b) for a, b in itertools.combinations(results, 2))


def test_the_automatic_preset_is_that_of_the_run(out):
    ok(here("--init_from", "resume", "--out_dir", out, "--max_iters", 61, "--preset", "auto"))
    assert load(out / "last.pt")["config"]["preset"] == "cpu"


# -- resumes that cannot be --------------------------------------------------------------------------------------------

SHAPES = ["--n_layer 3", "--n_head 4", "--block_size 16", "--bias", "--pos_emb rope", "--tie_weights=False"]


@pytest.mark.parametrize("flag", [*SHAPES, "--optimizer muon", "--preset gpu", "--recipe modern"])
def test_a_resume_cannot_change_the_network_or_the_optimizer(flag, out):
    assert_refused(out, *flag.split(), words=[flag.replace("=", " ").split()[0], f"conflicts with {out / 'last.pt'}"])


def test_a_run_from_before_a_setting_has_the_value_of_its_network(out):
    ckpt = load(out / "last.pt")
    del ckpt["config"]["norm_first"], ckpt["model_args"]["norm_first"]
    torch.save(ckpt, out / "last.pt")
    assert_refused(out, "--norm_first", "False", words=["--norm_first False conflicts", "(norm_first True)"])


def test_a_checkpoint_that_no_run_of_this_train_py_has_left_is_refused(out):
    """ckpt.pt is not for resuming, and nanoGPT's has other settings and another optimizer."""
    ckpt = load(out / "last.pt")
    nanogpts = {key: ckpt[key] for key in ("model", "model_args", "iter_num", "best_val_loss")} | {"config": {"lr": 1}}
    without = {key: value for key, value in ckpt.items() if key != "config"}
    for content in (nanogpts, without, load(out / "ckpt.pt")):
        torch.save(content, out / "last.pt")
        assert_refused(out, words=[f"{out / 'last.pt'} is not a last.pt of this train.py: start a new run from it"])


MINE = """
from pathlib import Path
import torch.nn as nn

Path(__file__).with_name("imported").touch()


class TrainingLoss(nn.Module):
    def __init__(self, model, config, ids):
        super().__init__()
        self.model = model
        self.scale = nn.Parameter(model.lm_head.weight.new_ones(()))
        self.saved = {"author": "me", "model": "not this"}

    def forward(self, x, y, where, left):
        loss = self.model(x, y)[1]
        return loss * self.scale**2, loss.detach()
"""


def test_a_loss_of_your_own_is_trained_saved_and_imported_only_if_a_flag_names_it(data_dir, tmp_path, monkeypatch):
    """A checkpoint is data: whoever sends you one does not choose which code runs."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    flags = [*SMALL, "--loss", "mine", "--log_interval", 1, "--lr_decay_iters", 6, "--data_dir", data_dir]
    ok(here(*flags, "--max_iters", 6, "--out_dir", tmp_path / "whole"))
    ok(here(*flags, "--max_iters", 3, "--out_dir", tmp_path / "out"))
    (tmp_path / "imported").unlink()
    monkeypatch.delitem(sys.modules, "mine")
    words = ["the run was trained with --loss mine", "pass it again"]
    assert_refused(tmp_path / "out", words=words)
    assert not (tmp_path / "imported").exists()
    assert_refused(tmp_path / "out", "--loss", "cross_entropy", words=["--loss cross_entropy conflicts"])
    ok(here("--init_from", "resume", "--loss", "mine", "--max_iters", 6, "--out_dir", tmp_path / "out"))
    assert_same_run(tmp_path / "whole", tmp_path / "out")
    last = load(tmp_path / "out" / "last.pt")
    assert last["author"] == "me" and "transformer.wte.weight" in last["model"]
    assert last["loss"].keys() == {"scale"} and last["loss"]["scale"] < 1


@pytest.mark.parametrize("name", ["nothere", "nothere.py", "./mine.py", "nothere.at.all", "json"])
def test_a_loss_that_is_not_there_is_one_line(name, data_dir, tmp_path):
    result = here(*SMALL, f"--loss={name}", "--data_dir", data_dir, "--out_dir", tmp_path / "out")
    assert_one_line(result, f"--loss {name}", code=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": []},
        {"config": {}},
        {"model_args": {"head_size": 4}},
    ],
)
def test_states_that_do_not_fit_are_refused_before_anything_moves(change, out):
    torch.save(load(out / "last.pt") | change, out / "last.pt")
    assert_refused(out)


def test_moments_of_another_shape_are_refused(out):
    """A fused AdamW would read and write beyond them."""
    last = load(out / "last.pt")
    state = last["optimizer"][0]["state"][0]
    state["exp_avg"] = state["exp_avg"].flatten()[1:]
    torch.save(last, out / "last.pt")
    assert_refused(out, words=["the state of an optimizer does not fit the weights"])


def test_a_resume_of_nothing_is_refused(tmp_path):
    assert_refused(tmp_path / "nowhere", words=[f"no checkpoint at {tmp_path / 'nowhere' / 'last.pt'}"])


def test_a_resume_names_data_dir_where_the_text_is_another_or_not_here(out, tmp_path):
    """The same characters in a different order are complete files with the right hashes, but different text."""
    tokenizer = CharTokenizer(load(out / "last.pt")["chars"])
    write_ids(tmp_path / "data", tokenizer, tokenizer.vocab * 40)
    assert_refused(
        out,
        "--data_dir",
        tmp_path / "data",
        words=[tmp_path / "data", "different text", "--data_dir", f"--init_from {out}"],
    )
    ckpt = load(out / "last.pt")
    ckpt["config"]["data_dir"] = "data/of/another/folder"  # relative to where the run was started
    torch.save(ckpt, out / "last.pt")
    assert_refused(out, words=["no usable data in data/of/another/folder (", "pass a different --data_dir"])


# -- dtypes ------------------------------------------------------------------------------------------------------------


def test_a_gpu_that_only_emulates_bfloat16_gets_float16(monkeypatch):
    """A T4 answers as this stand-in does: yes, unless it is asked for more than emulation."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr("train.pick_device", torch.device)
    assert set_up_device(make_config(dict(device="cuda")))[1] == "float16"


def test_bfloat16_is_the_dtype_of_the_forward_and_never_of_the_weights(data_dir, tmp_path, monkeypatch):
    dtypes = set()
    lm_head = torch.nn.Linear.forward

    def forward(layer, x):
        logits = lm_head(layer, x)
        dtypes.add(logits.dtype)
        return logits

    monkeypatch.setattr(torch.nn.Linear, "forward", forward)
    ok(here(*SMALL, "--dtype", "bfloat16", "--max_iters", 3, "--data_dir", data_dir, "--out_dir", tmp_path))
    assert torch.bfloat16 in dtypes
    last = load(tmp_path / "last.pt")
    moments = [value for values in last["optimizer"][0]["state"].values() for value in values.values()]
    assert {tensor.dtype for tensor in (*moments, *last["model"].values())} == {torch.float32}
    assert math.isfinite(float(log(tmp_path)[-1]["val_loss"]))
