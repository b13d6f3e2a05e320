import assert from "node:assert/strict";
import { test } from "node:test";
import { attend } from "../page/attention.js";
import { gumbelNoise, pick, softmax } from "../page/sampler.js";
import { assertClose } from "./toy.mjs";

// from model import gumbel_noise; gumbel_noise(seed, torch.tensor([0]), torch.tensor([0, 7]), 4)[0].tolist()
const NOISE = {
  "0": [[0.913511157, 2.378411293, 1.746452689, 0.746552169], [0.320347935, 0.953059614, 2.001496792, -0.637909293]],
  "1337": [[1.812505484, -0.718592286, -0.294520557, -0.578877985], [3.003112793, 0.907980561, -0.201784298, -0.192437232]],
  "9223372039002259461": [
    [0.226205572, 1.042150617, -0.174606293, -0.613179445], [0.122135185, 3.147990465, -0.063990243, -0.63843137],
  ],
  "18446744073709551615": [
    [-0.625588953, 0.67990905, 0.961598396, 0.916688442], [1.234375238, -0.117457248, 2.656429529, -1.453853846],
  ],
};

test("the noise is PyTorch's, for seeds of one half and of both", () => {
  for (const [seed, rows] of Object.entries(NOISE)) {
    const noise = gumbelNoise(BigInt(seed));
    [0, 7].forEach((step, i) => assertClose([0, 1, 2, 3].map((id) => noise(step, id)), rows[i], 1e-6));
  }
});

test("at temperature 0 the largest logit wins, and the lowest id among equal ones", () => {
  const noise = gumbelNoise(3n);
  assert.equal(pick([1, 5, -2, 5], (id) => noise(0, id), 0, null), 1);
  assert.equal(pick([1, 5, 7, 5], (id) => noise(0, id), 0, 2), 2);
});

test("top-k leaves exactly k candidates, the lowest ids among equal ones", () => {
  const logits = [0, 2, 1, 2, 2, -1];
  const noise = (step) => (id) => gumbelNoise(9n)(step, id);
  const picked = (topK) => new Set(Array.from({ length: 200 }, (_, step) => pick(logits, noise(step), 5, topK)));
  assert.deepEqual(picked(1), new Set([1]));
  assert.deepEqual([...picked(2)].sort(), [1, 3]);
  assert.deepEqual([...picked(4)].sort(), [1, 2, 3, 4]);
  assert.equal(picked(1000).size, logits.length);
  assert.deepEqual(picked(1000), picked(null));
});

test("softmax is PyTorch's, and large logits do not overflow", () => {
  // torch.tensor([1.5, -0.25, 3, 0]).softmax(0).tolist()
  const expected = [0.170108736, 0.029560465, 0.762374461, 0.037956387];
  assertClose(softmax(Float32Array.of(1.5, -0.25, 3, 0)), expected, 1e-6);
  assertClose(softmax([1001.5, 999.75, 1003, 1000]), expected, 1e-6);
});

test("a hidden column gets no attention", () => {
  const [query, keys, values] = [[1, -2], [0.5, 1, -1, 0, 0, -0.5], [1, 2, -1, 0.5, 0.25, -3]].map((each) => Float32Array.from(each));
  const { weights, mix } = attend(query, keys, values, 1);
  assert.equal(weights[1], 0);
  // q, k, v: the tensors above, in rows of 2. F.scaled_dot_product_attention(q, k, v, attn_mask=torch.tensor([[True, False, True]]))
  assertClose([...mix], [0.359365165, -2.270898581], 1e-6);
});
