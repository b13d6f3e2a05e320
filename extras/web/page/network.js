// The network: one forward of the exported graph, with a cache as its argument and its result.
import { emptyCache } from "./cache.js";

/** Return { forward, empty } of a graph. `empty` is a cache without columns.
 *
 *  ort: ONNX Runtime; bytes: the graph; info: model.json
 */
export async function createNetwork(ort, bytes, info) {
  const session = await ort.InferenceSession.create(bytes, { executionProviders: ["wasm"] });
  const empty = emptyCache(info);
  const queries = Array.from({ length: info.n_layer }, (_, i) => `query.${i}`);
  const names = empty.lanes.map((_, i) => `${i >> 1}.${i % 2 ? "value" : "key"}`);
  const presents = names.map((name) => `present.${name}`);

  const row = (length, value) =>
    new ort.Tensor("int64", BigInt64Array.from({ length }, (_, i) => BigInt(value(i))), [1, length]);

  /** Feed `ids` after the columns of `cache`.
   *
   *  positions  of the ids; by default they continue the cache
   *  masked     a column that no query may see (attention_mask 0)
   *  keep       whether to return the cache, extended by the new columns, and the queries of the last id
   *  Returns the logits after the last id, the cache, and per layer the queries, a Float32Array (query heads, head size).
   */
  async function forward(ids, cache, { positions, masked, keep = false } = {}) {
    const past = cache.length;
    const end = past + ids.length;
    const feeds = {
      input_ids: row(ids.length, (i) => ids[i]),
      attention_mask: row(end, (i) => (i === masked ? 0 : 1)),
      position_ids: row(ids.length, (i) => positions?.[i] ?? past + i),
    };
    names.forEach((name, i) => {
      const shape = [1, cache.heads, past, cache.size];
      feeds[`past_key_values.${name}`] = new ort.Tensor("float32", cache.lanes[i], shape);
    });
    const outputs = await session.run(feeds, keep ? ["logits", ...presents, ...queries] : ["logits"]);
    return {
      logits: outputs.logits.data.slice(-outputs.logits.dims.at(-1)),
      cache: keep ? { ...cache, length: end, lanes: presents.map((name) => outputs[name].data) } : cache,
      queries: keep ? queries.map((name) => outputs[name].data) : null,
    };
  }

  // A full context fails if the file does not match model.json. It also makes the browser compile what will be timed.
  const { cache } = await forward(Array(info.block_size - 1).fill(0), empty, { keep: true });
  const { logits } = await forward([0], cache);
  if (logits.length !== info.chars.length) throw new Error("model.onnx and model.json belong to different models");
  if (!logits.every(Number.isFinite)) throw new Error("its outputs are not finite");
  return { forward, empty };
}
