"""sample.py with extras: every way to decode, combined with the flags that change the text."""

import itertools

import pytest
import torch

from extra_helpers import TEXT
from extras.decode.ngrams import count_ngrams
from extras.decode.quantize import round_weights
from extras.formats.checkpoint import load_model
from helpers import CHARS, assert_one_line, here, ok, run, sample, save_model, text_before, tiny
from sample import SEPARATOR

ENGINES = {
    "plain": [],
    "no cache": ["--no_kv_cache"],
    "draft": ["--draft", "ngram"],
    "C": ["--compile"],
    "C, draft": ["--compile", "--draft", "ngram"],
    "int8": ["--weights", "int8", "--compile"],
    "onnx": ["--engine", "onnx"],
}
PROMPTS = {"one": ["ab"], "two": ["ab", "ba"], "two lengths": ["ab", "b"]}
STOPS = ["a", "bb"]
FILTERS = dict(temperature=0.9, top_k=9, top_p=0.95)
# What test_promises.py leaves out: --verify, int8 and ONNX, each with the other settings.
RUNS = [
    # engine, prompts, samples, overflow, stop, filters, verify
    ("plain", "two lengths", 3, "stop", True, False, True),
    ("no cache", "one", 3, "stop", False, True, True),
    ("draft", "one", 3, "slide", True, True, True),
    ("draft", "two lengths", 1, "stop", False, True, True),
    ("C", "one", 3, "slide", False, False, True),
    ("C, draft", "two", 3, "stop", False, False, True),
    ("int8", "one", 3, "slide", True, True, True),
    ("int8", "two", 1, "stop", False, False, False),
    ("int8", "two lengths", 3, "stop", True, False, False),
    ("onnx", "one", 3, "stop", False, False, False),
    ("onnx", "two", 1, "slide", True, True, True),
]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder with ckpt.pt and its export."""
    folder = tmp_path_factory.mktemp("exported")
    save_model(folder, tiny(), ngrams=count_ngrams(TEXT % len(CHARS), len(CHARS), 1000))
    ok(here("--format", "onnx", "--out_dir", folder, script="extras/export.py"))
    return folder


def texts_without_a_cache(model, tokenizer, prompts, samples, steps, stops, **sampling):
    """The text of each row by GPT.generate, which sample.py does not call."""
    texts = []
    for prompt, i in itertools.product(prompts, range(samples)):
        idx = torch.tensor([tokenizer.encode(prompt)])
        ids = model.generate(idx, steps, kv_cache=False, seed=1337, samples=[i], **sampling)[0].tolist()
        new = tokenizer.decode(ids[idx.size(1) :])
        texts.append(prompt + (text_before(new, stops) if stops else new))
    return texts


@pytest.mark.slow
@pytest.mark.parametrize(["engine", "prompts", "samples", "overflow", "stop", "filters", "verify"], RUNS)
def test_every_engine_writes_the_text_of_a_forward_without_a_cache(
    engine, prompts, samples, overflow, stop, filters, verify, exported
):
    flags = ["--out_dir", exported, "--device", "cpu", "--num_samples", samples, "--overflow", overflow]
    flags += ["--max_new_tokens", 40] if overflow == "slide" else []
    flags += [word for prompt in PROMPTS[prompts] for word in ("--prompt", prompt)]
    flags += [word for text in STOPS if stop for word in ("--stop", text)]
    flags += [word for name, value in FILTERS.items() if filters for word in (f"--{name}", value)]
    result = ok(here(*flags, *ENGINES[engine], *["--verify"] * verify, script="sample.py"))

    model, tokenizer = load_model(exported / "ckpt.pt")
    if engine == "int8":
        round_weights(model)
    stops = STOPS if stop else ()
    settings = dict(FILTERS if filters else {}, overflow=overflow)
    expected = texts_without_a_cache(model, tokenizer, PROMPTS[prompts], samples, 40, stops, **settings)
    assert result.stdout == SEPARATOR.join(expected)
    assert ("verify: OK" in result.stderr) == verify, result.stderr


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--no-kv_cache --compile", ["--no-kv_cache", "neither drafts nor --compile"]),
        ("--no-kv_cache --draft ngram", ["--no-kv_cache", "neither drafts nor --compile"]),
        ("--no-kv_cache --prompt b", ["--no-kv_cache needs prompts of equal length"]),
        ("--overflow slide --prompt b", ["overflow='slide' needs equal lengths"]),
        ("--engine onnx --draft ngram", ["--draft", "--engine torch"]),
        ("--engine onnx --compile", ["--compile", "--engine torch"]),
        ("--engine onnx --dtype bfloat16", ["--dtype", "--engine torch"]),
        ("--engine onnx --weights int8", ["--weights", "--engine torch"]),
        ("--engine onnx", ["no ONNX model", "python -m extras.export --format onnx --out_dir {out} writes one"]),
        ("--explain --compile", ["--explain"]),
        ("--explain --no-kv_cache", ["--explain"]),
        ("--draft ngram", ["draft='ngram' needs n-gram counts", "leave it out"]),
    ],
)
def test_what_does_not_work_together_is_one_line(flags, words, tmp_path):
    save_model(tmp_path, tiny())
    result = sample(tmp_path, "--prompt", "ab", *flags.split())
    assert_one_line(result, *(word.format(out=tmp_path) for word in words), code=1)
    assert result.stdout == ""


@pytest.mark.slow
def test_the_onnx_engine_has_nothing_to_explain(exported):
    assert_one_line(sample(exported, "--prompt", "ab", "--explain", "--engine", "onnx"), "--explain")


def test_a_checkpoint_is_not_for_the_onnx_engine_and_the_line_exports_it(tmp_path):
    save_model(tmp_path, tiny())
    result = here("--engine", "onnx", "--ckpt", tmp_path / "ckpt.pt", script="sample.py")
    hint = f"--format onnx --ckpt {tmp_path / 'ckpt.pt'} writes one"
    assert_one_line(result, "ckpt.pt is a checkpoint", hint, code=1)


# -- sample.py --compile -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [["--overflow", "slide", "--num_samples", 2, "--max_new_tokens", 60], ["--prompt", "A", "--draft", "ngram"]],
    ids=str,
)
def test_without_a_c_compiler_one_line_says_so(more, trained):
    flags = ["--prompt", "First ", *more]
    child = ["sample.py", "--out_dir", trained, "--device", "cpu", *flags, "--compile"]
    result = ok(run(*child, env={"CC": "/nowhere/cc"}, timeout=300))
    assert result.stderr.count("decoding without --compile") == 1 and "Traceback" not in result.stderr
    assert result.stdout == ok(sample(trained, *flags)).stdout
