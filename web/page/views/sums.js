// How much work so far: two counts with their pictures, how many times less it is, and the speed of this computer.
import { $, blank, colour, inEnglish, remember } from "./draw.js";

const sum = (numbers) => numbers.reduce((total, x) => total + x, 0);

/** Draw the columns that each step computed, a row per step: without the cache a triangle, with it a line. */
function drawSteps(name, rows, given, most) {
  const { context, width, height } = blank($(`steps-${name}`));
  const [x, y] = [width / most, height / most];
  context.fillStyle = colour(name);
  rows.forEach((count, step) => {
    const end = given + step; // the columns of the text before this step's character
    context.fillRect((end - count) * x, step * y, Math.max(count * x, 2), Math.max(y, 1) + 0.5);
  });
  const shape = name === "off" ? "A triangle: each step computes all columns" : "A line: each step computes one column";
  $(`steps-${name}`).ariaLabel = `${shape}, ${inEnglish(sum(rows))} so far`;
  $(`rows-${name}`).textContent = inEnglish(sum(rows));
}

/** off, on: lists of { rows, ms } per step, which grow; their lengths; given: characters of the prompt. */
export const drawSums = remember((off, on, offLength, onLength, given, blockSize) => {
  const same = Math.min(offLength, onLength); // in a race, one of them has taken more steps
  const [without, withIt] = [["off", off], ["on", on]].map(([name, steps]) => {
    const rows = steps.map((step) => step.rows);
    drawSteps(name, rows, given, blockSize);
    const seconds = sum(steps.map(({ ms }) => ms)) / 1e3;
    $(`speed-${name}`).textContent = steps.length ? inEnglish(Math.round(steps.length / seconds)) : "–";
    return sum(rows.slice(0, same));
  });
  const factor = same ? without / withIt : 1;
  $("factor").textContent = `${factor < 9.95 && factor > 1 ? factor.toFixed(1) : Math.round(factor)}×`;
});
