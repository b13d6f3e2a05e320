// Step 2: the race. Both write the same text at their own speed, and what it took becomes two bars.
import { $, say } from "../views/draw.js";
import { makeStairs, pathOf, rowsOf, type } from "../views/stairs.js";
import { counted, inEnglish } from "../words.js";

const sum = (numbers) => numbers.reduce((total, x) => total + x, 0);
const short = (number) => (number < 9.95 && number !== 1 ? number.toFixed(1) : inEnglish(Math.round(number)));

/** Draw the text, the work and the clock of one of the two: a pale outline of all its work, and what is done. */
function drawLane(name, { given, request, ids, [name]: steps }, { chars }) {
  const [svg, pane] = ["svg", ".typed"].map((part) => document.querySelector(`.race .${name} ${part}`));
  const { computed, kept } = rowsOf(given, request.steps, name === "on");
  const paths = makeStairs(svg, [0, 0, given + request.steps - 1, request.steps], ["planned", "kept", name]);
  const done = (rows) => rows.slice(0, steps.length);
  [computed, done(kept), done(computed)].forEach((rows, i) => paths[i].setAttribute("d", pathOf(rows)));
  const count = inEnglish(sum(steps.map((step) => step.computed)));
  svg.ariaLabel = `${name === "off" ? "A triangle" : "A line"}, ${count} positions computed so far`;
  type(pane, chars, [...ids.slice(0, given), ...steps.map(({ id }) => id)], given);
  say(`computed-${name}`, count);
  say(`time-${name}`, steps.length ? `${(sum(steps.map(({ ms }) => ms)) / 1e3).toFixed(1)} s` : "");
}

/** Return what a step takes in a finished race, on average, in milliseconds: { off, on, fixed }. Both pay the same fixed
 *  cost, and then for each position that they compute. */
export function costs({ on, off }) {
  const average = (steps, what) => sum(steps.map((step) => step[what])) / steps.length;
  const [slow, fast] = [off, on].map((steps) => ({ ms: average(steps, "ms"), computed: average(steps, "computed") }));
  const each = Math.max(0, slow.ms - fast.ms) / Math.max(1e-9, slow.computed - fast.computed);
  return { off: slow, on: fast, fixed: Math.max(0, Math.min(slow.ms, fast.ms - each * fast.computed)) };
}

/** Whether both have written their text. */
export const isOver = (race) => Boolean(race) && [race.on, race.off].every(({ length }) => length === race.request.steps);

function drawResult(race, guess) {
  const { off, on, fixed } = costs(race);
  const fewer = short(off.computed / on.computed);
  say("fewer", `${fewer}×`);
  say("faster", `${short(off.ms / on.ms)}×`);
  for (const [name, value] of Object.entries(guess)) say(`guessed-${name}`, `You said ${value}×.`);
  say("not", fewer);
  say("fixed", short(fixed));
  for (const [name, { ms, computed }] of Object.entries({ off, on })) {
    const [fix, rest, label] = document.querySelector(`.costs p.${name}`).children;
    const most = Math.max(off.ms, on.ms);
    fix.style.width = `${(100 * fixed) / most}%`;
    rest.style.width = `${(100 * (ms - fixed)) / most}%`;
    label.textContent = counted(Math.round(computed), "position");
    say(`per-step-${name}`, `${short(ms)} ms per step`);
  }
}

export const race = {
  next: "See the code",
  make(store) {
    $("guess").onchange = ({ target: { name, value } }) => store.set({ guess: { ...store.state.guess, [name]: value } });
  },
  go: (store) => store.race(),
  draw({ info, race, run, phase, guess }) {
    const shown = race ?? { ...run, on: [], off: [] };
    for (const name of ["off", "on"]) drawLane(name, shown, info);
    const isDone = isOver(race);
    if (isDone && $("guess").contains(document.activeElement)) $("next-step").focus(); // it would be lost
    const isRead = isDone && shown.request.steps > 1; // one step has nothing to read
    $("guess").hidden = isDone;
    $("result").hidden = $("reason").hidden = !isRead;
    if (isRead) drawResult(race, guess);
    $("run").textContent = phase === "running" ? "Pause" : isDone ? "Race again" : race?.off.length ? "Continue" : "Race";
  },
};
