"""Shared by the tests: scripts run as a user runs them, random models, comparisons of tokens, checkpoints and runs."""

import ast
import contextlib
import csv
import hashlib
import io
import itertools
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch.nn import functional as F

from model import GPT, GPTConfig, Sampling, generate, gumbel_noise, load_model, near_tie, save_checkpoint
from train import get_batch, make_config

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = ROOT / "data" / "sample.txt"

# Windows lacks the signals and terminals of Unix. It reports other errors for the same bad path, and it cannot replace
# or remove an open file. Packages of torch for Windows have lacked libuv, which torchrun needs.
# macOS has no /proc and no /dev/full, and its file names are UTF-8.
needs_extras = pytest.mark.skipif(not (ROOT / "extras").is_dir(), reason="needs the folder extras")
unix = pytest.mark.skipif(os.name == "nt", reason="needs Unix: signals, terminals, file system errors or torchrun")
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: /proc, /dev/full or file names of any bytes")

# -- scripts as processes ----------------------------------------------------------------------------------------------


def run(*args, timeout=120, env=None, cwd=ROOT, **kwargs):
    """Run `python ARGS` in the project's root. Returns the completed process, with its output as text."""
    return subprocess.run(
        [sys.executable, *map(str, args)],
        cwd=cwd,
        env={**os.environ, "PYTHONIOENCODING": "utf-8", **(env or {})},
        capture_output=True,
        encoding="utf-8",
        timeout=timeout,
        **kwargs,
    )


def ok(result):
    assert result.returncode == 0, result.stderr
    return result


def exit_code(error):
    """Return the exit code of a SystemExit. A message in it goes to stderr, as at the end of a process."""
    if isinstance(error.code, str):
        print(error.code, file=sys.stderr)
        return 1
    return error.code or 0


def assert_one_line(result, *words, code=None):
    """Assert a user's mistake: an exit code other than 0, and one line on stderr that has the `words`.

    Before it, another may say which model this is.
    """
    assert result.returncode != 0 if code is None else result.returncode == code, (result.returncode, result.stderr)
    assert "Traceback" not in result.stderr, result.stderr
    lines = [line for line in result.stderr.strip().splitlines() if ": using " not in line]
    assert len(lines) == 1, result.stderr
    for word in words:
        assert str(word) in lines[0], (word, result.stderr)


def assert_help(*scripts, **kwargs):
    """Assert that scripts print their --help if no folder of ours is on the path."""
    for script in scripts:
        assert ok(run("-P", script, "--help", **kwargs)).stdout.startswith("usage: ")


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def tree(folder):
    """{name: bytes} of all files below a folder, and None for a folder."""
    paths = folder.rglob("*")
    return {path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None for path in paths}


def saved(content):
    """The bytes of torch.save."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def imported_names(nodes):
    """Return the dotted names that these nodes of an ast import."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


# -- files that are damaged --------------------------------------------------------------------------------------------


def bytes_of(name, content):
    """Damage a folder's file: other bytes. `content` may make them, given the path that hostile code would write to."""
    return lambda files: (files / name).write_bytes(content(files / "harm") if callable(content) else content)


# -- train.py ----------------------------------------------------------------------------------------------------------

TINY = "--recipe nanogpt --learning_rate 3e-3 --n_layer 2 --n_head 2 --n_embd 32 --block_size 32".split()
TINY += "--batch_size 4 --device cpu".split()
SMALL = "--recipe nanogpt --n_layer 1 --n_head 2 --n_embd 16 --block_size 16 --batch_size 2 --device cpu".split()
# all that a resume has to carry over: dropout, micro-steps, warm-up and decay, and the state of both optimizers
STATEFUL = [*SMALL, *"--recipe modern --dropout 0.2 --gradient_accumulation_steps 2 --warmup_iters 4".split()]
HEADER = "step,seconds,train_loss,val_loss,lr,tokens_per_s,grad_norm".split(",")
CPU = torch.device("cpu")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def child(*flags, **kwargs):
    """Run train.py as a separate process, to its end."""
    return run(ROOT / "train.py", *flags, env=ONE_THREAD | kwargs.pop("env", {}), **kwargs)


def start(*flags, cwd=ROOT, **kwargs):
    """Start train.py as a separate process."""
    kwargs = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8") | kwargs
    env = {**os.environ, **ONE_THREAD, "PYTHONIOENCODING": "utf-8"}
    return subprocess.Popen([sys.executable, ROOT / "train.py", *map(str, flags)], cwd=cwd, env=env, **kwargs)


@contextlib.contextmanager
def num_threads(n):
    """Let torch use n threads inside the block. Tests use one, because sums on several differ in the last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def here(*flags, script="train.py"):
    """Like child, but in this process, which saves the import of torch. Still runs the script as __main__."""
    text = dict(encoding="utf-8", newline="\n", write_through=True)  # as run() reads it: \n on Windows too
    out, err, code = io.TextIOWrapper(io.BytesIO(), **text), io.TextIOWrapper(io.BytesIO(), **text), 0
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        num_threads(torch.get_num_threads()),
        patch("sys.argv", [script, *map(str, flags)]),
        patch("signal.signal"),  # pytest keeps its own handlers
    ):
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as error:
            code = exit_code(error)
    return subprocess.CompletedProcess(flags, code, *(stream.buffer.getvalue().decode() for stream in (out, err)))


def load(path):
    return torch.load(path, map_location="cpu", weights_only=True)


def log(out_dir):
    """The rows of log.csv. Asserts its header and rising steps."""
    with open(out_dir / "log.csv", encoding="utf-8", newline="") as f:
        reader = csv.DictReader(f)
        rows = list(reader)
    assert reader.fieldnames == HEADER
    steps = [int(row["step"]) for row in rows]
    assert all(a < b for a, b in itertools.pairwise(steps)), steps
    return rows


def write_ids(folder, tokenizer, text):
    """Write `text` as data/prepare.py would for this tokenizer."""
    middle = int(0.9 * len(text))
    ids = [tokenizer.encode(part) for part in (text[:middle], text[middle:])]
    write(folder, tokenizer.state_dict(), len(tokenizer.vocab), *ids)


def write(folder, vocabulary, size, train, val):
    """Write ids as data/prepare.py would."""
    folder.mkdir(parents=True, exist_ok=True)
    hashes = {"vocabulary": hashlib.sha256("".join(map(str, vocabulary.values())).encode()).hexdigest()}
    for split, ids in (("train", train), ("val", val)):
        content = np.array(ids, "<u2" if size <= 65536 else "<u4").tobytes()
        (folder / f"{split}.bin").write_bytes(content)
        hashes[split] = hashlib.sha256(content).hexdigest()
    meta = vocabulary | {"source": "a test", "sha256": hashes}
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")


def batch(ids, seed, number, batch_size, block_size, *ranks):
    """Return x and y of get_batch, on the CPU. ranks: rank and world size, if there are several."""
    config = make_config(dict(seed=seed, batch_size=batch_size, block_size=block_size))
    return get_batch(ids, config, number, CPU, *ranks)[:2]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != ".lock"}


def same(a, b):
    """Equal to the last bit: tensors, and plain values that hold tensors."""
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


def progress(out_dir):
    """The columns of log.csv that an interruption must not change. It does change times and speeds."""
    return [[row[name] for name in ("step", "train_loss", "val_loss", "lr")] for row in log(out_dir)]


def assert_refused(out_dir, *flags, words=()):
    """Assert that a resume ends in one line and an exit code other than 0, and changes no file."""
    before = contents(out_dir) if out_dir.exists() else None
    result = here("--init_from", "resume", "--out_dir", out_dir, "--max_iters", 61, *flags)
    assert_one_line(result, *words)
    assert result.stdout == ""
    assert (contents(out_dir) if out_dir.exists() else None) == before


def plain_val_loss(model, ids, block_size):
    """The mean loss over all characters but the first, in double precision, one window after the other."""
    losses = []
    for begin in range(0, len(ids) - 1, block_size):
        window = torch.tensor(ids[begin : begin + block_size + 1].tolist())
        with torch.no_grad():
            logits = model.eval()(window[None, :-1])[0][0].double()
        losses += F.cross_entropy(logits, window[1:], reduction="none").tolist()
    assert len(losses) == len(ids) - 1
    return sum(losses) / len(losses)


# -- sample.py ---------------------------------------------------------------------------------------------------------

PROMPT = "First Mason:\n"


def sample(out_dir, *flags):
    """Run sample.py on the checkpoint in out_dir, on the CPU, in this process."""
    return here("--out_dir", out_dir, "--device", "cpu", *flags, script="sample.py")


def texts_of(out_dir, prompt, steps, rows=1, **sampling):
    """Return one text per row, prompt and continuation, by GPT.generate instead of sample.py's command line."""
    model, tokenizer = load_model(out_dir / "ckpt.pt")
    idx = torch.tensor([tokenizer.encode(prompt)]).repeat(rows, 1)
    out = model.generate(idx, steps, kv_cache=False, **{"seed": 1337, **sampling})
    return [tokenizer.decode(row) for row in out.tolist()]


def text_before(text, stops):
    """The text before the stop text that is complete first, by another way than Sequence: character by character."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


# -- models ------------------------------------------------------------------------------------------------------------

KINDS = [
    dict(zip(("pos_emb", "norm_first", "n_kv_head"), values))
    for values in itertools.product(("learned", "rope"), (True, False), (None, 2, 1))
]
# the modern recipe's
KINDS += [dict(pos_emb="rope", qk_norm=True, activation="swiglu", n_kv_head=n_kv_head) for n_kv_head in (None, 2)]


def random_model(config, seed=0):
    """A GPT in eval mode whose weights are large enough for attention and tokens to differ from each other."""
    torch.manual_seed(seed)
    model = GPT(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * (0.3 if p.dim() > 1 else 0.1) + (p == 1))
    return model


def heads_of(model):
    """The Heads of all layers, in one list."""
    return [head for heads in model.kv_cache.heads for head in heads]


def stream(model, idx, max_new_tokens, *settings, kv_cache=True, **more_settings):
    """The new tokens of model.generate with these arguments, `(B, 1)` per step."""
    return generate(model, idx, max_new_tokens, Sampling(*settings, **more_settings), kv_cache)


V, CONTEXT = 23, 16
MODELS = {
    i: random_model(GPTConfig(block_size=CONTEXT, vocab_size=V, n_layer=2, n_head=4, n_embd=32, **kind), seed=i)
    for i, kind in enumerate(KINDS)
}
FILTERS = [
    dict(temperature=0),
    dict(temperature=1.0),
    dict(temperature=0.7, top_k=5),
    dict(temperature=1.3, top_p=0.8),
    dict(temperature=1.0, top_k=7, top_p=0.6),
]
a_model = st.sampled_from(sorted(MODELS)).map(MODELS.get)
a_filter = st.sampled_from(FILTERS)
a_seed = st.integers(0, 2**64 - 1)


def prompts(batch, length, seed=0):
    return torch.randint(V, (batch, length), generator=torch.Generator().manual_seed(seed))


def assert_train_mode_is_refused(way):
    """In train mode there is no cache. Several threads could not put one model into eval mode and back.

    way(model, idx, max_new_tokens, *settings)  a stream of blocks
    """
    model = random_model(MODELS[0].config)
    expected = model.generate(prompts(1, 3), 9, seed=1)
    stream = way(model, prompts(1, 3), 9)
    model.transformer.h[1].train()  # one layer is enough
    with pytest.raises(RuntimeError, match=r"train mode.*model\.eval\(\)"):
        next(iter(stream))
    model.train()
    with pytest.raises(RuntimeError, match=r"train mode.*model\.eval\(\)"):
        model.generate(prompts(1, 3), 2)
    model.eval()
    assert torch.equal(torch.cat([prompts(1, 3), *way(model, prompts(1, 3), 9, 0.8, None, None, 1)], 1), expected)


def tokens_differ(model, ours, theirs, T, samples, seed, filters):
    """Where two generations differ by more than a near-tie: the first (row, step), or None."""
    assert ours.shape == theirs.shape
    if torch.equal(ours, theirs):
        return None
    sampling, same = Sampling(seed=seed, **filters), set(range(len(ours)))
    start, block_size = 0, model.config.block_size
    for step in range(ours.size(1) - T):
        if T + step - start > block_size:
            start = T + step - max(1, block_size // 2)
        logits, _ = model(ours[:, start : T + step], last=True)
        for row in sorted(same):
            picks = ours[row, T + step].item(), theirs[row, T + step].item()
            noise = gumbel_noise(seed, torch.tensor([samples[row]]), torch.tensor([step]), logits.size(-1))[0, 0]
            if picks[0] != picks[1]:
                same.remove(row)
                if not all(near_tie(logits[row], noise, pick, sampling) for pick in picks):
                    return row, step
    return None


# -- small models of characters ----------------------------------------------------------------------------------------

CHARS = "\n !abcdefgé😀"
SIZE = dict(block_size=24, vocab_size=len(CHARS), n_layer=2, n_head=4, n_embd=32, bias=False)


def tiny(**network):
    """A random_model of SIZE, whose tokens are the characters CHARS."""
    return random_model(GPTConfig(**(SIZE | network)))


def save_model(folder, model, chars=CHARS, ngrams=None, name="ckpt.pt"):
    """Write ckpt.pt with what the scripts need of a checkpoint."""
    content = dict(model=model.state_dict(), model_args=vars(model.config).copy(), chars=chars, ngrams=ngrams)
    save_checkpoint(folder / name, content | dict(iter_num=7))
