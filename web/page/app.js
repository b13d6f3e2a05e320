// The page: reads the form, asks the worker, and draws. The views draw the state and never change it.
import { attend } from "./attention.js";
import { startWorker } from "./client.js";
import { keptColumns } from "./columns.js";
import { characters, FIELDS, readAddress, readRequest, writeAddress } from "./request.js";
import { $, element, forgetDrawings, glyph, percent, quoted, remember } from "./views/draw.js";
import { drawGuesses, drawShapes } from "./views/folded.js";
import { choose, clearMistakes, drawMistake, makeMistakes, mistakeInWords, NAMES } from "./views/mistakes.js";
import { drawNext } from "./views/next.js";
import * as stage from "./views/stage.js";
import { drawSums } from "./views/sums.js";
import { characterAt, drawText } from "./views/text.js";

const form = $("form");
const fields = form.elements;
const NOTHING = { ids: [], steps: 0, notes: [], key: "" }; // what a form with a mistake asks for
const ROUNDING = 1e-3; // right columns that are computed in another way differ by less

const worker = startWorker(onEvent);
let info; // model.json, and `ids`: Map(character => id)
let [runs, questions] = [0, 0];

const state = {
  phase: "loading", // or ready, running, paused, done, failed
  step: 1, // of the lesson, 1 to 4
  layer: 0, // from 0, as the head
  head: 0,
  run: null, // see reset
  answer: null, // what is on the stage instead of the run, see show
  mistakes: new Map(), // name => answer
  from: 0, // the first character on the stage
  page: null, // the same if the reader turned to it; null: the newest characters are on the stage
  pointed: null, // the character below the pointer, or with the focus
  clicked: null,
};

// -- the state ----------------------------------------------------------------------------------------------------------

/** Let the worker end what it does. Returns the number of the question that comes next. */
function cancel() {
  worker.stop();
  return ++questions;
}

/** Begin another run. Whatever belongs to the one before is gone. */
function reset(request) {
  cancel();
  const { ids, steps, sampling } = request;
  state.run = {
    name: ++runs, request, given: ids.length, ids: [...ids], racing: false,
    on: [], off: [], // steps with the cache and without: { id, rows, ms, probabilities, shapes }
    kept: keptColumns(info), queries: null, // as in an answer
    fed: ids.length, // how many characters have a cell: those that the model has read
  };
  if (ids.length) worker.call("begin", runs, ids, steps, sampling);
  state.mistakes.clear();
  clearMistakes();
  for (const id of ["guess-verdict", "guessed"]) $(id).textContent = "";
  state.pointed = state.clicked = null;
  show(null);
  setPhase("ready", request.notes.join(" "));
}

function setPhase(name, status) {
  state.phase = document.body.dataset.state = name;
  $("status").textContent = status;
  $("run").textContent = name === "running" ? "Pause" : "Run";
  for (const id of ["run", "one", "race", "without", "change", "guess"]) $(id).disabled = name === "failed";
  render();
}

/** Put an answer on the stage instead of the run, or null: the run again.
 *
 *  answer  { kind, ids, fed, kept, queries, verdict, ... }; kind: "without", "change" or "mistake"
 */
function show(answer) {
  state.answer = answer;
  if (!answer || answer.kind === "mistake") state.page = null;
  choose(answer?.name);
  if (answer) $("status").textContent = ""; // it is about the run
  for (const kind of ["without", "change", "mistake"]) {
    const shown = answer?.kind === kind;
    $(`${kind}-verdict`).textContent = shown ? answer.verdict : "";
    if ($(kind)) $(kind).ariaPressed = shown;
  }
  render();
}

/** Read the form, and begin another run if it describes another one. Returns whether it has no mistake. */
function readForm() {
  say("");
  let request = NOTHING;
  try {
    request = readRequest(fields, info);
  } catch (error) {
    if (!error.field) throw error;
    say(error.message, error.field);
  }
  if (request.key !== state.run?.request.key) reset(request);
  if (state.step === 4 && request !== NOTHING && state.phase === "ready") askMistakes();
  return request !== NOTHING;
}

function say(message, field) {
  $("message").textContent = message;
  for (const name of FIELDS) fields[name].ariaInvalid = fields[name] === field ? "true" : null;
  if (field && $("settings").contains(field)) $("settings").open = true;
}

function failed(error) {
  setPhase("failed", "");
  say(`${error.message}.`.replace(/\.\.$/, "."));
}

// -- the worker ---------------------------------------------------------------------------------------------------------

async function load() {
  info = await worker.call("load").catch(failed);
  if (!info) return;
  info.ids = new Map(info.chars.map((char, id) => [char, id]));
  const size = `${(info.parameters / 1e6).toFixed(2)} million parameters`;
  $("model").textContent = `The model has ${size} and a context of ${info.block_size} characters.`;
  $("guess-section").hidden = !info.guesses;
  state.layer = Math.min(1, info.n_layer - 1); // the first layer hardly looks further than the last characters
  makeSegments("layer", info.n_layer);
  makeSegments("head", info.n_head);
  $("changed").append(...info.chars.map((char, id) => element("option", glyph(char), { value: id })));
  $("changed").value = info.ids.get("q") ?? 0;
  makeMistakes(showMistake);
  stage.measure();

  const { prompt } = fields;
  const unknown = [...prompt.value].some((char) => !info.ids.has(char));
  if (!readAddress(fields) && unknown) prompt.value = prompt.defaultValue = "";
  listen();
  setSpeed();
  const ready = readForm();
  setStep();
  if (ready && !matchMedia("(prefers-reduced-motion: reduce)").matches && state.step < 3) play(Infinity);
}

/** Make radio buttons that choose a layer or a head. */
function makeSegments(name, count) {
  for (let i = 0; i < count; i++) {
    const label = element("label");
    label.append(element("input", "", { type: "radio", name, value: i, checked: i === state[name] }), element("span", i + 1));
    $(name).append(label);
  }
}

function onEvent(event, { run: name, on, off, received, total }) {
  const { run } = state;
  if (event === "loading") {
    $("status").textContent = `Loading the model: ${(received / 1e6).toFixed(1)} of ${(total / 1e6).toFixed(1)} MB.`;
  } else if (name === run.name) {
    if (off) run.off.push(off);
    if (on) {
      run.on.push(on);
      run.ids.push(on.id);
      run.fed = run.kept.add(on.columns).length;
      run.queries = on.queries;
    }
    render();
  }
}

/** Ask the worker. A newer question, or another run, cancels this one: then the answer is null. */
async function ask(name, ...args) {
  const question = cancel();
  if (state.phase === "running") setPhase("paused", "");
  const answer = await worker.call(name, ...args).catch(failed);
  return question === questions ? answer : null;
}

// -- running ------------------------------------------------------------------------------------------------------------

const isWhole = ({ request, on, off }) => on.length === request.steps && off.length === request.steps;

/** Take `count` steps of the run that the form describes. A race, and a run after a whole one, begin at the start. */
async function play(count, race = false) {
  if (!readForm()) return form.querySelector("[aria-invalid]").focus();
  writeAddress(fields);
  if (race || isWhole(state.run)) reset(state.run.request);
  show(null);
  const { run } = state;
  run.racing ||= race;
  const question = cancel();
  setPhase("running", "");
  await worker.call("advance", count, run.racing && count > 1).catch(failed);
  if (question !== questions || state.phase === "failed") return;
  setPhase(isWhole(run) ? "done" : "paused", [...run.request.notes, verdict(run)].join(" "));
  if (state.step === 4) askMistakes(); // those that the run has kept from being answered
}

function pause() {
  cancel();
  setPhase("paused", verdict(state.run));
}

function verdict(run) {
  const { on, off, given } = run;
  const same = Math.min(on.length, off.length);
  const different = off.findIndex(({ id }, i) => i < same && id !== on[i].id);
  const rounding = "Rounding may choose between two candidates closer than 0.0001. Anything else is a bug.";
  if (different >= 0) return `The texts differ from character ${given + different + 1} on. ${rounding}`;
  const all = isWhole(run) && same > 1 ? "all " : "";
  return same ? `With and without the cache the text is the same, ${all}${characters(same)}.` : "";
}

// -- questions ----------------------------------------------------------------------------------------------------------

/** Return what the worker answered as something that the stage can show. */
function picture(kind, answer) {
  const kept = keptColumns(info).add(answer.columns);
  return { kind, fed: kept.length, ...answer, kept };
}

/** Take a column out: `index`, or the one in sight that moves the prediction most. */
async function takeOut(index = null) {
  const { ids, kept } = state.run;
  const newest = kept.length - 1; // it asks, so it stays
  const inSight = [...ids.keys()].slice(state.from, Math.min(newest, state.from + stage.size.cells));
  const candidates = index === null ? inSight : [index].filter((each) => each < newest);
  const answer = candidates.length ? await ask("without", candidates) : null;
  if (!answer) return;
  const name = `column ${answer.hidden + 1}, ${quoted(info.chars[ids[answer.hidden]])}`;
  const why = index === null ? ": the most of any column here" : "";
  const verdict = `Without ${name}, in all layers and heads, ${percent(answer.moved)} of the probability moves${why}.`;
  show({ ...picture("without", answer), ids, verdict });
}

/** Change the character `index`, or one that leaves columns on both sides. */
async function change(index = state.answer?.position ?? state.clicked) {
  const { ids, kept } = state.run;
  if (!kept.length) return;
  const position = Math.min(kept.length - 1, index ?? Math.max(0, kept.length - 10));
  const id = Number($("changed").value);
  const answer = await ask("change", position, id);
  if (answer) show({ ...picture("change", answer), ids: ids.with(position, id), position });
}

const drawChange = remember(({ position, differences }, layer) => {
  const [keys, values] = differences.slice(2 * layer, 2 * layer + 2);
  const moved = keys.filter((x, i) => x > 0 || values[i] > 0).length;
  const left = Math.max(0, ...keys.subarray(0, position), ...values.subarray(0, position));
  const stays = `All ${position} to its left stay: the difference is ${left || "exactly 0"}.`;
  const changes = `In layer ${layer + 1}, ${moved} of the ${keys.length - position} columns from there on change.`;
  const was = `Character ${position + 1} was ${quoted(info.chars[state.run.ids[position]])}.`;
  $("change-verdict").textContent = `${was} ${changes} ${position ? stays : ""}`;
});

/** Answer all mistakes, one after the other, and show the first. */
async function askMistakes() {
  const { run } = state;
  for (const name of NAMES.filter((name) => !state.mistakes.has(name))) {
    const answer = await ask("mistake", name);
    if (!answer) return;
    const [keys, values] = answer.differences.slice(0, 2).map((each) => each.filter((x) => x > ROUNDING).length);
    const verdict = mistakeInWords(info.chars, answer, keys, values);
    state.mistakes.set(name, { ...picture("mistake", answer), name, verdict, fed: answer.at });
    drawMistake(info.chars, name, run.given, answer);
    if (state.step !== 4) return;
    if (!state.answer) showMistake(name);
  }
}

function showMistake(name) {
  if (state.phase === "running") pause();
  show(state.mistakes.get(name) ?? null);
}

async function askGuesses() {
  const { run } = state;
  const answer = run.given ? await ask("guess") : null;
  if (answer) drawGuesses(info.chars, run.given, answer, run.ids.every((id, i) => id === answer.ids[i]));
}

// -- drawing ------------------------------------------------------------------------------------------------------------

let due = false;

function render() {
  if (due || !state.run) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    draw();
  });
}

/** Return the first character on the stage. The strip turns by half a page, so that columns stay where they are. */
function firstCell({ fed }) {
  const { cells } = stage.size;
  if (state.page !== null) return Math.max(0, Math.min(state.page, fed - cells));
  const turn = Math.ceil(cells / 2);
  return Math.max(0, Math.ceil((fed - cells) / turn) * turn);
}

/** Return the key/value head that serves a query head. */
const keyHead = (head) => Math.floor((head * info.n_kv_head) / info.n_head);

/** What the newest character looks at, in a layer and a head, and how strongly the values are drawn that it gets. */
const attentionOf = remember(({ kept, queries, hidden }, length, layer, head) => {
  if (!queries) return {};
  const [keys, values] = [0, 1].map((kind) => kept.lane(layer, kind, keyHead(head)));
  const query = queries[layer].subarray(head * info.head_size, (head + 1) * info.head_size);
  const { weights, mix } = attend(query, keys, values, hidden);
  const most = Math.max(...weights);
  return { query, weights, mix, strengths: weights.map((weight) => 0.12 + 0.88 * Math.sqrt(weight / most)) };
});

/** Whether the keys and the values of a layer are not what they were, or what they should be. */
const marksOf = remember((answer, layer) => {
  const most = answer?.kind === "change" ? 0 : ROUNDING;
  return answer?.differences?.slice(2 * layer, 2 * layer + 2).map((each) => [...each].map((x) => x > most)) ?? null;
});

function draw() {
  const { run, answer, layer, head, step } = state;
  const { chars, block_size } = info;
  const shown = answer ?? run;
  const { ids, fed, kept, hidden } = shown;
  const from = firstCell(shown);
  if (from !== state.from) state.pointed = null; // another character is below the pointer now
  state.from = from;
  const marked = state.pointed ?? state.clicked;
  const wrong = answer?.position ?? (answer?.first >= 0 ? answer.first : null);
  const [on, off] = [run.on.at(-1), run.off.at(-1)];

  // the text, and how far both are
  const behind = run.off.length < run.on.length ? run.given + run.off.length - 1 : null;
  drawText(chars, ids, ids.length, run.given, behind, wrong, marked);
  for (const name of ["off", "on"]) {
    document.querySelector(`.tracks .${name}`).style.width = `${(100 * (run.given + run[name].length)) / block_size}%`;
  }

  // the strip
  const { query = null, weights = null, mix = null, strengths } = attentionOf(shown, kept.length, layer, head);
  const below = marksOf(answer, layer);
  const fresh = below ? 0 : (on?.rows ?? 0);
  const lanes = [kept, kept.length, layer, keyHead(head), run];
  stage.drawCells(chars, ids, fed, from, fresh, wrong, hidden, marked, weights);
  stage.drawKeys(...lanes, query, null, from);
  stage.drawValues(...lanes, mix, step === 1 ? strengths : null, from);
  stage.drawAttention(weights, from);
  stage.drawBelow(below, kept.length, off?.rows ?? 0, fresh, from);

  // what comes next, and the work
  drawCandidates(marked, weights);
  drawSums(run.off, run.on, run.off.length, run.on.length, run.given, block_size);
  $("all").textContent = off ? `all ${off.rows}` : "all";
  drawShapes(info, on, off, run.kept.length);
  if (answer?.kind === "change") drawChange(answer, layer);
}

/** Draw the probabilities of the marked character, else of the next one, and say what the marked one is. */
function drawCandidates(marked, weights) {
  const { run, answer } = state;
  const { chars } = info;
  const { ids } = answer ?? run;
  const step = answer?.kind === "mistake" ? undefined : run.on[(marked ?? ids.length - 1) - run.given];
  if (marked !== null && step && !answer) drawNext(chars, `character ${marked + 1}`, step.probabilities, ids[marked], null);
  else if (answer?.at) drawNext(chars, `character ${answer.at + 1}`, answer.before, ids[answer.at], answer.after);
  else drawNext(chars, "next", run.on.at(-1)?.probabilities, answer ? undefined : ids.at(-1), answer?.probabilities);

  const about = marked === null ? [] : [`Character ${marked + 1} is ${quoted(chars[ids[marked]])}.`];
  if (marked !== null && marked < run.given) about.push("It is from the prompt.");
  else if (marked !== null && step) about.push(`It was written with a probability of ${percent(step.probabilities[ids[marked]])}.`);
  if (weights?.[marked] !== undefined) about.push(`The newest gives it ${percent(weights[marked])} of its attention.`);
  $("about").textContent = about.join(" ");
}

// -- events -------------------------------------------------------------------------------------------------------------

/** Show the step of the lesson that the address names. */
function setStep() {
  state.step = Number(location.hash.match(/^#step-([1-4])$/)?.[1] ?? 1);
  document.body.dataset.step = state.step;
  for (const link of document.querySelectorAll("nav a")) link.ariaCurrent = link.hash.endsWith(state.step) ? "step" : null;
  if (state.phase !== "running") cancel(); // a question of the step before
  show(null);
  if (state.step === 4) askMistakes();
}

function setSpeed() {
  const value = Number($("speed").value);
  const perSecond = value < 100 ? 2 ** (value / 14) : Infinity;
  $("speed").ariaValueText = value < 100 ? `${characters(Math.round(perSecond))} per second` : "as fast as it goes";
  worker.setDelay(1000 / perSecond);
}

/** Mark a character, the one that is "pointed" at or "clicked", or none. */
function mark(how, index) {
  const { ids } = state.answer ?? state.run;
  const there = index !== null && index < ids.length ? index : null;
  if (state[how] === there) return;
  state[how] = there;
  render();
}

/** Mark the character that was clicked, or do with it what this step is about. */
function click(index) {
  if (index === null) return;
  turnTo(index);
  if (state.answer?.kind === "without") return takeOut(index);
  if (state.answer?.kind === "change") return change(index);
  mark("clicked", state.clicked === index ? null : index);
}

/** Let the strip show a character. */
function turnTo(index) {
  const { cells } = stage.size;
  if (index >= state.from && index < state.from + cells) return;
  state.page = index - Math.floor(cells / 2);
  state.pointed = null;
  draw();
}

/** Move the focus along the strip, which follows. */
function moveFocus(event) {
  const last = (state.answer ?? state.run).fed - 1;
  const index = cellIndex(event);
  const to = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: last }[event.key];
  if (to === undefined || to < 0 || to > last) return;
  event.preventDefault();
  turnTo(to);
  $("cells").children[to - state.from].focus();
}

const cellIndex = ({ target }) => state.from + [...$("cells").children].indexOf(target);

function listen() {
  form.onsubmit = (event) => {
    event.preventDefault();
    if (state.phase === "running") pause();
    else play(Infinity);
  };
  fields.prompt.onkeydown = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!event.repeat) play(Infinity);
  };
  for (const name of FIELDS) fields[name].oninput = readForm;
  $("one").onclick = () => play(1);
  $("race").onclick = () => play(Infinity, true);
  $("speed").oninput = setSpeed;
  for (const name of ["layer", "head"]) {
    $(name).onchange = ({ target }) => {
      state[name] = Number(target.value);
      render();
    };
  }
  $("without").onclick = () => (state.answer?.kind === "without" ? show(null) : takeOut());
  $("change").onclick = () => (state.answer?.kind === "change" ? show(null) : change());
  $("changed").oninput = () => change();
  $("guess").onclick = askGuesses;
  window.onhashchange = setStep;
  window.onkeydown = ({ key }) => {
    if (key !== "Escape") return;
    $("settings").open = false;
    mark("clicked", null);
  };
  const cells = $("cells");
  cells.onkeydown = moveFocus;
  cells.addEventListener("focusin", (event) => event.target.matches(":focus-visible") && mark("pointed", cellIndex(event)));
  cells.addEventListener("focusout", () => mark("pointed", null));
  for (const [place, indexOf] of [[$("strip"), (event) => stage.indexAt(event, state.from)], [$("text"), characterAt]]) {
    place.onpointermove = (event) => mark("pointed", indexOf(event));
    place.onpointerleave = () => mark("pointed", null);
    place.onclick = (event) => click(indexOf(event));
  }
  new ResizeObserver(redraw).observe($("strip"));
  for (const query of ["(prefers-color-scheme: dark)", "(forced-colors: active)"]) matchMedia(query).onchange = redraw;
}

function redraw() {
  stage.measure();
  forgetDrawings();
  render();
}

load();
