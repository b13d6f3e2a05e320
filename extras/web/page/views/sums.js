// The work so far, with and without the cache: counts with their pictures, and the two clocks.
import { inEnglish } from "../words.js";
import { $, blank, colour, remember, say } from "./draw.js";

const sum = (numbers) => numbers.reduce((total, x) => total + x, 0);
const columns = (count) => `${count} column${count === 1 ? "" : "s"}`;
const short = (number) => (number < 9.95 && number !== 1 ? number.toFixed(1) : Math.round(number));
const times = (factor) => `${short(factor)}×`;

/** Draw the columns that each step computed, one row per step: without the cache a triangle, with it a line. They are
 *  visible in a race. */
function drawSteps(name, computed, given, most) {
  const { context, width, height } = blank($(`steps-${name}`));
  const [x, y] = [width / most, height / most];
  context.fillStyle = colour(name);
  computed.forEach((count, step) => {
    const end = given + step; // columns of the text before this step's character
    context.fillRect((end - count) * x, step * y, Math.max(count * x, 2), Math.max(y, 1) + 0.5);
  });
  const shape = name === "off" ? "A triangle: each step computes all columns" : "A line: each step computes one column";
  $(`steps-${name}`).ariaLabel = `${shape}, ${inEnglish(sum(computed))} so far`;
  say(`computed-${name}`, inEnglish(sum(computed)));
}

/** run: { on, off, given, request, racing }, with lists of { computed, ms } per step. */
export const drawSums = remember((run, blockSize, parameters) => {
  const { given, request } = run;
  const same = Math.min(run.off.length, run.on.length); // in a race, one of them has taken more steps
  const [without, withIt] = ["off", "on"].map((name) => {
    const steps = run[name];
    const [computed, ms] = ["computed", "ms"].map((what) => steps.map((step) => step[what]));
    drawSteps(name, computed, given, blockSize);
    say(`time-${name}`, `${(sum(ms) / 1e3).toFixed(1)} s`);
    return { computed: sum(computed.slice(0, same)), ms: sum(ms.slice(0, same)) };
  });
  const less = same ? without.computed / withIt.computed : 1;
  say("factor", times(less));
  const faster = times(without.ms / withIt.ms);
  const expected = run.racing ? `You said ${run.racing}×. ` : "";
  const time = ({ ms }) => `${short(ms / same)}\u00a0ms`;
  const perStep = (text) => `${time(text)} for ${columns(Math.round(text.computed / same))}`;
  const average = `On average, a step takes ${perStep(without)} without the cache, and ${perStep(withIt)} with it.`;
  const fixed = `reading all ${inEnglish(parameters)} weights and starting hundreds of small operations`;
  const why = `${expected}It is ${faster} as fast here, not ${times(less)}. ${average} Most of the ${time(withIt)} is a fixed cost: ${fixed}.`;
  say("speeds", same > 1 && same === request.steps ? why : "");
});
