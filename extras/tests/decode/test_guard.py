"""extras/decode/guard.py: after an edit of model.py, step.c computes nothing, and one line says why."""

import functools
import importlib.util
import inspect
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from operator import attrgetter

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from extra_helpers import needs_compiler
from extras.decode import cuda_graph, guard
from extras.decode.c_step import CompileError, compile_step
from extras.decode.engine import Decoder, Generation
from helpers import ROOT, V, random_model
from model import ACTIVATIONS, MLP, GPTConfig, Sampling

pytestmark = needs_compiler

NETWORK = dict(n_layer=2, n_head=4, n_embd=20, activation="gelu")
MODEL = random_model(GPTConfig(block_size=16, vocab_size=V, **NETWORK))


def compiled(model=MODEL):
    return compile_step(model, num_drafts=0, table=None)


EDITS = {  # valid edits of model.py, after which step.c would generate different text, or none
    "window": ("<= pos[..., None]", "<= pos[..., None] - 8"),
    "length": ("cache.length += idx.size(1)", "cache.length += idx.size(1) - 1"),
    "mlp": ("x = self.activation(x)\n", "x = self.activation(2 * x)\n"),
    "gelu": ('"gelu": F.gelu,', '"gelu": F.relu,'),
    "slots": ("min(slots or config.block_size, config.block_size)", "min(slots or config.block_size, 8)"),
    "noise": ("vocab_size).unbind(1)", "vocab_size).mul(0.5).unbind(1)"),
    "filter": ("logits[..., sampling.top_k :]", "logits[..., sampling.top_k + 1 :]"),
    "eps": ("self.ln_1 = nn.LayerNorm(config.n_embd, bias", "self.ln_1 = nn.LayerNorm(config.n_embd, 1e-4, bias"),
    "norm": ("self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)", "self.ln_2 = nn.RMSNorm(config.n_embd)"),
    "logits": ("self.lm_head(x[:, -1] if last else x)", "9 * torch.tanh(self.lm_head(x[:, -1] if last else x) / 9)"),
    "sampler": ("score = logits + sampling.temperature * noise", "score = logits + 2 * sampling.temperature * noise"),
    "cache": (
        "return torch.arange(start, start + T, device=idx.device)",
        "return torch.arange(start, start + T, device=idx.device) + (start > 0)",
    ),
    "loop": ("new = sample_token(logits, noise, sampling)", "new = sample_token(-logits, noise, sampling)"),
    "constructor": ("ACTIVATIONS[config.activation]", 'ACTIVATIONS["gelu_tanh"]'),
    "signature": ("def rotate(x, cos, sin):", 'def rotate(x, cos, sin, y="é"):'),
}


def edited_functions():
    """The functions of model.py, or of the edited copy, whose code is not the one that step.c belongs to."""
    found = {name: guard.source_hash(attrgetter(name)(guard.model_py)) for name in guard.REPEATED}
    return [name for name, (expected, *_) in guard.REPEATED.items() if found[name] != expected]


def test_step_c_belongs_to_this_model_py():
    """If this fails, you have edited model.py. Make step.c compute the same, then put the new hash into guard.py."""
    compiled()  # the message has the hash
    assert edited_functions() == []


def test_each_function_has_its_counterparts():
    source = (ROOT / "extras" / "decode" / "step.c").read_text(encoding="utf-8")
    for _, in_c, in_graph in guard.REPEATED.values():
        for name in in_c.split(", "):
            assert re.search(rf"^(static|INLINE) .*\b{name}\(", source, flags=re.MULTILINE), name
        assert not in_graph or hasattr(cuda_graph, in_graph) or hasattr(cuda_graph.GraphedGPT, in_graph)


def edited_model_py(folder, monkeypatch, *replacements):
    """Let step.c be compared with an edited copy of model.py."""
    text = (ROOT / "model.py").read_text(encoding="utf-8")
    for old, new in replacements:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    file = folder / f"edited_{time.monotonic_ns()}.py"  # a new name, because linecache keeps what it has read
    file.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(guard, "model_py", module)
    return module


@pytest.mark.parametrize("edit", EDITS)
def test_after_an_edit_of_model_py_step_c_computes_nothing(edit, tmp_path, monkeypatch):
    """The line names the function, if step.c repeats it."""
    module = edited_model_py(tmp_path, monkeypatch, EDITS[edit])
    model = module.GPT(module.GPTConfig(block_size=70, vocab_size=V, **NETWORK)).eval()
    with pytest.raises(CompileError) as error:
        compiled(model)
    for name in edited_functions():
        assert re.search(rf"^{name} in model\.py has changed.* is [0-9a-f]{{16}}\)$", str(error.value))


@pytest.mark.parametrize(
    "old, new",
    [
        ("def state_dict(self):", "def state_dict(self):\n        print()"),  # not repeated
        ("# rotate in float32, whatever the dtype of x", "# é"),
        ('"""Return `(B, T, C)`: all of the network but', '"""Return all of the network but'),
        (
            '        """Return `(B, T, C)`: all of the network but lm_head. Unlike forward, pos makes no cache."""\n',
            "",
        ),
        ("x = self.activation(gate) * x", "x = (\n                self.activation(gate) * x\n            )"),
    ],
)
def test_comments_docstrings_and_line_breaks_do_not_count(old, new, tmp_path, monkeypatch):
    module = edited_model_py(tmp_path, monkeypatch, (old, new))
    assert edited_functions() == []
    compiled(module.GPT(MODEL.config).eval())


OTHER_PYTHON = """
import ast, hashlib, sys
{canonical}
for file in sys.argv[1:]:
    print(hashlib.sha256(canonical(ast.parse(open(file, encoding="utf-8").read())).encode()).hexdigest())
"""


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_every_version_of_python_gives_the_same_hashes(version):
    """The hashes in guard.py come from one of them."""
    program = shutil.which(f"python{version}")
    if not program or subprocess.run([program, "-c", ""], capture_output=True).returncode:
        pytest.skip(f"needs python{version}")
    script = OTHER_PYTHON.format(canonical=inspect.getsource(guard.canonical))
    files = [ROOT / name for name in ("model.py", "train.py", "sample.py", "data/prepare.py")]
    ours, theirs = (
        subprocess.run([python, "-c", script, *files], capture_output=True, encoding="utf-8")
        for python in (sys.executable, program)
    )
    assert theirs.returncode == 0, theirs.stderr
    assert len(ours.stdout.split()) == len(files) and ours.stdout == theirs.stdout


def norm_with(**settings):
    def change(model):
        model.transformer["h"][1].ln_2 = torch.nn.LayerNorm(model.config.n_embd, **settings)

    return change


def set_weight(path, *shape, dtype=torch.float32):
    def change(model):
        model.get_submodule(path).weight = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))

    return change


def set_attribute(path, name, value):
    return lambda model: setattr(model.get_submodule(path), name, value)


REFUSED = {
    "hook": (lambda model: model.transformer["h"][0].mlp.register_forward_hook(lambda *_: None), "hooks"),
    "hook on all modules": (lambda _: register_module_forward_hook(lambda *_: None), "hooks"),
    "method of an instance": (
        set_attribute("transformer.h.1.mlp", "forward", lambda x: 0 * x),
        "MLP with a patched forward",
    ),
    "another layer": (lambda model: model.transformer.update({"ln_f": torch.nn.RMSNorm(32)}), "RMSNorm"),
    "parametrization": (lambda m: torch.nn.utils.parametrizations.weight_norm(m.lm_head), "ParametrizedLinear"),
    "eps": (norm_with(eps=1e-6), "eps"),
    "norm without weight": (norm_with(elementwise_affine=False), "a weight"),
    "max_norm": (set_attribute("transformer.wte", "max_norm", 1.0), "max_norm"),
    "a layer less": (lambda model: model.transformer["h"].pop(1), "1 layers.*n_layer=2"),
    "smaller head": (set_weight("lm_head", V - 1, 32), "22, 32.*23, 32"),
    "shorter positions": (set_weight("transformer.wpe", 7, 32), "7, 32.*16, 32"),
    "two dtypes": (set_weight("transformer.h.1.attn.c_proj", 32, 32, dtype=torch.float64), "float64"),
    "bfloat16": (lambda model: model.bfloat16(), "float32.*bfloat16"),
    "another config": (lambda model: setattr(model.config, "n_head", 2), "fit its config"),
    "another activation": (
        set_attribute("transformer.h.1.mlp", "activation", ACTIVATIONS["swiglu"]),
        "activation gelu",
    ),
    "unknown activation": (set_attribute("transformer.h.1.mlp", "activation", torch.relu), "activation gelu"),
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_the_source_does_not_tell_is_refused(change):
    model = random_model(GPTConfig(block_size=16, vocab_size=V, n_layer=2, n_head=4, n_embd=32, tie_weights=False))
    compiled(model)
    function, words = REFUSED[change]
    handle = function(model)
    try:
        with pytest.raises(CompileError, match=words) as refused:
            compiled(model)
        assert "\n" not in str(refused.value)
    finally:
        if change == "hook on all modules":
            handle.remove()


def test_norms_of_two_kinds_are_refused_even_if_step_c_knows_both(monkeypatch):
    """A program computes one kind."""
    monkeypatch.setattr(guard, "NORMS", {torch.nn.LayerNorm, torch.nn.RMSNorm})
    model = random_model(MODEL.config)
    compiled(model)
    model.transformer["ln_f"] = torch.nn.RMSNorm(20, eps=1e-5)
    with pytest.raises(CompileError, match="does not know the layer RMSNorm"):
        compiled(model)


@functools.wraps(MLP.forward)  # inspect.getsource shows what it wraps
def wrapped(self, x):
    return 0 * x


@pytest.mark.parametrize(
    "patch", [wrapped, eval("lambda self, x: x"), lambda self, x: x, abs, functools.partial(wrapped)]
)
@pytest.mark.parametrize("kind", [MLP, torch.nn.LayerNorm])
def test_a_method_patched_into_a_class_is_refused(kind, patch, monkeypatch):
    monkeypatch.setattr(kind, "forward", patch)
    with pytest.raises(CompileError) as refused:
        compiled()
    assert "\n" not in str(refused.value)


@dataclass
class NewSampling(Sampling):
    """Sampling after somebody has added a setting to it."""

    min_p: float | None = None


def test_a_setting_of_the_sampler_that_step_c_does_not_know_is_refused():
    """Somebody may have put in the new hash of sample_token without a change of step.c."""
    decoder = Decoder(MODEL, compile=True)
    prompt = [torch.tensor([1])]
    assert len(list(Generation(decoder, prompt, 3, NewSampling(seed=1)))) > 0
    with pytest.raises(CompileError, match=r"step\.c has no min_p$"):
        Generation(decoder, prompt, 3, NewSampling(seed=1, min_p=0.1))
