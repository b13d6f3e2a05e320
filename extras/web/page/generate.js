// Generation: with the cache and without, and with a mistake. Ids in, ids out, and nothing of the page. The network is an
// argument, { forward, empty }: see network.js.
import { columns, differences } from "./cache.js";
import { MISTAKES } from "./mistakes.js";
import { gumbelNoise, pick, softmax } from "./sampler.js";

/** Start a run: the same text twice, `on` with the cache and `off` without. prompt: ids; steps: how many to add. */
export function begin(network, prompt, steps, sampling) {
  const noise = gumbelNoise(sampling.seed);
  const choose = (logits, step) => pick(logits, (id) => noise(step, id), sampling.temperature, sampling.topK);
  const text = (keep) => ({ ids: [...prompt], cache: network.empty, keep, ms: 0 });
  const total = prompt.length + steps;
  return { network, prompt, sampling, noise, choose, total, on: text(true), off: text(false) };
}

/** Return which text takes the next step, "on" or "off", or undefined at the end. Only a race needs the one without the
 *  cache. There, the one with less computing time steps, so both get the same share of their one processor. */
export function whoseTurn(run, racing) {
  const unfinished = (racing ? ["on", "off"] : ["on"]).filter((name) => run[name].ids.length < run.total);
  return unfinished.sort((a, b) => run[a].ms - run[b].ms)[0];
}

/** Add one token to run.on or run.off, with one forward of the tokens that its cache does not hold.
 *
 *  Returns { id, ms, computed, probabilities } and, with the cache, its new `columns` and the `queries` of the
 *  newest token. computed is how many columns were computed.
 */
export async function step(run, name) {
  const text = run[name];
  const past = text.cache.length;
  const fed = text.ids.slice(past);

  const began = performance.now();
  const { logits, cache, queries } = await run.network.forward(fed, text.cache, { keep: text.keep });
  const id = run.choose(logits, text.ids.length - run.prompt.length);
  const ms = performance.now() - began;

  text.ids.push(id);
  text.cache = cache;
  text.ms += ms;
  const added = text.keep ? columns(cache, past, cache.length) : null;
  return { id, ms, computed: fed.length, probabilities: softmax(logits), columns: added, queries };
}

/** Take back steps until the text has at most `steps` new tokens. The prompt has no columns before the first step. */
export function rewind({ on, prompt }, steps) {
  on.ids.length = Math.min(on.ids.length, prompt.length + steps);
  const end = steps ? on.ids.length - 1 : 0;
  if (on.cache.length > end) on.cache = columns(on.cache, 0, end);
}

// -- questions about a run ----------------------------------------------------------------------------------------------

/** What a forward shows: all columns, the queries of the newest token, and the probabilities of the next one. */
function picture({ logits, cache, queries }) {
  return { columns: cache, queries, probabilities: softmax(logits) };
}

/** Return the token that the newest step would have drawn from other logits, with the same random numbers. */
const drawAgain = ({ on, prompt, choose }, logits) => choose(logits, on.ids.length - 1 - prompt.length);

/** Take the last step again with one of the columns `candidates` masked: the one that moves the prediction most.
 *
 *  Returns a picture with `masked`, the column; `moved`, the total variation distance between the probabilities; and
 *  `next`, the token that is drawn now.
 */
export async function takeColumnOut(run, candidates, isStopped, breathe) {
  const { on, network } = run;
  const newest = on.ids.length - 2;
  const cache = columns(on.cache, 0, newest);
  const again = async (masked) => {
    const result = await network.forward([on.ids[newest]], cache, { masked, keep: true });
    return { ...picture(result), next: drawAgain(run, result.logits) };
  };
  const whole = await again();
  let most = null;
  for (const masked of candidates) {
    await breathe();
    if (isStopped()) return null;
    const answer = await again(masked);
    const moved = answer.probabilities.reduce((sum, p, id) => sum + Math.abs(p - whole.probabilities[id]) / 2, 0);
    if (!most || moved > most.moved) most = { ...answer, masked, moved };
  }
  return most;
}

/** Compute the whole text again with one character changed. Returns a picture with `differences`, see cache.js, and
 *  `next`, the token that is drawn now. */
export async function changedText(run, position, id) {
  const { forward, empty } = run.network;
  const ids = run.on.ids.slice(0, -1); // those with columns
  // kept for the next changes
  if (run.again?.length !== ids.length) run.again = (await forward(ids, empty, { keep: true })).cache;
  const changed = await forward(ids.with(position, id), empty, { keep: true });
  const next = drawAgain(run, changed.logits);
  return { ...picture(changed), next, differences: differences(run.again, changed.cache, ids.length) };
}

// -- mistakes ---------------------------------------------------------------------------------------------------------

/** Generate `steps` tokens with the cache and a mistake.
 *
 *  Returns a picture of the last step with `ids`, `logits` of every step, `tokens`, the token of each column, and
 *  `masked`, the column that its mask hides.
 */
async function generateWithMistake({ network, prompt, choose }, steps, mistake, isStopped, breathe) {
  const { forward, empty } = network;
  const T = prompt.length;
  const position = mistake.position ?? ((i) => i);
  const ids = [...prompt];
  const logits = [];
  let tokens = [...prompt]; // the token whose column is in each slot of the cache
  let masked;

  // prefill
  let result = await forward(prompt, empty, { keep: true });
  if (mistake.again) tokens.push(prompt.at(-1));
  if (mistake.again) result = await forward(prompt.slice(-1), result.cache, { positions: [T], keep: true });
  if (mistake.other) {
    const other = prompt.map((id) => (id + 1) % result.logits.length);
    result.cache = (await forward(other, empty, { keep: true })).cache;
    tokens = other;
  }

  // decode
  for (let step = 0; step < steps; step++) {
    ids.push(choose(result.logits, step));
    logits.push(result.logits);
    await breathe();
    if (isStopped()) return null;
    if (step === steps - 1) break;
    const past = mistake.overwrite ? columns(result.cache, 0, T) : result.cache;
    if (mistake.mask) masked = past.length - 1;
    tokens = [...tokens.slice(0, past.length), ids.at(-1)];
    result = await forward(ids.slice(-1), past, { positions: [position(ids.length - 1, T)], masked, keep: true });
  }
  return { ...picture(result), ids, tokens, masked, logits };
}

/** Generate with a mistake and without, and compare for as long as both have been fed the same text.
 *
 *  Returns the picture of the step that picked the token `at`, and
 *    ids, correct   the whole text with the mistake, and the correct one
 *    first          the index of the first incorrect token, or -1
 *    at, should     that index, or that of the logits that are off most; and the token that should be there
 *    largest        the largest error in a logit until then
 *    before, after  the probabilities of the token `at`, without the mistake and with it
 *    tokens, masked  the tokens whose columns are in the cache, and the column that is hidden
 *    differences    of the columns, see cache.js
 */
export async function compareMistake(run, steps, name, isStopped, breathe) {
  const generate = (mistake, steps) => generateWithMistake(run, steps, mistake, isStopped, breathe);
  run.correct ??= await generate({}, steps);
  const broken = await generate(MISTAKES[name], steps);
  if (!run.correct || !broken) return null;

  const T = run.prompt.length;
  const first = broken.ids.findIndex((id, i) => id !== run.correct.ids[i]);
  const compared = first < 0 ? steps : first - T + 1;
  const off = broken.logits.slice(0, compared).map((logits, step) =>
    logits.reduce((most, logit, id) => Math.max(most, Math.abs(logit - run.correct.logits[step][id])), 0),
  );
  const largest = Math.max(...off);
  const step = first < 0 ? off.indexOf(largest) : first - T;
  const then = await generate(MISTAKES[name], step + 1);
  if (!then) return null;
  const count = Math.min(T + step, then.columns.length); // both have been fed the same so far
  return {
    ids: broken.ids, correct: run.correct.ids, first, at: T + step, should: run.correct.ids[T + step], largest,
    before: softmax(run.correct.logits[step]), after: then.probabilities,
    columns: then.columns, queries: then.queries, tokens: then.tokens, masked: then.masked,
    differences: differences(run.correct.columns, then.columns, count),
  };
}
