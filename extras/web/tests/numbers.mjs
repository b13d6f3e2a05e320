// Asks the exported graph what the page's worker asks it, without a browser, and prints the answers as JSON.
//
//     node extras/web/tests/numbers.mjs FOLDER PLAN        PLAN, as JSON: see test_numbers.py
import { readFileSync } from "node:fs";
import { gunzipSync } from "node:zlib";
import * as ort from "../node_modules/onnxruntime-web/dist/ort.wasm.min.mjs";
import { attend } from "../page/attention.js";
import { keptColumns } from "../page/cache.js";
import { begin, step } from "../page/generate.js";
import { createNetwork } from "../page/network.js";

const [folder, plan] = [process.argv[2], JSON.parse(process.argv[3])];
const file = (name) => readFileSync(`${folder}/${name}`);
const info = JSON.parse(file("model.json"));
info.chars = [...info.chars];
ort.env.logLevel = "error";
ort.env.wasm.numThreads = 1;
const network = await createNetwork(ort, new Uint8Array(gunzipSync(file("model.onnx.gz"))), info);

const lists = (arrays) => arrays.map((array) => [...array]);
const run = begin(network, plan.prompt, plan.steps, { ...plan.sampling, seed: BigInt(plan.sampling.seed) });
const kept = keptColumns(info);
const steps = [];
for (let i = 0; i < plan.steps; i++) {
  steps.push(await step(run, "on"));
  kept.add(steps.at(-1).columns);
}
const layers = [...Array(info.n_layer).keys()];
const answers = {
  ids: run.on.ids,
  probabilities: steps.map(({ probabilities }) => probabilities),
  kept: layers.map((layer) =>
    [0, 1].map((kind) => lists(Array.from({ length: info.n_kv_head }, (_, head) => kept.lane(layer, kind, head)))),
  ),
  attention: layers.map((layer) =>
    Array.from({ length: info.n_head }, (_, head) => {
      const query = steps.at(-1).queries[layer].subarray(head * info.head_size, (head + 1) * info.head_size);
      const serving = Math.floor((head * info.n_kv_head) / info.n_head);
      const { weights, mix } = attend(query, kept.lane(layer, 0, serving), kept.lane(layer, 1, serving));
      return [weights, [...mix]];
    }),
  ),
};
const forward = async (options) => [...(await network.forward(plan.prompt, network.empty, options)).logits];
answers.moved = await forward({ positions: plan.positions });
answers.masked = await forward({ masked: plan.masked });
console.log(JSON.stringify(answers));
