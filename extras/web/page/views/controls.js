// The buttons and fields, the way through the lesson, and what the page says about them.
import { FIELDS } from "../request.js";
import { STEPS } from "../steps.js";
import { runInWords } from "../words.js";
import { $, say } from "./draw.js";

const all = (selector) => document.querySelectorAll(selector);

/** Show the lesson's step, and enable what can be done now. Before anything is computed, there is nothing to take out or
 *  change. */
export function drawControls(state) {
  const { phase, run, answer, step } = state;
  Object.assign(document.body.dataset, { step, racing: run?.racing ? "on" : "off" });
  for (const link of all("nav a:not(.go)")) link.ariaCurrent = link.hash.endsWith(step) ? "step" : null;
  $("next-step").setAttribute("href", `#step-${step + 1}`); // "hash" would keep the address of now, and reload the page
  $("next-step").hidden = step === STEPS.length || (phase === "running" && run.racing > 0); // or the result would be lost

  const ready = run && !["loading", "failed"].includes(phase);
  const computed = ready && run.kept.length > 0;
  for (const button of all("#run, #one, #race button")) button.disabled = !ready;
  for (const button of all("#back, #choices button")) button.disabled = !computed;
  $("take").disabled = !(run?.kept.length > 1) || phase === "failed"; // works before the model has arrived
  $("run").textContent = phase === "running" ? "Pause" : "Run";
  $("take").textContent = answer ? "Undo" : "Show me";
  $("choices").hidden = answer !== null;
  $("changing").hidden = answer === null;
  $("changed").value = state.changed;
  $("projector").ariaPressed = state.projector;
  for (const name of ["layer", "head"]) {
    $(name).disabled = phase === "loading"; // the opening has one of each
    for (const radio of $(name).querySelectorAll("input")) radio.checked = Number(radio.value) === state[name];
  }
  for (const name of FIELDS) $("form").elements[name].ariaInvalid = state.refused?.name === name ? "true" : null;
  drawSentences(state);
}

function drawSentences(state) {
  const { phase, run, answer, progress, step } = state;
  const megabytes = (bytes) => (bytes / 1e6).toFixed(1);
  const arrived = progress && ` ${megabytes(progress.received)} of ${megabytes(progress.total)} MB`;
  if (phase !== "loading") say("loading", "");
  else if (arrived) say("loading", `Loading the model:${arrived}.`);
  say("message", state.refused?.message ?? state.error);

  const isSaid = run && !answer && ["ready", "paused", "done"].includes(phase);
  say("status", isSaid ? state.note || [...run.request.notes, runInWords(run)].join(" ") : state.note);
  STEPS.forEach(({ words }, i) => words && say(`verdict-${i + 1}`, answer && i === step - 1 ? words(state) : ""));
}
