// A cache: { heads, size, length, lanes }. lanes holds the keys of layer 0, its values, the keys of layer 1, and so on, each
// a Float32Array of shape (heads, length, size). A column is one position: a key and a value per layer and head.

export function emptyCache({ n_layer, n_kv_head, head_size }) {
  const lanes = Array.from({ length: 2 * n_layer }, () => new Float32Array(0));
  return { heads: n_kv_head, size: head_size, length: 0, lanes };
}

/** Return the columns [begin, end) of a cache, as a cache. */
export function columns({ heads, size, length, lanes }, begin, end) {
  const count = end - begin;
  const cut = lanes.map((data) => {
    const part = new Float32Array(heads * count * size);
    for (let head = 0; head < heads; head++) {
      const row = head * length;
      part.set(data.subarray((row + begin) * size, (row + end) * size), head * count * size);
    }
    return part;
  });
  return { heads, size, length: count, lanes: cut };
}

/** Return how far the first `count` columns of two caches differ: per lane, one number for each column. */
export function differences(a, b, count) {
  const [from, to] = [columns(a, 0, count).lanes, columns(b, 0, count).lanes];
  return from.map((data, lane) => {
    const most = new Float32Array(count);
    data.forEach((x, i) => {
      const column = Math.floor(i / a.size) % count;
      most[column] = Math.max(most[column], Math.abs(x - to[lane][i]));
    });
    return most;
  });
}

/** Return the columns that the page shows, which arrive a few at a time: { add, truncate, lane, length, headSize }. */
export function keptColumns({ n_layer, n_kv_head, head_size, block_size }) {
  const size = n_kv_head * block_size * head_size;
  const lanes = Array.from({ length: 2 * n_layer }, () => new Float32Array(size)); // (heads, block_size, head_size) each
  const kept = {
    length: 0,
    headSize: head_size,
    /** Add the columns of a cache. */
    add({ length: count, lanes: added }) {
      added.forEach((data, lane) => {
        for (let head = 0; head < n_kv_head; head++) {
          const part = data.subarray(head * count * head_size, (head + 1) * count * head_size);
          lanes[lane].set(part, (head * block_size + kept.length) * head_size);
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
      return lanes[2 * layer + kind].subarray(begin, begin + kept.length * head_size);
    },
  };
  return kept;
}
