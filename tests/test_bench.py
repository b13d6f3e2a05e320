"""bench.py and kvgpt/peers.py: what is measured computes the same network, and gives the same tokens."""

import json
import os
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bench import COLUMNS, VARIANTS, check_tokens, limit_ms, make_runs, timed, write
from helpers import (
    CONTEXT,
    KINDS,
    MODELS,
    V,
    a_filter,
    a_seed,
    assert_one_line,
    contents,
    full_disk,
    linux,
    lively,
    needs_compiler,
    ok,
    prompts,
    run,
    tokens_differ,
    unix,
)
from kvgpt.peers import PerHeadLoop, llama2c_run, machine_rates
from model import GPTConfig

SAME = "the same tokens as a forward without a cache: "
BENCH_KEYS = set(
    "shape variant batch tokens_per_s ttft_ms tpot_ms itl_p50_ms itl_p99_ms speedup_over_uncached cache_bytes".split()
)


# -- the loop over heads -----------------------------------------------------------------------------------------------


def test_the_loop_over_heads_computes_the_same_network():
    """A baseline that is slow, or fast, because it computes something else."""
    for bias in (True, False):
        model = lively(GPTConfig(block_size=CONTEXT, vocab_size=V, n_layer=2, n_head=4, n_embd=32, bias=bias))
        idx = prompts(2, 9)
        expected = model(idx)[0]
        loop = PerHeadLoop(model, kv_cache=False)
        for _ in range(2):
            torch.testing.assert_close(loop(idx), expected, atol=1e-4, rtol=1e-4)
        loop = PerHeadLoop(model, kv_cache=True)
        parts = [loop(idx[:, begin:end]) for begin, end in ((0, 4), (4, 5), (5, 9))]
        torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=1e-4, rtol=1e-4)


@given(st.booleans(), a_filter, a_seed, st.data())
def test_the_loop_over_heads_draws_the_kits_own_noise(kv_cache, filters, seed, data):
    """Another text than the model's, which no check of tokens could compare; a second run that finds a full cache."""
    model, loop = MODELS[0], PerHeadLoop(MODELS[0], kv_cache)
    for _ in range(2):
        full = min(loop.num_cached() + 1, CONTEXT)  # the prompt whose newest token would fit behind an old cache
        B, T = data.draw(st.integers(1, 3)), data.draw(st.just(full) | st.integers(1, CONTEXT))
        idx, steps = prompts(B, T, seed % 997), data.draw(st.integers(0, 2 * CONTEXT))
        settings = dict(seed=seed, overflow=data.draw(st.sampled_from(["stop", "slide"])), **filters)
        ours = torch.cat((idx, *loop.stream(idx, steps, **settings)), dim=1)
        theirs = model.generate(idx, steps, kv_cache=False, **settings)
        assert tokens_differ(model, ours, theirs, T, range(B), seed, filters) is None


# -- the check of tokens -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["per_head_loop_uncached", "per_head_loop", "uncached", "eager"])
def test_bench_notices_one_wrong_token(name, capsys):
    """Figures for a text that is not the model's. The loops over heads draw the kit's noise and are checked too."""
    model, idx = MODELS[0], prompts(2, 3)
    _, new = timed(make_runs(model, None, [name])[name], idx, CONTEXT - 3, 0)
    assert check_tokens(model, {name: [new]}, [idx]) == [SAME + name]
    wrong = new.clone()
    wrong[1, 4] = (wrong[1, 4] + 1) % V
    for tokens, word in ((new[:, :-1], "12 new tokens in 2 rows"), (new[:1], "in 1 rows"), (wrong, "DIFFERENT")):
        with pytest.raises(SystemExit) as error:
            check_tokens(model, {name: [tokens]}, [idx])
        said = capsys.readouterr().err
        assert error.value.code == 1 and f"{name}, seed 0" in said and word in said
    assert "row 1, new token 4" in said


def test_a_variant_that_cannot_be_measured_is_named_with_the_reason(capsys):
    """A row of another network, or none without a word. The reason is said once for all the rows it concerns."""
    model = lively(GPTConfig(block_size=8, vocab_size=V, n_layer=1, n_head=2, n_embd=16, **KINDS[6]))
    assert model.config.pos_emb == "rope"
    names = ["per_head_loop_uncached", "per_head_loop", "eager", "draft", "hf", "hf_nocache"]
    assert list(make_runs(model, None, names)) == ["eager"]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    for line, words in zip(
        lines,
        (
            ["no per_head_loop_uncached, per_head_loop rows", "GPT-2's attention"],
            ["no draft rows", "--ckpt"],
            ["no hf, hf_nocache rows", "activation=gelu"],
        ),
    ):
        assert all(word in line for word in words), line
    with pytest.raises(SystemExit):
        make_runs(model, None, ["draft", "hf"])
    assert len(capsys.readouterr().err.splitlines()) == 1


# -- the limit of the machine ------------------------------------------------------------------------------------------


def test_the_limit_counts_the_bytes_and_the_operations_of_a_step():
    """Oracles: the bytes of the tensors that a real step reads, and the operations that torch counts in it."""
    config = GPTConfig(block_size=64, vocab_size=V, n_layer=2, n_head=4, n_kv_head=2, n_embd=64, bias=False)
    model, cpu = lively(config), torch.device("cpu")
    copied, multiplied = machine_rates(cpu)
    for B in (1, 3):
        idx, pos = prompts(B, 5), torch.arange(5)
        model(idx[:, :4], pos=pos[:4])
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            model(idx[:, 4:], pos=pos[4:])
        weights = sum(p.nbytes for name, p in model.named_parameters() if p.dim() == 2 and "wpe" not in name)
        read, operations = weights + model.cache_bytes()[0], counter.get_total_flops()
        assert limit_ms(model, B, 5, cpu) == pytest.approx(1e3 * max(read / copied, operations / multiplied))
        many = 10**6  # rows, so many that multiplying takes longer than reading
        assert limit_ms(model, many * B, 5, cpu) == pytest.approx(1e3 * many * operations / multiplied)


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_bench_writes_a_table_rows_and_checks_tokens(tmp_path):
    """A row left out, or one whose tokens nobody has compared: the loops over heads are covered by the check."""
    names = ["per_head_loop_uncached", "per_head_loop", "uncached", "eager"]
    files = ["--csv", tmp_path / "b.csv", "--json", tmp_path / "b.json"]
    shape = ["--shapes", "1/2/16/12", "--recipe", "nanogpt", "--batch", "2", "--repeats", "2"]
    result = ok(run("bench.py", *shape, "--variants", *names, *files))
    rows = json.loads((tmp_path / "b.json").read_text(encoding="utf-8"))
    assert [row["variant"] for row in rows] == names and all(set(row) >= BENCH_KEYS for row in rows)
    by_name = {row["variant"]: row for row in rows}
    assert by_name["uncached"]["speedup_over_uncached"] == 1 and by_name["uncached"]["cache_bytes"] == 0
    assert by_name["eager"]["cache_bytes"] == 2 * 1 * 2 * 8 * 12 * 2 * 4
    assert all(row["ms_at"].keys() == row["limit_ms_at"].keys() == {"12"} for row in rows)
    assert SAME + ", ".join(names) + "\n" in result.stdout
    assert len((tmp_path / "b.csv").read_text(encoding="utf-8").splitlines()) == 5


@linux
@pytest.mark.slow
def test_busy_measures_beside_a_training_and_ends_it(tmp_path):
    """A share of nothing; a training that runs on for ever."""
    flags = ["--shapes", "1/2/16/12", "--variants", "eager", "hf", "--repeats", "1", "--busy"]
    result = ok(run("bench.py", *flags, "--csv", tmp_path / "b.csv", "--json", tmp_path / "b.json"))
    eager, hf = json.loads((tmp_path / "b.json").read_text(encoding="utf-8"))
    assert eager["busy_share"] > 0 and hf["busy_share"] is None
    assert "beside a default train.py" in result.stdout
    commands = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline")]
    assert not [command for command in commands if b"--max_iters\x001000000000" in command]


LLAMA2C = """
#include <stdio.h>
typedef struct { int sizes[5], vocab_size, seq_len; } Config;
typedef struct { Config config; float logits[1]; } Transformer;
typedef struct { float temperature; } Sampler;
static void build_transformer(Transformer *t, char *path) {
    FILE *file = fopen(path, "rb");
    if (fread(&t->config, 4, 7, file) != 7) t->config.vocab_size = 0;
    fclose(file);
}
static void build_sampler(Sampler *s, int vocab_size, float temperature, float topp, int seed) {
    s->temperature = temperature;
}
static float *forward(Transformer *t, int token, int pos) {
    t->logits[0] = token + pos + t->config.vocab_size;
    return t->logits;
}
static int sample(Sampler *s, float *logits) { return (int)logits[0] % 7; }
"""


@needs_compiler
def test_llama2c_feeds_each_token_at_its_position(tmp_path):
    """A stand-in with llama2.c's functions counts tokens and positions. The header holds the sizes of the model."""
    (tmp_path / "run.c").write_text(LLAMA2C, encoding="utf-8")
    blocks = []
    llama2c_run(GPTConfig(block_size=16, vocab_size=5, n_layer=1, n_head=2, n_embd=8), tmp_path)(
        torch.tensor([[3, 2]]), 4, 0, blocks.append
    )
    text = [3, 2]
    for pos in range(1, 5):
        text.append((text[-1] + pos + 5) % 7)
    assert torch.cat(blocks, dim=1).tolist() == [text[2:]]
    assert sys.float_info.min / 2 > 0, "the library makes the process round subnormal numbers to 0"
    with pytest.raises(ValueError, match=r"run\.c"):
        llama2c_run(GPTConfig(16, 5, 1, 2, 8), tmp_path / "none")


@linux
@pytest.mark.slow
def test_bench_mistakes_are_one_line(trained):
    """A traceback, or minutes of work before the message."""
    for flags, words in (
        (["--shapes", "4/4/64"], ["4/4/64", "layers/heads/width/context"]),
        (["--shapes", "4/3/64/32"], ["4/3/64/32", "multiple of n_head"]),
        (["--shapes", "4/4/64/1"], ["4/4/64/1", "no room"]),
        (["--shapes", "1/1/8/8", "--variants", "draft"], ["draft", "--shapes"]),
        (["--shapes", "1/1/8/8", "--ckpt", trained / "ckpt.pt"], ["--ckpt"]),
        (["--ckpt", "/nowhere.pt"], ["/nowhere.pt"]),
        (["--variants", "fastest"], ["fastest"]),
        (["--plot", "speed.docx"], ["speed.docx", ".png"]),
        (["--csv", "/proc/none/speed.csv"], ["/proc/none"]),
        (["--ckpt", trained / "ckpt.pt", "--csv", trained / "ckpt.pt"], ["ckpt.pt", "two uses"]),
        (["--csv", "speed.txt", "--json", "speed.txt"], ["speed.txt", "two uses"]),
        (["--recipe", "nanogpt"], ["--recipe", "--shapes"]),
        (["--variants", "llama2c"], ["llama2c", "--llama2c"]),
        (["--llama2c", "llama2.c", "--batch", "2"], ["--llama2c", "one text"]),
        (["--ckpt", trained / "ckpt.pt", "/nowhere.pt", "--repeats", "1"], ["/nowhere.pt"]),  # stdout stays empty
    ):
        result = run("bench.py", *flags)
        assert_one_line(result, *words)
        assert result.stdout == ""


@pytest.mark.slow
@unix
@pytest.mark.parametrize(["flag", "limit"], [("--csv", 50), ("--json", 400), ("--plot", 5000)])
def test_a_full_disk_leaves_the_older_files_and_is_told_with_a_name(flag, limit, tmp_path):
    for name in ("rows.csv", "older.png"):
        (tmp_path / name).write_bytes(b"older")
    before = contents(tmp_path)
    flags = ["--shapes", "1/1/8/16", "--variants", "eager", "--repeats", "1", "--csv", tmp_path / "rows.csv"]
    result = run("bench.py", *flags, flag, tmp_path / "older.png", preexec_fn=full_disk(limit))
    assert result.returncode == 1
    assert result.stderr.splitlines()[1:] == [f"bench.py: cannot use {tmp_path / 'older.png'}: File too large"]
    assert contents(tmp_path) == before


@unix
def test_a_pipe_is_written_and_a_link_stays_a_link(tmp_path):
    """A rename would put a file in the place of a pipe or of /dev/null."""
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    (tmp_path / "rows.json").write_bytes(b"older")
    (tmp_path / "link").symlink_to("rows.json")
    write(Namespace(csv=tmp_path / "pipe", json=tmp_path / "link", plot=None), [], {})
    assert os.read(reader, 4096).decode().split(",")[: len(COLUMNS) - 1] == list(COLUMNS[:-1])
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "link").is_symlink()
    assert (tmp_path / "rows.json").read_bytes() == b"[]\n"


@pytest.mark.slow
def test_bench_measures_every_variant_of_a_trained_model(trained, tmp_path):
    """A variant that is left out, or whose tokens are not compared. transformers' draw their own noise."""
    files = ["--csv", tmp_path / "b.csv", "--json", tmp_path / "b.json", "--plot", tmp_path / "b.png"]
    result = ok(run("bench.py", "--ckpt", trained / "ckpt.pt", "--repeats", "2", *files, timeout=400))
    rows = json.loads((tmp_path / "b.json").read_text(encoding="utf-8"))
    variants = [name for name in VARIANTS if name != "llama2c"]
    assert [row["variant"] for row in rows] == variants, result.stderr
    compared = [name for name in variants if not name.startswith("hf")]
    assert len(compared) == 9 and SAME + ", ".join(compared) + "\n" in result.stdout
    assert (tmp_path / "b.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
