// The address: the form, and a moment of the lesson, so that a teacher can link to it. All numbers count from 1.
//
//   at        how many characters the text has
//   layer, head
//   take      the character that is hidden from the newest
//   change    the character that is changed; to: what it is changed to
//   mistake   its name
import { FIELDS } from "./request.js";
import { STEPS } from "./steps.js";

const NUMBERS = ["at", "layer", "head", "take", "change"];
const WORDS = ["to", "mistake"];

/** Return the step in the address. */
export function readStep() {
  return Number(location.hash.match(/^#step-([1-7])$/)?.[1] ?? 1);
}

/** Return the moment in the address, without the entries that the address does not have. */
export function readMoment() {
  const query = new URLSearchParams(location.search);
  const moment = {};
  for (const name of NUMBERS) if (/^[1-9]\d{0,8}$/.test(query.get(name))) moment[name] = Number(query.get(name));
  for (const name of WORDS) if (query.get(name)) moment[name] = query.get(name);
  return moment;
}

/** Return the moment that the page shows. What is as at the start of the step is null. */
export function momentOf({ state, lookOfStep, prepared }) {
  const { run, answer, info, step, layer, head } = state;
  const at = run.given + run.on.length;
  const look = lookOfStep();
  return {
    at: !STEPS[step - 1].prepares || at === prepared(run) ? null : at,
    layer: layer === look.layer ? null : layer + 1,
    head: head === look.head ? null : head + 1,
    take: answer?.kind === "take" ? answer.masked + 1 : null,
    change: answer?.kind === "change" ? answer.position + 1 : null,
    to: answer?.kind === "change" ? info.chars[answer.ids[answer.position]] : null,
    mistake: answer?.name,
  };
}

/** Put the form and a moment into the address, so that you can link to them and a reload loses nothing. */
export function writeAddress(fields, moment) {
  const query = new URLSearchParams();
  for (const name of FIELDS) if (fields[name].value !== fields[name].defaultValue) query.set(name, fields[name].value);
  for (const [name, value] of Object.entries(moment)) if (value != null) query.set(name, value);
  history.replaceState({ isMoment: true }, "", (query.size ? `?${query}` : location.pathname) + location.hash);
}

/** Fill the form from the address. */
export function readForm(fields) {
  const query = new URLSearchParams(location.search);
  for (const name of FIELDS) if (query.has(name)) fields[name].value = query.get(name);
}
