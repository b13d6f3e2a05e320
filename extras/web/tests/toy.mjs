// A tiny transformer in plain JavaScript, for tests without a graph: two layers of two heads, rotary positions, no MLP.
import assert from "node:assert/strict";
import { emptyCache } from "../page/cache.js";
import { softmax } from "../page/sampler.js";

export const INFO = { n_layer: 2, n_head: 2, n_kv_head: 2, head_size: 4, block_size: 32, chars: [..."abcdefgh"] };
INFO.ids = new Map(INFO.chars.map((char, id) => [char, id]));
const WIDTH = INFO.n_head * INFO.head_size;

let seed = 1;
const random = () => (seed = (Math.imul(seed, 48271) >>> 0) % 2147483647) / 2147483647 - 0.5;
const matrix = (rows) => Array.from({ length: rows }, () => Array.from({ length: WIDTH }, () => 3 * random()));
const times = (rows, x) => rows.map((row) => row.reduce((sum, w, i) => sum + w * x[i], 0));

const EMBEDDING = matrix(INFO.chars.length);
const LAYERS = Array.from({ length: INFO.n_layer }, () => [matrix(WIDTH), matrix(WIDTH), matrix(WIDTH)]);

/** Turn each pair of numbers by an angle that depends on the position. */
function rotated(x, position) {
  return x.map((own, i) => {
    const angle = position / (i % 4 < 2 ? 1 : 5);
    const partner = i % 2 ? x[i - 1] : -x[i + 1];
    return own * Math.cos(angle) + partner * Math.sin(angle);
  });
}

/** Feed ids after the columns of a cache. allowed(i, j): whether column i may look at column j. Returns the logits after
 *  every id, and the cache and queries that forward returns. */
function compute(ids, cache, positions, allowed) {
  const { length: past, heads, size } = cache;
  const end = past + ids.length;
  const [lanes, queries] = [[], []];
  let xs = ids.map((id) => EMBEDDING[id]);
  LAYERS.forEach((weights, layer) => {
    const [q, k, v] = weights.map((rows) => xs.map((x) => times(rows, x)));
    const [keys, values] = [k.map((x, i) => rotated(x, positions[i])), v].map((added, kind) => {
      const lane = new Float32Array(heads * end * size);
      for (let head = 0; head < heads; head++) {
        lane.set(cache.lanes[2 * layer + kind].subarray(head * past * size, (head + 1) * past * size), head * end * size);
        added.forEach((x, i) => lane.set(x.slice(head * size, (head + 1) * size), (head * end + past + i) * size));
      }
      lanes.push(lane);
      return (column, head) => lane.subarray((head * end + column) * size, (head * end + column + 1) * size);
    });
    const asked = q.map((x, i) => rotated(x, positions[i]));
    queries.push(Float32Array.from(asked.at(-1)));
    xs = xs.map((x, i) => {
      const out = Array.from({ length: heads }, (_, head) => {
        const query = asked[i].slice(head * size, (head + 1) * size);
        const seen = [...Array(end).keys()].filter((column) => allowed(past + i, column));
        const shares = softmax(seen.map((column) => times([query], keys(column, head))[0] / Math.sqrt(size)));
        return query.map((_, j) => seen.reduce((sum, column, n) => sum + shares[n] * values(column, head)[j], 0));
      });
      return out.flat().map((y, j) => x[j] + y);
    });
  });
  const logits = xs.map((x) => Float32Array.from(times(EMBEDDING, x)));
  return { logits, cache: { ...cache, length: end, lanes }, queries };
}

const causal = (i, j) => j <= i;

/** The logits after every id, in one forward without a cache. */
export function wholeLogits(ids, { positions = [...ids.keys()], allowed = causal } = {}) {
  return compute(ids, emptyCache(INFO), positions, allowed).logits;
}

/** Like createNetwork of network.js. */
export function toyNetwork() {
  async function forward(ids, cache, { positions, masked, keep = false } = {}) {
    const places = ids.map((_, i) => positions?.[i] ?? cache.length + i);
    const result = compute(ids, cache, places, (i, j) => j <= i && j !== masked);
    const kept = keep ? result : { cache, queries: null };
    return { logits: result.logits.at(-1), cache: kept.cache, queries: kept.queries };
  }
  return { forward, empty: emptyCache(INFO) };
}

export function assertClose(got, expected, most = 1e-5) {
  assert.equal(got.length, expected.length);
  got.forEach((x, i) => assert.ok(Math.abs(x - expected[i]) < most, `${got} is not ${expected}`));
}
