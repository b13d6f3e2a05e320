"""What export.py writes, as the libraries that read it see it: ONNX Runtime, onnx and transformers themselves."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from conftest import ROOT, TINY, assert_one_line, run
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_model import lively
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    StableLmConfig,
    StableLmForCausalLM,
)

from checkpoint import build_model, load_model, save_checkpoint
from export import write_onnx
from hf import model_type, read_folder, write_folder
from model import GPT, GPTConfig
from onnx_gpt import OnnxGPT

S, CHARS = 24, "\n !abcdefgé😀"
SIZE = dict(block_size=S, vocab_size=len(CHARS), n_layer=2, n_head=4, n_embd=32, bias=False)
GPT2, STABLELM = {}, dict(pos_emb="rope", activation="swiglu")
NETWORKS = {
    "GPT-2": dict(GPT2, bias=True, activation="gelu_tanh"),
    "StableLM": dict(STABLELM, qk_norm=True, n_kv_head=2, mlp_ratio=3.3),
    "post-LN": dict(norm_first=False, n_kv_head=1, tie_weights=False, bias=True),
}


def tiny(**network):
    return lively(GPTConfig(**(SIZE | network)))


@pytest.fixture(scope="module", params=NETWORKS)
def exported(request, tmp_path_factory):
    """(model, its model.onnx)"""
    model, file = tiny(**NETWORKS[request.param]), tmp_path_factory.mktemp("onnx") / "model.onnx"
    write_onnx(model, CHARS, file)
    return model, file


def feed(session, ids, past, mask=None, positions=None):
    """One call by names, as anybody would make it who has only the file. Returns (logits, past)."""
    begin, (B, T) = past[0].shape[2], ids.shape
    mask = np.ones((B, begin + T), np.int64) if mask is None else mask
    positions = np.tile(np.arange(begin, begin + T), (B, 1)) if positions is None else positions
    names = [f"past_key_values.{i}.{kind}" for i in range(len(past) // 2) for kind in ("key", "value")]
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, **dict(zip(names, past))}
    logits, *past = session.run(["logits", *(name.replace("past_key_values", "present") for name in names)], inputs)
    return torch.from_numpy(logits), past


def nothing(model, B):
    config = model.config
    return [np.zeros((B, config.n_kv_head or 4, 0, 8), np.float32) for _ in range(2 * config.n_layer)]


# -- ONNX --------------------------------------------------------------------------------------------------------------


def test_the_graph_has_the_names_and_axes_that_others_expect(exported):
    """Of Optimum and transformers.js, which need heads and head size as numbers."""
    model, file = exported
    proto = onnx.load(file)
    onnx.checker.check_model(proto, full_check=True)
    assert [(entry.domain, entry.version) for entry in proto.opset_import if not entry.domain] == [("", 20)]
    assert not any(tensor.external_data for tensor in proto.graph.initializer)
    heads, whole = model.config.n_kv_head or 4, "past_sequence_length + sequence_length"
    axes = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*proto.graph.input, *proto.graph.output)
    }
    each = [f"{i}.{kind}" for i in range(2) for kind in ("key", "value")]
    assert axes == {
        "input_ids": ["batch_size", "sequence_length"],
        "attention_mask": ["batch_size", whole],
        "position_ids": ["batch_size", "sequence_length"],
        **{f"past_key_values.{slot}": ["batch_size", heads, "past_sequence_length", 8] for slot in each},
        "logits": ["batch_size", "sequence_length", len(CHARS)],
        **{f"present.{slot}": ["batch_size", heads, whole, 8] for slot in each},
    }


@given(data=st.data())
def test_any_split_of_any_batch_gives_the_logits_of_one_forward(exported, data):
    model, file = exported
    session = session_of(file)
    B, T = data.draw(st.integers(1, 3)), data.draw(st.integers(1, S))
    cuts = sorted(data.draw(st.sets(st.integers(1, T - 1)))) if T > 1 else []
    ids = torch.randint(len(CHARS), (B, T), generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    past, logits = nothing(model, B), []
    for begin, end in zip([0, *cuts], [*cuts, T]):
        some, past = feed(session, ids[:, begin:end].numpy(), past)
        logits.append(some)
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(logits, 1), model(ids)[0], atol=1e-4, rtol=0)
    assert all(each.shape == (B, model.config.n_kv_head or 4, T, 8) for each in past)


_sessions = {}


def session_of(file):
    if file not in _sessions:
        _sessions[file] = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return _sessions[file]


def test_padding_on_the_left_changes_nothing(exported):
    """As transformers pads a batch: positions count from the first real token, the mask is 0 before."""
    model, file = exported
    session, ids = session_of(file), torch.arange(10)[None] % len(CHARS)
    padded = torch.cat((torch.full((1, 3), 5), ids[:, :7]), dim=1)
    batch = torch.cat((ids, padded)).numpy()
    mask = np.array([[1] * 10, [0] * 3 + [1] * 7])
    positions = np.maximum(mask.cumsum(1) - 1, 0)
    logits, past = feed(session, batch, nothing(model, 2), mask, positions)
    with torch.no_grad():
        alone = model(torch.cat((ids[:, :7], torch.tensor([[2, 3]])), dim=1))[0][0]
    torch.testing.assert_close(logits[1, 3:], alone[:7], atol=1e-4, rtol=0)
    for step, token in enumerate((2, 3)):
        mask = np.concatenate((mask, np.ones((2, 1), np.int64)), axis=1)
        token, position = np.full((2, 1), token), np.array([[10 + step], [7 + step]])
        logits, past = feed(session, token, past, mask, position)
        torch.testing.assert_close(logits[1, 0], alone[7 + step], atol=1e-4, rtol=0)


@given(data=st.data())
def test_the_engine_picks_the_tokens_of_pytorch(exported, data):
    """With and without the cache, past the context too."""
    model, file = exported
    engine = OnnxGPT(file)
    B, T = data.draw(st.integers(1, 3)), data.draw(st.integers(1, S))
    idx = torch.randint(len(CHARS), (B, T), generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    sampling = dict(
        seed=data.draw(st.integers(0, 2**64 - 1)),
        temperature=data.draw(st.sampled_from([0.0, 0.7, 1.0])),
        top_k=data.draw(st.sampled_from([None, 1, 5])),
        top_p=data.draw(st.sampled_from([None, 0.9])),
        overflow=data.draw(st.sampled_from(["stop", "slide"])),
        samples=[7 + row for row in range(B)],
    )
    steps = data.draw(st.integers(0, 2 * S))
    new = list(engine.stream(idx, steps, kv_cache=data.draw(st.booleans()), **sampling))
    ours = torch.cat((idx, torch.stack(new, 1)), 1) if new else idx
    assert torch.equal(ours, model.generate(idx, steps, **sampling))


# -- the command line, and sample.py --engine onnx ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def out(trained, data_dir, tmp_path_factory):
    """(out_dir with a checkpoint and every ONNX file of it, what export.py said)"""
    folder = tmp_path_factory.mktemp("out")
    shutil.copy(trained / "ckpt.pt", folder)
    flags = ["--format", "onnx", "--int8", "--cacheless", "--out_dir", folder, "--data_dir", data_dir]
    result = run("export.py", *flags)
    assert result.returncode == 0, result.stderr
    return folder, result


@pytest.mark.slow
def test_export_reports_sizes_and_losses(out, trained):
    folder, result = out
    assert not result.stderr, result.stderr
    lines = dict(line.split(": ", 1) for line in result.stdout.splitlines()[3:])
    val_loss = torch.load(trained / "ckpt.pt", weights_only=True)["best_val_loss"]
    for name in ("PyTorch", "model.onnx", "model_cacheless.onnx", "model_int8.onnx"):
        size, loss = lines[name].split(" MB, val loss ")
        assert float(loss) == pytest.approx(val_loss, abs=0.05 if "int8" in name else 1.01e-4)
        if name != "PyTorch":
            assert float(size) == pytest.approx((folder / "onnx" / name).stat().st_size / 1e6, abs=0.0051)
    types = [i.data_type for i in onnx.load(folder / "onnx" / "model_int8.onnx").graph.initializer]
    assert types.count(onnx.TensorProto.INT8) >= 8  # four matrices in each of two layers


def sample(out, *args):
    return run("sample.py", "--out_dir", out[0], "--prompt", "First Mason:\n", *args)


@pytest.mark.slow
def test_the_engine_gives_the_text_of_pytorch(out, tmp_path):
    theirs = sample(out, "--num_samples", "2", "--seed", "9").stdout
    result = sample(out, "--num_samples", "2", "--seed", "9", "--engine", "onnx", "--verify")
    assert result.returncode == 0 and result.stdout == theirs, result.stderr
    assert "2 of 2 samples match" in result.stderr
    cached = 2 * 2 * 2 * 16 * 31 * 2 * 4  # keys and values, layers, heads, head size, tokens, rows, bytes
    assert f"{cached:,} bytes used of {cached:,} reserved" in result.stderr
    shutil.copytree(out[0] / "onnx", tmp_path / "onnx")  # the file is enough
    alone = sample([tmp_path], "--num_samples", "2", "--seed", "9", "--engine", "onnx", "--no-kv_cache")
    assert alone.stdout == theirs and "KV cache: off" in alone.stderr, alone.stderr


@pytest.mark.slow
def test_engine_mistakes_are_one_line(out, tmp_path):
    (tmp_path / "damaged.onnx").write_bytes((out[0] / "onnx" / "model.onnx").read_bytes()[:2000])
    model, chars = load_model(out[0] / "ckpt.pt")
    write_onnx(GPT(replace(model.config, block_size=16)).eval(), chars, tmp_path / "other.onnx")
    proto = onnx.load(out[0] / "onnx" / "model.onnx")
    del proto.metadata_props[:]
    onnx.save(proto, tmp_path / "foreign.onnx")
    for flags, words in (
        (["--draft", "ngram"], ["--draft"]),
        (["--compile"], ["--compile"]),
        (["--dtype", "bfloat16"], ["--dtype bfloat16"]),
        (["--device", "cuda"], ["--device cuda"]),
        (["--prompt", "one"], ["--engine onnx", "3 and 13"]),
        (["--prompt", "#"], ["'#'"]),
        (["--ckpt", tmp_path / "none.onnx"], ["none.onnx", "export.py"]),
        (["--ckpt", tmp_path / "damaged.onnx"], ["damaged.onnx"]),
        (["--ckpt", tmp_path / "foreign.onnx"], ["foreign.onnx", "metadata"]),
        (["--ckpt", out[0] / "onnx" / "model_cacheless.onnx"], ["--no-kv_cache"]),
        (["--ckpt", tmp_path / "other.onnx", "--verify"], ["--verify", "other.onnx", "export it again"]),
    ):
        assert_one_line(sample(out, "--engine", "onnx", *flags), *words)


@pytest.mark.slow
def test_export_mistakes_are_one_line(out, tmp_path):
    model = tiny(**NETWORKS["post-LN"])
    save_checkpoint(
        tmp_path / "ckpt.pt", dict(model=model.state_dict(), model_args=vars(model.config).copy(), chars=CHARS)
    )
    (tmp_path / "file").write_text("in the way")
    for flags, words in (
        ([], ["--format"]),
        (["--format", "gguf"], ["gguf"]),
        (["--format", "hf", "--int8"], ["--int8"]),
        (["--format", "onnx", "--ckpt", tmp_path / "none.pt"], ["none.pt"]),
        (["--format", "hf", "--out_dir", tmp_path], ["norm_first=False"]),
        (["--format", "onnx", "--ckpt", out[0] / "ckpt.pt", "--out_dir", tmp_path / "file"], ["file"]),
    ):
        assert_one_line(run("export.py", *flags), *words)
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(["format", "module"], [("onnx", "onnxscript"), ("hf", "transformers")])
def test_a_missing_package_is_one_line_with_the_command(format, module, trained):
    """The import system is told that the package is not there; everything after that is real."""
    code = f"import sys, runpy; sys.modules[{module!r}] = None; runpy.run_path('export.py', run_name='__main__')"
    command = [sys.executable, "-c", code, "--format", format, "--ckpt", trained / "ckpt.pt"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8")
    assert_one_line(result, "pip install", module)


# -- Hugging Face ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "network",
    [
        GPT2,
        dict(GPT2, bias=True, activation="gelu_tanh"),
        dict(GPT2, tie_weights=False, mlp_ratio=2.3),
        STABLELM,
        dict(STABLELM, qk_norm=True, mlp_ratio=3.3),
        dict(STABLELM, qk_norm=True, n_kv_head=2, tie_weights=False),
    ],
    ids=str,
)
def test_transformers_computes_the_same_and_the_folder_comes_back(network, tmp_path):
    model = tiny(**network)
    write_folder(model, CHARS, tmp_path)
    hf, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path).eval(), AutoTokenizer.from_pretrained(tmp_path)
    ids = torch.randint(len(CHARS), (2, S), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(hf(ids).logits, model(ids)[0], atol=1e-4, rtol=0)
    greedy = hf.generate(ids[:1, :5], max_length=S, do_sample=False)
    assert torch.equal(greedy, model.generate(ids[:1, :5], S, temperature=0))

    text = CHARS + CHARS[::-1] + "\n\n  \n"
    assert tokenizer(text)["input_ids"] == [CHARS.index(char) for char in text]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    with pytest.raises(Exception, match="UNK"):
        tokenizer("abZ")
    stored = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in stored) == (not model.config.tie_weights)

    back = read_folder(tmp_path)
    assert back["chars"] == CHARS
    with torch.no_grad():
        assert torch.equal(build_model(back).eval()(ids)[0], model(ids)[0])


SIZES = dict(vocab_size=len(CHARS), tie_word_embeddings=True)
GPT2_SIZES = dict(SIZES, n_positions=S, n_embd=32, n_layer=2, n_head=4, activation_function="gelu")
STABLELM_SIZES = dict(
    SIZES, max_position_embeddings=S, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96
)
STABLELM_SIZES |= dict(num_key_value_heads=2, qk_layernorm=True)
ROPE = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=1.0)


def foreign(folder, hf):
    """A folder that transformers wrote from a model of its own, with our tokenizer."""
    write_folder(tiny(), CHARS, folder)
    for name, p in hf.named_parameters():
        if "layernorm.norms" not in name and not (isinstance(hf, StableLmForCausalLM) and name.endswith("bias")):
            torch.nn.init.normal_(p, std=0.3)
    hf.save_pretrained(folder)
    return hf.eval()


@pytest.mark.parametrize(
    "make",
    [
        lambda: GPT2LMHeadModel(GPT2Config(**GPT2_SIZES)),
        lambda: GPT2LMHeadModel(GPT2Config(**GPT2_SIZES | dict(n_inner=40, activation_function="gelu_new"))),
        lambda: StableLmForCausalLM(StableLmConfig(**STABLELM_SIZES, rope_parameters=ROPE)),
    ],
    ids=["GPT-2", "GPT-2, a narrow MLP", "StableLM"],
)
def test_a_model_that_was_born_in_transformers_comes_in(make, tmp_path):
    torch.manual_seed(3)
    hf = foreign(tmp_path, make())
    ours, ids = build_model(read_folder(tmp_path)).eval(), torch.arange(S)[None] % len(CHARS)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids)[0], hf(ids).logits, atol=1e-4, rtol=0)


def edit(folder, name, change):
    content = json.loads((folder / name).read_text(encoding="utf-8"))
    change(content)
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize(
    ["damage", "words"],
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"no"), "cannot be read"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "model"),
        (lambda folder: edit(folder, "config.json", lambda c: c.update(model_type="llama")), "llama"),
        (lambda folder: edit(folder, "config.json", lambda c: c.update(use_parallel_residual=True)), "parallel"),
        (lambda folder: edit(folder, "config.json", lambda c: c["rope_parameters"].update(rope_theta=5e5)), "theta"),
        (lambda folder: edit(folder, "config.json", lambda c: c["rope_parameters"].update(rope_type="yarn")), "yarn"),
        (lambda folder: edit(folder, "config.json", lambda c: c.update(num_hidden_layers=3)), "layers.2"),
        (lambda folder: edit(folder, "config.json", lambda c: c.update(num_hidden_layers=1)), "no place"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda folder: edit(folder, "config.json", lambda c: c.update(hidden_size=48)), "fit"),
        (lambda folder: edit(folder, "config.json", lambda c: c.pop("hidden_size")), "hidden_size"),
        (lambda folder: edit(folder, "tokenizer.json", lambda c: c["model"]["vocab"].update(the=99)), "single char"),
    ],
)
def test_a_folder_that_is_no_network_of_ours_is_refused_in_one_line(damage, words, tmp_path):
    write_folder(tiny(**STABLELM), CHARS, tmp_path / "hf")
    damage(tmp_path / "hf")
    with pytest.raises(ValueError) as error:
        build_model(read_folder(tmp_path / "hf"))
    assert words in str(error.value) and "\n" not in str(error.value)


def test_weights_in_several_files_come_in(tmp_path):
    hf = foreign(tmp_path, StableLmForCausalLM(StableLmConfig(**STABLELM_SIZES, rope_parameters=ROPE)))
    whole = read_folder(tmp_path)["model"]
    (tmp_path / "model.safetensors").unlink()
    hf.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    parts = read_folder(tmp_path)["model"]
    assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)


def test_a_folder_that_cannot_be_written_leaves_the_older_one(tmp_path):
    """A folder is in the way of the new tokenizer.json: config and weights stay the pair that they were."""
    write_folder(tiny(**STABLELM), CHARS, tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").mkdir()
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    with pytest.raises(OSError):
        write_folder(tiny(**GPT2), CHARS, tmp_path)
    after = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    assert after["config.json"] == before["config.json"] and after["model.safetensors"] == before["model.safetensors"]


def test_transformers_4_finds_its_settings_too(tmp_path):
    """It reads them from the top level, and would take a quarter of each head for rotary without a word."""
    write_folder(tiny(**STABLELM), CHARS, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert (config["partial_rotary_factor"], config["rope_theta"]) == (1.0, 10000.0)
    tokenizer = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_the_smallest_contexts_are_exported_or_refused(block_size, tmp_path):
    model = tiny(**STABLELM, block_size=block_size)
    ckpt = dict(model=model.state_dict(), model_args=vars(model.config).copy(), chars=CHARS)
    save_checkpoint(tmp_path / "ckpt.pt", ckpt)
    for flags in (["hf"], ["onnx", "--int8"], ["onnx", "--cacheless"]):
        result = run("export.py", "--out_dir", tmp_path, "--format", *flags)
        if "--cacheless" in flags and block_size < 3:
            assert_one_line(result, f"{block_size}", "--cacheless")
        else:
            assert result.returncode == 0 and "logits within" in result.stdout, result.stderr
    assert (tmp_path / "onnx" / "model_int8.onnx").exists() == (block_size < 3)  # of the run before, else removed


@pytest.mark.parametrize(
    ["network", "word"],
    [
        (dict(norm_first=False), "norm_first"),
        (dict(activation="swiglu"), "activation"),
        (dict(qk_norm=True), "qk_norm"),
        (dict(n_kv_head=2), "n_kv_head"),
        (dict(pos_emb="rope"), "activation"),
        (dict(STABLELM, bias=True), "bias"),
    ],
    ids=str,
)
def test_a_network_that_no_class_computes_is_refused_by_name(network, word):
    with pytest.raises(ValueError, match=word):
        model_type(GPTConfig(**(SIZE | network)))


@pytest.mark.slow
def test_there_and_back_by_the_command_line(trained, data_dir, tmp_path):
    """Out by export.py, in by train.py with a learning rate of 0, and the loss is what it was; then it resumes."""
    result = run("export.py", "--format", "hf", "--ckpt", trained / "ckpt.pt", "--out_dir", tmp_path)
    assert result.returncode == 0, result.stderr
    flags = [*TINY, "--learning_rate", 0, "--data_dir", data_dir, "--out_dir", tmp_path / "back"]
    result = run("train.py", *flags, "--init_from", tmp_path / "hf", "--max_iters", 2)
    assert result.returncode == 0, result.stderr
    there, back = (load_model(folder / "ckpt.pt")[0] for folder in (trained, tmp_path / "back"))
    ids = torch.arange(32)[None] % there.config.vocab_size
    with torch.no_grad():
        torch.testing.assert_close(back(ids)[0], there(ids)[0], atol=1e-5, rtol=0)
    result = run("train.py", "--init_from", "resume", "--out_dir", tmp_path / "back", "--max_iters", 3)
    assert result.returncode == 0 and "steps 2..3" in result.stdout, result.stderr
    for extra, words in ((["--n_layer", 3], ["n_layer 2", "3"]), (["--init_from", tmp_path], ["config.json"])):
        flags = ["--init_from", tmp_path / "hf", *extra, "--data_dir", data_dir, "--out_dir", tmp_path / "no"]
        assert_one_line(run("train.py", *flags), *words)
    (tmp_path / "other").mkdir()
    text = tmp_path / "other.txt"
    text.write_text("other words, other characters: 0123456789 " * 40, encoding="utf-8")
    run("data/prepare.py", "--input", text, "--data_dir", tmp_path / "other")
    flags = ["--init_from", tmp_path / "hf", "--data_dir", tmp_path / "other", "--out_dir", tmp_path / "no"]
    assert_one_line(run("train.py", *flags), "other characters", "hf")
