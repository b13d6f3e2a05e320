// The state of the page and what can happen to it. Nothing here knows the document: controls.js calls the transitions, and
// views/ draws the state and never changes it.
import { keptColumns } from "./cache.js";
import { NAMES } from "./mistakes.js";
import { STEPS } from "./steps.js";
import { isOver } from "./steps/race.js";

/** Return { state, and the transitions }. worker: see client.js. onChange() is called after every transition.
 *  delay: between the steps of a run that the reader watches, in milliseconds. */
export function createStore(worker, onChange, delay = 120) {
  let [runs, questions] = [0, 0];

  const state = {
    phase: "loading", // or ready, preparing, running, paused, done, failed
    info: null, // model.json, and `ids`: Map(character => id)
    step: 1, // of the lesson, from 1
    layer: 0, // from 0, like the head
    head: 0,
    run: null, // see begin
    race: null, // the run whose text is also written without the cache, and what came of it
    guess: {}, // of the race: how many times `fewer` positions and how many times `faster` the reader expects
    answer: null, // what is on the stage instead of the run, see show
    mistakes: new Map(), // name => answer
    changed: 0, // the id that a character is changed to
    all: false, // whether all characters, layers and heads are on the stage, or three characters in large
    cells: 40, // how many characters fit on the stage
    from: 0, // the first of them
    page: null, // the same if the reader chose it; null: the newest characters are on the stage
    pointed: null, // the character below the pointer, or with the focus
    note: "", // about the last click
    refused: null, // what is wrong with the form: { message, name }
    error: "",
  };

  /** Call after every transition. */
  function changed() {
    const from = state.run ? firstCell(state.answer ?? state.run) : 0;
    if (from !== state.from) Object.assign(state, { from, pointed: null }); // another character is below the pointer now
    onChange();
  }

  function set(values) {
    Object.assign(state, values);
    changed();
  }

  /** Return the first character on the stage. The strip moves by a quarter of its width at a time, so columns mostly stay
   *  in place. */
  function firstCell({ tokens }) {
    const { cells, page } = state;
    const fed = tokens.length;
    if (page !== null) return Math.max(0, Math.min(page, fed - cells));
    const turn = Math.ceil(cells / 4);
    return Math.max(0, Math.ceil((fed - cells) / turn) * turn);
  }

  // -- runs -------------------------------------------------------------------------------------------------------------

  /** Make the worker end its current work. Returns the number of the next question. */
  function cancel() {
    worker.stop();
    return ++questions;
  }

  /** Start a new run, with nothing computed. Everything of the previous run is dropped. */
  function begin(request) {
    cancel();
    const { ids, steps, sampling } = request;
    state.run = {
      name: ++runs, request, given: ids.length, ids: [...ids],
      on: [], off: [], // steps with the cache and without: { id, computed, ms, probabilities, queries }
      kept: keptColumns(state.info),
    };
    grown(state.run);
    worker.call("begin", runs, ids, steps, sampling).catch(fail);
    Object.assign(state, { mistakes: new Map(), phase: "ready" });
    show(null);
  }

  /** Note that a run has gained or lost steps. */
  function grown(run) {
    run.tokens = run.ids.slice(0, run.on.length ? run.kept.length : run.given); // the characters that have a cell
    run.queries = run.on.at(-1)?.queries ?? null;
  }

  /** Start the run that the form describes, unless it is the present one. moment: see address.js. */
  function describe(request, moment) {
    const { run } = state;
    state.refused = null;
    if (request.key === run?.request.key) return changed();
    begin(request);
    state.race = null;
    const { early, prepares } = STEPS[state.step - 1];
    if (!run && !early) enter(moment);
    else if (prepares) enter(); // but a race waits for its button
  }

  /** Race: both write the text, each at its own speed. A race that was paused goes on, and another run starts over. */
  function race() {
    if (state.run !== state.race || isOver(state.race)) begin(state.run.request);
    state.race = state.run;
    return advance(Infinity, { racing: true });
  }

  /** Take `count` steps of the run, with the cache. A finished run starts over. */
  function play(count) {
    const { run } = state;
    if (run.on.length === run.request.steps) begin(run.request);
    show(null);
    return advance(count, { delay: count > 1 ? delay : 0 });
  }

  async function advance(count, how) {
    const question = cancel();
    set({ phase: "running" });
    await worker.call("advance", count, how).catch(fail);
    if (question === questions) settle();
  }

  /** End a run where it is now. */
  function settle() {
    if (state.phase === "failed") return;
    const { on, off, request } = state.run;
    const isDone = state.run === state.race ? isOver(state.race) : on.length === request.steps;
    set({ phase: isDone ? "done" : on.length + off.length ? "paused" : "ready" });
  }

  function pause() {
    cancel();
    settle();
  }

  /** Move the run, forward or back, to a text of `length` characters. Returns whether it got there uninterrupted. */
  async function goTo(length) {
    if (state.run === state.race) begin(state.run.request); // the race stays as it is
    const { run } = state;
    const steps = Math.max(0, Math.min(length - run.given, run.request.steps));
    const question = cancel();
    if (steps > run.on.length) set({ phase: "preparing" });
    await worker.call("rewind", steps).catch(fail);
    run.on.splice(steps);
    run.ids.splice(run.given + steps);
    run.kept.truncate(steps ? run.given + steps - 1 : 0);
    grown(run);
    if (question !== questions) return false;
    await worker.call("advance", steps - run.on.length).catch(fail);
    if (question !== questions || state.phase === "failed") return false;
    settle();
    return true;
  }

  function goBack() {
    show(null);
    goTo(state.run.ids.length - 1);
  }

  /** Add a step that the worker took: see commands.js. */
  function receive({ run: name, on, off }) {
    const { run } = state;
    if (name !== run?.name) return;
    if (off) run.off.push(off);
    if (on) {
      run.on.push(on);
      run.ids.push(on.id);
      run.kept.add(on.columns);
    }
    grown(run);
    changed();
  }

  function fail({ message }) {
    set({ phase: "failed", error: `${message}.`.replace(/\.\.$/, ".") });
  }

  // -- the lesson -------------------------------------------------------------------------------------------------------

  /** The length of the text at the start of a step. Never the whole text: the step is about the next character. */
  const prepared = ({ given, request }) => given + Math.min(state.info.start.new, Math.ceil(0.7 * request.steps));

  /** The layer and the head at the start of the step. */
  function lookOfStep() {
    const { info, step } = state;
    const { look = {} } = STEPS[step - 1];
    const { layer = 0, head = 0 } = look === "start" ? info.start : look;
    return { layer: Math.min(layer, info.n_layer - 1), head: Math.min(head, info.n_head - 1) };
  }

  /** Prepare this step of the lesson, or a moment in it: see address.js. */
  async function enter(moment = {}) {
    const { run, info } = state;
    const { early, prepares, enter: begins } = STEPS[state.step - 1];
    const { layer, head } = lookOfStep();
    state.layer = Math.min(moment.layer ? moment.layer - 1 : layer, info.n_layer - 1);
    state.head = Math.min(moment.head ? moment.head - 1 : head, info.n_head - 1);
    state.all = Boolean(moment.layer || moment.head);
    cancel(); // what an earlier step has asked for
    if (["running", "preparing"].includes(state.phase)) settle();
    show(null);
    if (!run && !early) return; // the model has not arrived
    if (!prepares || (await goTo(moment.at ?? prepared(run)))) await begins?.(store, moment);
  }

  function turnToStep(step, moment) {
    state.step = step;
    enter(moment);
  }

  /** Put an answer on the stage instead of the run, or null: the run again.
   *
   *  answer  { kind, ids, tokens, kept, queries, ... }; kind: "take", "change" or "mistake"
   */
  function show(answer) {
    if (!answer || answer.kind === "mistake") state.page = null;
    if (!answer) state.pointed = null;
    set({ answer, note: "" });
  }

  /** Turn the worker's answer into something that the stage can show. */
  function picture(kind, answer) {
    const kept = keptColumns(state.info).add(answer.columns);
    const tokens = answer.tokens ?? answer.ids.slice(0, kept.length);
    return { kind, ...answer, kept, tokens };
  }

  /** Ask the worker. A newer question or another run cancels this one, and then the answer is null. */
  async function ask(name, ...args) {
    const question = cancel();
    if (["running", "preparing"].includes(state.phase)) settle();
    const answer = await worker.call(name, ...args).catch(fail);
    return question === questions ? answer : null;
  }

  /** Take out a column: `index`, or the visible one that moves the prediction most. */
  async function takeOut(index = null) {
    const { run } = state;
    const newest = run.kept.length - 1; // it is the one asking, so it stays
    if (index !== null) turnTo(Math.min(index, newest));
    if (index === newest) return set({ note: "The newest character is the one asking, so its own key and value stay." });
    const from = firstCell(run);
    const inSight = [...run.ids.keys()].slice(from, Math.min(newest, from + state.cells));
    if (newest < 1 || index > newest || !inSight.length) return;
    const answer = await ask("takeOut", index === null ? inSight : [index]);
    if (answer) show(picture("take", { ...answer, isMost: index === null, ids: run.ids.with(-1, answer.next) }));
  }

  /** Change a character, by default the one that is changed already, to the character `to`. */
  async function changeCharacter(index = state.answer?.position, to = null) {
    const { run, info } = state;
    if (!run.kept.length) return;
    const position = Math.min(run.kept.length - 1, index ?? 0);
    let id = info.ids.get(to) ?? state.changed;
    if (id === run.ids[position]) id = (id + 1) % info.chars.length; // otherwise nothing would change
    set({ changed: id });
    const answer = await ask("change", position, id);
    if (!answer) return;
    const ids = run.ids.with(position, id).with(-1, answer.next);
    show(picture("change", { ...answer, ids, position }));
  }

  /** Get the answers for all mistakes, one after the other, and show `first` as soon as it is there. */
  async function askMistakes(first = NAMES[0]) {
    if (state.mistakes.has(first)) showMistake(first);
    const missing = NAMES.filter((name) => !state.mistakes.has(name)).sort((a, b) => (b === first) - (a === first));
    for (const name of missing) {
      const answer = await ask("mistake", name);
      if (!answer) return;
      set({ mistakes: new Map(state.mistakes).set(name, { ...picture("mistake", answer), name }) });
      if (!state.answer) showMistake(name);
    }
  }

  const showMistake = (name) => show(state.mistakes.get(name) ?? null);

  // -- pointing ---------------------------------------------------------------------------------------------------------

  /** Point at a character, or at none. */
  function point(index) {
    if (!state.run) return;
    const pointed = index !== null && index < (state.answer ?? state.run).ids.length ? index : null;
    if (pointed !== state.pointed) set({ pointed });
  }

  /** Respond to a click on a character: do what this step is about. */
  function click(index) {
    if (index !== null && state.run) STEPS[state.step - 1].click?.(store, index);
  }

  /** Move the strip to a character. A run would move it back at once, so pause the run. */
  function turnTo(index) {
    const { from, cells } = state;
    if (index >= from && index < from + cells) return;
    if (state.phase === "running") pause();
    set({ page: Math.max(0, index - Math.floor(cells / 2)) });
  }

  const store = {
    state, set, receive, fail, describe, lookOfStep, prepared, enter, turnToStep, race, play, pause, goBack,
    show, takeOut, changeCharacter, askMistakes, showMistake, point, click, turnTo,
  };
  return store;
}
