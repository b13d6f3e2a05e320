"""sample.py as a user runs it: its output, its promise, its report, and what it says to a mistake."""

import os
import re
import subprocess
import sys

import pytest

from helpers import PROMPT, ROOT, assert_one_line, ok, random_model, sample, texts_of, unix
from model import GPTConfig, KVCache, save
from sample import PRETRAINED, parse_args


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
    figures = (
        r"38 tokens: TTFT [\d.]+ ms, TPOT [\d.]+ ms, ITL p50 [\d.]+ ms, p99 [\d.]+ ms, E2E [\d.]+ ms, [\d,]+ tokens/s"
    )
    assert re.search(figures, result.stderr), result.stderr


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


@pytest.mark.slow
def test_the_flags_of_nanogpts_sample_py_work(trained):
    """The folder of the run and the device are those of `sample`."""
    flags = "--num_samples=3 --max_new_tokens=15 --temperature=0.7 --top_k=200 --seed=5 --dtype=float32 --compile=False"
    result = ok(sample(trained, f"--start={PROMPT}", *flags.split()))
    expected = texts_of(trained, PROMPT, 15, rows=3, temperature=0.7, top_k=200, seed=5)
    assert result.stdout.split("\n---------------\n") == expected
    assert "for the model\n" in result.stderr  # and for no C backend


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
    save(tmp_path / "ckpt.pt", content)
    flags = ["--prompt", "cache", "--verify", flag]
    assert f"match the run {how} the cache (1 of 1 samples)" in ok(sample(tmp_path, *flags)).stderr
    update = KVCache.update

    def forgetful(cache, layer, pos, k, v):
        views = update(cache, layer, pos, k, v)
        if pos[0, 0] > 0:
            cache.value[layer][:, :, 0] = 100
        return views

    monkeypatch.setattr(KVCache, "update", forgetful)
    result = sample(tmp_path, *flags)
    assert result.returncode == 1
    assert re.search(rf"DIFFERENT at row 0, new token \d+: '\w', but '\w' {how} the cache", result.stderr)


@pytest.mark.slow
def test_verify_matches_for_samples_of_the_pretrained_model():
    result = ok(sample("out", "--ckpt", PRETRAINED, "--prompt", "O Romeo, ", "--verify", "--num_samples", 3))
    assert "3 of 3 samples)" in result.stderr or "near-tie" in result.stderr


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--temperature", "-1"], ["--temperature", "-1"]),
        (["--temperature", "nan"], ["--temperature", "nan"]),
        (["--top_k", "0"], ["--top_k", "0"]),
        (["--top_p", "1.5"], ["--top_p", "1.5"]),
        (["--seed", str(2**64)], ["--seed", 2**64]),
        (["--dtype", "int8"], ["--dtype", "int8"]),
        (["--verify", "--dtype", "bfloat16"], ["bfloat16"]),
        (["--ckpt", ""], ["--ckpt", "empty"]),
        (["--meta", "meta.pkl"], ["--meta", "--ckpt"]),
        (["--engine", "onnx", "--weights", "int8"], ["--weights int8", "--engine torch"]),
        (["--promt", "x"], ["--promt"]),
        (["--explain", "--draft", "ngram"], ["--explain"]),
        (["--explain", "--no-kv_cache"], ["--explain"]),
        (["--explain", "--num_samples", "2"], ["--explain"]),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_impossible_flags_are_one_line_and_exit_code_2(flags, words, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_args(flags)
    captured = capsys.readouterr()
    assert stop.value.code == 2 and captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1
    assert all(str(word) in captured.err for word in words), captured.err


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, words",
    [
        (["--prompt", "O Roméo #"], ["'é'", "'#'", "abcdefghijklmnopqrstuvwxyz"]),
        (["--prompt", "x" * 32], ["32", "at most 31"]),
        (["--prompt", "FILE:/nowhere/at/all"], ["/nowhere/at/all"]),
        (["--prompt", "FILE:"], ["FILE:", "needs a file name"]),
        (["--out_dir", "/nowhere"], ["no checkpoint", "train.py"]),
        (["--ckpt", ROOT / "README.md"], ["README.md", "damaged"]),
        (["--device", "cuda:99"], ["cuda:99"]),
    ],
    ids=lambda value: " ".join(map(str, value))[:40],
)
def test_mistakes_are_one_line(trained, flags, words):
    result = sample(trained, *flags)
    assert_one_line(result, *words)
    assert result.stdout == ""
