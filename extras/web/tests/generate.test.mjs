import assert from "node:assert/strict";
import { test } from "node:test";
import { begin, changedText, compareMistake, rewind, step, takeColumnOut, whoseTurn } from "../page/generate.js";
import { NAMES, ROUNDING } from "../page/mistakes.js";
import { softmax } from "../page/sampler.js";
import { INFO, assertClose, toyNetwork, wholeLogits } from "./toy.mjs";

const PROMPT = [1, 4, 2, 7];
const OTHER = PROMPT.map((id) => (id + 1) % INFO.chars.length); // the prompt of the mistake "another prompt"
const [T, STEPS] = [PROMPT.length, 12];
const SAMPLING = { temperature: 4, topK: null, seed: 3n };
const never = () => false;
const breathe = async () => {};

const start = (network = toyNetwork()) => begin(network, PROMPT, STEPS, SAMPLING);

/** Take all steps of the text, or of both in a race, and return them. */
async function finish(run, racing = false) {
  const steps = { on: [], off: [] };
  for (let name = whoseTurn(run, racing); name; name = whoseTurn(run, racing)) steps[name].push(await step(run, name));
  return steps;
}

test("with the cache and without, the text is that of one forward, and each step's columns are counted", async () => {
  const run = start();
  const { on, off } = await finish(run, true);
  assert.deepEqual(run.on.ids, run.off.ids);
  assert.deepEqual(on.map(({ computed }) => computed), [T, ...Array(STEPS - 1).fill(1)]);
  assert.deepEqual(off.map(({ computed }) => computed), Array.from({ length: STEPS }, (_, i) => T + i));
  const logits = wholeLogits(run.on.ids).slice(T - 1, -1);
  on.forEach(({ probabilities }, i) => assertClose(probabilities, softmax(logits[i])));
  assert.deepEqual(run.on.ids.slice(T), logits.map((each, i) => run.choose(each, i)));
  assert.ok(new Set(run.on.ids).size > 3);
});

test("a run that goes back generates the same text again", async () => {
  const run = start();
  await finish(run);
  const text = [...run.on.ids];
  for (const left of [5, 0]) {
    rewind(run, left);
    assert.equal(run.on.cache.length, left ? T + left - 1 : 0);
    const { on } = await finish(run);
    assert.deepEqual(run.on.ids, text);
    assert.equal(on[0].computed, left ? 1 : T);
  }
});

test("in a race, the text with less computing time steps, and otherwise the one with the cache", () => {
  const [fast, slow, whole] = [{ ids: [0, 1], ms: 1 }, { ids: [0], ms: 5 }, { ids: [0, 1, 2], ms: 1 }];
  assert.equal(whoseTurn({ on: slow, off: fast, total: 3 }, false), "on");
  assert.equal(whoseTurn({ on: slow, off: fast, total: 3 }, true), "off");
  assert.equal(whoseTurn({ on: whole, off: slow, total: 3 }, true), "off");
  assert.equal(whoseTurn({ on: whole, off: slow, total: 3 }, false), undefined);
});

test("without a column, the prediction is that of a masked forward, and the one that moves it most is found", async () => {
  const run = start();
  await finish(run);
  const fed = run.on.ids.slice(0, -1);
  const newest = fed.length - 1;
  const without = (column) => wholeLogits(fed, { allowed: (i, j) => j <= i && (i < newest || j !== column) }).at(-1);
  const whole = softmax(wholeLogits(fed).at(-1));
  const moved = (column) => softmax(without(column)).reduce((sum, p, id) => sum + Math.abs(p - whole[id]) / 2, 0);
  for (let column = 0; column < newest; column++) {
    const answer = await takeColumnOut(run, [column], never, breathe);
    assertClose(answer.probabilities, softmax(without(column)));
    assertClose([answer.moved], [moved(column)]);
    assert.equal(answer.next, run.choose(without(column), STEPS - 1));
  }
  const all = [...Array(newest).keys()];
  const most = await takeColumnOut(run, all, never, breathe);
  assertClose([most.moved], [Math.max(...all.map(moved))]);
  assert.equal(await takeColumnOut(run, all, () => true, breathe), null);
});

test("a changed character changes columns to its right only, and in the first layer only its own", async () => {
  const run = start();
  await finish(run);
  const [position, id] = [6, (run.on.ids[6] + 1) % INFO.chars.length];
  const answer = await changedText(run, position, id);
  const changed = wholeLogits(run.on.ids.slice(0, -1).with(position, id)).at(-1);
  assertClose(answer.probabilities, softmax(changed));
  assert.equal(answer.next, run.choose(changed, STEPS - 1));
  const all = [...Array(T + STEPS - 1).keys()];
  const differing = answer.differences.map((lane) => all.filter((i) => lane[i] > 0));
  const right = all.slice(position);
  assert.deepEqual(differing, [[position], [position], right, right]);
});

/** The logits of every step of a mistake, by one forward without a cache. added: the new tokens that are fed. */
function mistakenLogits(name, added) {
  const n = T + added.length;
  const isNew = (i) => i >= T;
  const places = [...Array(n).keys()];
  const whole = (ids, options) => wholeLogits(ids, options).slice(-1 - added.length);
  const ids = [...PROMPT, ...added];
  return {
    "never moves": () => whole(ids, { positions: places.map((i) => Math.min(i, T)) }),
    "one too far": () => whole(ids, { positions: places.map((i) => (isNew(i) ? i + 1 : i)) }),
    overwritten: () => whole(ids, { allowed: (i, j) => j <= i && (!isNew(j) || j === i) }),
    mask: () => whole(ids, { allowed: (i, j) => j <= i && !(isNew(i) && j === i - 1) }),
    "fed twice": () => whole([...PROMPT, PROMPT.at(-1), ...added]),
    "another prompt": () => [wholeLogits(PROMPT).at(-1), ...wholeLogits([...OTHER, ...added]).slice(T)],
  }[name]();
}

for (const name of NAMES) {
  test(`the mistake "${name}" gives the text and the logits that it computes`, async () => {
    const run = start();
    const answer = await compareMistake(run, STEPS, name, never, breathe);
    const logits = mistakenLogits(name, answer.ids.slice(T, -1));
    assert.deepEqual(answer.ids, [...PROMPT, ...logits.map((each, step) => run.choose(each, step))]);

    // compared with the correct ones until the first incorrect token
    await finish(run);
    const { correct, first, at } = answer;
    assert.deepEqual(correct, run.on.ids);
    const expected = wholeLogits(correct).slice(T - 1, -1);
    assert.equal(first, answer.ids.findIndex((id, i) => id !== correct[i]));
    const compared = first < 0 ? STEPS : first - T + 1;
    const off = logits.slice(0, compared).map((each, step) => Math.max(...each.map((x, id) => Math.abs(x - expected[step][id]))));
    assertClose([answer.largest], [Math.max(...off)]);
    assert.equal(at, T + (first < 0 ? off.indexOf(Math.max(...off)) : first - T));
    assert.equal(answer.should, correct[at]);
    assertClose(answer.before, softmax(expected[at - T]));
    assertClose(answer.after, softmax(logits[at - T]));
  });
}

test("a mistake shows in the keys and values by its cause", async () => {
  const answers = {};
  for (const name of NAMES) answers[name] = await compareMistake(start(), STEPS, name, never, breathe);
  // in the first layer, as you would see it when looking for the bug: which columns are incorrect, in keys or in values
  const incorrect = (name) => answers[name].differences.slice(0, 2).map((lane) => [...lane.keys()].filter((i) => lane[i] > ROUNDING));
  const places = (begin, end) => Array.from({ length: end - begin }, (_, i) => begin + i);
  const fed = (name) => answers[name].ids.slice(0, answers[name].at);
  // only keys, because rotary positions do not touch values; "never moves" starts at the second new character
  assert.deepEqual(incorrect("one too far"), [places(T, answers["one too far"].at), []]);
  assert.deepEqual(incorrect("never moves"), [places(T + 1, answers["never moves"].at), []]);
  assert.deepEqual(incorrect("mask"), [[], []]);
  assert.deepEqual(incorrect("another prompt"), [places(0, T), places(0, T)]);
  // the tokens whose columns are in the cache
  assert.deepEqual(answers.mask.tokens, fed("mask"));
  assert.deepEqual(answers["fed twice"].tokens, [...PROMPT, PROMPT.at(-1), ...fed("fed twice").slice(T)]);
  assert.deepEqual(answers["another prompt"].tokens, [...OTHER, ...fed("another prompt").slice(T)]);
  assert.deepEqual(answers.overwritten.tokens, [...PROMPT, ...fed("overwritten").slice(T).slice(-1)]);
  assert.equal(answers.overwritten.columns.length, answers.overwritten.tokens.length);
});
