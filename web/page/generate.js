// Generation: with the cache and without, by guesses, and with a mistake. Ids in, ids out. No part of the page is here.
import { guess } from "./ngrams.js";
import { columns, columnsOf, emptyCache, forward, withColumn } from "./network.js";
import { gumbelNoise, pick, softmax } from "./sampler.js";

const NUM_GUESSES = 3;

/** Begin a generation. prompt: ids; sampling: { temperature, topK, seed }. */
export function begin(prompt, sampling) {
  const noise = gumbelNoise(sampling.seed);
  const choose = (logits, step) => pick(logits, (id) => noise(step, id), sampling.temperature, sampling.topK);
  return { prompt, sampling, noise, choose, step: 0, on: { ids: [...prompt], cache: emptyCache() }, off: [...prompt] };
}

/** Add one token to both texts of a run: one forward with the cache, and one without.
 *
 *  Returns { on, off }, each { id, ms, rows, shapes }; on also has `columns`, the new columns of the cache. rows is how
 *  many rows each layer computed.
 */
export async function stepBoth(run) {
  const { on } = run;
  const past = columnsOf(on.cache);
  const cached = await timed(run, on.ids.slice(past), on.cache, true);
  on.cache = cached.cache;
  on.ids.push(cached.id);
  const uncached = await timed(run, run.off, emptyCache(), false);
  run.off.push(uncached.id);
  run.step++;
  delete cached.cache;
  delete uncached.cache;
  return { on: { ...cached, columns: columns(on.cache, past, columnsOf(on.cache)) }, off: uncached };
}

async function timed(run, ids, cache, keep) {
  const began = performance.now();
  const result = await forward(ids, cache, { keep });
  const id = run.choose(result.logits, run.step);
  return { id, ms: performance.now() - began, rows: ids.length, shapes: result.shapes, cache: result.cache };
}

// -- questions about the cache of a run -----------------------------------------------------------------------------

/** Return the probabilities of the token after the next: the newest one is fed, and `change` says how the cache differs.
 *
 *  change  {}: as it is; { hidden }: without this column; { column, id }: with the column that `id` would have there
 */
export async function nextProbabilities({ ids, cache }, { hidden, column, id } = {}) {
  if (id !== undefined) {
    const other = await forward([id], columns(cache, 0, column), { keep: true });
    cache = withColumn(cache, column, columns(other.cache, column, column + 1));
  }
  return softmax((await forward(ids.slice(-1), cache, { hidden })).logits);
}

/** Return per column how much of the next token's distribution moves without it: the total variation distance. */
export async function influences(text, isStopped, breathe) {
  const whole = await nextProbabilities(text);
  const moved = new Float32Array(columnsOf(text.cache));
  for (let hidden = 0; hidden < moved.length; hidden++) {
    const without = await nextProbabilities(text, { hidden });
    moved[hidden] = without.reduce((sum, p, id) => sum + Math.abs(p - whole[id]) / 2, 0);
    if (hidden % 16 === 15) await breathe();
    if (isStopped()) return null;
  }
  return moved;
}

// -- guesses ----------------------------------------------------------------------------------------------------------

/** Generate `steps` tokens by guesses. Returns { ids, rounds, forwards }.
 *
 *  A round is one forward: the newest token and up to NUM_GUESSES guesses. It has `right`, the guesses that were kept,
 *  `wrong`, those that were thrown away, and `picked`, the token that the model picked itself.
 */
export async function generateWithGuesses({ prompt, sampling, noise, choose }, steps, table, isStopped, breathe) {
  const ids = [...prompt];
  const total = prompt.length + steps;
  const rounds = [];
  for (let cache = emptyCache(); ids.length < total; ) {
    const step = ids.length - prompt.length;
    const count = Math.min(NUM_GUESSES, total - ids.length - 1);
    const guesses = guess(table, ids, count, step, noise, sampling);
    const fed = [...ids.slice(columnsOf(cache)), ...guesses];
    const { logits, cache: grown } = await forward(fed, cache, { keep: true, every: true });
    const picks = logits.slice(-1 - count).map((each, i) => choose(each, step + i));
    const wrong = picks.findIndex((id, i) => id !== guesses[i]); // never -1: the last pick has no guess
    cache = columns(grown, 0, ids.length + wrong); // the columns of wrong guesses are thrown away
    ids.push(...picks.slice(0, wrong + 1));
    rounds.push({ right: guesses.slice(0, wrong), wrong: guesses.slice(wrong), picked: picks[wrong] });
    await breathe();
    if (isStopped()) return null;
  }
  return { ids, rounds };
}

// -- mistakes ---------------------------------------------------------------------------------------------------------

// Each mistake is made at one place of the loop below.
//   position(i, T)  where the token i of the text is said to stand; T is the length of the prompt
//   again           the position at which the last token of the prompt is fed a second time
//   other           whether the cache is filled from another prompt
const MISTAKES = {
  none: {},
  "too far": { position: (i, T) => (i < T ? i : i + 1) },
  "standing still": { position: (i, T) => Math.min(i, T) },
  "fed twice": { position: (i, T) => (i < T ? i : i + 1), again: (T) => T },
  "another prompt": { other: true },
  "all too far": { position: (i) => i + 5 },
  "fed twice in place": { again: (T) => T - 1 },
};
export const LARGEST_SHIFT = 5;

/** Generate `steps` tokens with a mistake, through the cache. other: ids as long as the prompt. Returns the ids. */
export async function generateWithMistake({ prompt, choose }, steps, name, other, isStopped, breathe) {
  const T = prompt.length;
  const mistake = MISTAKES[name];
  const position = (i) => (mistake.position ?? ((same) => same))(i, T);
  const feed = (ids, first, cache) => forward(ids, cache, { positions: ids.map((_, i) => position(first + i)), keep: true });
  const ids = [...prompt];

  // prefill
  let result;
  if (mistake.other) {
    result = await feed(other.slice(0, -1), 0, emptyCache());
    result = await feed(prompt.slice(-1), T - 1, result.cache);
  } else {
    result = await feed(prompt, 0, emptyCache());
  }
  if (mistake.again) {
    result = await forward(prompt.slice(-1), result.cache, { positions: [mistake.again(T)], keep: true });
  }

  // decode
  for (let step = 0; step < steps; step++) {
    ids.push(choose(result.logits, step));
    if (step < steps - 1) result = await feed(ids.slice(-1), ids.length - 1, result.cache);
    if (step % 8 === 7) await breathe();
    if (isStopped()) return null;
  }
  return ids;
}
