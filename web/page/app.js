// The page: reads the form and the address, asks the worker, and draws. The views draw the state and never change it.
import { attend } from "./attention.js";
import { startWorker } from "./client.js";
import { keptColumns } from "./columns.js";
import { readMoment, writeMoment } from "./moment.js";
import { openingRun, openingWithout } from "./opening.js";
import { characters, FIELDS, readAddress, readRequest, writeAddress } from "./request.js";
import { $, element, forgetDrawings, glyph, percent, quoted, remember } from "./views/draw.js";
import { drawGuesses, drawShapes } from "./views/folded.js";
import { choose, clearMistakes, drawMistake, makeMistakes, mistakeInWords, NAMES } from "./views/mistakes.js";
import { drawNext } from "./views/next.js";
import { makeScale } from "./views/scale.js";
import * as stage from "./views/stage.js";
import { drawSums } from "./views/sums.js";
import { characterAt, drawText, drawTextWithout } from "./views/text.js";

const form = $("form");
const fields = form.elements;
const ROUNDING = 1e-3; // right columns differ by less when they are computed differently
const PREPARED = 25; // new characters at the start of a step of the lesson, if the run is long enough
// layer and head of each step, by default 0
const LOOKS = [{ layer: 1, head: 3 }, { layer: 1, head: 3 }, { layer: 1 }, {}, {}];

const worker = startWorker(onEvent);
let info; // model.json, and `ids`: Map(character => id)
let [runs, questions, versions] = [0, 0, 0];

const state = {
  phase: "loading", // or ready, preparing, running, paused, done, failed
  step: 1, // of the lesson, 1 to 5
  layer: 0, // from 0, like the head
  head: 0,
  run: null, // see reset; null until the form describes one
  answer: null, // what is on the stage instead of the run, see show
  mistakes: new Map(), // name => answer
  guess: null, // which columns the reader expects to change: "left", "right" or "all"
  from: 0, // the first character on the stage
  page: null, // the same if the reader chose it; null: the newest characters are on the stage
  pointed: null, // the character below the pointer, or with the focus
  clicked: null,
};

// -- the state ----------------------------------------------------------------------------------------------------------

/** Make the worker end its current work. Returns the number of the next question. */
function cancel() {
  worker.stop();
  return ++questions;
}

/** Start a new run, with nothing computed. Everything of the previous run is dropped. */
function reset(request) {
  cancel();
  const { ids, steps, sampling } = request;
  state.run = {
    name: ++runs, request, given: ids.length, ids: [...ids], racing: 0,
    on: [], off: [], // steps with the cache and without: { id, rows, ms, probabilities, shapes, queries }
    kept: keptColumns(info),
  };
  changed(state.run);
  worker.call("begin", runs, ids, steps, sampling).catch(failed);
  state.mistakes.clear();
  clearMistakes();
  for (const id of ["guess-verdict", "guessed"]) $(id).textContent = "";
  show(null);
  setPhase("ready");
}

/** Note that a run has gained or lost steps. */
function changed(run) {
  run.version = ++versions;
  run.slots = run.ids.slice(0, run.on.length ? run.kept.length : run.given); // the characters that have a cell
  if (!run.isOpening) run.queries = run.on.at(-1)?.queries ?? null;
}

function setPhase(name) {
  state.phase = document.body.dataset.state = name;
  const { run } = state;
  const isSaid = ["ready", "paused", "done"].includes(name) && run;
  $("status").textContent = isSaid ? [...run.request.notes, verdict(run)].join(" ") : "";
  $("loading").textContent = "";
  $("run").textContent = name === "running" ? "Pause" : "Run";
  render();
}

/** End a run where it is now. */
function settle() {
  setPhase(isWhole(state.run) ? "done" : state.run.on.length ? "paused" : "ready");
  keepAddress();
}

/** Put an answer on the stage instead of the run, or null: the run again.
 *
 *  answer  { kind, version, ids, slots, kept, queries, verdict, ... }; kind: "take", "change" or "mistake"
 */
function show(answer) {
  state.answer = answer;
  if (!answer || answer.kind === "mistake") state.page = null;
  if (!answer) state.pointed = state.clicked = null;
  choose(answer?.name);
  $("take-verdict").textContent = answer?.kind === "take" ? answer.verdict : "";
  $("mistake-verdict").textContent = answer?.kind === "mistake" ? answer.verdict : "";
  if (answer) $("status").textContent = ""; // the status is about the run
  keepAddress();
  render();
}

/** Read the form, and start a new run if it describes a different one. A mistake in the form leaves the run alone.
 *  Returns whether the form is valid. */
function readForm() {
  if (state.phase === "loading") return true; // it is read when the model has arrived
  say("");
  let request;
  try {
    request = readRequest(fields, info);
  } catch (error) {
    if (!error.field) throw error;
    say(error.message, error.field);
    return false;
  }
  const { run } = state;
  if (request.key === run?.request.key && !run.isOpening) return true;
  const taken = run?.isOpening && state.answer ? { take: state.answer.masked + 1 } : {};
  reset(request);
  if (!run || run.isOpening) enter({ ...readMoment(), ...taken });
  else if (state.step > 2) enter(); // these steps have no button to run it
  else goTo(state.run.given + 1); // so that the stage shows the new prompt
  return true;
}

function say(message, field) {
  $("message").textContent = message;
  for (const name of FIELDS) fields[name].ariaInvalid = fields[name] === field ? "true" : null;
  if (field && $("settings").contains(field)) $("settings").open = true;
}

function failed(error) {
  setPhase("failed");
  say(`${error.message}.`.replace(/\.\.$/, "."));
}

let writing;

/** Put what is on the page into the address, a little later: browsers limit how often it may change. */
function keepAddress() {
  clearTimeout(writing);
  writing = setTimeout(() => {
    const { phase, run, answer, step, layer, head } = state;
    if (!run || ["loading", "preparing", "running"].includes(phase) || document.querySelector("[aria-invalid]")) return;
    const at = run.given + Math.min(run.on.length, run.off.length);
    const look = lookOf(step);
    writeAddress(fields);
    writeMoment({
      at: step === 5 || at === prepared(run) ? null : at,
      layer: layer === look.layer ? null : layer + 1,
      head: head === look.head ? null : head + 1,
      take: answer?.kind === "take" ? answer.masked + 1 : null,
      change: answer?.kind === "change" ? answer.position + 1 : null,
      to: answer?.kind === "change" ? info.chars[answer.ids[answer.position]] : null,
      mistake: answer?.name,
      projector: "projector" in document.body.dataset ? "on" : null,
    });
  }, 200);
}

// -- the worker ---------------------------------------------------------------------------------------------------------

async function load() {
  info = await worker.call("about").catch(failed);
  if (!info) return;
  info.ids = new Map(info.chars.map((char, id) => [char, id]));
  info.heads = info.n_layer * info.n_head;
  for (const each of document.querySelectorAll("[data-info]")) each.textContent = info[each.dataset.info];
  const size = `${(info.parameters / 1e6).toFixed(2)} million parameters`;
  $("model").textContent = `The model has ${size} and a context of ${info.block_size} characters.`;
  makeSegments("layer", info.n_layer);
  makeSegments("head", info.n_head);
  $("changed").append(...info.chars.map((char, id) => element("option", glyph(char), { value: id })));
  $("changed").value = info.ids.get("q") ?? 0;
  makeMistakes(showMistake);
  makeScale(info);
  linkToCode();
  if (readMoment().projector) setProjector(true);
  stage.measure();

  const { prompt } = fields;
  const unknown = [...prompt.value].some((char) => !info.ids.has(char));
  if (!readAddress(fields) && unknown) prompt.value = prompt.defaultValue = "";
  listen();
  setSpeed();
  state.step = stepOfAddress();
  drawStep();
  showOpening();
  const loaded = await worker.call("load").catch(failed);
  if (!loaded) return;
  $("guess-section").hidden = !loaded.guesses;
  setPhase("ready");
  readForm();
}

/** Show the opening moment until the model has arrived, unless the address asks for something else. */
function showOpening() {
  const { opening, block_size } = info;
  if (!opening || state.step > 2 || location.search) return;
  const { layer, head, ids, given } = opening;
  Object.assign(state, { layer, head });
  const request = { ids: ids.slice(0, given), steps: block_size - given, notes: [] };
  state.run = openingRun(info, request);
  changed(state.run);
  setLook("layer", layer);
  setLook("head", head);
}

/** Make radio buttons for the layers or the heads. */
function makeSegments(name, count) {
  for (let i = 0; i < count; i++) {
    const label = element("label");
    label.append(element("input", "", { type: "radio", name, value: i }), element("span", i + 1));
    $(name).append(label);
  }
}

/** On GitHub Pages, the address tells where the code is. */
function linkToCode() {
  const owner = location.hostname.match(/^([\w-]+)\.github\.io$/)?.[1];
  if (!owner) return;
  const path = `github.com/${owner}/${location.pathname.split("/")[1]}`;
  Object.assign($("repository").querySelector("a"), { href: `https://${path}`, textContent: path });
  $("repository").hidden = false;
}

function onEvent(event, { run: name, on, off, received, total }) {
  const { run } = state;
  if (event === "loading") {
    if (state.phase !== "loading") return; // something else failed meanwhile
    $("loading").textContent = `Loading the model: ${(received / 1e6).toFixed(1)} of ${(total / 1e6).toFixed(1)} MB.`;
  } else if (name === run.name) {
    if (off) run.off.push(off);
    if (on) {
      run.on.push(on);
      run.ids.push(on.id);
      run.kept.add(on.columns);
    }
    changed(run);
    if (state.phase === "running" && state.step === 2 && !run.racing) stage.animateStep();
    render();
  }
}

/** Ask the worker. A newer question or another run cancels this one, and then the answer is null. */
async function ask(name, ...args) {
  const question = cancel();
  if (["running", "preparing"].includes(state.phase)) settle();
  const answer = await worker.call(name, ...args).catch(failed);
  return question === questions ? answer : null;
}

// -- running ------------------------------------------------------------------------------------------------------------

const isWhole = ({ request, on, off }) => on.length === request.steps && off.length === request.steps;

/** Take `count` steps of the run that the form describes. A race starts over, and so does a finished run.
 *
 *  racing: how many times as fast the cache is, by the reader's guess; 0: no race
 */
async function play(count, racing = 0) {
  if (state.phase === "loading") return;
  if (!readForm()) return form.querySelector("[aria-invalid]").focus();
  if (racing || isWhole(state.run)) reset(state.run.request);
  show(null);
  const { run } = state;
  run.racing ||= racing;
  const question = cancel();
  setPhase("running");
  await worker.call("advance", count, { racing: run.racing && count > 1 }).catch(failed);
  if (question === questions && state.phase !== "failed") settle();
}

function pause() {
  cancel();
  settle();
}

/** Move the run, forward or back, to a text of `length` characters. Returns whether it got there uninterrupted. */
async function goTo(length) {
  const { run } = state;
  const steps = Math.max(0, Math.min(length - run.given, run.request.steps));
  const question = cancel();
  if (steps > Math.min(run.on.length, run.off.length)) setPhase("preparing");
  await worker.call("rewind", steps).catch(failed);
  run.on.splice(steps);
  run.off.splice(steps);
  run.ids.splice(run.given + steps);
  run.kept.truncate(steps ? run.given + steps - 1 : 0);
  run.racing = 0;
  changed(run);
  const missing = steps - Math.min(run.on.length, run.off.length);
  if (question !== questions) return false;
  await worker.call("advance", missing, { hurrying: true }).catch(failed);
  if (question !== questions || state.phase === "failed") return false;
  settle();
  return true;
}

function goBack() {
  show(null);
  goTo(state.run.ids.length - 1);
}

function verdict(run) {
  const { on, off, given } = run;
  const same = Math.min(on.length, off.length);
  const different = off.findIndex(({ id }, i) => i < same && id !== on[i].id);
  const rounding = "Rounding can decide between two candidates closer than 0.0001. Anything else is a bug.";
  if (different >= 0) return `The texts differ from character ${given + different + 1} on. ${rounding}`;
  const all = isWhole(run) && same > 1 ? "all " : "";
  return same ? `The text is the same with and without the cache: ${all}${characters(same)}.` : "";
}

// -- the lesson ---------------------------------------------------------------------------------------------------------

const stepOfAddress = () => Number(location.hash.match(/^#step-([1-5])$/)?.[1] ?? 1);

/** The length of the text at the start of a step. Never the whole text: the step is about the next character. */
const prepared = ({ given, request }) => given + Math.min(PREPARED, Math.ceil(0.7 * request.steps));

/** The layer and the head at the start of a step. */
function lookOf(step) {
  const { layer = 0, head = 0 } = LOOKS[step - 1];
  return { layer: Math.min(layer, info.n_layer - 1), head: Math.min(head, info.n_head - 1) };
}

/** Prepare this step of the lesson, or the moment in it that a link points to: see moment.js. */
async function enter({ at, layer, head, take, change, to, mistake } = {}) {
  const { run, step } = state;
  const look = lookOf(step);
  setLook("layer", Math.min(layer ? layer - 1 : look.layer, info.n_layer - 1));
  setLook("head", Math.min(head ? head - 1 : look.head, info.n_head - 1));
  state.guess = null;
  show(null);
  if (step === 5 || !run || state.phase === "loading") return;
  if (!(await goTo(at ?? prepared(run)))) return;
  if (step === 1 && take) {
    turnTo(Math.min(take, run.ids.length) - 1);
    await takeOut(take - 1);
  }
  if (info.ids.has(to)) $("changed").value = info.ids.get(to);
  if (step === 3 && change) await changeCharacter(change - 1);
  if (step === 4) await askMistakes(mistake);
}

function setLook(name, value) {
  state[name] = value;
  for (const radio of $(name).querySelectorAll("input")) radio.checked = Number(radio.value) === value;
  keepAddress();
  render();
}

function setProjector(on) {
  if (on) document.body.dataset.projector = "on";
  else delete document.body.dataset.projector;
  $("projector").ariaPressed = on;
}

/** Turn the worker's answer into something that the stage can show. */
function picture(kind, answer) {
  const kept = answer.kept ?? keptColumns(info).add(answer.columns);
  const slots = answer.slots ?? answer.ids.slice(0, kept.length);
  return { kind, version: ++versions, ...answer, kept, slots };
}

/** Take out a column: `index`, or the visible one that moves the prediction most. */
async function takeOut(index = null) {
  const { run } = state;
  const newest = run.kept.length - 1; // it is the one asking, so it stays
  const from = firstCell(run);
  const inSight = [...run.ids.keys()].slice(from, Math.min(newest, from + stage.size.cells));
  if (index === newest) $("status").textContent = "The newest character is the one asking, so its column stays.";
  if (newest < 1 || index >= newest || !inSight.length) return;
  const without = (columns) => (run.isOpening ? openingWithout(info, columns) : ask("takeOut", columns));
  const most = await without(inSight);
  const answer = most && index !== null ? await without([index]) : most;
  if (!answer) return;
  const name = ({ masked }) => `column ${masked + 1}, ${quoted(info.chars[run.ids[masked]])}`;
  const points = ({ moved }) => `${percent(moved).slice(0, -1)} percentage points`;
  const moved = `Without ${name(answer)}, the prediction changes by ${points(answer)}`;
  const isMost = answer.masked === most.masked;
  const rank = isMost ? ", more than for any other column shown." : `. For ${name(most)}, it is ${points(most)}.`;
  const ids = run.ids.with(-1, answer.next);
  show({ ...picture("take", { ...answer, ids }), verdict: moved + rank });
}

/** Change a character: `index`, or one in the middle of the visible ones. */
async function changeCharacter(index = state.answer?.position ?? null) {
  const { run } = state;
  if (!run.kept.length) return;
  const from = firstCell(run);
  const middle = Math.floor((from + Math.min(run.kept.length, from + stage.size.cells)) / 2);
  const position = Math.min(run.kept.length - 1, index ?? middle);
  let id = Number($("changed").value);
  if (id === run.ids[position]) id = (id + 1) % info.chars.length; // otherwise nothing would change
  $("changed").value = id;
  const answer = await ask("change", position, id);
  if (!answer) return;
  const ids = run.ids.with(position, id).with(-1, answer.next);
  show(picture("change", { ...answer, ids, position }));
}

/** Describe what changed in a layer. */
const drawChange = remember(({ position, differences }, was, layer, guess) => {
  const [keys, values] = differences.slice(2 * layer, 2 * layer + 2);
  const moved = keys.filter((x, i) => x > 0 || values[i] > 0).length;
  const left = Math.max(0, ...keys.subarray(0, position), ...values.subarray(0, position));
  const from = keys.length - position;
  const which = moved === from ? `all ${from} columns` : `${moved} of the ${from} columns`;
  const there = `Character ${position + 1} was ${quoted(info.chars[was])}. In layer ${layer + 1}`;
  const first = `${there}, only its own column changes, because keys and values there depend on a single character.`;
  const later = `${there}, ${which} from there on change, because their characters looked at it. All ${position} to its
    left stay the same: the difference is ${left || "exactly 0"}.`;
  const verdicts = { right: "You were right. ", left: "It is the other way round. ", all: "Not all of them change. " };
  const reason = `No character may look to its right. And writing only ever appends on the right, so nothing that comes
    later can change a column, and we may keep it.`;
  $("change-verdict").textContent = `${verdicts[guess] ?? ""}${layer ? later : first} ${reason}`;
});

/** Get the answers for all mistakes, one after the other, and show `first` as soon as it is there. */
async function askMistakes(first = NAMES[0]) {
  const { run } = state;
  if (state.mistakes.has(first)) showMistake(first);
  const missing = NAMES.filter((name) => !state.mistakes.has(name)).sort((a, b) => (b === first) - (a === first));
  for (const name of missing) {
    const answer = await ask("mistake", name);
    if (!answer) return;
    const [keys, values] = answer.differences.slice(0, 2).map((each) => each.filter((x) => x > ROUNDING).length);
    const verdict = mistakeInWords(info.chars, name, answer, keys, values);
    state.mistakes.set(name, { ...picture("mistake", answer), name, verdict });
    drawMistake(info.chars, name, run.given, answer);
    if (state.answer) render(); // it can be chosen now
    else showMistake(name);
  }
}

function showMistake(name) {
  show(state.mistakes.get(name) ?? null);
}

async function askGuesses() {
  const { run } = state;
  const answer = await ask("guess");
  if (answer) drawGuesses(info.chars, run.given, answer, run.ids.every((id, i) => id === answer.ids[i]));
}

// -- drawing ------------------------------------------------------------------------------------------------------------

let due = false;

function render() {
  if (due) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    drawControls();
    if (state.run && state.phase !== "preparing") draw(); // the stage keeps its picture until the next one is there
  });
}

/** Enable what can be done now. Before anything is computed, there is nothing to take out or change. */
function drawControls() {
  const { phase, run, answer } = state;
  const ready = run && !["loading", "failed"].includes(phase);
  const computed = ready && run.kept.length > 0;
  for (const id of ["run", "one"]) $(id).disabled = !ready;
  const asking = phase === "preparing" || (state.step === 4 && state.mistakes.size < NAMES.length);
  $("guess").disabled = !ready || asking; // a question would cancel the previous one
  for (const button of $("race").children) button.disabled = !ready;
  $("next-step").hidden = state.step === 5 || (phase === "running" && run.racing); // or the result would be lost
  for (const button of $("guesses").querySelectorAll("button")) button.disabled = !computed;
  for (const input of $("mistakes").querySelectorAll("input")) input.disabled = !state.mistakes.has(input.value);
  $("back").disabled = !computed;
  $("take").disabled = !(run?.kept.length > 1) || phase === "failed";
  for (const name of ["layer", "head"]) $(name).disabled = phase === "loading"; // the opening has one of each
  $("take").textContent = answer?.kind === "take" ? "Undo" : "Show me";
  $("guesses").hidden = answer?.kind === "change";
  $("changing").hidden = answer?.kind !== "change";
}

/** Show the lesson's step. */
function drawStep() {
  document.body.dataset.step = state.step;
  for (const link of document.querySelectorAll("nav a:not(.go)")) {
    link.ariaCurrent = link.hash.endsWith(state.step) ? "step" : null;
  }
  $("next-step").hash = `step-${state.step + 1}`;
}

/** Return the first character on the stage. The strip moves by a quarter of its width at a time, so columns mostly stay
 *  in place. In a race it follows the slower text. */
function firstCell({ slots, on, off }) {
  const { cells } = stage.size;
  const fed = slots.length;
  if (state.page !== null) return Math.max(0, Math.min(state.page, fed - cells));
  const turn = Math.ceil(cells / 4);
  const end = off?.length < on?.length ? (off.at(-1)?.rows ?? 0) : fed;
  return Math.max(0, Math.ceil((end - cells) / turn) * turn);
}

/** Return the key/value head that serves a query head. */
const keyHead = (head) => Math.floor((head * info.n_kv_head) / info.n_head);

/** What the newest character looks at, in a layer and a head, and how strongly to draw the values that it gets. */
const attentionOf = remember(({ kept, queries, masked }, layer, head) => {
  if (!queries) return {};
  const [keys, values] = [0, 1].map((kind) => kept.lane(layer, kind, keyHead(head)));
  const query = queries[layer].subarray(head * info.head_size, (head + 1) * info.head_size);
  const { scores, weights, mix } = attend(query, keys, values, masked);
  const most = Math.max(...weights);
  return { query, scores, weights, mix, strengths: weights.map((weight) => 0.12 + 0.88 * Math.sqrt(weight / most)) };
});

/** Whether the keys and values of a layer differ from what they were, or from what they should be. */
const marksOf = remember((answer, layer) => {
  const most = answer?.kind === "change" ? 0 : ROUNDING;
  return answer?.differences?.slice(2 * layer, 2 * layer + 2).map((each) => [...each].map((x) => x > most)) ?? null;
});

function draw() {
  const { run, answer, layer, head, step } = state;
  const { chars } = info;
  const shown = answer ?? run;
  const from = firstCell(shown);
  if (from !== state.from) state.pointed = null; // another character is below the pointer now
  state.from = from;
  const marked = state.pointed ?? state.clicked;
  const wrong = answer?.position ?? (answer?.first >= 0 ? answer.first : null);
  const [on, off] = [run.on.at(-1), run.off.at(-1)];

  // the text
  const newest = shown.at ?? shown.slots.length;
  drawText(chars, { ...shown, fed: newest }, run.given, wrong, marked);
  const without = [...run.ids.slice(0, run.given), ...run.off.map(({ id }) => id)];
  drawTextWithout(chars, { ids: without, fed: null, version: run.version }, run.given, null, null);

  // the strip
  const { query = null, scores = null, weights = null, mix = null, strengths } = attentionOf(shown, layer, head);
  const marks = marksOf(answer, layer);
  const computed = marks ? 0 : (on?.rows ?? 0);
  const lanes = [shown, run, layer, keyHead(head)];
  stage.drawCells(chars, shown, from, computed, wrong, marked, weights);
  stage.drawKeys(...lanes, query, null, from, marked);
  stage.drawValues(...lanes, mix, step === 1 ? strengths : null, from, null);
  stage.drawScores(scores, from);
  stage.drawAttention(weights, from);
  const same = answer?.kind === "change" ? "stay" : "right";
  stage.drawBelow(marks, same, run.kept.length, off?.rows ?? 0, computed, from);

  // what comes next, and the work
  drawCandidates(marked, scores, weights);
  drawSums(run, info.block_size, info.parameters);
  $("all").textContent = off ? `all ${off.rows} columns` : "all columns";
  drawShapes(info, on, off, run.kept.length);
  if (answer?.kind === "change") drawChange(answer, run.ids[answer.position], layer, state.guess);
}

/** Draw the probabilities of the marked character, or else of the next one, and describe the marked one. */
function drawCandidates(marked, scores, weights) {
  const { run, answer } = state;
  const { chars } = info;
  const { ids } = answer ?? run;
  const step = answer?.kind === "mistake" ? undefined : run.on[(marked ?? ids.length - 1) - run.given];
  const name = `character ${marked + 1}`;
  if (marked !== null && step && !answer) drawNext(chars, name, step.probabilities, ids[marked], null);
  else if (answer?.at) drawNext(chars, `character ${answer.at + 1}`, answer.before, ids[answer.at], answer.after);
  else drawNext(chars, "next", run.on.at(-1)?.probabilities, ids.at(-1), answer?.probabilities);

  const char = chars[answer?.slots[marked] ?? ids[marked]];
  const about = marked === null ? [] : [`Character ${marked + 1} is ${quoted(char)}.`];
  const probability = step && percent(step.probabilities[ids[marked]]);
  if (marked !== null && marked === answer?.position) about.push("You put it there.");
  else if (marked !== null && marked < run.given) about.push("It is from the prompt.");
  else if (marked !== null && step) about.push(`The model gave it a probability of ${probability}.`);
  const share = weights?.[marked];
  const score = scores?.[marked]?.toFixed(1).replace("-", "−");
  if (share !== undefined) {
    about.push(`Its key scores ${score}, so the newest gives it ${percent(share)} of its attention.`);
  }
  $("about").textContent = about.join(" ");
}

// -- events -------------------------------------------------------------------------------------------------------------

function setSpeed() {
  const value = Number($("speed").value);
  const perSecond = value < 100 ? 2 ** (value / 14) : Infinity;
  $("speed").ariaValueText = value < 100 ? `${characters(Math.round(perSecond))} per second` : "as fast as possible";
  worker.setDelay(1000 / perSecond);
}

/** Mark the character that is "pointed" at or "clicked", or none. */
function mark(how, index) {
  if (!state.run) return;
  const { ids } = state.answer ?? state.run;
  const there = index !== null && index < ids.length ? index : null;
  if (state[how] === there) return;
  state[how] = there;
  render();
}

/** Respond to a click on a character: do what this step is about, or mark the character. */
function click(index) {
  const { run, answer, step } = state;
  if (index === null || !run) return;
  if (step === 1 && index === answer?.masked) return show(null);
  turnTo(index);
  if (step === 1) takeOut(index);
  else if (answer?.kind === "change") changeCharacter(index);
  else mark("clicked", state.clicked === index ? null : index);
}

/** Move the strip to a character. A run would move it back at once, so pause the run. */
function turnTo(index) {
  const { cells } = stage.size;
  if (index >= state.from && index < state.from + cells) return;
  if (state.phase === "running") pause();
  state.page = Math.max(0, index - Math.floor(cells / 2));
  state.pointed = null;
  draw();
}

/** Move the focus along the strip, and the strip with it. */
function moveFocus(event) {
  const last = (state.answer ?? state.run).slots.length - 1;
  const index = cellIndex(event);
  const to = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: last }[event.key];
  if (to === undefined || to < 0 || to > last) return;
  event.preventDefault();
  turnTo(to);
  $("cells").children[to - state.from].focus();
}

/** Move the focus, because the focused button disappears with the next drawing. */
function focusInstead(selector) {
  requestAnimationFrame(() => document.querySelector(selector).focus());
}

const cellIndex = ({ target }) => state.from + [...$("cells").children].indexOf(target);

/** Go to the step in the address, and to a moment in it. */
function follow(moment) {
  const isNext = document.activeElement.matches(".go");
  state.step = stepOfAddress();
  drawStep();
  if (isNext) document.querySelector(`.says.step-${state.step} h2`).focus({ preventScroll: true });
  scrollTo(0, 0);
  enter(moment);
}

function listen() {
  form.onsubmit = (event) => {
    event.preventDefault();
    if (state.phase === "running") pause();
    else if (state.step < 3) play(Infinity); // in later steps the button is hidden, but Enter still submits
  };
  fields.prompt.onkeydown = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!event.repeat && state.step < 3) play(Infinity);
  };
  for (const name of FIELDS) fields[name].oninput = () => readForm() && keepAddress();
  $("one").onclick = () => play(1);
  $("back").onclick = goBack;
  for (const button of $("race").children) button.onclick = () => play(Infinity, Number(button.dataset.times));
  $("speed").oninput = setSpeed;
  for (const name of ["layer", "head"]) $(name).onchange = ({ target }) => setLook(name, Number(target.value));
  $("take").onclick = () => (state.answer?.kind === "take" ? show(null) : takeOut());
  for (const button of $("guesses").querySelectorAll("button")) {
    button.onclick = async () => {
      state.guess = button.dataset.guess;
      await changeCharacter();
      focusInstead("#next-step");
    };
  }
  $("changed").oninput = () => changeCharacter();
  $("unchange").onclick = async () => {
    await enter();
    focusInstead("#guesses button");
  };
  $("guess").onclick = askGuesses;
  $("projector").onclick = () => {
    setProjector(!("projector" in document.body.dataset));
    keepAddress();
    redraw();
  };
  window.onhashchange = () => stepOfAddress() !== state.step && follow();
  window.onpopstate = ({ state: held }) => {
    if (!held) return; // a new step, not one that the reader returns to
    readAddress(fields);
    readForm();
    follow(readMoment());
  };
  window.onkeydown = ({ key }) => {
    if (key !== "Escape") return;
    $("settings").open = false;
    mark("clicked", null);
  };
  const cells = $("cells");
  cells.onkeydown = moveFocus;
  cells.addEventListener("focusin", (event) => {
    if (event.target.matches(":focus-visible")) mark("pointed", cellIndex(event));
  });
  cells.addEventListener("focusout", () => mark("pointed", null));
  const places = [[$("strip"), (event) => stage.indexAt(event, state.from)], [$("text"), characterAt]];
  for (const [place, indexOf] of places) {
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
