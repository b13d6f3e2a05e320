import assert from "node:assert/strict";
import { test } from "node:test";
import { attend } from "../page/attention.js";

const QUERY = Float32Array.of(1, -2, 0.5, 0);
const KEYS = [[0.5, 1, -1, 2], [-1, 0, 2, 1], [0, -0.5, 1, 3]];
const VALUES = [[1, 2, 3, 4], [-1, 0.5, 0, 2], [0.25, -3, 1, 1]];
const flat = (rows) => Float32Array.from(rows.flat());

const assertClose = (got, expected) => {
  assert.equal(got.length, expected.length);
  got.forEach((x, i) => assert.ok(Math.abs(x - expected[i]) < 1e-6, `${got} is not ${expected}`));
};

test("weights and mix are PyTorch's", () => {
  const { scores, weights, mix } = attend(QUERY, flat(KEYS), flat(VALUES));
  assertClose(scores, [-1, 0, 0.75]); // products that one can add up by hand, divided by the root of 4
  // q, k, v: the tensors above, q of shape (1, 4). (q @ k.T / 2).softmax(-1), F.scaled_dot_product_attention(q, k, v)
  assertClose(weights, [0.105564475, 0.286953986, 0.607481599]);
  assertClose([...mix], [-0.029519126, -1.467838764, 0.924175024, 1.60364747]);
});

test("a hidden column gets no attention, and the rest get theirs as if it were not there", () => {
  const { weights, mix } = attend(QUERY, flat(KEYS), flat(VALUES), 1);
  const rest = attend(QUERY, flat([KEYS[0], KEYS[2]]), flat([VALUES[0], VALUES[2]]));
  assert.deepEqual(weights, [rest.weights[0], 0, rest.weights[1]]);
  // F.scaled_dot_product_attention(q, k, v, attn_mask=torch.tensor([[True, False, True]]))
  assertClose([...mix], [0.361035407, -2.259763718, 1.296094418, 1.444141626]);
});

test("weights sum to 1, and scores of a thousand do not overflow", () => {
  const { weights, mix } = attend(QUERY.map((x) => 1000 * x), flat(KEYS), flat(VALUES));
  assertClose([weights.reduce((sum, x) => sum + x)], [1]);
  assertClose(weights, [0, 0, 1]);
  assertClose([...mix], VALUES[2]);
});
