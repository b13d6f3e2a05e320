"""Drafts, ragged batches and the compiled step: faster ways to the same tokens, and honest counts of what they did."""

import collections
import gc
import math
import re

import numpy as np
import pytest
import torch
from conftest import run
from hypothesis import given, settings
from hypothesis import strategies as st
from test_generate import CONTEXT, FILTERS, MODELS, V, a_filter, a_model, a_seed, prompts, tokens_differ
from test_model import KINDS, lively

import decode
from decode import Decoder, count_ngrams, ngram_table, ngrams_fit
from model import GPTConfig, clear_kv_cache

TEXT = np.random.default_rng(0).choice(V, 3000, p=np.arange(V, 0, -1) / (V * (V + 1) / 2))
NGRAMS = count_ngrams(TEXT, V, 1000)
DRAFTS = {
    "one token a step": dict(draft=None),
    "look-up": dict(draft="ngram"),
    "n-grams": dict(draft="ngram", ngrams=NGRAMS),
}
a_draft = st.sampled_from(sorted(DRAFTS)).map(DRAFTS.get)


def alone(model, prompt, steps, sample, **sampling):
    """What the plain loop makes of one prompt, without the cache."""
    return model.generate(prompt[None], steps, kv_cache=False, samples=[sample], **sampling)


def assert_same(model, got, ragged, steps, samples, seed, filters, **more):
    for ours, prompt, sample in zip(got, ragged, samples, strict=True):
        theirs = alone(model, prompt, steps, sample, seed=seed, **filters, **more)
        assert tokens_differ(model, ours[None], theirs, len(prompt), [sample], seed, filters) is None


# -- the same tokens ---------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(a_model, a_draft, st.lists(st.integers(1, CONTEXT), min_size=1, max_size=4), a_filter, a_seed, st.data())
def test_prompts_of_any_lengths_get_the_tokens_that_each_gets_alone(model, draft, lengths, filters, seed, data):
    steps = data.draw(st.integers(0, CONTEXT + 3))
    samples = data.draw(st.lists(st.integers(0, 2**40), min_size=len(lengths), max_size=len(lengths)))
    ragged = [prompts(1, n, seed % 997 + n)[0] for n in lengths]
    decoder = Decoder(model, **draft)
    got = decoder.generate(ragged, steps, seed=seed, samples=samples, **filters)
    assert [len(row) for row in got] == [min(n + steps, CONTEXT) for n in lengths]
    assert_same(model, got, ragged, steps, samples, seed, filters)
    assert all(head.key_cache is None for head in model.transformer.h[0].attn.heads)


@given(a_model, a_draft, st.integers(1, 3 * CONTEXT), st.integers(1, 3 * CONTEXT), a_filter, a_seed)
def test_past_the_context_too(model, draft, length, steps, filters, seed):
    idx = prompts(2, length, seed % 1000)
    got = Decoder(model, **draft).generate(idx, steps, seed=seed, overflow="slide", **filters)
    assert_same(model, got, idx, steps, range(2), seed, filters, overflow="slide")


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 5])
def test_contexts_smaller_than_a_chunk(block_size):
    model = lively(GPTConfig(block_size=block_size, vocab_size=V, n_layer=1, n_head=2, n_embd=16))
    for draft in DRAFTS.values():
        for length in range(1, 2 * block_size + 2):
            idx = prompts(2, length, length)
            got = torch.stack(Decoder(model, **draft).generate(idx, 11, seed=5, overflow="slide"))
            assert torch.equal(got, model.generate(idx, 11, seed=5, overflow="slide", kv_cache=False))
            if length <= block_size:
                got = torch.stack(Decoder(model, **draft).generate(idx, 11, seed=5))
                assert torch.equal(got, model.generate(idx, 11, seed=5, kv_cache=False))


@settings(max_examples=100)
@given(a_model, a_draft, a_filter, a_seed, st.data())
def test_whatever_happens_between_two_places_changes_no_token(model, draft, filters, seed, data):
    ragged = [prompts(1, n, n)[0] for n in (2, 5)]
    decoder = Decoder(model, **draft)
    others = [decoder.stream(prompts(2, 3, s), CONTEXT, seed=s) for s in range(2)]
    plain = model.stream(prompts(2, 4), CONTEXT, seed=3)
    disturbances = [
        lambda: None,
        lambda: model(prompts(4, 9), targets=prompts(4, 9)),
        lambda: (model.train(), model.eval()),
        lambda: clear_kv_cache(model),
        lambda: model(prompts(2, 5, 9), pos=torch.arange(5)),
        lambda: next(others[0], None),
        lambda: next(others[1], None),
        lambda: others[1].close(),
        lambda: next(plain, None),
        lambda: model.load_state_dict(model.state_dict()),
        lambda: places[-1].zero_(),
    ]
    places, got = [], []
    for tokens in decoder.stream(ragged, CONTEXT, seed=seed, **filters):
        places.append(tokens)
        got.append(tokens.clone())
        data.draw(st.sampled_from(disturbances))()
    got = [torch.cat((prompt, row[row >= 0])) for prompt, row in zip(ragged, torch.stack(got, dim=1))]
    assert_same(model, got, ragged, CONTEXT, range(2), seed, filters)
    for other in (*others, plain):
        other.close()
    clear_kv_cache(model)


def test_a_row_that_has_ended_gives_minus_one():
    model = MODELS[0]
    stream = Decoder(model).stream([prompts(1, CONTEXT - 2)[0], prompts(1, CONTEXT - 5)[0]], 100, seed=1)
    rows = torch.stack(list(stream), dim=1)
    assert rows.shape == (2, 5) and (rows[0, 2:] == -1).all() and (rows[0, :2] >= 0).all() and (rows[1] >= 0).all()


@pytest.mark.parametrize(
    "arguments, words",
    [
        (([prompts(1, 3)[0], prompts(1, 4)[0]], 5, dict(overflow="slide")), "slide together"),
        (([prompts(1, 3)[0], prompts(1, 0)[0]], 5, {}), "a prompt of 0 tokens"),
        (([prompts(1, CONTEXT + 1)[0]], 5, {}), f"a prompt of {CONTEXT + 1} tokens"),
        (([], 5, {}), "0 prompts"),
        (([prompts(1, 3)[0]], 5, dict(samples=[1, 2])), "samples"),
        (([prompts(1, 3)[0]], 5, dict(top_p=0.0)), "top_p"),
    ],
)
def test_impossible_requests_are_refused_before_anything_is_made(arguments, words):
    with pytest.raises(ValueError, match=words):
        Decoder(MODELS[0]).stream(*arguments[:2], **arguments[2])
    with pytest.raises(ValueError, match="draft='ngrams'"):
        Decoder(MODELS[0], draft="ngrams")


# -- guesses and their count -------------------------------------------------------------------------------------------


def constant_model(token, context=CONTEXT):
    """Predicts `token`, whatever came before."""
    model = lively(GPTConfig(block_size=context, vocab_size=V, n_layer=1, n_head=2, n_embd=16, tie_weights=False))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.zero_() if "ln_f" not in name else p.fill_(1.0)
        model.lm_head.weight[token] = 1.0
        model.transformer.ln_f.weight.zero_()
    return model


def test_a_draft_that_knows_the_text_is_accepted_whole_and_a_wrong_one_never():
    model = constant_model(4, context=64)
    for text, right in ((4, True), (5, False)):
        decoder = Decoder(model, "ngram", count_ngrams(np.full(100, text), V, 100))
        (row,) = decoder.generate(prompts(1, 3), 20, temperature=0)
        assert (row[3:] == 4).all() and len(row) == 23
        assert decoder.accepted == (decoder.offered if right else 0)
        assert decoder.forwards == (math.ceil(20 / (decode.GUESSES + 1)) if right else 20)
        if right:
            assert decoder.offered == 20 - decoder.forwards


@given(a_model, a_draft, st.lists(st.integers(1, CONTEXT), min_size=1, max_size=3), a_filter, a_seed)
def test_every_token_is_a_forwards_own_or_an_accepted_guess(model, draft, lengths, filters, seed):
    decoder, chunks = Decoder(model, **draft), []
    for _ in decoder.stream([prompts(1, n, n)[0] for n in lengths], CONTEXT, seed=seed, **filters):
        chunks.append(decoder.forwards)
    assert 0 <= decoder.accepted <= decoder.offered <= decode.GUESSES * decoder.forwards * len(lengths)
    if len(lengths) == 1:
        new = CONTEXT - lengths[0]
        assert len(chunks) == new == decoder.forwards + decoder.accepted
        sizes = collections.Counter(chunks).values()
        assert max(sizes, default=0) <= decoder.guesses + 1
        # what is left of the text, and of the context, clips a guess
        ends = np.cumsum([lengths[0], *sizes])
        assert decoder.offered == sum(min(decoder.guesses, CONTEXT - end - 1) for end in ends[:-1])


def dictionary_ngrams(text, context):
    """P(next | context) by interpolated absolute discounting, from dictionaries; an own reading of the definition."""
    runs = collections.Counter(tuple(text[i : i + decode.ORDER + 1]) for i in range(len(text) - decode.ORDER))
    runs = {run: n for run, n in runs.items() if n > 1}

    def probability(context):
        followers = collections.Counter()
        for tokens, n in runs.items():
            if tokens[decode.ORDER - len(context) : decode.ORDER] == context:
                followers[tokens[-1]] += n
        lower = probability(context[1:]) if context else [1 / V] * V
        total = sum(followers.values())
        if not total:
            return lower
        return [(max(0, followers[t] - 0.75) + 0.75 * len(followers) * lower[t]) / total for t in range(V)]

    return probability(tuple(context))


def test_the_table_is_interpolated_absolute_discounting():
    text = TEXT.tolist()
    rows, logits = ngram_table(count_ngrams(TEXT, V, 10**6), V, "cpu")
    torch.testing.assert_close(logits.exp().sum(1), torch.ones(len(logits)))
    generator = np.random.default_rng(1)
    seen = [text[i : i + decode.ORDER] for i in generator.integers(len(text) - 3, size=12)]
    for context in [*seen, [], [3], [0, 1], [22, 22, 22], [22, 0, 21]]:
        code = 0
        for token in context:
            code = code * (V + 1) + token + 1
        expected = torch.tensor(dictionary_ngrams(text, context), dtype=torch.float64)
        torch.testing.assert_close(logits[rows[code]].exp().double(), expected, atol=1e-5, rtol=1e-4)


@given(st.lists(st.integers(0, 5), max_size=60), st.integers(0, 40))
def test_ngrams_are_counted_as_a_dictionary_counts_them(text, most):
    ngrams = count_ngrams(np.array(text, dtype=np.uint16), 6, most)
    counted = collections.Counter(tuple(text[i : i + 4]) for i in range(len(text) - 3))
    counted = {run: n for run, n in counted.items() if n > 1}
    if ngrams is None:
        assert not counted or not most
        return
    codes = ngrams["codes"].tolist()
    runs = [tuple(code // 6**i % 6 for i in (3, 2, 1, 0)) for code in codes]
    assert codes == sorted(set(codes)) and len(codes) == min(most, len(counted))
    assert all(counted[run] == n for run, n in zip(runs, ngrams["counts"].tolist(), strict=True))
    assert sorted(ngrams["counts"].tolist()) == sorted(counted.values())[len(counted) - len(codes) :]
    assert ngrams_fit(ngrams, 6)
    ngram_table(ngrams, 6, "cpu")


def test_a_large_vocabulary_shortens_the_contexts_and_one_too_large_has_no_counts():
    text = np.random.default_rng(0).integers(3000, size=5000).tolist() * 2
    rows, logits = ngram_table(count_ngrams(np.array(text), 3000, 10**6), 3000, "cpu")
    assert len(rows) == 3001 and logits.numel() <= 2**23
    assert count_ngrams(np.array(text), 2**16, 10) is None
    model = lively(GPTConfig(block_size=8, vocab_size=3000, n_layer=1, n_head=2, n_embd=16))
    decoder = Decoder(model, "ngram", count_ngrams(np.array(text), 3000, 1000))
    idx = prompts(2, 3)
    assert torch.equal(torch.stack(decoder.generate(idx, 5, seed=1)), model.generate(idx, 5, seed=1, kv_cache=False))


def test_damaged_counts_are_told_from_good_ones():
    codes, counts = NGRAMS["codes"], NGRAMS["counts"]
    assert ngrams_fit(NGRAMS, V)
    for bad in (
        7,
        {"codes": codes},
        {"codes": codes, "counts": counts[:-1]},
        {"codes": codes - 10**9, "counts": counts},
        {"codes": codes + V**4, "counts": counts},
        {"codes": codes.float(), "counts": counts},
        {"codes": codes, "counts": counts * 0},
        {"codes": codes[None], "counts": counts[None]},
    ):
        assert not ngrams_fit(bad, V)


def test_fifty_generations_leave_nothing_behind():
    model, decoder = MODELS[3], Decoder(MODELS[3], "ngram", NGRAMS)

    def tensors():
        gc.collect()
        return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())

    def generate(seed):
        model.generate(prompts(2, 3), CONTEXT, seed=seed)
        decoder.generate(prompts(3, 4), CONTEXT, seed=seed)
        decoder.generate(prompts(1, 4), 40, seed=seed, overflow="slide")
        next(decoder.stream(prompts(1, 4), 40, seed=seed))  # abandoned

    generate(0)
    before = tensors()
    for seed in range(50):
        generate(seed)
    assert tensors() <= before


# -- the compiled step -------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.slow
@pytest.mark.parametrize("kind, draft", [(KINDS[0], "n-grams"), (KINDS[7], "look-up"), (KINDS[4], "one token a step")])
def test_the_compiled_step_gives_the_same_tokens_from_one_program(fresh_cache, capfd, kind, draft):
    """One compilation serves every seed, temperature, length and overflow; another process run loads it."""
    model = lively(GPTConfig(block_size=CONTEXT, vocab_size=V, n_layer=2, n_head=4, n_embd=32, **kind), seed=5)
    for _ in range(2):  # the second time from the disk
        decoder = Decoder(model, **DRAFTS[draft], compile=True)
        for seed, lengths in enumerate(([1, 1], [3, 9], [16, 5], [6, 6])):
            ragged = [prompts(1, n, n)[0] for n in lengths]
            filters = FILTERS[seed % 2]
            got = decoder.generate(ragged, CONTEXT, seed=seed, **filters)
            assert_same(model, got, ragged, CONTEXT, range(2), seed, filters)
        for length in (4, 40):
            idx = prompts(2, length)
            got = decoder.generate(idx, 50, seed=9, overflow="slide")
            assert_same(model, got, idx, 50, range(2), 9, {}, overflow="slide")
    assert capfd.readouterr().err.count("compiling") == 1
    assert len(list(fresh_cache.glob("decode-*.pt2"))) == len(decoder.programs) == 1

    with torch.no_grad():  # other weights need another program
        model.lm_head.weight.mul_(-1)
    idx = prompts(2, 3)
    assert_same(model, decoder.generate(idx, 9, seed=1), idx, 9, range(2), 1, {})
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
        assert_same(model, got, idx, CONTEXT, [0], 4, filters)
    assert capfd.readouterr().err.count("compiling") == 1


@pytest.mark.slow
def test_sample_compiles_once_and_the_next_run_loads(trained, tmp_path):
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    flags = ["--out_dir", trained, "--device", "cpu", "--prompt", "First ", "--compile", "--draft", "ngram", "--verify"]
    for expected in (1, 0):
        result = run("sample.py", *flags, env=env)
        assert result.returncode == 0 and "1 of 1 samples match" in result.stderr, result.stderr
        assert result.stderr.count("compiling") == expected
        assert re.search(r"draft: \d+ of \d+ guesses accepted", result.stderr)
    (program,) = tmp_path.glob("decode-*.pt2")
    program.write_bytes(program.read_bytes()[:1000])  # damaged: made again
    result = run("sample.py", *flags, env=env)
    assert result.returncode == 0 and "1 of 1 samples match" in result.stderr, result.stderr
    assert result.stderr.count("compiling") == 1


@pytest.mark.slow
def test_without_a_compiler_one_line_says_so_and_the_text_is_the_same(trained, tmp_path):
    flags = ["--out_dir", trained, "--device", "cpu", "--prompt", "First "]
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "CXX": "/nowhere/c++", "PATH": str(tmp_path)}
    result = run("sample.py", *flags, "--compile", env=env)
    assert result.returncode == 0 and "Traceback" not in result.stderr
    assert result.stdout == run("sample.py", *flags).stdout
    assert len([line for line in result.stderr.splitlines() if "decoding without --compile" in line]) == 1


# -- bench.py ----------------------------------------------------------------------------------------------------------


def test_the_textbook_of_the_bench_computes_the_same_network():
    from bench import Textbook

    for bias in (True, False):
        model = lively(GPTConfig(block_size=CONTEXT, vocab_size=V, n_layer=2, n_head=4, n_embd=32, bias=bias))
        textbook, idx = Textbook(model), prompts(2, 9)
        expected = model(idx)[0]
        torch.testing.assert_close(textbook(idx, 0, False), expected, atol=1e-4, rtol=1e-4)
        parts = [textbook(idx[:, begin:end], begin, True) for begin, end in ((0, 4), (4, 5), (5, 9))]
        torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=1e-4, rtol=1e-4)


BENCH_KEYS = set(
    "shape variant batch tokens_per_s ttft_ms tpot_ms itl_p50_ms itl_p99_ms speedup_over_uncached cache_bytes".split()
)


@pytest.mark.slow
def test_bench_writes_a_table_rows_and_checks_tokens(tmp_path):
    import json

    names = ["textbook_uncached", "textbook", "uncached", "eager"]
    files = ["--csv", tmp_path / "b.csv", "--json", tmp_path / "b.json"]
    result = run("bench.py", "--shapes", "1/2/16/12", "--batch", "2", "--repeats", "2", "--variants", *names, *files)
    assert result.returncode == 0, result.stderr
    rows = json.loads((tmp_path / "b.json").read_text(encoding="utf-8"))
    assert [row["variant"] for row in rows] == names and all(set(row) >= BENCH_KEYS for row in rows)
    by_name = {row["variant"]: row for row in rows}
    assert by_name["uncached"]["speedup_over_uncached"] == 1 and by_name["uncached"]["cache_bytes"] == 0
    assert by_name["eager"]["cache_bytes"] == 2 * 1 * 2 * 8 * 12 * 2 * 4
    assert "the same tokens as a forward without a cache: uncached, eager" in result.stdout
    assert len((tmp_path / "b.csv").read_text(encoding="utf-8").splitlines()) == 5


def test_bench_notices_one_wrong_token():
    from bench import Arrivals, check_tokens

    model, idx, steps = MODELS[0], prompts(2, 3), CONTEXT - 3
    new = model.generate(idx, steps, seed=0)[:, 3:].t().tolist()

    def arrivals(rows):
        run = Arrivals(idx.device)
        for tokens in rows:
            run(tokens)
        return {"eager": [run]}

    assert "the same tokens" in check_tokens(model, arrivals(new), [idx], steps)[0]
    for wrong in (new[:-1], [*new[:4], [new[4][0], (new[4][1] + 1) % V], *new[5:]]):
        with pytest.raises(SystemExit, match="eager, seed 0"):
            check_tokens(model, arrivals(wrong), [idx], steps)


@pytest.mark.slow
def test_bench_mistakes_are_one_line(trained):
    for flags, words in (
        (["--shapes", "4/4/64"], ["4/4/64", "layers/heads/width/context"]),
        (["--shapes", "4/3/64/32"], ["4/3/64/32", "multiple of n_head"]),
        (["--shapes", "4/4/64/1"], ["4/4/64/1", "no room"]),
        (["--shapes", "1/1/8/8", "--variants", "draft"], ["draft", "--ckpt"]),
        (["--shapes", "1/1/8/8", "--ckpt", trained / "ckpt.pt"], ["--ckpt"]),
        (["--ckpt", "/nowhere.pt"], ["/nowhere.pt"]),
        (["--variants", "fastest"], ["fastest"]),
        (["--plot", "speed.docx"], ["speed.docx", ".png"]),
        (["--csv", "/proc/none/speed.csv"], ["/proc/none"]),
    ):
        result = run("bench.py", *flags)
        assert result.returncode != 0 and "Traceback" not in result.stderr and result.stdout == ""
        assert len(result.stderr.strip().splitlines()) == 1, result.stderr
        assert all(str(word) in result.stderr for word in words), result.stderr


@pytest.mark.slow
def test_bench_measures_every_variant_of_a_trained_model(trained, tmp_path):
    import json

    files = ["--csv", tmp_path / "b.csv", "--json", tmp_path / "b.json", "--plot", tmp_path / "b.png"]
    result = run("bench.py", "--ckpt", trained / "ckpt.pt", "--repeats", "2", *files, timeout=400)
    assert result.returncode == 0, result.stderr
    rows = json.loads((tmp_path / "b.json").read_text(encoding="utf-8"))
    from bench import VARIANTS

    assert [row["variant"] for row in rows] == list(VARIANTS), result.stderr
    assert (
        "the same tokens as a forward without a cache: uncached, uncached+compile, eager, compile, draft, compile+draft"
        in result.stdout
    )
    assert (tmp_path / "b.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
