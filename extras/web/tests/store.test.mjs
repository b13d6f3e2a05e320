import assert from "node:assert/strict";
import { test } from "node:test";
import { momentOf } from "../page/address.js";
import { COMMANDS, use } from "../page/commands.js";
import { NAMES } from "../page/mistakes.js";
import { mistakeInWords } from "../page/steps/break.js";
import { takenInWords } from "../page/steps/inside.js";
import { costs, isOver } from "../page/steps/race.js";
import { changeOf } from "../page/steps/why.js";
import { createStore } from "../page/store.js";
import { runInWords } from "../page/words.js";
import { INFO, toyNetwork } from "./toy.mjs";

const info = { ...INFO, start: { new: 8, layer: 1, head: 1 } };
const PROMPT = [1, 4, 2, 7];
const [RACE, WHY, INSIDE, BREAK] = [2, 4, 5, 6]; // the numbers of the steps

/** A request as readRequest returns it. */
function requestOf({ ids = PROMPT, seed = 3n, steps = info.block_size - ids.length } = {}) {
  return { ids, steps, sampling: { temperature: 0.8, topK: null, seed }, key: [ids, steps, seed].join() };
}

/** The commands of the worker without a worker: one after the other, and "stop" ends all that came before it. */
function open() {
  let [stops, queue] = [0, Promise.resolve()];
  const call = (name, ...args) => {
    const before = stops;
    queue = queue.then(() => COMMANDS[name](() => stops !== before, ...args));
    return queue;
  };
  const store = createStore({ call, stop: () => stops++ }, () => {}, 0);
  globalThis.postMessage = ({ event, ...step }) => store.receive(structuredClone(step));
  use(toyNetwork());
  store.set({ info, cells: 10, phase: "ready" });
  return store;
}

/** Wait until a store shows what is expected. */
async function until(holds) {
  for (let i = 0; i < 5000 && !holds(); i++) await new Promise((resolve) => setImmediate(resolve));
  assert.ok(holds(), String(holds));
}

/** Open a step, or a moment in it, and wait until it is prepared. */
async function at(step, moment) {
  const store = open();
  store.set({ step });
  store.describe(requestOf(), moment);
  await until(() => ["paused", "done"].includes(store.state.phase));
  return store;
}

test("a step begins in the middle of the text, with its own layer and head", async () => {
  const looks = { [WHY]: [1, 0], [INSIDE]: [1, 1], [BREAK]: [0, 0] };
  for (const [step, look] of Object.entries(looks)) {
    const { state } = await at(Number(step));
    assert.equal(state.run.ids.length, PROMPT.length + 8);
    assert.deepEqual([state.layer, state.head], look);
  }
});

test("a race gives the same text twice, and stays while other steps go back", async () => {
  const store = await at(WHY);
  const { state } = store;
  store.turnToStep(RACE);
  assert.equal(state.race, null); // it waits for the guesses
  await store.race();
  const { race } = state;
  assert.ok(isOver(race) && state.phase === "done");
  assert.equal(race.ids.length, info.block_size);
  assert.equal(runInWords(race), "The text is the same with and without the cache: all 28 characters.");
  assert.deepEqual(race.off.map(({ computed }) => computed), Array.from({ length: 28 }, (_, i) => PROMPT.length + i));
  store.turnToStep(INSIDE);
  await until(() => state.phase === "paused");
  assert.deepEqual([state.run.on.length, state.run.off.length], [8, 0]); // without the cache only in a race
  store.turnToStep(RACE);
  assert.deepEqual([state.race, race.on.length, state.phase], [race, 28, "paused"]); // its result, and no new race
  await store.race();
  assert.ok(state.race !== race && isOver(state.race));
  assert.deepEqual(state.race.ids, race.ids);
});

test("a race that is paused goes on, and a new prompt waits for the button", async () => {
  const store = await at(WHY);
  const { state } = store;
  store.turnToStep(RACE);
  store.race();
  await until(() => state.race?.on.length > 3);
  store.pause();
  const { race } = state;
  assert.ok(state.phase === "paused" && !isOver(race));
  await store.race();
  assert.ok(state.race === race && isOver(race));
  store.describe(requestOf({ ids: [5, 5] }));
  assert.deepEqual([state.race, state.phase, state.run.on.length], [null, "ready", 0]);
});

test("both pay the same fixed cost, and then for each position", () => {
  const steps = (each) => each.map((computed) => ({ computed, ms: 5 + 2 * computed }));
  const { off, on, fixed } = costs({ off: steps([4, 5, 6]), on: steps([4, 1, 1]) });
  assert.deepEqual([off, on], [{ ms: 15, computed: 5 }, { ms: 9, computed: 2 }]);
  assert.equal(fixed, 5);
  // a small model may gain nothing, and then all is fixed
  assert.equal(costs({ off: [{ computed: 9, ms: 3 }], on: [{ computed: 1, ms: 4 }] }).fixed, 3);
});

test("a run goes on, back and over", async () => {
  const store = await at(INSIDE);
  const { state } = store;
  await store.play(Infinity);
  const { ids } = state.run;
  assert.deepEqual([state.phase, ids.length, state.run.kept.length], ["done", info.block_size, info.block_size - 1]);
  await store.play(1);
  assert.deepEqual([state.run.ids.length, state.phase], [PROMPT.length + 1, "paused"]);
  await store.play(Infinity);
  assert.deepEqual(state.run.ids, ids);
  store.goBack();
  await until(() => state.phase === "paused");
  assert.deepEqual(state.run.ids, ids.slice(0, -1));
});

test("a new prompt drops everything of the previous run", async () => {
  const store = await at(INSIDE);
  const { state } = store;
  store.play(Infinity);
  await until(() => state.run.on.length > 12);
  store.describe(requestOf({ ids: [5, 5] }));
  await until(() => state.phase === "paused");
  assert.deepEqual([state.run.ids.slice(0, 2), state.run.on.length, state.run.kept.length], [[5, 5], 8, 9]);
  assert.equal(state.answer, null);
  store.receive({ run: state.run.name - 1, on: { id: 0, computed: 1 } }); // late
  assert.equal(state.run.on.length, 8);
});

test("a step that the reader has left does not answer", async () => {
  const store = await at(INSIDE);
  const { state } = store;
  store.turnToStep(WHY);
  store.turnToStep(3);
  await new Promise((resolve) => setTimeout(resolve, 50));
  assert.deepEqual([state.step, state.answer], [3, null]);
});

test("a column is taken out and put back, but never the one that asks", async () => {
  const store = await at(INSIDE);
  const { state } = store;
  await store.takeOut();
  assert.match(takenInWords(state), /^Without character \d+, “.”, [\d.]+% of the probability moves to other characters, more than for any other one shown\.$/);
  const one = state.answer.masked === 3 ? 4 : 3;
  store.click(one);
  await until(() => state.answer.masked === one);
  assert.match(takenInWords(state), new RegExp(`^Without character ${one + 1}, “.”, [\\d.]+% of .* other characters\\.$`));
  store.click(one);
  assert.equal(state.answer, null);
  store.click(state.run.kept.length - 1);
  assert.match(state.note, /newest character is the one asking/);
});

test("a changed character changes what comes after it, and nothing before it, to the last bit", async () => {
  const store = await at(WHY);
  const { state } = store;
  await until(() => state.answer);
  const { length } = state.run.kept;
  const { position } = state.answer;
  assert.equal(position, Math.floor(length / 2));
  const { moved, before } = changeOf(state.answer, 1);
  assert.deepEqual([moved, before], [Array.from({ length }, (_, i) => i >= position), 0]);
  assert.deepEqual(changeOf(state.answer, 0).moved, Array.from({ length }, (_, i) => i === position)); // only its own
  for (const to of "abcdefgh") store.changeCharacter(undefined, to); // only the newest question is answered
  const previous = state.answer;
  await until(() => state.answer !== previous);
  assert.equal(info.chars[state.answer.ids[position]], "h");
  assert.deepEqual(state.answer.ids.slice(0, position), state.run.ids.slice(0, position));
});

test("all mistakes are answered, the one in the link first, and the rest do not replace it", async () => {
  const store = await at(BREAK, { mistake: "mask" });
  const { state } = store;
  await until(() => state.mistakes.size === NAMES.length);
  assert.equal([...state.mistakes.keys()][0], "mask");
  assert.equal(state.answer.name, "mask");
  store.showMistake("overwritten");
  assert.equal(state.answer.name, "overwritten");
  assert.ok(mistakeInWords(state).includes("A logit is off by up to"));
  store.turnToStep(WHY);
  assert.equal(state.answer, null);
});

const MOMENTS = [
  [INSIDE, { at: 20, layer: 1, head: 1 }],
  [INSIDE, { at: 9, take: 3 }],
  [INSIDE, { at: 15, head: 1 }],
  [WHY, { layer: 1, change: 6, to: "c" }],
  [BREAK, { layer: 2, mistake: "mask" }],
];

test("a link to a moment shows it, and what is shown gives the link again", async () => {
  for (const [step, moment] of MOMENTS) {
    const store = await at(step, moment);
    await until(() => store.state.answer || !(moment.take || moment.change || moment.mistake));
    const shown = Object.fromEntries(Object.entries(momentOf(store)).filter(([, value]) => value != null));
    assert.deepEqual(shown, moment);
  }
  const store = await at(WHY);
  store.turnToStep(RACE);
  assert.ok(Object.values(momentOf(store)).every((value) => value == null));
});

test("a click on an early character moves the strip there and pauses the run", async () => {
  const store = await at(BREAK);
  const { state } = store;
  store.play(Infinity);
  await until(() => state.from > 8);
  store.click(1);
  assert.deepEqual([state.phase, state.from, state.pointed], ["paused", 0, 1]);
  store.point(5);
  store.set({ page: 5 });
  assert.deepEqual([state.from, state.pointed], [5, null]); // another character is below the pointer now
  store.show(null);
  assert.equal(state.page, null);
});

test("a failure ends everything and says so", async () => {
  const store = await at(INSIDE);
  use({ ...toyNetwork(), forward: () => Promise.reject(new Error("out of memory")) });
  store.describe(requestOf({ seed: 4n }));
  await until(() => store.state.phase === "failed");
  assert.equal(store.state.error, "out of memory.");
});
