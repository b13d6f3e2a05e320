#!/bin/sh
# torch 2.13.0, paddlepaddle 3.3.1, tensorflow 2.21.0, mlx 0.32.4, mindspore 2.10.0:
# a compiled sampler that is seeded again.
#
# In all five, an uncompiled sampler repeats its tokens with the same seed and changes them with another one. Compiled,
# it does so in torch and paddle. tf.function keeps the seed of its first call: set_seed starts the text over, whatever
# the number. mx.compile keeps the noise itself, so every token of a constant distribution is the same; its page on
# compilation says that mx.random.state must be passed. And mindspore's jit ignores set_seed from the second call on.
# None of these three says anything. (tinygrad-seed-and-jit.sh is about a fourth.)
#
# It matters because "set the seed, then generate" is how samples are made reproducible, and it fails in three different
# ways as soon as the step is compiled. Draw the noise outside, and make it an argument.
#
# Seen (Linux x86-64, Python 3.11, gcc 12), three tokens of 1,000 after each seed:
#                         seed 0           seed 0           seed 1
#   torch.compile         436  863  780    436  863  780    510  164  118
#   paddle to_static      312  126  816    312  126  816     17  764  676
#   tf.function           158  895  943    158  895  943    158  895  943
#   mx.compile            805  805  805    805  805  805    805  805  805
#   mx.compile, state     805  158  991    805  158  991     81  367  586
#   mindspore jit         421  739  406    574  454  702    710  331  131
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 paddlepaddle==3.3.1 tensorflow-cpu==2.21.0 "mlx[cpu]==0.32.4" mindspore==2.10.0 \
    numpy==1.26.4 setuptools
# A file, because mindspore reads the source, and one process for each library.
cat > sampler.py <<'END'
import sys


def with_torch():
    import torch

    def draw():
        return torch.multinomial(torch.ones(1000), 1)

    return torch.manual_seed, draw, torch.compile(draw)


def with_paddle():
    import paddle

    def draw():
        return paddle.multinomial(paddle.ones([1000]), 1)

    return paddle.seed, draw, paddle.jit.to_static(draw, full_graph=True)


def with_tensorflow():
    import tensorflow as tf

    def draw():
        return tf.random.categorical(tf.zeros([1, 1000]), 1)

    return tf.random.set_seed, draw, tf.function(draw)


def with_mlx(**state):
    import mlx.core as mx

    def draw():
        return mx.random.categorical(mx.zeros(1000))

    return mx.random.seed, draw, mx.compile(draw, **state)


def with_mlx_state():
    import mlx.core as mx

    return with_mlx(inputs=mx.random.state, outputs=mx.random.state)


def with_mindspore():
    import mindspore
    from mindspore import ops

    def draw():
        return ops.multinomial(ops.ones((1, 1000)), 1)

    mindspore.set_device("CPU")
    return mindspore.set_seed, draw, mindspore.jit(draw)


def texts(set_seed, draw):
    import numpy as np

    for seed in (0, 0, 1):
        set_seed(seed)
        yield [int(np.asarray(draw()).item()) for _ in range(3)]


def behavior(first, again, other):
    if len({*first, *again, *other}) == 1:
        return "one token"
    if first == again:
        return "any seed is the first" if first == other else "correct"
    return "ignored"


set_seed, draw, compiled = globals()["with_" + sys.argv[1]]()
assert behavior(*texts(set_seed, draw)) == "correct", "without compilation"
seen = list(texts(set_seed, compiled))
print(f"{sys.argv[2]:20}" + "  ".join("{:5}{:5}{:5}".format(*text) for text in seen))
if behavior(*seen) != sys.argv[3]:
    sys.exit(f"changed: what a new seed does in {sys.argv[2]}: {behavior(*seen)}, not {sys.argv[3]}")
END
export TORCHINDUCTOR_CACHE_DIR="$dir/inductor"
sampler() {
    venv/bin/python -W ignore sampler.py "$@" 2>log || { tail -n 1 log >&2; exit 1; }
}
echo "                        seed 0           seed 0           seed 1"
sampler torch "torch.compile" "correct"
sampler paddle "paddle to_static" "correct"
sampler tensorflow "tf.function" "any seed is the first"
sampler mlx "mx.compile" "one token"
sampler mlx_state "mx.compile, state" "correct"
sampler mindspore "mindspore jit" "ignored"
