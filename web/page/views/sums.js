// How much work so far: two counts with their pictures, how many times less it is, and the speed of this computer.
import { $, blank, colour, inEnglish, remember } from "./draw.js";

const sum = (numbers) => numbers.reduce((total, x) => total + x, 0);

/** Draw the columns that each step computed, a row per step: without the cache a triangle, with it a line. */
function drawSteps(canvas, name, rows, given, context_) {
  const { context, width, height } = blank(canvas);
  const [x, y] = [width / context_, height / context_];
  context.fillStyle = colour("rule");
  context.fillRect(0, 0, width, 1);
  context.fillRect(0, 0, 1, height);
  context.fillStyle = colour(name);
  rows.forEach((count, step) => {
    const end = given + step; // the columns of the text before this step's character
    context.fillRect((end - count) * x, step * y, Math.max(count * x, 2), Math.max(y, 1) + 0.5);
  });
}

/** off, on: lists of { rows, ms } per step, which grow; their lengths; given: characters of the prompt. */
export const drawSums = remember((off, on, offLength, onLength, given, blockSize) => {
  const rows = [off, on].map((steps) => steps.map((step) => step.rows));
  const [without, with_] = rows.map(sum);
  drawSteps($("triangle"), "off", rows[0], given, blockSize);
  drawSteps($("line"), "on", rows[1], given, blockSize);
  $("rows-off").textContent = inEnglish(without);
  $("rows-on").textContent = inEnglish(with_);
  $("triangle").ariaLabel = `A triangle: each step computes all columns again, ${inEnglish(without)} so far`;
  $("line").ariaLabel = `A line: each step computes one column, ${inEnglish(with_)} so far`;
  const factor = without && with_ ? without / with_ : 1;
  $("factor").textContent = `${factor < 9.95 && factor > 1 ? factor.toFixed(1) : Math.round(factor)}×`;
  const speed = (steps) => inEnglish(Math.round(steps.length / (sum(steps.map(({ ms }) => ms)) / 1e3)));
  const [slow, fast] = [off, on].map((steps) => (steps.length ? speed(steps) : "–"));
  $("speed-off").textContent = slow;
  $("speed-on").textContent = fast;
});
