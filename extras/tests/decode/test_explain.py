"""--explain shows the shapes that a generation has, and attention weights are those of the forward."""

import ast
import re

import pytest
import torch

from extras.decode.explain import attention_weights, explain, watch
from extras.formats.checkpoint import load_model
from helpers import KINDS, PROMPT, prompts, random_model, sample, texts_of
from model import CharTokenizer, GPTConfig, Sampling


def shapes(printed):
    """[{name: shape}] of each call in what --explain printed."""
    calls = re.split(r"^(?:prefill|decode).*$", printed, flags=re.MULTILINE)[1:]
    return [dict(re.findall(r"^    (\S.*?\S) +(\(.*?\)|none)", call, flags=re.MULTILINE)) for call in calls]


@pytest.mark.slow
def test_explain_prints_the_shapes_that_a_prefill_and_two_steps_have(trained):
    """The prefill feeds T characters and each step one, so they attend to T, T + 1 and T + 2 slots."""
    result = sample(trained, "--prompt", PROMPT, "--explain")
    assert result.returncode == 0 and result.stderr == "", result.stderr
    T, calls = len(PROMPT), shapes(result.stdout)
    vocab_size = load_model(trained / "ckpt.pt")[0].config.vocab_size
    assert len(calls) == 3
    for fed, held, call in zip((T, 1, 1), (T, T + 1, T + 2), calls):
        assert call == {
            "wte": f"(1, {fed}, 32)",
            "c_attn": f"(1, {fed}, 96)",
            "new k, v": f"(1, 2, {fed}, 16)",
            "key_cache": f"(1, {held}, 16)",
            "queries": f"(1, 2, {fed}, 16)",
            "keys, values": f"(1, 2, {held}, 16)",
            "mask": f"({T}, {T})" if fed > 1 else "none",
            "weights": f"(1, 2, {fed}, {held})",
            "attention": f"(1, {fed}, 32)",
            "mlp": f"(1, {fed}, 32)",
            "lm_head": f"(1, {vocab_size})",
            "sampled": "(1,)",
        }
    sampled = re.findall(r"sampled +\(1,\) +('.*?'|\".\")", result.stdout)
    assert result.stdout.count("fed at the next step") == 2
    assert [ast.literal_eval(char) for char in sampled] == list(texts_of(trained, PROMPT, 3)[0][T:])


def test_explain_leaves_the_model_as_it_was_and_stops_with_the_context(trained, capsys):
    model, tokenizer = load_model(trained / "ckpt.pt")
    idx = torch.zeros(1, 5, dtype=torch.int64)
    before = model.generate(idx, 10, seed=1)
    explain(model, tokenizer, "a" * 31, 3, Sampling(seed=1))
    printed = capsys.readouterr().out
    assert "decode 1, pos 31" not in printed and "the context is full" in printed
    assert torch.equal(model.generate(idx, 10, seed=1), before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_an_attention_of_your_own_cannot_be_explained(monkeypatch):
    def attention(q, k, v, attn_mask=None, is_causal=False, **settings):
        weights = (q @ k.mT / q.size(-1) ** 0.5).tril(k.size(2) - q.size(2)).softmax(-1)
        return weights @ v

    model = random_model(GPTConfig(**KINDS[0], block_size=16, vocab_size=20, n_layer=1, n_head=2, n_embd=8))
    monkeypatch.setattr("model.F.scaled_dot_product_attention", attention)
    with pytest.raises(ValueError, match=r"--explain watches F\.scaled_dot_product_attention"):
        explain(model, CharTokenizer("abcdefghijklmnopqrst"), "abca", 3, Sampling(seed=0))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_attention_weights_give_the_output_of_the_layer(kind):
    """Query head i reads Head i // (nh / nkv). Weights in another order would still sum to one."""
    model = random_model(GPTConfig(block_size=16, vocab_size=23, n_layer=2, n_head=4, n_embd=32, **kind))
    idx, attn = prompts(2, 9), model.transformer.h[1].attn
    weights = attention_weights(model, idx, layer=1)
    with torch.no_grad(), watch(model, layer=1) as seen:
        model(idx, pos=torch.arange(9))
        heads = model.kv_cache.heads[1]
        values = torch.stack([heads[i * len(heads) // 4].value_cache for i in range(4)], dim=1)
        out = attn.c_proj((weights @ values).transpose(1, 2).flatten(2))
    torch.testing.assert_close(out, seen["attention"])
