import assert from "node:assert/strict";
import { test } from "node:test";
import { guess, readNgrams } from "../page/ngrams.js";

const assertClose = (got, expected, most) => {
  assert.equal(got.length, expected.length);
  got.forEach((x, i) => assert.ok(Math.abs(x - expected[i]) < most, `${got} is not ${expected}`));
};

/** Return the file of a text's n-grams: see ngrams_bytes in kvgpt/interop/webpage.py. */
function fileOf(text, order, vocabSize) {
  const counts = new Map();
  for (let i = order; i < text.length; i++) {
    const code = text.slice(i - order, i + 1).reduce((code, id) => code * vocabSize + id, 0);
    counts.set(code, (counts.get(code) ?? 0) + 1);
  }
  const codes = [...counts.keys()].sort((a, b) => a - b);
  const differences = codes.map((code, i) => code - (codes[i - 1] ?? 0));
  return Uint32Array.of(order, ...differences, ...codes.map((code) => counts.get(code))).buffer;
}

test("the estimate is the same as in kvgpt/decoding/ngrams.py", () => {
  // ids = torch.tensor([*map("abcdr".index, "abracadabrabracadabra")]); ngrams = count_ngrams(ids, 5, 1000)
  // np.frombuffer(ngrams_bytes(ngrams), "<u4"); the rows of ngram_table(ngrams, 5) for "", "abra" and "cdcd", .exp()
  const file = [4, 226, 1, 38, 119, 750, 1, 191, 594, 625, 8, 1, 2, 2, 2, 1, 2, 2, 2, 1, 2];
  const table = readNgrams(Uint32Array.from(file).buffer, 5);
  const after = (context) => [...table([...context].map((char) => "abcdr".indexOf(char)))].map(Math.exp);
  assertClose(after(""), [0.41176, 0.17647, 0.11765, 0.11765, 0.17647], 1e-5);
  assertClose(after("abra"), [0.01654, 0.1931, 0.75621, 0.02705, 0.00709], 1e-5);
  assertClose(after("cdcd"), [0.77941, 0.06618, 0.04412, 0.04412, 0.06618], 1e-5); // known is "d" alone
  assert.deepEqual(after("rabra"), after("abra")); // a context longer than the order
});

test("each estimate is that of counting in the text, after the longest known ending", () => {
  const [order, vocabSize] = [2, 4];
  const text = Array.from({ length: 300 }, (_, i) => (i * i + (i >> 2)) % vocabSize);
  const count = (ending, next) => {
    let found = 0;
    for (let i = order; i < text.length; i++) {
      const fits = ending.every((id, j) => text[i - ending.length + j] === id);
      if (fits && (next === undefined || text[i] === next)) found++;
    }
    return found;
  };
  /** Absolute discounting: each seen follower gives up 0.75, which goes to the estimate of the shorter ending. */
  const expected = (ending, next) => {
    const shorter = ending ? expected(ending.length ? ending.slice(1) : null, next) : 1 / vocabSize;
    if (!ending || !count(ending)) return shorter;
    const kinds = [0, 1, 2, 3].filter((id) => count(ending, id)).length;
    return (Math.max(0, count(ending, next) - 0.75) + 0.75 * kinds * shorter) / count(ending);
  };
  const table = readNgrams(fileOf(text, order, vocabSize), vocabSize);
  for (let a = 0; a < vocabSize; a++) {
    for (let b = 0; b < vocabSize; b++) {
      const got = [...table([a, b])].map(Math.exp);
      assertClose(got, [0, 1, 2, 3].map((next) => expected([a, b], next)), 1e-6);
      assertClose([got.reduce((sum, p) => sum + p)], [1], 1e-6);
    }
  }
});

test("guesses continue with the likeliest token, and use the noise of their own step", () => {
  const table = readNgrams(fileOf([0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3], 1, 4), 4);
  const noNoise = () => 0;
  assert.deepEqual(guess(table, [0], 5, 0, noNoise, { temperature: 0.8, topK: null }), [1, 2, 3, 0, 1]);
  const forced = (step, id) => (id === [3, 0, 3][step - 10] ? 1e6 : 0);
  assert.deepEqual(guess(table, [0], 3, 10, forced, { temperature: 0.8, topK: null }), [3, 0, 3]);
  assert.deepEqual(guess(table, [0], 3, 10, forced, { temperature: 0.8, topK: 1 }), [1, 2, 3]);
});
