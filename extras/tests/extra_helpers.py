"""Shared by the tests of extras: ways of decoding, exports, BPEs. What needs no extras is in tests/helpers.py."""

import math
import re
import shutil
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from extras.decode.ngrams import count_ngrams
from extras.formats.bpe import train_bpe
from helpers import CHARS, ROOT, SAMPLE, V, here, tokens_differ
from model import CharTokenizer

# -- scripts -----------------------------------------------------------------------------------------------------------


@lru_cache
def flags_of(*scripts):
    """Return the flags that the --help of these scripts lists."""
    lists = [here("--help", script=script).stdout.partition("\noptions:")[2] for script in scripts]
    return set(re.findall(r"--[\w-]+", "".join(lists)))


# -- the Decoder -------------------------------------------------------------------------------------------------------

TEXT = np.random.default_rng(0).choice(V, 3000, p=np.arange(V, 0, -1) / (V * (V + 1) / 2))
NGRAMS = count_ngrams(TEXT, V, 1000)
DRAFTS = {
    "one token per step": dict(draft=None),
    "n-grams": dict(draft="ngram", ngrams=NGRAMS),
}
a_draft = st.sampled_from(sorted(DRAFTS)).map(DRAFTS.get)
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="needs a C compiler")
WAYS = DRAFTS | ({} if needs_compiler.args[0] else {f"{k}, compiled": v | {"compile": True} for k, v in DRAFTS.items()})
a_way = st.sampled_from(sorted(WAYS)).map(WAYS.get)


def assert_same_as_alone(model, got, ragged, steps, samples, seed, filters, **more):
    """Assert that each row of `got` equals GPT.generate on its prompt alone, without the cache, up to a near-tie."""
    for ours, prompt, i in zip(got, ragged, samples, strict=True):
        theirs = model.generate(prompt[None], steps, kv_cache=False, samples=[i], seed=seed, **filters, **more)
        assert tokens_differ(model, ours[None], theirs, len(prompt), [i], seed, filters) is None


def without_minus_one(ragged, blocks):
    """Return each prompt with its continuation, from the blocks of Decoder.stream."""
    rows = [torch.cat((prompt, *(block[i] for block in blocks))) for i, prompt in enumerate(ragged)]
    return [row[row >= 0] for row in rows]


def attend(head, q, pos):
    """Attention over the caches of a Head, for queries `(B, T, hs)` at positions `(T,)`: the output, the weights."""
    scores = q @ head.key_cache.transpose(1, 2) / math.sqrt(q.size(-1))
    visible = torch.arange(head.key_cache.size(1)) <= pos[:, None]
    weights = scores.masked_fill(~visible, -math.inf).softmax(dim=-1)
    return weights @ head.value_cache, weights


# -- step.c ------------------------------------------------------------------------------------------------------------

NETWORKS = [
    dict(n_embd=20, n_head=4, activation="gelu"),  # sizes that fill no vector, and heads of five
    dict(n_embd=48, n_head=3, n_kv_head=1, activation="gelu_tanh", bias=False, mlp_ratio=1.3),
    dict(n_embd=96, n_head=2, activation="swiglu", pos_emb="rope", qk_norm=True, norm_first=False, mlp_ratio=5),
    dict(n_embd=64, n_head=4, n_kv_head=2, vocab_size=130, tie_weights=False, pos_emb="rope"),
    dict(n_embd=2, n_head=1, vocab_size=2, block_size=3, pos_emb="rope"),
]


def copy_of_step(folder, replacements=()):
    """Copy step.c and pool.h into a folder, and replace text that occurs once in one of them."""
    for name in ("step.c", "pool.h"):
        shutil.copy(ROOT / "extras" / "decode" / name, folder)
    for old, new in replacements:
        (file,) = [file for file in folder.glob("*.[ch]") if old in file.read_text(encoding="utf-8")]
        text = file.read_text(encoding="utf-8")
        assert text.count(old) == 1, old
        file.write_text(text.replace(old, new), encoding="utf-8")


# -- exports -----------------------------------------------------------------------------------------------------------

TOKENIZER = CharTokenizer(CHARS)
# networks that transformers' classes of these names compute, and one that no class of transformers computes
GPT2 = {}
STABLELM = dict(pos_emb="rope", activation="swiglu")
POST_LN = dict(norm_first=False, n_kv_head=1, tie_weights=False, bias=True)


@lru_cache
def bpe(vocab_size=512):
    """The tokenizer.json of a BPE that was trained on data/sample.txt."""
    return train_bpe(SAMPLE.read_text(encoding="utf-8"), vocab_size)


def write_gpt2(folder, seed=0, **settings):
    """Write the folder of a random GPT-2 as transformers writes it, with a BPE of 512. Returns transformers' model."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = dict(vocab_size=512, n_positions=48, n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None)
    torch.manual_seed(seed)
    hf = GPT2LMHeadModel(GPT2Config(**(sizes | settings))).eval()
    with torch.no_grad():
        for p in hf.parameters():  # large enough for tokens to differ from each other
            p.copy_(torch.randn_like(p) * (0.3 if p.dim() > 1 else 0.1) + (p == 1))
    hf.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(bpe(), encoding="utf-8")
    return hf


def assert_tells_no_paths(files, *more):
    """The files hold neither the project's path nor the user's home, nor the paths in `more`."""
    for file in files:
        for folder in (ROOT, Path.home(), *more):
            assert str(folder).encode() not in file.read_bytes(), (file, folder)
