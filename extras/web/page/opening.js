// The first picture: the exporter computes the opening moment, so that the stage is full before the model has arrived.
// model.json holds its text, one layer and one head of its columns, and the same without each of them.

/** Return the run of the opening, as far as the stage and step 1 need it. */
export function openingRun({ opening, head_size, n_head }, request) {
  const { ids, layer, head, keys, values, query, probabilities } = opening;
  const given = request.ids.length;
  const added = ids.slice(given).map((id, i) => ({ id, probabilities: probabilities[i], ms: 0, shapes: [] }));
  return {
    isOpening: true, request, given, ids, racing: 0,
    on: added.map((step, i) => ({ ...step, computed: i ? 1 : given })),
    off: added.map((step, i) => ({ ...step, computed: given + i })),
    kept: columnsOf(Float32Array.from(keys), Float32Array.from(values), head_size),
    queries: queriesOf(query, layer, head, head_size, n_head),
  };
}

/** Take out the one of `candidates` that moves the prediction most: what takeColumnOut of generate.js answers. */
export function openingWithout({ opening, head_size, n_head }, candidates) {
  const { taken, layer, head, keys, values } = opening;
  const masked = candidates.reduce((most, each) => (taken[each].moved > taken[most].moved ? each : most));
  const { key, value, query, ...rest } = taken[masked];
  const [newKeys, newValues] = [[keys, key], [values, value]].map(([all, newest]) => {
    const changed = Float32Array.from(all);
    changed.set(newest, changed.length - head_size);
    return changed;
  });
  const kept = columnsOf(newKeys, newValues, head_size);
  return { ...rest, masked, kept, queries: queriesOf(query, layer, head, head_size, n_head) };
}

/** Like keptColumns of cache.js, for the only layer and head that are there. */
function columnsOf(keys, values, headSize) {
  return { length: keys.length / headSize, headSize, lane: (layer, kind) => [keys, values][kind] };
}

function queriesOf(query, layer, head, headSize, heads) {
  const queries = [];
  queries[layer] = new Float32Array(heads * headSize);
  queries[layer].set(query, head * headSize);
  return queries;
}
