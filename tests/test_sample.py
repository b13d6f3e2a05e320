"""sample.py as a user runs it: its output, its promise, its report, and what it says to a mistake."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import model
from helpers import PROMPT, ROOT, assert_one_line, here, needs_extras, ok, sample, save_model, texts_of, tiny, unix
from model import PRETRAINED, KVCache, load_model
from sample import SEPARATOR, generate_texts, report, verify


@pytest.mark.parametrize("flag", ["--kv_cache", "--no-kv_cache"])
def test_stdout_is_the_prompt_and_its_continuation_and_nothing_else(trained, flag):
    result = sample(trained, "--prompt", PROMPT, flag)
    assert result.returncode == 0, result.stderr
    assert result.stdout == texts_of(trained, PROMPT, 100)[0]
    assert len(result.stdout) == 32  # as much as fits the context
    assert ("KV cache: off" in result.stderr) == (flag == "--no-kv_cache")


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
    rows = [SimpleNamespace(new=[0, 1, 2, 3], ended=False)] * 2
    times = [0.001, 0.011, 0.015, 0.025, 0.035, 0.035]  # after 1 ms the engine is ready
    report(SimpleNamespace(kv_cache=False, max_new_tokens=None), SimpleNamespace(source="a model"), rows, times)
    line = "\nsample.py: using a model\nsample.py: 8 tokens: TTFT 10.00 ms, TPOT 8.000 ms, 235 tokens/s\n"
    assert capsys.readouterr().err == line + "sample.py: KV cache: off\n"


def test_a_length_past_the_context_is_capped_and_said(trained):
    result = sample(trained, "--prompt", PROMPT, "--max_new_tokens", "500")
    assert result.returncode == 0 and len(result.stdout) == 32
    assert "500" in result.stderr and "capped at 19" in result.stderr


@pytest.mark.slow
def test_an_empty_prompt_starts_from_a_newline(trained):
    assert ok(sample(trained, "--prompt", "")).stdout == texts_of(trained, "\n", 100)[0]


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


@pytest.mark.parametrize("flag, way", [("--kv_cache", "without"), ("--no-kv_cache", "with")])
def test_verify_of_a_broken_cache_exits_1(flag, way, tmp_path, monkeypatch):
    save_model(tmp_path, tiny())
    flags = ["--prompt", "cabbage", "--verify", flag]
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
    said = rf"new token \d+: the text has '.+', but {way} the cache, the model picks '.+'$"
    assert re.search(f"DIFFERENT at row 0, {said}", result.stderr, re.M), result.stderr


def test_verify_sees_a_broken_cache_that_changes_no_token(monkeypatch):
    """Without a mask in the prefill, the tokens of the prompt see later ones, and yet this text stays the same."""
    flags = ["--ckpt", PRETRAINED, "--device", "cpu", "--prompt", "O Romeo, ", "--verify", "--max_new_tokens", 60]
    right = ok(here(*flags, script="sample.py"))
    monkeypatch.setattr(KVCache, "mask", lambda cache, pos: None)
    result = here(*flags, script="sample.py")
    assert result.returncode == 1 and result.stdout == right.stdout
    said = r"^sample.py: verify: DIFFERENT at row 0: logits, keys or values differ by up to 0\.\d+$"
    assert re.search(said, result.stderr, re.M), result.stderr


@pytest.mark.parametrize("flags", [[], ["--stop", "bbb"]], ids=["to the end", "stop"])
def test_a_text_that_ends_early_is_noticed(flags, tmp_path, monkeypatch):
    """Of every token that it was asked for, none may be missing, whatever wrote the text."""
    save_model(tmp_path, tiny())
    generate = model.generate

    def early(gpt, idx, max_new_tokens, *rest):
        return generate(gpt, idx, max_new_tokens - 3, *rest)

    monkeypatch.setattr(model, "generate", early)
    with pytest.raises(RuntimeError, match="a text ended after 6 of 9 new tokens"):
        sample(tmp_path, "--prompt", "cabbage", "--max_new_tokens", "9", *flags)


def run_of(gpt, tokenizer):
    """A run, as arguments of verify: the model, the texts, the cache."""
    [rows] = generate_texts(gpt, tokenizer, ["O Romeo, "], 40, seed=3)
    return gpt, rows, gpt.kv_cache


@pytest.mark.parametrize("kind", ["key_cache", "value_cache"])
def test_verify_reads_the_cache_that_the_run_has_left(kind, capsys):
    """A cache that is damaged after the last pick has changed no token, but the next one would be wrong."""
    run = run_of(*load_model(PRETRAINED))
    verify(*run)
    assert "verify: OK" in capsys.readouterr().err
    getattr(run[-1].heads[2][1], kind)[0, 17] += 0.1
    with pytest.raises(SystemExit, match=r"DIFFERENT at row 0: logits, keys or values differ by up to 0\.1"):
        verify(*run)


def test_verify_compares_all_logits(monkeypatch):
    """A wrong logit of a token that is never picked changes no text yet."""
    gpt, tokenizer = load_model(PRETRAINED)
    run = run_of(gpt, tokenizer)
    forward = gpt.forward

    def wrong(idx, cache=None, **options):
        logits, loss = forward(idx, cache=cache, **options)
        if cache is not None:
            logits[..., tokenizer.ids["$"]] += 1.0
        return logits, loss

    monkeypatch.setattr(gpt, "forward", wrong)
    with pytest.raises(SystemExit, match=r"DIFFERENT at row 0: logits, keys or values differ by up to 1\.0"):
        verify(*run)


def test_verify_notices_nan():
    """A NaN is not larger than any limit."""
    run = run_of(*load_model(PRETRAINED))
    with torch.no_grad():
        run[0].lm_head.weight[:, 0] = torch.nan
    with pytest.raises(SystemExit, match="DIFFERENT at row 0"):
        verify(*run)


@pytest.mark.parametrize("scale", [1e20, 3e38])
def test_logits_that_overflow_are_one_line(scale, tmp_path):
    """The weights are finite, so the file loads, and an argmax would pick something."""
    network = tiny()
    with torch.no_grad():
        network.lm_head.weight.fill_(scale)
        network.transformer["ln_f"].weight.fill_(1e20)
    save_model(tmp_path, network)
    for flags in ([], ["--verify"], ["--no-kv_cache"], ["--top_k", 2]):
        assert_one_line(sample(tmp_path, "--prompt", "a", *flags), "the logits are infinite or NaN", code=1)


# -- from Python -------------------------------------------------------------------------------------------------------


def test_generate_texts_returns_what_sample_py_prints():
    flags = ["--ckpt", PRETRAINED, "--device", "cpu", "--num_samples", 2, "--top_k", 9, "--seed", 4, "--stop", "\n\n"]
    printed = ok(here("--prompt", "O Romeo, ", "--prompt", "My lord, ", *flags, script="sample.py")).stdout
    gpt, tokenizer = load_model(PRETRAINED)
    pieces = {}
    texts = generate_texts(
        gpt,
        tokenizer,
        ["O Romeo, ", "My lord, "],
        num_samples=2,
        top_k=9,
        seed=4,
        stop=["\n\n"],
        on_text=lambda row, piece: pieces.setdefault(row, []).append(piece),
    )
    assert [len(samples) for samples in texts] == [2, 2]
    flat = [str(text) for samples in texts for text in samples]
    assert SEPARATOR.join(flat) == printed
    assert ["".join(pieces[row]) for row in range(4)] == flat and len(pieces[0]) > 9


def test_stop_strings_may_be_any_iterable_and_no_prompts_are_no_texts():
    gpt, tokenizer = load_model(PRETRAINED)
    [[text]] = generate_texts(gpt, tokenizer, ["O Romeo, "], 40, seed=1, stop=(stop for stop in ["e"]))
    assert "e" not in text.text.removeprefix("O Romeo, ")
    assert generate_texts(gpt, tokenizer, []) == [] and generate_texts(gpt, tokenizer, ["O"], num_samples=0) == [[]]
    for wrong in (dict(prompts="O Romeo"), dict(prompts=["O"], stop="the")):
        with pytest.raises(TypeError, match="prompts and stop are lists of strings"):
            generate_texts(gpt, tokenizer, **wrong)


def test_generate_texts_refuses_what_it_cannot_generate():
    gpt, tokenizer = load_model(PRETRAINED)
    for prompts, how, words in (
        (["x" * 256], {}, "the prompt has 256 characters"),
        (["é"], {}, "no 'é' in the vocabulary"),
        (["O"], dict(stop=["é"]), "no 'é' in the vocabulary"),
        (["O"], dict(stop=[""]), "a stop string is empty"),
    ):
        with pytest.raises(ValueError, match=words):
            generate_texts(gpt, tokenizer, prompts, **(dict(max_new_tokens=5) | how))


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--max_new_tokens", "0"], ["--max_new_tokens 0 is not from 1 to"]),
        (["--num_samples", "100000"], ["--num_samples 100000 is not from 1 to 4096"]),
        (["--num_samples", "two"], ["--num_samples", "two"]),
        (["--kv_cache", "maybe"], ["--kv_cache", "maybe"]),
        (["--temperature", "warm"], ["--temperature", "warm"]),
        (["--dtype", "int8"], ["--dtype", "int8"]),
        (["--verify", "--dtype", "bfloat16"], ["bfloat16"]),
        (["--promt", "x"], ["--promt"]),
        (["--prompt", "-Hello"], ["argument --prompt/--start: expected one argument"]),
        (["--ckpt", "a.pt", "--out_dir", "b"], ["--ckpt and --out_dir both say which model"]),
        (["hello"], ["unrecognized arguments: hello"]),
        pytest.param(["--ckpt="], ["--ckpt is empty"], marks=needs_extras),
        (["--prompt", "FILE:/nowhere/at/all"], ["cannot read 'FILE:/nowhere/at/all': "]),
        (["--prompt", "FILE:"], ["cannot read 'FILE:'"]),
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
        (["--temperature", "-1"], ["sample.py: temperature=-1.0: must be at least 0"]),
        (["--temperature", "nan"], ["temperature=nan"]),
        (["--top_k", "0"], ["top_k=0"]),
        (["--top_p", "1.5"], ["top_p=1.5"]),
        (["--seed", str(2**64)], [f"seed={2**64}"]),
        (["--out_dir", "/nowhere"], ["no checkpoint", "train.py"]),
        (["--device", "cuda:99"], ["cuda:99"]),
        (["--device", "gpu"], ["--device gpu cannot be used here: pass cpu, cuda (an NVIDIA GPU) or mps"]),
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
        assert ok(result).stdout and ("--device cuda uses the GPU" in result.stderr) == ("--device" not in flags)


def test_a_file_that_is_no_checkpoint_or_missing_is_one_line():
    for file, *words in (
        ("mine.pt", "no checkpoint at mine.pt", "python train.py"),
        (ROOT / "README.md", "README.md", "is damaged, or not a checkpoint of a GPT"),
    ):
        assert_one_line(here("--ckpt", file, script="sample.py"), *words, code=1)


def test_a_prompt_that_is_not_utf8_is_one_line(trained, tmp_path):
    (tmp_path / "p.txt").write_bytes("café".encode("latin-1"))
    result = sample(trained, "--prompt", f"FILE:{tmp_path / 'p.txt'}")
    assert_one_line(result, "cannot read 'FILE:", "p.txt': 'utf-8' codec", code=2)
