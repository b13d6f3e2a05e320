"""extras/evaluate.py: the loss on a text file, with windows side by side and overlapping."""

import json
import math
import re
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from extra_helpers import write_gpt2
from extras.evaluate import mean_loss
from extras.formats.checkpoint import load_model
from helpers import SAMPLE, assert_one_line, here, ok, plain_val_loss, random_model
from model import GPTConfig

SAID = re.compile(r"loss ([\d.]+) \(perplexity ([\d.]+), ([\d.]+) bits per byte\): (.*)\n(.*)\n")


def loss(*flags):
    return here(*flags, "--device", "cpu", script="extras/evaluate.py")


@given(length=st.integers(2, 300), block_size=st.integers(1, 20), stride=st.integers(1, 20))
def test_overlapping_windows_predict_each_token_once_from_most_of_a_context(length, block_size, stride):
    """The oracle predicts token after token, from the start of the first window that reaches it."""
    stride = min(stride, block_size)
    model = random_model(GPTConfig(block_size=block_size, vocab_size=20, n_layer=1, n_head=2, n_embd=16))
    ids = torch.from_numpy(np.random.default_rng(0).integers(20, size=length))
    losses = []
    for i in range(1, length):
        window = max(0, -(-(i - block_size) // stride))
        context = ids[window * stride : i][None]
        assert window == 0 or context.size(1) > block_size - stride
        losses.append(-model(context)[0][0, -1].log_softmax(-1)[ids[i]].item())
    assert mean_loss(model, ids, stride) == pytest.approx(np.mean(losses), rel=1e-4)


@pytest.mark.parametrize("stride", [None, 16])
def test_the_loss_on_a_text_file_is_that_of_transformers(stride, tmp_path):
    """Theirs counts a target of -100 as context only, which is how the recipes for strided perplexity use it."""
    hf, text = write_gpt2(tmp_path / "gpt2"), SAMPLE.read_text(encoding="utf-8")[:900] + "né\r\n"
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    flags = ["--ckpt", tmp_path / "gpt2", "--text", tmp_path / "a.txt"]
    said = ok(loss(*flags, *(["--stride", stride] if stride else []))).stdout
    nats, perplexity, bits, what, context = SAID.fullmatch(said).groups()

    text, step = text.replace("\r\n", "\n"), stride or 48
    ids = AutoTokenizer.from_pretrained(tmp_path / "gpt2")(text, return_tensors="pt")["input_ids"]
    sums, end = [], 0
    for begin in range(0, ids.size(1) - 1, step):
        window = ids[:, begin : begin + 49]
        fresh = window.size(1) - 1 - (end - begin if begin else 0)
        end = begin + window.size(1) - 1
        if fresh > 0:
            labels = window[:, 1:].clone()
            labels[:, : labels.size(1) - fresh] = -100
            logits = hf(window[:, :-1]).logits
            sums += [torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="sum").item()]
    expected = sum(sums) / (ids.size(1) - 1)
    assert float(nats) == pytest.approx(expected, abs=1e-4)
    assert float(perplexity) == pytest.approx(math.exp(expected), rel=1e-3)
    assert float(bits) == pytest.approx(expected / math.log(2) * ids.size(1) / len(text.encode()), abs=1e-4)
    assert f"{ids.size(1) - 1} tokens of {tmp_path / 'a.txt'}" in what
    assert f"from {33 if stride else 1} to 48 tokens" in context


def test_a_text_needs_two_tokens_that_the_model_has(trained, tmp_path):
    file, flags = tmp_path / "a.txt", ["--ckpt", trained, "--text"]
    file.write_text("ab", encoding="utf-8")
    model, tokenizer = load_model(trained / "ckpt.pt")
    expected = plain_val_loss(model, torch.tensor(tokenizer.encode("ab")), 32)
    assert float(SAID.fullmatch(ok(loss(*flags, file)).stdout)[1]) == pytest.approx(expected, abs=1e-4)
    for content, more, words in (
        (b"a", [], ["a.txt has 1 characters"]),
        (b"a\xff", [], ["a.txt is not UTF-8 (byte 1)"]),
        ("a中".encode(), [], ["no '中' in the vocabulary"]),
        (b"ab", ["--stride", 33], ["--stride 33 is not from 1 to 32"]),
        (b"ab", ["--stride", 0], ["--stride 0 is not from 1 to 32"]),
        (b"version https://git-lfs.github.com/spec/v1\n", [], ["a.txt is a Git LFS pointer"]),
    ):
        file.write_bytes(content)
        assert_one_line(loss(*flags, file, *more), *words, code=1)
    assert_one_line(loss(*flags, tmp_path / "none.txt"), "none.txt", code=1)


@pytest.mark.parametrize("change", ["kind", "order", "list"])
def test_a_vocabulary_that_is_not_the_one_of_the_ids_is_one_line(change, trained, data_dir, tmp_path):
    """With two characters swapped, the loss would be that of different text."""
    shutil.copytree(data_dir, tmp_path, dirs_exist_ok=True)
    meta = json.loads((tmp_path / "meta.json").read_text(encoding="utf-8"))
    kinds = dict(kind=meta | {"chars": None}, order=meta | {"chars": meta["chars"][::-1]}, list=[meta])
    (tmp_path / "meta.json").write_text(json.dumps(kinds[change]), encoding="utf-8")
    assert_one_line(loss("--ckpt", trained, "--data_dir", tmp_path), f"the data in {tmp_path} cannot be read (", code=1)
