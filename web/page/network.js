// The network: one forward of the exported graph, with a cache as its argument and its result.
//
// A cache is a list of Float32Arrays: the keys of layer 0, its values, the keys of layer 1, and so on. Their shape is
// (heads, columns, head size). A column is one position: a key and a value per layer and head.

let ort, session, info;

export async function createNetwork(runtime, bytes, about) {
  ort = runtime;
  info = about;
  session = await ort.InferenceSession.create(bytes, { executionProviders: ["wasm"] });
  // A full context fails if the file does not match model.json. It also makes the browser compile what will be timed.
  const most = info.block_size - 1;
  const { cache } = await forward(Array(most).fill(0), emptyCache(), { keep: true });
  const { logits } = await forward([0], cache);
  if (logits.length !== info.chars.length) throw new Error("model.onnx and model.json belong to different models");
  if (!logits.every(Number.isFinite)) throw new Error("its outputs are not finite");
}

export function emptyCache() {
  return Array.from({ length: 2 * info.n_layer }, () => new Float32Array(0));
}

/** Return how many columns a cache holds. */
export function columnsOf(cache) {
  return cache[0].length / (info.n_kv_head * info.head_size);
}

/** Feed `ids` after the columns of `cache`.
 *
 *  positions  of the ids; by default they continue the cache
 *  masked     a column that no query may see (attention_mask 0)
 *  keep       whether to return the cache, extended by the new columns, and the queries of the last id
 *  every      whether to return the logits after every id, one array per id, instead of those after the last
 *  Returns { logits, cache, queries, shapes }. queries: a Float32Array (query heads, head size) per layer; shapes:
 *  [direction, name, dimensions] per input and output of the graph.
 */
export async function forward(ids, cache, { positions, masked, keep = false, every = false } = {}) {
  const past = columnsOf(cache);
  const end = past + ids.length;
  const row = (length, value) =>
    new ort.Tensor("int64", BigInt64Array.from({ length }, (_, i) => BigInt(value(i))), [1, length]);
  const feeds = {
    input_ids: row(ids.length, (i) => ids[i]),
    attention_mask: row(end, (i) => (i === masked ? 0 : 1)),
    position_ids: row(ids.length, (i) => positions?.[i] ?? past + i),
  };
  const names = [];
  cache.forEach((data, i) => {
    const name = `${i >> 1}.${i % 2 ? "value" : "key"}`;
    feeds[`past_key_values.${name}`] = new ort.Tensor("float32", data, [1, info.n_kv_head, past, info.head_size]);
    names.push(`present.${name}`);
  });
  const queries = Array.from({ length: info.n_layer }, (_, i) => `query.${i}`);
  const outputs = await session.run(feeds, keep ? ["logits", ...names, ...queries] : ["logits"]);
  const vocabSize = outputs.logits.dims.at(-1);
  const all = outputs.logits.data;
  const shape = (direction) => ([name, tensor]) => [direction, name, tensor.dims];
  return {
    logits: every ? ids.map((_, i) => all.slice(i * vocabSize, (i + 1) * vocabSize)) : all.slice(-vocabSize),
    cache: keep ? names.map((name) => outputs[name].data) : cache,
    queries: keep ? queries.map((name) => outputs[name].data) : null,
    shapes: [...Object.entries(feeds).map(shape("in")), ...Object.entries(outputs).map(shape("out"))],
  };
}

/** Return the columns [begin, end) of a cache, as a cache. */
export function columns(cache, begin, end) {
  const size = info.head_size;
  const width = columnsOf(cache) * size;
  return cache.map((data) => {
    const part = new Float32Array(info.n_kv_head * (end - begin) * size);
    for (let head = 0; head < info.n_kv_head; head++) {
      part.set(data.subarray(head * width + begin * size, head * width + end * size), head * (end - begin) * size);
    }
    return part;
  });
}

/** Return how far the first `count` columns of two caches differ: like a cache, but with one number per column. */
export function differences(a, b, count) {
  const size = info.head_size;
  const [from, to] = [columns(a, 0, count), columns(b, 0, count)];
  return from.map((data, slot) => {
    const most = new Float32Array(count);
    data.forEach((x, i) => {
      const column = Math.floor(i / size) % count;
      most[column] = Math.max(most[column], Math.abs(x - to[slot][i]));
    });
    return most;
  });
}
