// The page, drawn from the state. Nothing in this folder changes it.
import { FIELDS } from "../request.js";
import { STEPS } from "../steps.js";
import { runInWords } from "../words.js";
import { $, refuse, say } from "./draw.js";

let open; // the step that is on the page

/** Turn to a step: its section, the parts that it shares with others, and the button to the next one. */
function turn(step) {
  const sections = [...document.querySelectorAll("main > section")];
  sections.forEach((section, i) => (section.hidden = i !== step - 1));
  for (const name of ["form", "stage", "layers"]) sections[step - 1].querySelector(`[data-holds=${name}]`)?.append($(name));
  for (const link of document.querySelectorAll("nav a:not(.go)")) link.ariaCurrent = link.hash.endsWith(step) ? "step" : null;
  $("next-step").hidden = step === STEPS.length;
  $("next-step").setAttribute("href", `#step-${step + 1}`); // "hash" would keep the address of now, and reload the page
  say("next-step", STEPS[step - 1].next ?? "");
  open = step;
}

export function draw(state) {
  const { phase, run, race, step, refused, error, note } = state;
  if (step !== open) turn(step);
  const ready = run && !["loading", "failed"].includes(phase);
  for (const id of ["run", "one"]) $(id).disabled = !ready;
  $("back").disabled = !ready || !run.on.length;
  for (const name of ["layer", "head"]) {
    for (const radio of $(name).querySelectorAll("input")) radio.checked = Number(radio.value) === state[name];
  }
  const fields = $("form").elements;
  refuse("refused", FIELDS.map((name) => fields[name]), fields[refused?.name], refused?.message);
  if (phase !== "loading") say("loading", "");
  say("message", error);
  say("status", race && step === 2 && !refused && phase !== "running" ? runInWords(race) : note);
  if (run && phase !== "preparing") STEPS[step - 1].draw?.(state); // a step keeps its picture until the next one is there
}
