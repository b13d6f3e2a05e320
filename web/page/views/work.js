// The work: two squares with a dot per row computed, and the milliseconds of each step below.
import { $, blank, colour, fillTable, inEnglish } from "./draw.js";

export function drawWork({ info, prompt, steps }) {
  for (const setting of ["off", "on"]) {
    const rows = steps.map((step) => step[setting].rows);
    const total = rows.reduce((sum, count) => sum + count, 0);
    const { context, width, height } = blank($(`square-${setting}`));
    const [x, y] = [width / info.block_size, height / info.block_size];
    context.fillStyle = colour(setting);
    rows.forEach((count, step) => {
      const end = prompt.length + step; // the characters before this step's
      const [top, bottom] = [Math.floor(step * y), Math.ceil((step + 1) * y)]; // whole pixels, or stripes would show
      context.fillRect((end - count) * x, top, Math.max(count * x, 1.5), bottom - top);
    });
    $(`rows-${setting}`).textContent = inEnglish(total);
    const newest = steps.at(-1)?.[setting];
    const now = newest ? `; this step: ${newest.rows}, ${newest.ms.toFixed(1)} ms` : "";
    $(`work-${setting}`).textContent = `row${total === 1 ? "" : "s"} so far${now}`;
    const label = `${inEnglish(total)} rows computed per layer ${setting === "on" ? "with" : "without"} the cache`;
    $(`square-${setting}`).setAttribute("aria-label", label);
  }
  drawChart({ info, prompt, steps });
}

// -- milliseconds per step ----------------------------------------------------------------------------------------------

const WINDOW = 16; // steps behind a point of a curve

/** Return [position, ms] points: means of WINDOW steps without their fastest and slowest quarter.
 *
 *  A median would not do, because many browsers' clocks tick in whole milliseconds, and a step takes less. The first
 *  step reads the prompt and is in no mean.
 */
function curve(ms, first) {
  const size = Math.min(WINDOW, ms.length - 1);
  const quarter = Math.floor(size / 4);
  const points = [];
  for (let from = 1; size > 0 && from + size <= ms.length; from++) {
    const middle = ms.slice(from, from + size).sort((a, b) => a - b).slice(quarter, size - quarter);
    points.push([first + from + (size - 1) / 2, middle.reduce((sum, x) => sum + x) / middle.length]);
  }
  return points;
}

function drawChart({ info, prompt, steps }) {
  const svg = $("chart");
  const { clientWidth: width, clientHeight: height } = svg;
  const em = parseFloat(getComputedStyle(svg).fontSize);
  const [left, right, top, bottom] = [3.5 * em, width - 2, 2 * em, height - 3.5 * em];
  const first = prompt.length;
  const runs = ["off", "on"].map((setting) => {
    const ms = steps.map((step) => step[setting].ms);
    return { setting, ms, points: curve(ms, first) };
  });
  const heights = runs.flatMap(({ ms, points }) => (points.length ? points.map(([, y]) => y) : ms));
  const highest = Math.max(1e-3, ...heights) * 1.1; // a lone slow step may be above, because it would flatten all others
  const x = (position) => (left + ((right - left) * position) / info.block_size).toFixed(1);
  const y = (ms) => (bottom - ((bottom - top) * ms) / highest).toFixed(1);

  // axes
  const text = (x, y, content, anchor) => `<text x="${x}" y="${y}" class="${anchor}">${content}</text>`;
  let axes = text(0, em, "milliseconds per token", "start");
  axes += text(right, height - 0.3 * em, "position in the text", "end");
  const step = [1, 2, 5, 10].map((n) => n * 10 ** Math.floor(Math.log10(highest / 4))).find((n) => highest / n <= 5);
  for (let i = 0; steps.length ? i * step <= highest : i < 1; i++) {
    axes += `<line x1="${left}" x2="${right}" y1="${y(i * step)}" y2="${y(i * step)}"/>`;
    axes += text(left - 0.5 * em, Number(y(i * step)) + 0.3 * em, Number((i * step).toPrecision(3)), "end");
  }
  for (const quarter of [0, 1, 2, 3, 4]) {
    const position = Math.round((info.block_size * quarter) / 4);
    axes += text(x(position), bottom + 1.5 * em, position, quarter < 4 ? "middle" : "end");
  }
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  $("axes").innerHTML = axes; // numbers and words of this file only

  // curves and table
  let description = "Milliseconds per token against position.";
  for (const { setting, ms, points } of runs) {
    const dots = ms.map((each, i) => (each <= highest ? `M${x(first + i)} ${y(each)}h0` : ""));
    $(`dots-${setting}`).setAttribute("d", dots.join(""));
    $(`curve-${setting}`).setAttribute("points", points.map(([position, each]) => `${x(position)},${y(each)}`).join(" "));
    const seconds = ms.reduce((sum, each) => sum + each, 0) / 1e3;
    const [from, to] = points.length ? [points[0], points.at(-1)].map(([, each]) => each.toFixed(2)) : [];
    const rate = seconds > 0 ? inEnglish(Math.round(ms.length / seconds)) : "";
    const cells = [ms.length || "", rate, from ? `${from} → ${to}` : ""];
    [...$(`row-${setting}`).querySelectorAll("td")].forEach((cell, i) => (cell.textContent = cells[i]));
    const last = first + ms.length - 1;
    if (from) description += ` KV cache ${setting}: from ${from} to ${to}, positions ${first} to ${last}.`;
  }
  svg.setAttribute("aria-label", description);
}

// -- the newest step, in and out ----------------------------------------------------------------------------------------

export function drawShapes({ steps, info }) {
  if (!steps.length) return fillTable($("shapes").tBodies[0], []);
  const { on, off } = steps.at(-1);
  const uncached = new Map(off.shapes.map(([, name, dims]) => [name, dims]));
  const shape = (dims) => (dims ? `(${dims.join(", ")})` : "-");
  const rows = on.shapes
    .filter(([, name]) => !/\.[1-9]\d*\./.test(name)) // layer 0 stands for all
    .map(([direction, name, dims]) => [direction, name, shape(dims), shape(uncached.get(name))]);
  const more = 2 * (info.n_layer - 1);
  if (more) rows.push(["", `and ${more} more, of the other layers, in and out`, "", ""]);
  fillTable($("shapes").tBodies[0], rows);
}
