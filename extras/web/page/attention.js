// Attention of one head, for one query, that of the newest character.
import { softmax } from "./sampler.js";

/** Return { scores, weights, mix }: how well each key matches the query, how much the query therefore looks at each
 *  column, and the values mixed with these weights.
 *
 *  query         Float32Array (size)
 *  keys, values  Float32Arrays (columns, size)
 *  masked        a column that the query may not see
 */
export function attend(query, keys, values, masked) {
  const size = query.length;
  const scores = Array.from({ length: keys.length / size }, (_, column) => {
    if (column === masked) return -Infinity;
    return query.reduce((sum, x, i) => sum + x * keys[column * size + i], 0) / Math.sqrt(size);
  });
  const weights = softmax(scores);
  const mix = query.map((_, i) => weights.reduce((sum, weight, column) => sum + weight * values[column * size + i], 0));
  return { scores, weights, mix };
}
