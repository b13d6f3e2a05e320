"""sample.py as a user runs it: its output, its promise, its report, and what it says to a mistake."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import model
from helpers import PROMPT, ROOT, assert_one_line, here, ok, random_model, sample, text_before, texts_of, unix
from model import GPTConfig, KVCache, save_checkpoint
from sample import PRETRAINED, report


@pytest.mark.parametrize("flag", ["--kv_cache", "--no-kv_cache"])
def test_stdout_is_the_prompt_and_its_continuation_and_nothing_else(trained, flag):
    result = sample(trained, "--prompt", PROMPT, flag)
    assert result.returncode == 0, result.stderr
    assert result.stdout == texts_of(trained, PROMPT, 100)[0]
    assert len(result.stdout) == 32  # as much as fits the context
    assert ("KV cache: off" in result.stderr) == (flag == "--no-kv_cache")


@pytest.mark.slow
def test_filters_and_seed_reach_the_sampler(trained):
    flags = ["--temperature", "0.7", "--top_k", "9", "--top_p", "0.8", "--seed", "5", "--max_new_tokens", "12"]
    result = sample(trained, "--prompt", PROMPT, *flags)
    assert result.stdout == texts_of(trained, PROMPT, 12, temperature=0.7, top_k=9, top_p=0.8, seed=5)[0]


@pytest.mark.slow
def test_the_report_counts_the_bytes_that_the_formula_gives(trained):
    """2 layers * 2 heads * 16 head size; slots for 13 + 19 tokens; 2 rows; 4 bytes."""
    result = sample(trained, "--prompt", PROMPT, "--num_samples", "2")
    assert f"= {2 * 2 * 2 * 16 * 32 * 2 * 4:,} bytes" in result.stderr
    figures = r"^sample.py: 38 tokens: TTFT [\d.]+ ms, TPOT [\d.]+ ms, [\d,]+ tokens/s$"
    assert re.search(figures, result.stderr, re.M), result.stderr
    one = sample(trained, "--prompt", PROMPT, "--max_new_tokens", "1").stderr
    assert re.search(r"^sample.py: 1 tokens: TTFT [\d.]+ ms, [\d,]+ tokens/s$", one, re.M), one


def test_the_figures_are_those_computed_by_hand(capsys):
    """Two rows of four new tokens in gaps of 4, 10 and 10 ms."""
    texts = [SimpleNamespace(ids=[7, 0, 1, 2, 3])] * 2
    report(SimpleNamespace(kv_cache=False), None, 9, texts, [1, 1], [0.010, 0.014, 0.024, 0.034])
    line = "\nsample.py: 8 tokens: TTFT 10.00 ms, TPOT 8.000 ms, 235 tokens/s\n"
    assert capsys.readouterr().err == line + "sample.py: KV cache: off\n"


@pytest.mark.parametrize(
    "prompt, flags, slots",
    [
        ("O", ["--max_new_tokens", "5"], 6),
        ("O" * 20, [], 32),  # the context
        ("O" * 20, ["--overflow", "slide", "--max_new_tokens", "50"], 32),
        ("O" * 40, ["--overflow", "slide", "--max_new_tokens", "5"], 21),  # half the context of the prompt, and 5
    ],
)
def test_the_report_counts_the_slots_that_the_cache_has(prompt, flags, slots, trained, monkeypatch):
    made, init = [], KVCache.__init__

    def __init__(cache, *args):
        init(cache, *args)
        made.append(cache.slots)

    monkeypatch.setattr(KVCache, "__init__", __init__)
    result = ok(sample(trained, "--prompt", prompt, *flags))
    assert max(made) == slots and f" * {slots} slots * " in result.stderr, (made, result.stderr)


def test_a_length_past_the_context_is_capped_and_said(trained):
    result = sample(trained, "--prompt", PROMPT, "--max_new_tokens", "500")
    assert result.returncode == 0 and len(result.stdout) == 32
    assert "500" in result.stderr and "capped at 19" in result.stderr


@pytest.mark.slow
def test_an_empty_prompt_starts_from_a_newline_and_says_so(trained):
    result = sample(trained, "--prompt", "")
    assert result.stdout == texts_of(trained, "\n", 100)[0]
    assert "prompt is empty" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--prompt", "--start"])
def test_a_prompt_from_a_file(flag, trained, tmp_path):
    (tmp_path / "p.txt").write_bytes(PROMPT.encode())
    result = sample(trained, flag, f"FILE:{tmp_path / 'p.txt'}")
    assert result.stdout == texts_of(trained, PROMPT, 100)[0]


def test_the_line_ends_of_a_prompt_are_those_of_a_file(trained, tmp_path):
    text = "ab\r\ncd\re\n"
    (tmp_path / "p.txt").write_bytes(text.encode())
    results = [ok(sample(trained, "--prompt", prompt)) for prompt in (text, f"FILE:{tmp_path / 'p.txt'}")]
    assert results[0].stdout == results[1].stdout and results[0].stdout.startswith("ab\ncd\ne\n")


def test_a_stop_text_has_the_line_ends_of_the_text(trained):
    """A script written on Windows passes CR LF."""
    text = texts_of(trained, "First ", 100)[0]
    stop = next(text[i : i + 3] for i in range(8, len(text) - 3) if text[i + 1] == "\n")
    result = ok(sample(trained, "--prompt", "First ", "--stop", stop.replace("\n", "\r\n")))
    assert result.stdout == "First " + text_before(text.removeprefix("First "), [stop]) != text


@pytest.mark.slow
def test_the_flags_of_nanogpts_sample_py_work(trained):
    """The folder of the run and the device are those of `sample`."""
    flags = "--num_samples=3 --max_new_tokens=15 --temperature=0.7 --top_k=200 --seed=5 --dtype=float32 --compile=False"
    result = ok(sample(trained, f"--start={PROMPT}", *flags.split()))
    expected = texts_of(trained, PROMPT, 15, rows=3, temperature=0.7, top_k=200, seed=5)
    assert result.stdout.split("\n---------------\n") == expected
    assert " * 28 slots * " in result.stderr  # those of the text; the C backend has as many as the context, 32


@unix
@pytest.mark.slow
def test_characters_stream_as_they_come(trained):
    """On a terminal every character arrives in a separate write, and a newline ends the text."""
    parent, child = os.openpty()
    command = [sys.executable, "sample.py", "--out_dir", str(trained), "--device", "cpu", "--prompt", "O"]
    command += ["--overflow", "slide", "--max_new_tokens", "2000"]  # long enough for any scheduler to let us read
    process = subprocess.Popen(command, cwd=ROOT, stdout=child, stderr=subprocess.PIPE)
    os.close(child)
    reads = []
    while True:
        try:
            reads.append(os.read(parent, 4096))
        except OSError:  # Linux says so when the other side is closed
            break
        if not reads[-1]:
            break
    assert process.wait(60) == 0
    os.close(parent)
    text = b"".join(reads).decode().replace("\r\n", "\n")
    assert len(text) == 2002 and text.endswith("\n")
    assert len(reads) > 20  # not one lump at the end


# -- the promise -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag, how", [("--kv_cache", "without"), ("--no-kv_cache", "with")])
def test_verify_of_a_broken_cache_exits_1(flag, how, tmp_path, monkeypatch):
    chars = "abcdefghijklmnopqrstuvw"
    args = dict(block_size=32, vocab_size=len(chars), n_layer=2, n_head=2, n_embd=32)
    content = {"model": random_model(GPTConfig(**args)).state_dict(), "model_args": args, "chars": chars}
    save_checkpoint(tmp_path / "ckpt.pt", content)
    flags = ["--prompt", "cache", "--verify", flag]
    assert "are the same with and without the cache (1 of 1 samples)" in ok(sample(tmp_path, *flags)).stderr
    update = KVCache.update

    def forgetful(cache, layer, pos, k, v):
        views = update(cache, layer, pos, k, v)
        if pos[0] > 0:
            cache.value[layer][:, :, 0] = 100
        return views

    monkeypatch.setattr(KVCache, "update", forgetful)
    result = sample(tmp_path, *flags)
    assert result.returncode == 1
    two = r"-?[\d.]+ and -?[\d.]+"
    picks = rf"DIFFERENT at row 0, new token \d+: the text has '\w', but {how} the cache, the model picks '\w'\. "
    logits = rf"Logits of the two: {two} with the cache, {two} without$"
    assert re.search(picks + logits, result.stderr, re.M), result.stderr


def test_verify_sees_a_broken_cache_that_changes_no_token(monkeypatch):
    """Without a mask in the prefill, the tokens of the prompt see later ones, and yet this text stays the same."""
    flags = ["--ckpt", PRETRAINED, "--device", "cpu", "--prompt", "O Romeo, ", "--verify"]
    right = ok(here(*flags, script="sample.py"))
    monkeypatch.setattr(KVCache, "mask", lambda cache, pos: None)
    result = here(*flags, script="sample.py")
    assert result.returncode == 1 and result.stdout == right.stdout
    said = r"^sample.py: verify: DIFFERENT: the tokens agree, but logits .* are up to 0\.\d+ apart$"
    assert re.search(said, result.stderr, re.M), result.stderr


@pytest.mark.parametrize("flags", [[], ["--stop", "#"]], ids=["to the end", "stop"])
def test_verify_of_a_text_that_ends_early_exits_1(flags, tmp_path, monkeypatch):
    """Of every token that it was asked for, none may be missing, whatever wrote the text."""
    chars = "abcdefghijklmnopqrstuvw#"
    args = dict(block_size=32, vocab_size=len(chars), n_layer=2, n_head=2, n_embd=32)
    network = random_model(GPTConfig(**args))
    with torch.no_grad():
        network.lm_head.weight[-1] = 0  # rarely a stop string
    save_checkpoint(tmp_path / "ckpt.pt", {"model": network.state_dict(), "model_args": args, "chars": chars})
    generate = model.generate

    def early(gpt, idx, max_new_tokens, sampling, kv_cache=True, cache=None, forced=None):
        return generate(gpt, idx, max_new_tokens - (3 if kv_cache else 0), sampling, kv_cache, cache, forced)

    monkeypatch.setattr(model, "generate", early)
    result = sample(tmp_path, "--prompt", "cache", "--max_new_tokens", "9", "--verify", *flags)
    assert result.returncode == 1 and "DIFFERENT at row 0: it ends after 6 of 9 new tokens" in result.stderr, (
        result.stderr
    )


@pytest.mark.slow
def test_verify_matches_for_samples_of_the_pretrained_model():
    flags = ["--ckpt", PRETRAINED, "--device", "cpu", "--prompt", "O Romeo, ", "--num_samples", 3]
    result = ok(here(*flags, "--verify", script="sample.py"))
    assert "3 of 3 samples)" in result.stderr or "near-tie" in result.stderr


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--max_new_tokens", "0"], ["--max_new_tokens 0 is not from 1 to"]),
        (["--num_samples", "-2"], ["--num_samples -2 is not from 1 to 4096"]),
        (["--num_samples", "100000"], ["--num_samples 100000 is not from 1 to 4096"]),
        (["--num_samples", "two"], ["--num_samples", "two"]),
        (["--kv_cache", "maybe"], ["--kv_cache", "maybe"]),
        (["--temperature", "warm"], ["--temperature", "warm"]),
        (["--dtype", "int8"], ["--dtype", "int8"]),
        (["--verify", "--dtype", "bfloat16"], ["bfloat16"]),
        (["--promt", "x"], ["--promt"]),
        (["--prompt", "-Hello"], ["argument --prompt: expected one argument", "--prompt=-a"]),
        (["--ckpt", "a.pt", "--out_dir", "b"], ["--ckpt and --out_dir both say which model"]),
        (["hello"], ['unrecognized arguments: hello: type --prompt "TEXT"']),
        (["--ckpt="], ["--ckpt, --out_dir or --stop is empty"]),
        (["--out_dir", ""], ["--ckpt, --out_dir or --stop is empty"]),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_impossible_flags_are_one_line_and_exit_code_2(flags, words):
    result = here(*flags, script="sample.py")
    assert_one_line(result, *words, code=2)
    assert result.stdout == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, words",
    [
        (["--prompt", "O Roméo #"], ["'é'", "'#'", "abcdefghijklmnopqrstuvwxyz"]),
        (["--prompt", "x" * 32], ["32", "at most 31"]),
        (["--prompt", "FILE:/nowhere/at/all"], ["/nowhere/at/all"]),
        (["--prompt", "FILE:"], ["the prompt from the file ''"]),
        (["--temperature", "-1"], ["sample.py: --temperature=-1.0: must be a number >= 0"]),
        (["--temperature", "nan"], ["--temperature=nan"]),
        (["--top_k", "0"], ["--top_k=0"]),
        (["--top_p", "1.5"], ["--top_p=1.5"]),
        (["--seed", str(2**64)], [f"--seed={2**64}"]),
        (["--out_dir", "/nowhere"], ["no checkpoint", "train.py"]),
        (["--device", "cuda:99"], ["cuda:99"]),
        (
            ["--device", "gpu"],
            ["--device gpu cannot be used here: it is cpu, cuda (a GPU) or mps"],
        ),
        (["--device", "mps:7"], ["--device mps:7 cannot be used here: "]),
    ],
    ids=lambda value: " ".join(map(str, value))[:40],
)
def test_mistakes_are_one_line(trained, flags, words):
    result = sample(trained, *flags)
    assert_one_line(result, *words, code=1)
    assert result.stdout == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a GPU that torch cannot use")
@pytest.mark.parametrize(
    "flags, device",
    [
        ([], "cpu"),
        (["--num_samples", "8"], "cpu"),
        (["--num_samples", "64"], "cuda"),
        (["--no-kv_cache"], "cuda"),
        (["--dtype", "bfloat16"], "cuda"),
        (["--device", "cuda"], "cuda"),
        (["--device", "cpu", "--no-kv_cache"], "cpu"),
    ],
    ids=" ".join,
)
def test_a_small_step_leaves_the_gpu_alone(flags, device, monkeypatch):
    """torch says that there is a GPU, which fails once it is used: so an error shows that sample.py took it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    result = here("--ckpt", PRETRAINED, "--prompt", "O", "--max_new_tokens", 1, *flags, script="sample.py")
    if device == "cuda":
        assert_one_line(result, "sample.py: --device cuda cannot be used here", code=1)
    else:
        assert ok(result).stdout and ("--device cuda takes the GPU" in result.stderr) == ("--device" not in flags)


def test_a_file_that_is_no_checkpoint_or_missing_is_one_line():
    for file, *words in (
        ("mine.pt", "no checkpoint at mine.pt", "python train.py"),
        (ROOT / "README.md", "README.md", "cannot be loaded: it is damaged, not a checkpoint"),
    ):
        assert_one_line(here("--ckpt", file, script="sample.py"), *words, code=1)


def test_a_prompt_that_is_not_utf8_is_one_line(trained, tmp_path):
    (tmp_path / "p.txt").write_bytes("café".encode("latin-1"))
    result = sample(trained, "--prompt", f"FILE:{tmp_path / 'p.txt'}")
    assert_one_line(result, f"the prompt in {tmp_path / 'p.txt'} is not UTF-8", code=1)
