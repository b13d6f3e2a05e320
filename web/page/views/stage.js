// The stage: a strip of the newest characters and, below each, its column and how it takes part in the newest step.
import { $, blank, classes, colour, element, glyph, percent, quoted, remember } from "./draw.js";

const MOST_CELLS = 40;
export const size = { cells: MOST_CELLS, cell: 20, gap: 14 }; // in CSS pixels

/** Choose how many cells there are. They fill the width, and the query has a cell of its own beyond them. */
export function measure() {
  const em = parseFloat(getComputedStyle(document.documentElement).fontSize);
  const least = em * (matchMedia("(pointer: coarse)").matches ? 1.4 : 1.05);
  const width = $("keys").clientWidth;
  size.gap = 0.7 * em;
  size.cells = Math.max(1, Math.min(MOST_CELLS, Math.floor((width - size.gap) / least) - 1));
  size.cell = (width - size.gap) / (size.cells + 1);
  $("strip").style.setProperty("--cell", `${size.cell}px`);
  $("strip").style.setProperty("--beyond", `${size.cells * size.cell + size.gap}px`);
  for (const id of ["cells", "attention", "row-0", "row-1"]) {
    const tag = id === "cells" ? "button" : "i";
    $(id).replaceChildren(...Array.from({ length: size.cells }, () => element(tag, "", { type: "button", tabIndex: -1 })));
  }
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
 *  fed      how many ids have a column; they get a cell, and the next one stands beyond the strip
 *  fresh    how many of the newest columns this step computed with the cache
 *  weights  how much attention each column gets, or null
 */
export const drawCells = remember((chars, ids, fed, from, fresh, wrong, hidden, marked, weights) => {
  const end = Math.min(fed, from + size.cells);
  const inSight = (index) => index !== null && index >= from && index < end;
  const reachable = inSight(marked) ? marked : end - 1; // by the tabulator key
  [...$("cells").children].forEach((cell, i) => {
    const [index, number, char] = [from + i, from + i + 1, chars[ids[from + i]]];
    const there = inSight(index);
    cell.textContent = there ? glyph(char) : "";
    cell.dataset.number = there && (number % 10 === 0 || index === marked) ? number : "";
    cell.tabIndex = index === reachable ? 0 : -1;
    cell.disabled = !there;
    classes(cell, { fresh: there && index >= fed - fresh, wrong: there && index === wrong, marked: index === marked });
    const share = weights ? `, ${percent(weights[index] ?? 0)} of the attention` : "";
    cell.ariaLabel = there ? `character ${number}, ${quoted(char)}${share}` : "no character yet";
  });
  for (const [id, index, count] of [["marked", marked, 1], ["taken", hidden, 1], ["fresh", Math.max(from, fed - fresh), fresh]]) {
    $(id).hidden = !count || !inSight(index);
    $(id).style.left = `${left(index - from) - 1}px`;
    $(id).style.width = `${left(Math.min(index + count, end) - from) - left(index - from) + 1}px`;
  }
  $("next-cell").textContent = fed < ids.length ? glyph(chars[ids[fed]]) : "";
  classes($("next-cell"), { wrong: wrong === fed });
  $("earlier").textContent = from ? `← ${from} before` : "";
  $("later").textContent = fed > end ? `${fed - end} after →` : "";
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

/** Return the view of the keys (kind 0) or the values (kind 1): a column of shades per character.
 *
 *  length     how many columns `kept` has, because it grows
 *  first      { kept, given }: the columns of the prompt are the unit of the shades, so no later column changes them
 *  beyond     what stands beyond the strip, or null: a Float32Array (head size)
 *  strengths  of the columns, 0 to 1, or null: all 1
 */
function laneView(kind, name) {
  return remember((kept, length, layer, head, first, beyond, strengths, from) => {
    const canvas = $(name);
    const { context, height } = blank(canvas);
    const { headSize } = kept;
    const lane = kept.lane(layer, kind, head);
    const scale = unit(first.kept.lane(layer, kind, head).subarray(0, first.given * headSize));
    const [ink, empty] = [colour("ink"), colour("empty")];
    const place = (numbers, x, width, scale, strength) => {
      context.fillStyle = numbers ? ink : empty;
      if (numbers) drawColumn(context, numbers, scale, x, width, height, strength);
      else context.fillRect(x, 0, width, height);
    };
    for (let i = 0; i < size.cells; i++) {
      const index = from + i;
      const numbers = index < length ? lane.subarray(index * headSize, (index + 1) * headSize) : null;
      place(numbers, left(i), left(i + 1) - left(i) - 1, scale, strengths?.[index] ?? 1);
    }
    place(beyond, left(size.cells) + size.gap, Math.floor(size.cell) - 1, beyond && unit(beyond), 1);
    canvas.ariaLabel = `The ${name} of layer ${layer + 1}, head ${head + 1}: ${length} columns`;
  });
}

export const drawKeys = laneView(0, "keys");
export const drawValues = laneView(1, "values");

/** Draw how much of its attention the newest character gives to each column. */
export const drawAttention = remember((weights, from) => {
  const most = weights ? Math.max(...weights) : 1;
  [...$("attention").children].forEach((bar, i) => {
    bar.style.height = `${(100 * (weights?.[from + i] ?? 0)) / most}%`;
  });
  const label = weights ? `Attention: most, ${percent(most)}, for character ${weights.indexOf(most) + 1}` : "No attention yet";
  $("attention").ariaLabel = label;
});

/** Draw two rows below the columns. They are lights: orange where this step computed a column without the cache, blue
 *  with it. Or, with `marks`, they say whether the key and the value are what they were, or should be.
 *
 *  marks    a list of booleans for the keys, and one for the values: whether they differ; or null
 *  off, on  how many columns this step computed without the cache, and with it; length: how many there are
 */
export const drawBelow = remember((marks, length, off, on, from) => {
  document.body.dataset.below = marks ? "marks" : "lights";
  for (const [row, computed] of [off, on].entries()) {
    [...$(`row-${row}`).children].forEach((cell, i) => {
      const index = from + i;
      const differs = marks?.[row][index];
      cell.textContent = differs === undefined ? "" : differs ? "≠" : "=";
      const isLit = row ? index < length && index >= length - computed : index < computed;
      classes(cell, { lit: isLit && !marks, differs });
    });
    const count = marks?.[row].filter((differs) => differs).length;
    $(`row-${row}`).ariaLabel = marks ? `${count} differ` : `${computed} computed in this step`;
  }
});
