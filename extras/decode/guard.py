"""Does --compile compute what this model.py computes? It runs step.c, or on a GPU cuda_graph.py.

Both are a few functions of model.py, rewritten. Comparing outputs could not prove that they agree, because a difference
may show only late in the text. So they belong to one version of each function, whose hash is here. If one has changed,
or the model has a layer that they do not know, we decode without --compile.
"""

import ast
import contextlib
import hashlib
import inspect
import os
import textwrap
import types
from dataclasses import fields
from functools import cache, partial
from operator import attrgetter

import torch
from torch import nn
from torch.nn import functional as F

import model as model_py
from extras.decode.c_library import CompileError
from extras.decode.c_pack import NORMS

# A function of model.py: its hash, and what computes the same in step.c and in cuda_graph.py. None: cuda_graph.py calls
# the function itself. Once you have changed both to match, put in the hash that the message names. Comments, docstrings
# and the layout of the code do not count.
REPEATED = {
    "KVCache.next_positions": ("43ebae0cb5410430", "plan, accept", "stream"),
    "KVCache.update": ("e57f12edf27cfaff", "forward", "attend"),
    "KVCache.mask": ("9ba9e5eb5a2db1d4", "forward", None),
    "rotate": ("b2ef75fe0b946155", "rotate", None),
    "CausalSelfAttention.forward": ("2cea02760b9e8ec7", "forward, attend", "attend"),
    "MLP.forward": ("f68477bca22343a6", "forward, activate", "feed_forward"),
    "Block.forward": ("512d730d44e510fc", "forward, norm", "logits"),
    "GPT.forward": ("2ff02d1c0f5c7f49", "work, plan", "logits"),
    "GPT.hidden_states": ("80cfd8fa183abbda", "forward", "logits"),
    "GPT.new_cache": ("1910467ae981b3dc", "work", "stream"),
    "generate": ("90b74c355c9ffc65", "work", "stream"),
    "slide": ("049db06ee8ef579a", "work", None),
    "require_finite": ("078321bcb29525b7", "sample_token", None),
    "sample_token": ("6c2375f195acf9ed", "sample_token", None),
    "Sampling.noise": ("22dfbc91cf604f2e", "gumbel_noise", None),
    "gumbel_noise": ("1e51bb36e1c52083", "gumbel_noise", None),
}
SAMPLING = {"temperature", "top_k", "top_p", "seed", "samples", "overflow"}  # what step.c knows
ACTIVATIONS = {"gelu": (F.gelu, {}), "gelu_tanh": (F.gelu, {"approximate": "tanh"}), "swiglu": (F.silu, {})}


def refuse_other_networks(model, graph=False):
    """Raise CompileError unless --compile computes what this model computes. pack_weights checks the shapes for step.c.

    graph  whether cuda_graph.py is to compute it, instead of step.c
    """
    refuse_changed_code(graph)
    refuse_unknown_layers(model)
    refuse_other_settings(model, graph)


def refuse_changed_code(graph):
    """Raise CompileError if a function of model.py that we repeat has changed."""
    for name, (expected, in_c, in_graph) in REPEATED.items():
        found = source_hash(attrgetter(name)(model_py))
        if found != expected and (in_graph or not graph):
            where = f"cuda_graph.py in {in_graph}" if graph else f"step.c in {in_c}"
            both = "step.c and cuda_graph.py compute" if in_graph else "step.c computes"
            raise CompileError(
                f"{name} in model.py has changed, and {where} computes the old version (once {both} the new one, its "
                f"hash in guard.py is {found})"
            )


def refuse_other_sampling(sampling):
    """Raise CompileError if a setting of Sampling is in use that step.c does not know."""
    for f in fields(sampling):
        if f.name not in SAMPLING and getattr(sampling, f.name) != f.default:
            raise CompileError(f"step.c has no {f.name}")


def refuse_other_settings(model, graph):
    """Raise CompileError unless every layer is what the config says, which is all that we know.

    graph  see refuse_other_networks. cuda_graph.py calls the activation of the model, whatever it is
    """
    config = model.config
    blocks = model.transformer["h"]
    if len(blocks) != config.n_layer:
        raise CompileError(f"the model has {len(blocks)} layers, but its config says n_layer={config.n_layer}")
    for block in blocks:
        attn = block.attn
        mlp = block.mlp
        activation = partial(mlp.activation)  # which may be a partial already
        if not graph and (activation.func, activation.keywords) != ACTIVATIONS.get(config.activation):
            raise CompileError(f"step.c does not compute the activation {config.activation} of this model")
        fits = (
            block.norm_first == config.norm_first
            and attn.n_head == config.n_head
            and attn.n_kv_head == config.n_kv_head
            and attn.head_size == config.head_size
            and attn.qk_norm == config.qk_norm
            and mlp.gated == (config.activation == "swiglu")
        )
        if not fits:
            raise CompileError("the model has a layer that does not fit its config")


def refuse_unknown_layers(model):
    """Raise CompileError for what the source does not show: foreign layers, their settings, hooks, patched methods."""
    ours = (model_py.GPT, model_py.Block, model_py.CausalSelfAttention, model_py.MLP)
    norms = [type(module) for module in model.modules() if type(module) in NORMS]
    layers = (nn.Linear, nn.Embedding, *norms[:1])  # all norms are of one kind
    known = (*ours, nn.ModuleDict, nn.ModuleList, *layers)
    hooks = [nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks]
    for module in model.modules():
        kind = type(module)
        if kind not in known:
            raise CompileError(f"--compile does not know the layer {kind.__name__}")
        methods = [name for name in vars(module) if callable(getattr(kind, name, None))]
        if methods:
            raise CompileError(f"--compile cannot compute a {kind.__name__} with a patched {methods[0]}")
        if hasattr(module, "eps") and (module.eps != 1e-5 or module.weight is None):
            raise CompileError(f"--compile cannot compute {module}: it needs eps=1e-05 and a weight")
        if kind is nn.Embedding and module.max_norm is not None:
            raise CompileError(f"--compile cannot compute {module}: it does not implement max_norm")
        hooks += [module._forward_hooks, module._forward_pre_hooks]
    if any(hooks):
        raise CompileError("--compile cannot compute a model with forward hooks")
    for kind, name in ((nn.Module, "__call__"), *((kind, "forward") for kind in layers)):
        if not from_torch(code_of(getattr(kind, name))):
            raise CompileError(f"--compile cannot compute {kind.__name__}, because its {name} is not PyTorch's")


# -- the hash of a function --------------------------------------------------------------------------------------------


def source_hash(function):
    """Return a hash of the code of a function. Raises CompileError if its source is unknown."""
    try:
        return code_hash(code_of(function))
    except (OSError, SyntaxError):  # SyntaxError: of a lambda, getsource returns the lines around it
        raise CompileError(f"--compile cannot compute {function.__qualname__}, whose source is unknown") from None


@cache  # it takes a millisecond
def code_hash(code):
    source = textwrap.dedent(inspect.getsource(code))
    return hashlib.sha256(canonical(ast.parse(source)).encode()).hexdigest()[:16]


def canonical(node):
    """Return an ast as text without docstrings, the same in every version of Python.

    ast.dump and ast.unparse differ between versions: in empty fields, in new ones, in the quotes of f-strings.
    """
    if isinstance(node, list):
        return f"[{', '.join(map(canonical, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = {name: value for name, value in ast.iter_fields(node) if value is not None and value != []}
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node, clean=False) is not None:
        fields["body"] = node.body[1:]
    return f"{type(node).__name__}({', '.join(f'{name}={canonical(fields[name])}' for name in sorted(fields))})"


def code_of(function):
    """Return the code that a call of `function` runs. Raises CompileError if it is not written in Python."""
    if not isinstance(function, types.FunctionType):
        raise CompileError(f"--compile cannot compute {function!r:.100}, which has no source")
    known_wrapper = from_torch(function.__code__) or function.__code__.co_filename == contextlib.__file__
    if known_wrapper and hasattr(function, "__wrapped__"):  # by torch.inference_mode or contextmanager
        return code_of(function.__wrapped__)
    return function.__code__  # a wrapper's own code, while inspect.getsource shows what it wraps


def from_torch(code):
    return code.co_filename.startswith(os.path.dirname(torch.__file__))
