// The page: reads the form, asks the worker, and draws. The state is `view`; the views read it and never change it.
import { startWorker } from "./client.js";
import { keptColumns } from "./columns.js";
import { characters, FIELDS, readAddress, readRequest, writeAddress } from "./request.js";
import { clearAnswers, drawChanges, drawGuesses, drawMistake, makeMistakes } from "./views/answers.js";
import { $, element, quoted, visible } from "./views/draw.js";
import { drawColumn, drawInfluences, drawLanes, drawNext } from "./views/kept.js";
import { drawText, firstDifference } from "./views/text.js";
import { drawShapes, drawWork } from "./views/work.js";

const form = $("form");
const fields = form.elements;
const OTHER_PROMPT = "KING RICHARD III: ";
const TOOLS = ["kept-tools", "change-tools", "guess-tools", "mistakes"];

const worker = startWorker(onEvent);
let info; // model.json, and `ids`: Map(character => id)
let view = null; // the run: see newView
let phase = "loading"; // or ready, running, done, failed. A run that was stopped is "done" and can go on

/** The state of a run. `on` and `off` are the new tokens with the cache and without. */
function newView(request) {
  return {
    info, request, prompt: request.ids, steps: [], on: [], off: [], kept: keptColumns(info),
    column: null, change: null, before: null, after: null, influences: null, again: null, changes: null,
  };
}

function setPhase(name, status) {
  phase = document.body.dataset.state = name;
  $("status").textContent = status;
  const idle = name === "ready" || name === "done";
  $("run").disabled = $("step").disabled = !idle && name !== "running";
  $("run").textContent = name === "done" && goesOn() ? "Go on" : "Run both";
  $("stop").disabled = name !== "running";
  for (const id of TOOLS) $(id).disabled = !idle;
}

function say(message, field) {
  $("message").textContent = message;
  for (const each of FIELDS) fields[each].removeAttribute("aria-invalid");
  if (!message) return;
  $("message").scrollIntoView({ block: "nearest" });
  if (!field) return;
  if ($("settings").contains(field)) $("settings").open = true;
  field.setAttribute("aria-invalid", "true");
  field.focus();
}

function failed(error) {
  setPhase("failed", "");
  say(`${error.message}.`.replace(/\.\.$/, "."));
}

// -- loading ------------------------------------------------------------------------------------------------------------

function onEvent(event, data) {
  if (event === "loading") {
    [$("loading").max, $("loading").value] = [data.total, data.received];
    $("status").textContent = `Loading the model: ${(data.received / 1e6).toFixed(1)} of ${(data.total / 1e6).toFixed(1)} MB.`;
  } else if (event === "step") {
    view.steps.push({ on: data.on, off: data.off });
    view.on.push(data.on.id);
    view.off.push(data.off.id);
    view.kept.add(data.on.columns);
    draw();
  }
}

async function load() {
  try {
    info = await worker.call("load");
  } catch (error) {
    return failed(error);
  }
  info.ids = new Map(info.chars.map((char, id) => [char, id]));
  const loss = info.val_loss === null ? "" : `, validation loss ${info.val_loss.toFixed(3)}`;
  const size = `${(info.parameters / 1e6).toFixed(2)} million parameters${loss}`;
  const shape = `${info.n_layer} layers of ${info.n_kv_head} key/value heads of ${info.head_size}`;
  $("model").textContent = `It has ${size}; ${shape}; a context of ${info.block_size} characters.`;
  document.querySelector(".num-layers").textContent = info.n_layer;
  document.querySelector(".head-size").textContent = info.head_size;
  $("guess-section").hidden = !info.guesses;
  for (const [id, count] of [["layer", info.n_layer], ["head", info.n_kv_head]]) {
    $(id).append(...Array.from({ length: count }, (_, i) => element("option", i + 1, { value: i })));
  }
  for (const id of ["written", "changed"]) {
    $(id).append(...info.chars.map((char, i) => element("option", visible(char), { value: i })));
    $(id).value = Math.min(info.chars.length - 1, info.ids.get("q") ?? 0);
  }
  makeMistakes(askMistake);
  const { prompt } = fields;
  const unknown = [...prompt.value].some((char) => !info.ids.has(char));
  if (!readAddress(fields) && unknown) prompt.value = prompt.defaultValue = "";
  $("loading").remove();
  setPhase("ready", "Ready. Ctrl+Enter in the prompt runs both.");
  drawAll();
}

// -- running ------------------------------------------------------------------------------------------------------------

/** Begin the run that the form describes, unless it is the present one. Returns whether the form is right. */
function begin() {
  say("");
  let request;
  try {
    request = readRequest(fields, info);
  } catch (error) {
    if (!error.field) throw error;
    say(error.message, error.field);
    return false;
  }
  writeAddress(fields);
  if (request.key !== view?.request.key) beginAnew(request);
  return true;
}

function beginAnew(request) {
  worker.stop(); // questions about the run before
  view = newView(request);
  clearAnswers();
  $("position").max = request.ids.length - 1;
  $("position").value = Math.floor(request.ids.length / 2);
  worker.call("begin", request.ids, request.sampling);
}

function goesOn() {
  return view && view.steps.length > 0 && view.steps.length < view.request.steps;
}

async function advance(most) {
  if (phase === "running" || !begin()) return;
  if (view.steps.length === view.request.steps) beginAnew(view.request);
  const run = view;
  worker.stop(); // questions about the step before
  Object.assign(run, { change: null, after: null, influences: null, again: null, changes: null });
  setPhase("running", "");
  try {
    await worker.call("advance", Math.min(most, run.request.steps - run.steps.length));
    setPhase("done", [...run.request.notes, verdict(run)].join(" "));
    run.column = run.kept.length - 1;
    await look(run);
  } catch (error) {
    failed(error);
  }
}

function verdict({ steps, on, off, request }) {
  const different = firstDifference(on, off);
  const [count, whole] = [steps.length, steps.length === request.steps];
  if (different >= 0) {
    const [a, b] = [on[different], off[different]].map((id) => quoted(info.chars[id]));
    const rounding = "Rounding may choose between two candidates closer than 0.0001. Anything else is a bug.";
    return `The texts differ from new character ${different + 1} on: ${a} with the cache, ${b} without. ${rounding}`;
  }
  const stopped = whole ? "" : "Stopped. ";
  if (!count) return `${stopped}No new character.`;
  const all = count === 1 ? "1 new character" : whole ? `all ${characters(count)}` : `${characters(count)} so far`;
  return `${stopped}With and without the cache the text is the same, ${all}.`;
}

/** Ask what the next character is, and what it would be without each column. */
async function look(run) {
  if (!run.kept.length) return drawAll();
  drawAll();
  const seen = await worker.call("look");
  if (run !== view || phase === "running") return;
  run.before = seen.probabilities;
  run.again = seen.difference;
  drawAll();
  const influences = await worker.call("influences");
  if (run !== view || !influences || phase === "running") return;
  run.influences = influences;
  askChange();
}

// -- drawing ------------------------------------------------------------------------------------------------------------

const calm = matchMedia("(prefers-reduced-motion: reduce)");
let due = false;
let cost = 0; // milliseconds of the last drawing

/** Draw what changes from step to step, twice per second for readers who want little motion.
 *
 *  Else as often as leaves two thirds of the time to the reader's clicks, because a phone can need long for a drawing.
 */
function draw() {
  if (due) return;
  due = true;
  const wait = calm.matches && phase === "running" ? 500 : 2 * cost;
  setTimeout(() => {
    due = false;
    const began = performance.now();
    drawAll();
    cost = performance.now() - began;
  }, wait);
}

function drawAll() {
  if (!info) return;
  const shown = view ?? newView({ ids: [], steps: 0 });
  const column = Math.min(shown.column ?? shown.kept.length - 1, shown.kept.length - 1);
  drawText(shown);
  drawWork(shown);
  drawShapes(shown);
  drawLanes(shown);
  drawInfluences({ ...shown, column });
  drawColumn({ ...shown, column: Math.max(0, column) });
  drawNext(shown);
  $("take-out").setAttribute("aria-pressed", shown.change === "hidden");
  $("write").setAttribute("aria-pressed", shown.change === "id");
  const far = shown.again === null ? "" : shown.again.toExponential(1);
  $("again").textContent = far && `Computed again without the cache, the columns differ by at most ${far}.`;
  drawPosition(shown);
  if (shown.changes) drawChanges(info, shown.changes.layers, shown.changes.position);
}

function drawPosition({ prompt, on }) {
  const text = [...prompt, ...on];
  $("position").max = Math.max(0, text.length - 1);
  const position = Number($("position").value);
  $("position-name").textContent = text.length ? `Position ${position}, ${quoted(info.chars[text[position]])},` : "";
}

// -- questions ----------------------------------------------------------------------------------------------------------

/** Ask the worker about the present run and use its answer, unless another run has begun meanwhile. */
async function ask(use, name, ...args) {
  const run = view;
  try {
    const answer = await worker.call(name, ...args);
    if (run === view && answer) use(answer);
  } catch (error) {
    say(`That failed: ${error.message}.`);
  }
}

/** Change the cache of the run at the chosen column, or take the change back. change: "hidden", "id" or null. */
function changeColumn(change) {
  if (!view?.kept.length) return;
  view.column = Number($("column").value);
  view.change = change;
  view.after = null;
  drawAll();
  if (!change) return;
  const { column } = view;
  const how = change === "hidden" ? { hidden: column } : { column, id: Number($("written").value) };
  ask((after) => {
    if (view.change !== change || view.column !== column) return;
    view.after = after;
    drawAll();
  }, "changeCache", how);
}

function askChange() {
  drawAll();
  if (!view?.on.length) return;
  const position = Number($("position").value);
  const id = Number($("changed").value);
  ask((layers) => {
    view.changes = { layers, position };
    drawAll();
  }, "changeText", position, id);
}

function askGuesses() {
  if (!begin()) return;
  const { prompt, request } = view;
  ask((answer) => {
    const known = Math.min(view.on.length, request.steps);
    const same = answer.ids.slice(prompt.length, prompt.length + known).every((id, i) => id === view.on[i]);
    drawGuesses(info, prompt, answer, same);
  }, "guess", request.steps);
}

function askMistake(name) {
  if (!begin()) return;
  for (const radio of $("mistakes").querySelectorAll("input")) radio.checked = radio.value === name;
  const { prompt, request } = view;
  const known = [...OTHER_PROMPT].filter((char) => info.ids.has(char)).map((char) => info.ids.get(char));
  const other = prompt.map((id, i) => (known.length ? known[i % known.length] : (id + 1) % info.chars.length));
  ask((answer) => drawMistake(info, name, prompt, answer), "mistake", name, other, request.steps);
}

// -- events -------------------------------------------------------------------------------------------------------------

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (phase === "ready" || phase === "done") advance(Infinity);
});
form.addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  if (event.repeat) event.preventDefault(); // a key that is held runs once
  else if (event.target === fields.prompt && (event.ctrlKey || event.metaKey)) form.requestSubmit($("run"));
});
form.addEventListener("input", () => {
  $("run").textContent = "Run both";
});
$("step").addEventListener("click", () => advance(1));
$("stop").addEventListener("click", () => worker.stop());
$("speed").addEventListener("input", ({ target }) => {
  const delay = target.value === "100" ? 0 : Math.round(1000 * 2 ** (-target.value / 14));
  target.setAttribute("aria-valuetext", delay ? `${delay} milliseconds between steps` : "full");
  worker.setDelay(delay);
});
for (const id of ["layer", "head"]) $(id).addEventListener("change", drawAll);
$("column").addEventListener("input", () => changeColumn(view?.change ?? null));
$("take-out").addEventListener("click", () => changeColumn(view.change === "hidden" ? null : "hidden"));
$("write").addEventListener("click", () => changeColumn(view.change === "id" ? null : "id"));
$("written").addEventListener("change", () => changeColumn("id"));
$("position").addEventListener("input", askChange);
$("changed").addEventListener("change", askChange);
$("guess").addEventListener("click", askGuesses);
for (const details of document.querySelectorAll("main details")) {
  details.open = matchMedia("(min-width: 48rem)").matches;
  details.addEventListener("toggle", drawAll);
}
new ResizeObserver(drawAll).observe(document.querySelector("main"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);

if (location.protocol !== "file:") load();
