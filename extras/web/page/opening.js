// The first picture: the exporter computes the opening moment, so that the page is full before the model has arrived.
// model.json holds its text, and one layer and one head of its columns.

/** Return the run of the opening, as far as the pictures need it. */
export function openingRun({ opening, head_size, n_head, block_size }) {
  const { ids, given, layer, head, keys, values, query, probabilities } = opening;
  const lanes = [keys, values].map((each) => Float32Array.from(each));
  const queries = [];
  queries[layer] = new Float32Array(n_head * head_size);
  queries[layer].set(query, head * head_size);
  return {
    isOpening: true, given, ids, queries, off: [],
    request: { ids: ids.slice(0, given), steps: block_size - given, notes: [] },
    on: ids.slice(given).map((id, i) => ({ id, probabilities: probabilities[i] })),
    kept: { length: keys.length / head_size, headSize: head_size, lane: (layer, kind) => lanes[kind] }, // see cache.js
  };
}
