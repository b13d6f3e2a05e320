// The columns that the page shows: the keys and values of all layers and heads, as they arrive.

/** Return { add, truncate, lane, length, headSize }. */
export function keptColumns({ n_layer, n_kv_head, head_size, block_size }) {
  const size = n_kv_head * block_size * head_size;
  const slots = Array.from({ length: 2 * n_layer }, () => new Float32Array(size)); // (heads, block_size, head_size) each
  const kept = {
    length: 0,
    headSize: head_size,
    /** Add the columns of a cache: see cache.js. */
    add({ length: count, slots: added }) {
      added.forEach((data, slot) => {
        for (let head = 0; head < n_kv_head; head++) {
          const part = data.subarray(head * count * head_size, (head + 1) * count * head_size);
          slots[slot].set(part, (head * block_size + kept.length) * head_size);
        }
      });
      kept.length += count;
      return kept;
    },
    /** Keep only the first `count` columns. */
    truncate(count) {
      kept.length = Math.min(kept.length, count);
    },
    /** Return a layer's keys (kind 0) or values (kind 1) in one head, column by column. */
    lane(layer, kind, head) {
      const begin = head * block_size * head_size;
      return slots[2 * layer + kind].subarray(begin, begin + kept.length * head_size);
    },
  };
  return kept;
}
