import assert from "node:assert/strict";
import { test } from "node:test";
import { momentOf } from "../page/address.js";
import { COMMANDS, use } from "../page/commands.js";
import { NAMES } from "../page/mistakes.js";
import { STEPS } from "../page/steps.js";
import { createStore } from "../page/store.js";
import { runInWords } from "../page/words.js";
import { INFO, toyNetwork } from "./toy.mjs";

const info = { ...INFO, start: { new: 8, layer: 1, head: 1 } };
const PROMPT = [1, 4, 2, 7];

/** A request as readRequest returns it. */
function requestOf({ ids = PROMPT, seed = 3n, steps = info.block_size - ids.length } = {}) {
  return { ids, steps, sampling: { temperature: 0.8, topK: null, seed }, notes: [], key: [ids, steps, seed].join() };
}

/** The commands of the worker without a worker: one after the other, and "stop" ends all that came before it. */
function open() {
  let [stops, queue] = [0, Promise.resolve()];
  const call = (name, ...args) => {
    const before = stops;
    const control = { isStopped: () => stops !== before, delay: () => 0 };
    queue = queue.then(() => COMMANDS[name](control, ...args));
    return queue;
  };
  const store = createStore({ call, stop: () => stops++ }, () => store?.state.phase === "running" && store.whileRunning?.());
  globalThis.postMessage = ({ event, ...data }) => store.receive(event, structuredClone(data));
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
  await until(() => store.state.phase === "paused");
  return store;
}

const words = ({ state }) => STEPS[state.step - 1].words(state);

test("a step begins in the middle of the text, with its own layer and head", async () => {
  for (const step of [1, 2, 3, 4]) {
    const { state } = await at(step);
    assert.equal(state.run.ids.length, PROMPT.length + 8);
    assert.deepEqual([state.layer, state.head], { 1: [1, 1], 2: [1, 1], 3: [1, 0], 4: [0, 0] }[step]);
  }
});

test("a run ends with the same text twice, and the next one starts over", async () => {
  const store = await at(2);
  const { state } = store;
  await store.play(Infinity);
  const { ids } = state.run;
  assert.equal(state.phase, "done");
  assert.equal(ids.length, info.block_size);
  assert.equal(runInWords(state.run), "The text is the same with and without the cache: all 28 characters.");
  assert.equal(state.run.kept.length, info.block_size - 1);
  await store.play(1);
  assert.deepEqual([state.run.ids.length, state.phase], [PROMPT.length + 1, "paused"]);
  await store.play(Infinity, 8);
  assert.deepEqual([state.run.ids, state.run.racing], [ids, 8]);
  store.goBack();
  await until(() => state.phase === "paused");
  assert.deepEqual([state.run.ids, state.run.racing], [ids.slice(0, -1), 0]);
});

test("in a race, the strip stays where the slower text is", async () => {
  const store = await at(2);
  const { state } = store;
  const { forward, ...network } = toyNetwork();
  const slow = async (ids, cache, options) => {
    if (!options.keep) await new Promise((resolve) => setTimeout(resolve, 5)); // without the cache
    return forward(ids, cache, options);
  };
  use({ ...network, forward: slow });
  const frames = []; // whether the slower text is visible
  store.whileRunning = () => {
    const { run, from } = state;
    const slower = run.off.at(-1)?.computed ?? 0;
    if (run.on.length <= run.off.length) return;
    frames.push(from <= slower && slower <= from + state.cells);
  };
  await store.play(Infinity, 2);
  assert.ok(frames.length > 3 && frames.every(Boolean));
});

test("a new prompt drops everything of the previous run, and takes one step", async () => {
  const store = await at(1);
  const { state } = store;
  store.play(Infinity);
  await until(() => state.run.on.length > 12);
  store.describe(requestOf({ ids: [5, 5] }));
  await until(() => state.phase === "paused");
  assert.deepEqual([state.run.ids.slice(0, -1), state.run.off.length, state.run.kept.length], [[5, 5], 1, 2]);
  assert.equal(state.answer, null);
  store.receive("step", { run: state.run.name - 1, off: { id: 0, computed: 1 } }); // late
  assert.equal(state.run.off.length, 1);
});

test("a column is taken out and put back, but never the one that asks", async () => {
  const store = await at(1);
  const { state } = store;
  await store.takeOut();
  assert.match(words(store), /^Without column \d+, “.”, [\d.]+% of the probability moves to other characters, more than for any other column shown\.$/);
  const most = state.answer.masked;
  const one = most === 3 ? 4 : 3;
  store.click(one);
  await until(() => state.answer.masked === one);
  assert.match(words(store), new RegExp(`For column ${most + 1}, “.”, it is`));
  store.click(one);
  assert.equal(state.answer, null);
  store.click(state.run.kept.length - 1);
  assert.match(state.note, /newest character is the one asking/);
});

test("the answer of step 3 says what stays and why it may be kept", async () => {
  const store = await at(3);
  const { state } = store;
  await store.expect("right");
  assert.match(words(store), /^You were right\. .*exactly 0\. .*we may keep it\.$/);
  store.set({ layer: 0 });
  assert.match(words(store), /only its own column changes/);
  for (const to of "abcdefgh") store.changeCharacter(undefined, to); // only the newest question is answered
  const before = state.answer;
  await until(() => state.answer !== before);
  const { position, ids } = state.answer;
  assert.equal(info.chars[ids[position]], "h");
  assert.deepEqual(ids.slice(0, position), state.run.ids.slice(0, position));
});

test("all mistakes are answered, the one in the link first, and the rest do not replace it", async () => {
  const store = await at(4, { mistake: "mask" });
  const { state } = store;
  await until(() => state.mistakes.size === NAMES.length);
  assert.equal([...state.mistakes.keys()][0], "mask");
  assert.equal(state.answer.name, "mask");
  store.showMistake("overwritten");
  assert.equal(state.answer.name, "overwritten");
  store.turnToStep(3);
  assert.equal(state.answer, null);
});

const MOMENTS = [
  [1, { at: 20, layer: 1, head: 1 }],
  [1, { at: 9, take: 3 }],
  [2, { at: 15, head: 1 }],
  [3, { layer: 1, change: 6, to: "c" }],
  [4, { layer: 2, mistake: "mask" }],
];

test("a link to a moment shows it, and what is shown gives the link again", async () => {
  for (const [step, moment] of MOMENTS) {
    const store = await at(step, moment);
    await until(() => store.state.answer || !(moment.take || moment.change || moment.mistake));
    const shown = Object.fromEntries(Object.entries(momentOf(store)).filter(([, value]) => value != null));
    assert.deepEqual(shown, moment);
  }
  assert.ok(Object.values(momentOf(await at(2))).every((value) => value == null));
});

test("a click on an early character moves the strip there and pauses the run", async () => {
  const store = await at(2);
  const { state } = store;
  store.play(Infinity);
  await until(() => state.from > 8);
  store.click(1);
  assert.deepEqual([state.phase, state.from, state.clicked], ["paused", 0, 1]);
  store.point(5);
  store.set({ page: 5 });
  assert.deepEqual([state.from, state.pointed], [5, null]); // another character is below the pointer now
  store.show(null);
  assert.equal(state.page, null);
});

test("a failure ends everything and says so", async () => {
  const store = await at(1);
  use({ ...toyNetwork(), forward: () => Promise.reject(new Error("out of memory")) });
  store.describe(requestOf({ seed: 4n }));
  await until(() => store.state.phase === "failed");
  assert.equal(store.state.error, "out of memory.");
});
