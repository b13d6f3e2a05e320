#!/bin/sh
# optax 0.2.8 with flax 0.12.8, keras 3.15.1: Muon orthogonalizes the biases of an attention layer, not its weights.
#
# Both libraries choose Muon for parameters with two axes and Adam for all others, which is documented. But the query,
# key and value weights of flax's and Keras's MultiHeadAttention have three axes (width, heads, head size), and their
# biases two (heads, head size). So the weights get Adam, at Muon's learning rate, and the biases Muon, across heads.
# Embedding and output layer get Muon too (in Keras, only the output layer). mlx stores its attention in two axes, so
# there the weights get Muon; its biases get plain momentum.
#
# It matters because Muon is meant for these weights, and its learning rate is too large for Adam: in the first step
# they move 14 (flax) or 6 times (Keras) as far as those of the MLP. In optax, pass muon_weight_dimension_numbers; in
# Keras, write the attention with Dense layers.
#
# Seen (Linux x86-64, Python 3.11), first step at a learning rate of 1, width 64, 4 heads, root mean square:
#                         flax, optax        keras              mlx
#   embedding             Muon      0.11     Adam      1.00     Muon      0.11
#   query weight          Adam      1.47     Adam      1.00     Muon      0.11
#   query bias            Muon      0.49     Muon      0.21     momentum  0.09
#   attention out weight  Adam      1.47     Adam      1.00     Muon      0.11
#   attention out bias    Adam      1.47     Adam      1.00     momentum  0.08
#   MLP weight            Muon      0.11     Muon      0.17     Muon      0.11
#   output weight         Muon      0.11     Muon      0.17     Muon      0.11
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq jax==0.10.2 flax==0.12.8 optax==0.2.8 keras==3.15.1 'mlx[cpu]==0.32.4' numpy==2.4.6
KERAS_BACKEND=jax venv/bin/python -W ignore - <<'END'
import sys

import jax
import keras
import mlx.core as mx
import mlx.nn
import mlx.optimizers
import mlx.utils
import numpy as np
import optax
from flax import nnx

WIDTH, HEADS, VOCABULARY = 64, 4, 65
rng = np.random.default_rng(0)


def gradients(shapes):
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def with_optax():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embedding = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
            self.mlp = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
            self.output = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    leaves, tree = jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(nnx.state(Model(nnx.Rngs(0)), nnx.Param)))
    params = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    grads = gradients({name: p.shape for name, p in params.items()})
    muon = optax.contrib.muon(1.0)
    weights = tree.unflatten(params.values())
    updates, _ = muon.update(tree.unflatten(grads.values()), muon.init(weights), weights)
    steps = dict(zip(params, map(np.asarray, jax.tree.leaves(updates))))
    names = "embedding/embedding attention/query/kernel attention/query/bias attention/out/kernel attention/out/bias"
    return steps, grads, (names + " mlp/kernel output/kernel").split()


def with_keras():
    tokens = keras.Input((8,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, WIDTH, name="embedding")(tokens)
    x = keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS, name="attention")(x, x)
    x = keras.layers.Dense(4 * WIDTH, name="mlp")(x)
    x = keras.layers.Dense(VOCABULARY, name="output")(x)
    variables = keras.Model(tokens, x).trainable_variables
    before = {v.path: np.array(v) for v in variables}
    grads = gradients({v.path: v.shape for v in variables})
    muon = keras.optimizers.Muon(1.0, weight_decay=None, adam_weight_decay=None)
    muon.build(variables)
    muon.apply([keras.ops.convert_to_tensor(g) for g in grads.values()], variables)
    steps = {v.path: np.array(v) - before[v.path] for v in variables}
    names = "embedding/embeddings attention/query/kernel attention/query/bias"
    names += " attention/attention_output/kernel attention/attention_output/bias mlp/kernel output/kernel"
    return steps, grads, names.split()


def with_mlx():
    class Model(mlx.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = mlx.nn.Embedding(VOCABULARY, WIDTH)
            self.attention = mlx.nn.MultiHeadAttention(WIDTH, HEADS, bias=True)
            self.mlp = mlx.nn.Linear(WIDTH, 4 * WIDTH)
            self.output = mlx.nn.Linear(WIDTH, VOCABULARY)

    params = Model().parameters()
    flat = dict(mlx.utils.tree_flatten(params))
    grads = gradients({name: p.shape for name, p in flat.items()})
    tree = mlx.utils.tree_unflatten([(name, mx.array(g)) for name, g in grads.items()])
    new = dict(mlx.utils.tree_flatten(mlx.optimizers.Muon(1.0, weight_decay=0).apply_gradients(tree, params)))
    steps = {name: np.array(new[name] - p) for name, p in flat.items()}
    names = "embedding.weight attention.query_proj.weight attention.query_proj.bias attention.out_proj.weight"
    return steps, grads, (names + " attention.out_proj.bias mlp.weight output.weight").split()


def kind(step, gradient):
    if np.abs(step).std() < 1e-3 * np.abs(step).mean():
        return "Adam"  # its first step has the same size everywhere
    if np.allclose(step / gradient, (step / gradient).mean(), rtol=1e-3):
        return "momentum"  # proportional to the gradient
    u, _, v = np.linalg.svd(gradient, full_matrices=False)
    cosine = -(step * (u @ v)).sum() / np.linalg.norm(step) / np.linalg.norm(u @ v)
    return "Muon" if cosine > 0.9 else "?"


rows = "embedding|query weight|query bias|attention out weight|attention out bias|MLP weight|output weight".split("|")
seen = []
for run in (with_optax, with_keras, with_mlx):
    steps, grads, names = run()
    seen.append([(kind(steps[name], grads[name]), np.sqrt((steps[name] ** 2).mean())) for name in names])
print(f"{'':22}{'flax, optax':19}{'keras':19}mlx")
for name, *entries in zip(rows, *seen):
    print(f"{name:22}" + "".join(f"{kind:10}{rms:4.2f}     " for kind, rms in entries).rstrip())
expected = [
    ["Muon", "Adam", "Muon", "Adam", "Adam", "Muon", "Muon"],
    ["Adam", "Adam", "Muon", "Adam", "Adam", "Muon", "Muon"],
    ["Muon", "Muon", "momentum", "Muon", "momentum", "Muon", "Muon"],
]
if [[kind for kind, _ in column] for column in seen] != expected:
    sys.exit("changed: which parameters of an attention layer get Muon")
END
