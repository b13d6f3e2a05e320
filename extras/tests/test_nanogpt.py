"""For people who come from nanoGPT: hints for its flags, its meta.pkl, and its checkpoints."""

import pickle
import re

import numpy as np
import pytest
import torch

from extra_helpers import flags_of
from extras.checkpoint import load_model
from extras.nanogpt import CONFIGS, INSTEAD, read_meta
from helpers import SAMPLE, assert_one_line, here, load, ok, plain_val_loss
from model import GPT, GPTConfig, save
from train import FLAGS

# -- flags -------------------------------------------------------------------------------------------------------------

NANOGPT_ONLY = """dataset always_save_checkpoint decay_lr backend wandb_log wandb_project
wandb_run_name""".split()  # settings of nanoGPT that mean nothing here


def test_settings_that_mean_nothing_here_are_no_flags_and_have_a_hint():
    assert not FLAGS.keys() & set(NANOGPT_ONLY)
    assert not [name for name in NANOGPT_ONLY if f"--{name}" not in INSTEAD]


def test_a_hint_names_flags_that_exist():
    named = re.findall(r"--\w+", " ".join([*INSTEAD.values(), *CONFIGS.values()]))
    assert named and {*named} <= flags_of("train.py", "sample.py")


@pytest.mark.parametrize("words", [["--init_from=resume"], ["--init_from", "resume"]], ids=str)
def test_nanogpts_resume_is_the_run_in_out_dir(words, trained):
    flags = ["--out_dir", trained, "--device", "cpu", "--max_new_tokens", 5]
    assert ok(here(*flags, *words, script="sample.py")).stdout == ok(here(*flags, script="sample.py")).stdout
    result = here(*flags, *words, "--bogus", script="sample.py")
    assert_one_line(result, "unrecognized arguments: --bogus (", code=2)


def test_sample_py_is_told_where_gpt2_is():
    result = here("--init_from=gpt2-xl", script="sample.py")
    download = "hf download openai-community/gpt2-xl --local-dir gpt2-xl downloads it"
    assert_one_line(result, "--init_from=gpt2-xl: type --ckpt gpt2-xl; ", download, code=2)
    assert result.stdout == ""


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_a_nanogpt_checkpoint_is_evaluated_and_trained_on_text_that_was_prepared_for_it(tmp_path):
    """Its seven model_args and its meta.pkl, whose characters are in another order than ours."""
    text = SAMPLE.read_text(encoding="utf-8")
    chars = "".join(sorted(set(text), reverse=True))
    args = dict(n_layer=1, n_head=2, n_embd=16, block_size=12, bias=True, vocab_size=len(chars), dropout=0.1)
    model = GPT(GPTConfig(**args)).eval()
    torch.save({"model": model.state_dict(), "model_args": args, "config": {}}, tmp_path / "ckpt.pt")
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"itos": dict(enumerate(chars))}))
    flags = ["--init_from", tmp_path / "ckpt.pt", "--meta", tmp_path / "meta.pkl", "--data_dir", tmp_path / "data"]
    prepare = ["--input", SAMPLE, "--data_dir", tmp_path / "data"]
    ok(here(*prepare, script="data/prepare.py"))
    assert_one_line(here(*flags, "--eval_only"), f"--tokenizer {tmp_path / 'meta.pkl'}", code=1)
    ok(here(*prepare, "--tokenizer", tmp_path / "meta.pkl", script="data/prepare.py"))
    val = np.array([chars.index(c) for c in text[int(0.9 * len(text)) :]])
    loss = plain_val_loss(model, val, 12)
    assert float(ok(here(*flags, "--eval_only")).stdout.split()[2]) == pytest.approx(loss, abs=1e-4)
    still = ["--learning_rate", 0, "--weight_decay", 0, "--recipe", "nanogpt", "--max_iters", 1, "--device", "cpu"]
    ok(here(*flags, *still, "--out_dir", tmp_path / "out"))
    trained = load(tmp_path / "out" / "last.pt")
    assert trained["chars"] == chars
    result = here(*flags, "--init_from", tmp_path / "out", "--eval_only")
    assert_one_line(result, "has its own vocabulary: leave out --meta", code=1)
    assert all(torch.equal(p, trained["model"][name]) for name, p in model.state_dict().items())


def test_a_meta_file_that_is_not_there_is_named(trained, data_dir):
    assert_one_line(here("--init_from", trained, "--meta", "no.json", "--data_dir", data_dir), "no.json", code=1)


def test_a_checkpoint_without_a_vocabulary_is_told_about_meta_pkl_here_too(tmp_path):
    config = GPTConfig(n_layer=1, n_head=2, n_embd=8, block_size=8, vocab_size=5)
    save(tmp_path / "ckpt.pt", {"model": GPT(config).state_dict(), "model_args": vars(config)})
    with pytest.raises(ValueError, match="--meta"):
        load_model(tmp_path / "ckpt.pt")


@pytest.mark.parametrize(
    "meta, chars",
    [
        ({"itos": {0: "a", 1: "b"}}, "ab"),
        ({"itos": ["a", "b"]}, "ab"),
        ({"stoi": {"b": 1, "a": 0}}, "ab"),
        ({"itos": {0: "a", 1: "the"}}, "tokens are not characters"),
        ({"vocab_size": 2}, "stoi"),
    ],
)
def test_a_meta_pkl_of_any_making_gives_its_characters_or_says_what_it_holds(meta, chars, tmp_path):
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
    if chars == "ab":
        assert read_meta(tmp_path / "meta.pkl") == chars
    else:
        with pytest.raises(ValueError, match=chars):
            read_meta(tmp_path / "meta.pkl")
