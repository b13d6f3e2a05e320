#!/bin/sh
# @huggingface/transformers 4.3.1 (transformers.js): top_p, min_p and num_beams are accepted and ignored.
#
# transformers.js reads the same generation_config.json as Python and takes the same options. Of the sampling filters it
# applies temperature and top_k. top_p, min_p, typical_p and epsilon_cutoff change nothing, and num_beams=4 gives the
# greedy text. There is no warning.
#
# It matters because many published models set top_p in generation_config.json: the page samples from the whole
# vocabulary (or the 50 best, the default top_k), where Python leaves out the unlikely rest. Set top_k.
#
# Seen (Linux x86-64, Python 3.11, Node.js 20), logits of 0, -1, ... -15, different tokens in 2,000 draws, and a graph
# whose likeliest pair of tokens does not begin with the likeliest token (the draws vary):
#   top_k 3          3, the filter leaves 3
#   top_p 0.7        8, the filter leaves 2
#   min_p 0.3        7, the filter leaves 2
#   num_beams 4      [1,0], greedy [1,0], the likeliest pair is [2,3]
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq onnx==1.23.2 numpy==2.4.6
npm install --silent --no-audit --no-fund --ignore-scripts @huggingface/transformers@4.3.1
ORT_DISABLE_TELEMETRY=1
export ORT_DISABLE_TELEMETRY
venv/bin/python - <<'END'
import json
import os

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

# a decoder with a cache of zeros, whose logits depend only on the token before: after 0 always the same
V = 16
after = np.tile(-np.arange(V, dtype=np.float32), (V, 1))
# for the beams: 0 is followed by 1, which leads to poor tokens, while 2 leads to good ones
beams = np.full((V, V), -3.0, np.float32)
beams[0, 1], beams[0, 2], beams[2, 3] = 1.0, 0.9, 9.0


def write(folder, logits):
    os.makedirs(f"{folder}/onnx")
    value, node = helper.make_tensor_value_info, helper.make_node
    cache = [f"past_key_values.0.{name}" for name in ("key", "value")]
    present = [f"present.0.{name}" for name in ("key", "value")]
    ids = [value(name, TensorProto.INT64, ["batch", "new"]) for name in ("input_ids", "attention_mask", "position_ids")]
    nodes = [
        node("Gather", ["logits_after", "input_ids"], ["logits"]),
        node("Gather", ["zeros", "input_ids"], ["x"]),
        node("Unsqueeze", ["x", "one"], ["new"]),
        *(node("Concat", [old, "new"], [both], axis=2) for old, both in zip(cache, present)),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        ids + [value(name, TensorProto.FLOAT, ["batch", 1, "past", 4]) for name in cache],
        [value("logits", TensorProto.FLOAT, ["batch", "new", V])]
        + [value(name, TensorProto.FLOAT, ["batch", 1, "all", 4]) for name in present],
        [
            numpy_helper.from_array(logits, "logits_after"),
            numpy_helper.from_array(np.zeros((V, 4), np.float32), "zeros"),
            numpy_helper.from_array(np.array([1]), "one"),
        ],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), f"{folder}/onnx/model.onnx"
    )
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_head": 1, "n_embd": 4, "n_layer": 1}
    with open(f"{folder}/config.json", "w") as file:
        json.dump(config | {"vocab_size": V, "n_positions": 64, "bos_token_id": 0, "eos_token_id": V - 1}, file)


write("fixed", after)
write("beams", beams)
END
cat > generate.mjs <<'END'
import { AutoModelForCausalLM, Tensor, env } from "@huggingface/transformers";

env.allowRemoteModels = false;
env.localModelPath = "./";
const inputs = new Tensor("int64", [0n], [1, 1]);
const attention_mask = new Tensor("int64", [1n], [1, 1]);

async function generate(model, options) {
  const ids = await model.generate({ inputs, attention_mask, ...options });
  return ids.tolist()[0].slice(1).map(Number);
}

const fixed = await AutoModelForCausalLM.from_pretrained("fixed", { dtype: "fp32" });
const seen = {};
for (const [name, options] of Object.entries({
  "top_k 3": { top_k: 3 },
  "top_p 0.7": { top_k: 0, top_p: 0.7 },
  "min_p 0.3": { top_k: 0, min_p: 0.3 },
})) {
  const tokens = new Set();
  for (let i = 0; i < 2000; i++) {
    tokens.add((await generate(fixed, { do_sample: true, max_new_tokens: 1, ...options }))[0]);
  }
  seen[name] = tokens.size;
  console.log(`${name.padEnd(16)} ${tokens.size}, the filter leaves ${name === "top_k 3" ? 3 : 2}`);
}
const beams = await AutoModelForCausalLM.from_pretrained("beams", { dtype: "fp32" });
const greedy = await generate(beams, { do_sample: false, max_new_tokens: 2 });
const searched = await generate(beams, { do_sample: false, max_new_tokens: 2, num_beams: 4 });
console.log(`num_beams 4      [${searched}], greedy [${greedy}], the likeliest pair is [2,3]`);
if (!(seen["top_k 3"] === 3 && seen["top_p 0.7"] > 4 && seen["min_p 0.3"] > 4 && `${searched}` === `${greedy}`)) {
  console.error("changed: transformers.js applies top_p, min_p or num_beams");
  process.exit(1);
}
END
node generate.mjs
