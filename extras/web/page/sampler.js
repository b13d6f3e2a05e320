// The sampler: the same picks as sample_token and gumbel_noise in model.py, in the same float32.

/** Return the winning id: argmax of logits + temperature * noise among the topK likeliest, or among all. */
export function pick(logits, noise, temperature, topK) {
  let candidates = [...logits.keys()];
  // a stable sort: ties go to the lowest id
  if (topK) candidates = candidates.sort((a, b) => logits[b] - logits[a]).slice(0, topK);
  const scale = Math.fround(temperature);
  const score = (id) => Math.fround(logits[id] + Math.fround(scale * noise(id)));
  let best = candidates[0];
  let most = score(best);
  for (const id of candidates.slice(1)) {
    const own = score(id);
    if (own > most) [best, most] = [id, own];
  }
  return best;
}

/** Return (step, id) => standard Gumbel noise, for the first sample of a seed, a BigInt below 2**64. */
export function gumbelNoise(seed) {
  const mix = (h) => {
    h = Math.imul(h ^ (h >>> 16), 0x7feb352d);
    h = Math.imul(h ^ (h >>> 15), 0x846ca68b);
    return (h ^ (h >>> 16)) >>> 0;
  };
  const absorb = (h, counter) => mix(h ^ mix(counter + 0x9e3779b9));
  const sample = 0;
  const begin = [Number(seed & 0xffffffffn), Number(seed >> 32n), sample].reduce(absorb, 0);
  return (step, id) => {
    const h = absorb(absorb(begin, step), id);
    const uniform = Math.min(Math.fround(Math.fround(h) + 0.5) * 2 ** -32, 1 - 2 ** -24);
    return -Math.fround(Math.log(-Math.fround(Math.log1p(-uniform))));
  };
}

export function softmax(logits) {
  const most = Math.max(...logits);
  const weights = Array.from(logits, (logit) => Math.exp(logit - most));
  const total = weights.reduce((sum, weight) => sum + weight);
  return weights.map((weight) => weight / total);
}
