// Guesses from the n-grams of the training text. The estimate is the same as in kvgpt/decoding/ngrams.py.
import { pick } from "./sampler.js";

const DISCOUNT = 0.75;

/** Return (ids) => log-probabilities of the next token, from the longest known ending of the context.
 *
 *  file  little-endian uint32: order, then the differences between codes, then the counts. A code is a number in base
 *        vocabSize whose digits are the `order` tokens of a context and the token after them.
 */
export function readNgrams(file, vocabSize) {
  const [order, ...rest] = new Uint32Array(file);
  const size = rest.length / 2;
  const followers = Array.from({ length: order + 1 }, () => new Map()); // per length: context => Map(token => count)
  for (let i = 0, code = 0; i < size; i++) {
    code += rest[i];
    const next = code % vocabSize;
    const context = Math.floor(code / vocabSize);
    for (let length = 0; length <= order; length++) {
      const ending = context % vocabSize ** length;
      if (!followers[length].has(ending)) followers[length].set(ending, new Map());
      const seen = followers[length].get(ending);
      seen.set(next, (seen.get(next) ?? 0) + rest[size + i]);
    }
  }
  const uniform = new Float64Array(vocabSize).fill(1 / vocabSize);

  return (ids) => {
    let estimate = uniform;
    for (let length = 0, ending = 0; length <= Math.min(order, ids.length); length++) {
      if (length) ending += ids.at(-length) * vocabSize ** (length - 1);
      const seen = followers[length].get(ending);
      if (!seen) break;
      const total = [...seen.values()].reduce((sum, count) => sum + count);
      const shorter = estimate;
      estimate = shorter.map((p) => (DISCOUNT * seen.size * p) / total);
      for (const [token, count] of seen) estimate[token] += (count - DISCOUNT) / total;
    }
    return Float32Array.from(estimate, (p) => Math.log(Math.max(p, 1e-12)));
  };
}

/** Return `count` guesses after `ids`, picked from n-grams with the noise that the model's picks will use. */
export function guess(logProbabilities, ids, count, step, noise, { temperature, topK }) {
  const text = [...ids];
  for (let i = 0; i < count; i++) {
    text.push(pick(logProbabilities(text), (id) => noise(step + i, id), temperature, topK));
  }
  return text.slice(ids.length);
}
