"""The compiled step: the same tokens from one program, made anew when anything that shapes it changes."""

import ast
import copy
import json
import shutil
import textwrap

import pytest
import torch

from helpers import (
    CONTEXT,
    DRAFTS,
    FILTERS,
    KINDS,
    MODELS,
    NGRAMS,
    ONE_THREAD,
    ROOT,
    V,
    assert_same_as_alone,
    lively,
    ok,
    prompts,
    run,
)
from kvgpt.decoding import compile as compiling
from kvgpt.decoding import decode
from kvgpt.decoding.decode import Decoder
from model import GPT, GPTConfig


@pytest.fixture
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, draft", [(KINDS[0], "n-grams"), (KINDS[7], "look-up"), (KINDS[4], "one token per step")]
)
def test_the_compiled_step_gives_the_same_tokens_from_one_program(fresh_cache, capfd, kind, draft):
    """One compilation serves every seed, temperature, length and overflow; another process run loads it."""
    model = lively(GPTConfig(block_size=CONTEXT, vocab_size=V, n_layer=2, n_head=4, n_embd=32, **kind), seed=5)
    for _ in range(2):  # the second time from the disk
        decoder = Decoder(model, **DRAFTS[draft], compile=True)
        for seed, lengths in enumerate(([1, 1], [3, 9], [16, 5], [6, 6])):
            ragged = [prompts(1, n, n)[0] for n in lengths]
            filters = FILTERS[seed % 2]
            got = decoder.generate(ragged, CONTEXT, seed=seed, **filters)
            assert_same_as_alone(model, got, ragged, CONTEXT, range(2), seed, filters)
        for length in (4, 40):
            idx = prompts(2, length)
            got = decoder.generate(idx, 50, seed=9, overflow="slide")
            assert_same_as_alone(model, got, idx, 50, range(2), 9, {}, overflow="slide")
    assert capfd.readouterr().err.count("compiling") == 1
    assert len(list(fresh_cache.glob("decode-*.pt2"))) == len(decoder.programs) == 1

    with torch.no_grad():  # other weights need another program
        model.lm_head.weight.mul_(-1)
    idx = prompts(2, 3)
    assert_same_as_alone(model, decoder.generate(idx, 9, seed=1), idx, 9, range(2), 1, {})
    assert capfd.readouterr().err.count("compiling") == 1


@pytest.mark.slow
def test_the_compiled_step_follows_the_weights(fresh_cache):
    """They are inside the program, and a fused optimizer changes them without a trace in their version counters."""
    model = lively(GPTConfig(block_size=8, vocab_size=7, n_layer=1, n_head=1, n_embd=8))
    decoder, idx = Decoder(model, compile=True), torch.arange(7)[None]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3, fused=True)

    def same():
        (ours,) = decoder.generate(idx[:, :1], 7, seed=1, temperature=0)
        assert torch.equal(ours[None], model.generate(idx[:, :1], 7, seed=1, temperature=0, kv_cache=False))

    same()
    model.train()
    for _ in range(20):
        model(idx[:, :-1], idx[:, 1:])[1].backward()
        optimizer.step()
        optimizer.zero_grad()
    list(decoder.stream(idx[:, :1], 3))
    assert model.training and all(module.training for module in model.modules())
    model.eval()
    same()
    stream, got = decoder.stream(idx[:, :1], 7, seed=1), [0]
    got.append(int(next(stream)))
    model.double().float()  # the caches of a live generation go, the dtype changes under it
    got += [int(token) for token in stream]
    assert got == model.generate(idx[:, :1], 7, seed=1, kv_cache=False)[0].tolist()


@pytest.mark.slow
def test_the_compiled_step_filters(fresh_cache, capfd):
    model, decoder = MODELS[0], Decoder(MODELS[0], "ngram", NGRAMS, compile=True)
    for filters in [*FILTERS[2:], dict(temperature=0, top_k=3), dict(top_k=1), dict(top_k=1000)]:
        idx = prompts(1, 3)
        got = decoder.generate(idx, CONTEXT, seed=4, **filters)
        assert_same_as_alone(model, got, idx, CONTEXT, [0], 4, filters)
    assert capfd.readouterr().err.count("compiling") == 1


# -- which program is kept where ---------------------------------------------------------------------------------------


@pytest.fixture
def program_name(fresh_cache, monkeypatch):
    """A function that returns the name of the file that a Decoder would load its compiled step from."""
    names = []
    monkeypatch.setattr(compiling, "load_program", lambda path, inputs: names.append(path.name))

    def name(model, rows=1, draft="look-up", **sampling):
        Decoder(model, **DRAFTS[draft], compile=True).stream(prompts(rows, 3), 5, **sampling)
        return names.pop()

    return name


SHAPE = dict(block_size=CONTEXT, vocab_size=V, n_layer=1, n_head=2, n_embd=16)


def test_a_program_is_found_again_for_the_same_step(program_name):
    """Seed, temperature and filters are inputs of the program. Another name would compile the same step again."""
    model = lively(GPTConfig(**SHAPE))
    name = program_name(model, seed=1)
    assert name == program_name(model, seed=2**40, temperature=0.3, samples=[7], overflow="slide")
    assert name == program_name(copy.deepcopy(model), seed=1)
    assert program_name(model, top_k=5) == program_name(model, top_k=9, top_p=0.5) == program_name(model, top_p=0.1)


def test_a_program_has_another_name_for_other_weights_drafts_or_rows(program_name, monkeypatch):
    """The weights are inside the program. A program found by a wrong name would generate another model's text."""
    model = lively(GPTConfig(**SHAPE))
    names = {"look-up": program_name(model)}
    names["two rows"] = program_name(model, rows=2)
    names["no draft"] = program_name(model, draft="one token per step")
    names["n-grams"] = program_name(model, draft="n-grams")
    names["filters"] = program_name(model, top_k=5)
    for num_drafts in (1, 2):
        with monkeypatch.context() as patch:
            patch.setattr(decode, "NUM_DRAFTS", num_drafts)
            names[f"{num_drafts} drafts"] = program_name(model)

    for key, parameter in model.named_parameters():
        changed = copy.deepcopy(model)
        with torch.no_grad():
            changed.get_parameter(key).view(-1)[-1] += 1e-3
        assert not torch.equal(changed.get_parameter(key), parameter)
        names[key] = program_name(changed)
    for change in (dict(activation="gelu_tanh"), dict(n_head=1)):  # the same weights in another network
        other = GPT(GPTConfig(**SHAPE | change)).eval()
        other.load_state_dict(model.state_dict())
        names[str(change)] = program_name(other)
    assert len(set(names.values())) == len(names), names


def test_a_program_has_another_name_after_any_change_of_the_code_behind_it(tmp_path):
    """A stale program would run older code. The files come from the imports and from a trace of a decode step."""
    shutil.copy(ROOT / "model.py", tmp_path)
    shutil.copytree(ROOT / "kvgpt", tmp_path / "kvgpt", ignore=shutil.ignore_patterns("__pycache__"))
    script = """
        import json, sys
        from pathlib import Path

        import torch

        from kvgpt.decoding import compile as compiling

        root, names = Path.cwd(), []
        imported = {getattr(module, "__file__", None) for module in sys.modules.values()}

        from kvgpt.decoding import decode
        from kvgpt.decoding.ngrams import count_ngrams
        from model import GPT, GPTConfig

        torch.manual_seed(0)
        model = GPT(GPTConfig(block_size=8, vocab_size=5, n_layer=1, n_head=1, n_embd=8)).eval()
        ngrams = count_ngrams(torch.arange(50).numpy() % 5, 5, 10)
        ran, step = set(), decode.decode_step

        def traced(*args):
            sys.setprofile(lambda frame, event, _: ran.add(frame.f_code.co_filename))
            step(*args)
            sys.setprofile(None)

        decode.decode_step = traced
        for counts in (None, ngrams):
            decode.Decoder(model, "ngram", counts).generate([torch.tensor([1, 2])], 5, top_k=3)
        decode.decode_step = step

        compiling.load_program = lambda path, inputs: names.append(path.name)

        def name():
            decode.Decoder(model, compile=True).stream([torch.tensor([1, 2])], 5, seed=1)
            return names.pop()

        files = {Path(file) for file in imported | ran if file and Path(file).is_relative_to(root)}
        before, after = name(), {}
        for file in sorted(files):
            content = file.read_bytes()
            file.write_bytes(content + b"# a comment\\n")
            after[file.relative_to(root).as_posix()] = name()
            file.write_bytes(content)
        ran = [Path(file).relative_to(root).as_posix() for file in ran if Path(file).is_relative_to(root)]
        print(json.dumps(dict(before=before, after=after, again=name(), ran=sorted(ran))))
    """
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), **ONE_THREAD}
    report = json.loads(ok(run("-c", textwrap.dedent(script), cwd=tmp_path, env=env)).stdout)
    assert report["again"] == report["before"]
    decoding = {f"kvgpt/decoding/{name}.py" for name in ("sampling", "speculate", "ngrams", "compile")}
    assert {"model.py", "kvgpt/decoding/sampling.py", "kvgpt/decoding/speculate.py"} <= set(report["ran"])
    assert {"model.py", *decoding} | set(report["ran"]) <= set(report["after"])
    report["after"].pop("kvgpt/__init__.py")  # a docstring
    names = [report["before"], *report["after"].values()]
    assert len(set(names)) == len(names), report


def test_the_package_itself_holds_no_code():
    """A change of kvgpt/__init__.py keeps every program, so the file must hold nothing but its docstring."""
    content = ast.parse((ROOT / "kvgpt" / "__init__.py").read_text(encoding="utf-8")).body
    assert [type(part) for part in content] == [ast.Expr]
