// The stage: a strip of the newest characters and, below each, its column and how it takes part in the newest step.
import { $, blank, colour, element, glyph, percent, quoted, remember } from "./draw.js";

const MOST_CELLS = 40;
export const size = { cells: MOST_CELLS, cell: 20, gap: 14 }; // in CSS pixels

/** Choose how many cells there are. They fill the width, and the query has a cell of its own beyond them. */
export function measure() {
  const em = parseFloat(getComputedStyle(document.documentElement).fontSize);
  const least = em * (matchMedia("(pointer: coarse)").matches ? 1.4 : 1.05);
  const width = $("cells").parentElement.clientWidth;
  size.gap = 0.7 * em;
  size.cells = Math.min(MOST_CELLS, Math.floor((width - size.gap) / least) - 1);
  size.cell = (width - size.gap) / (size.cells + 1);
  $("strip").style.setProperty("--cell", `${size.cell}px`);
  $("strip").style.setProperty("--beyond", `${size.cells * size.cell + size.gap}px`);
  $("cells").replaceChildren(
    ...Array.from({ length: size.cells }, () => element("button", "", { type: "button", tabIndex: -1 })),
  );
}

/** Return where a cell begins, in whole pixels: a column between two pixels would be blurred. */
const left = (i) => Math.round(i * size.cell);

/** Return the index of the character that is at a horizontal place of the strip, or null. */
export function indexAt(event, from) {
  const cell = Math.floor((event.clientX - $("cells").getBoundingClientRect().left) / size.cell);
  return cell >= 0 && cell < size.cells ? from + cell : null;
}

/** Draw the characters that are on the stage.
 *
 *  fed      how many ids have a column; they get a cell
 *  fresh    how many of the newest columns this step computed with the cache
 *  weights  how much attention each column gets, or null
 */
export const drawCells = remember((chars, ids, fed, from, fresh, wrong, marked, weights) => {
  const end = Math.min(fed, from + size.cells);
  const reachable = marked >= from && marked < end ? marked : end - 1; // by the tabulator key
  [...$("cells").children].forEach((cell, i) => {
    const index = from + i;
    const [there, number, char] = [index < fed, index + 1, chars[ids[index]]];
    cell.textContent = there ? glyph(char) : "";
    cell.dataset.number = there && (number % 10 === 0 || index === marked) ? number : "";
    cell.tabIndex = index === reachable ? 0 : -1;
    cell.disabled = !there;
    const names = { fresh: there && index >= fed - fresh, wrong: there && index === wrong, marked: index === marked };
    cell.className = Object.keys(names).filter((name) => names[name]).join(" ");
    const share = weights ? `, ${percent(weights[index] ?? 0)} of the attention` : "";
    cell.ariaLabel = there ? `character ${number}, ${quoted(char)}${share}` : "no character yet";
  });
  $("band").hidden = marked === null || marked < from || marked >= end;
  $("band").style.left = `${(marked - from) * size.cell}px`;
  const characters = (count) => `${count} character${count === 1 ? "" : "s"}`;
  $("earlier").textContent = from ? `← ${characters(from)} before` : "";
  $("later").textContent = fed > end ? `${characters(fed - end)} after →` : "";
});

/** Draw the cell beyond the strip: the character that comes next, which has no column yet. */
export const drawNextCell = remember((char, wrong) => {
  $("next-cell").textContent = char === undefined ? "" : glyph(char);
  $("next-cell").className = wrong ? "wrong" : "";
});

/** Return the root mean square of numbers, the unit of their shades. */
function unit(numbers) {
  return Math.sqrt(numbers.reduce((sum, x) => sum + x * x, 0) / Math.max(1, numbers.length)) || 1;
}

/** Draw numbers as shades, one above the other. strength: 0 to 1. */
function drawColumn(context, numbers, scale, x, width, height, strength) {
  const step = height / numbers.length;
  numbers.forEach((number, row) => {
    const shade = Math.min(1, Math.max(0, 0.5 + number / (4.4 * scale)));
    context.globalAlpha = strength * (0.05 + 0.8 * shade ** 1.4);
    const [top, bottom] = [Math.round(row * step), Math.round((row + 1) * step)];
    context.fillRect(x, top, width, bottom - top);
  });
  context.globalAlpha = 1;
}

function hatch(context, x, width, height) {
  context.save();
  context.beginPath();
  context.rect(x, 0, width, height);
  context.clip();
  context.beginPath();
  for (let y = -width; y < height + width; y += 6) {
    context.moveTo(x, y + width);
    context.lineTo(x + width, y);
  }
  context.stroke();
  context.strokeRect(x + 0.5, 0.5, width - 1, height - 1);
  context.restore();
}

/** Return the unit of a lane's shades: that of its first columns, so that no later column changes a shade. */
export function laneScale(kept, count, layer, kind, head) {
  return unit(kept.lane(layer, kind, head).subarray(0, count * kept.headSize));
}

/** Return the view of the keys (kind 0) or the values (kind 1): a column of shades per character.
 *
 *  length     how many columns `kept` has, because it grows
 *  beyond     what stands beyond the strip, or null: a Float32Array (head size)
 *  strengths  of the columns, 0 to 1, or null: all 1
 *  hidden     the column that is taken out
 *  fresh      how many of the newest columns get a frame: this step computed them with the cache
 */
function laneView(kind, name) {
  return remember((kept, length, layer, head, scale, beyond, strengths, hidden, from, fresh) => {
    const canvas = $(name);
    const { context, height } = blank(canvas);
    const { cells, gap } = size;
    const lane = kept.lane(layer, kind, head);
    const [ink, empty] = [colour("ink"), colour("empty")];
    const place = (numbers, x, width, scale, strength) => {
      context.fillStyle = numbers ? ink : empty;
      if (numbers) drawColumn(context, numbers, scale, x, width, height, strength);
      else context.fillRect(x, 0, width, height);
    };
    for (let i = 0; i < cells; i++) {
      const index = from + i;
      const numbers = index < length ? lane.subarray(index * kept.headSize, (index + 1) * kept.headSize) : null;
      const [x, width] = [left(i), left(i + 1) - left(i) - 1];
      context.strokeStyle = ink;
      if (index === hidden) hatch(context, x, width, height);
      else place(numbers, x, width, scale, strengths?.[index] ?? 1);
    }
    place(beyond, left(cells) + gap, Math.floor(size.cell) - 1, beyond && unit(beyond), 1);

    const [first, end] = [Math.max(from, length - fresh), Math.min(length, from + cells)];
    if (first < end && fresh) {
      context.strokeStyle = colour("on");
      context.lineWidth = 2;
      context.strokeRect(left(first - from), 1, left(end - from) - left(first - from) - 1, height - 2);
    }
    canvas.ariaLabel = `The ${name} of layer ${layer + 1}, head ${head + 1}: ${length} columns`;
  });
}

export const drawKeys = laneView(0, "keys");
export const drawValues = laneView(1, "values");

/** Draw how much of its attention the newest character gives to each column. */
export const drawAttention = remember((weights, from, marked) => {
  const canvas = $("attention");
  const { context, height } = blank(canvas);
  const { cells, cell } = size;
  const most = weights ? Math.max(...weights) : 1;
  context.fillStyle = colour("ink");
  context.fillRect(0, height - 1, left(cells) - 1, 1);
  for (let i = 0; weights && i < cells; i++) {
    const bar = ((weights[from + i] ?? 0) / most) * (height - 4);
    context.globalAlpha = marked === null || marked === from + i ? 1 : 0.6;
    context.fillRect(left(i + 0.2), height - bar, left(i + 0.8) - left(i + 0.2), bar);
  }
  const top = weights?.indexOf(most);
  canvas.ariaLabel = weights ? `Attention: most, ${percent(most)}, for character ${top + 1}` : "No attention yet";
});

/** Draw two rows below the columns: `marks` if there are any, else the lights. */
export const drawBelow = remember((marks, length, off, fresh, from) => {
  const canvas = $("lights");
  const { context, height } = blank(canvas);
  document.body.dataset.below = marks ? "marks" : "lights";
  canvas.ariaLabel = marks ? drawMarks(context, height, marks, from) : drawLights(context, height, length, off, fresh, from);
});

/** Draw two lights per character: orange where this step computed a column without the cache, blue with it. */
function drawLights(context, height, length, off, fresh, from) {
  const { cells, cell } = size;
  const radius = Math.min(0.34 * cell, 0.2 * height);
  const light = (i, row, name) => {
    context.fillStyle = colour(name);
    context.beginPath();
    context.arc((i + 0.5) * cell - 0.5, height * (0.25 + 0.5 * row), radius, 0, 7);
    context.fill();
  };
  for (let i = 0; i < cells; i++) {
    const index = from + i;
    light(i, 0, index < off ? "off" : "empty");
    light(i, 1, index < length && index >= length - fresh ? "on" : "empty");
  }
  return `This step computed ${off} columns without the cache and ${fresh} with it`;
}

/** Draw whether each column is what it was, or ought to be. keys, values: differences per column. */
function drawMarks(context, height, { keys, values, tolerance }, from) {
  const { cells, cell } = size;
  context.textAlign = "center";
  context.textBaseline = "middle";
  for (const [row, differences] of [keys, values].entries()) {
    const y = height * (0.25 + 0.5 * row);
    for (let i = 0; i < cells && from + i < differences.length; i++) {
      const same = differences[from + i] <= tolerance;
      context.fillStyle = colour(same ? "quiet" : "ink");
      if (!same) context.fillRect(left(i), y - 0.22 * height, left(i + 1) - left(i) - 1, 0.44 * height);
      if (!same) context.fillStyle = colour("paper");
      context.font = `${same ? "" : "bold "}${0.36 * height}px sans-serif`;
      context.fillText(same ? "=" : "≠", (i + 0.5) * cell - 0.5, y);
    }
  }
  const count = keys.filter((x, i) => x > tolerance || values[i] > tolerance).length;
  return `${count} of ${keys.length} columns are different`;
}
