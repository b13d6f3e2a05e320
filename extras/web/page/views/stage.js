// The stage: a strip of characters and, below each, its column and its part in the newest step.
import { glyph, percent, quoted } from "../words.js";
import { $, blank, classes, colour, element, remember } from "./draw.js";

const MOST_CELLS = 40;
const ON_A_PROJECTOR = 16;
export const size = { cells: MOST_CELLS, cell: 20, gap: 14 }; // in CSS pixels

/** Choose how many cells there are, and return it. They fill the lane, and the query has its own cell beyond them. */
export function measure() {
  const em = parseFloat(getComputedStyle(document.documentElement).fontSize);
  const least = em * (matchMedia("(pointer: coarse)").matches ? 1.4 : 1.05);
  const most = "projector" in document.body.dataset ? ON_A_PROJECTOR : MOST_CELLS;
  const width = $("keys").clientWidth;
  size.gap = 0.7 * em;
  size.cells = Math.max(1, Math.min(most, Math.floor((width - size.gap) / least) - 1));
  size.cell = (width - size.gap) / (size.cells + 1);
  $("strip").style.setProperty("--cell", `${size.cell}px`);
  $("strip").style.setProperty("--count", size.cells);
  for (const id of ["cells", "scores", "attention", "row-0", "row-1"]) {
    const tag = id === "cells" ? "button" : "i";
    const make = () => element(tag, "", { type: "button", tabIndex: -1 });
    $(id).replaceChildren(...Array.from({ length: size.cells }, make));
  }
  return size.cells;
}

/** Return where a cell starts, in whole pixels: a column between two pixels would be blurred. */
const left = (i) => Math.round(i * size.cell);

/** Return the index of the character at an event on the strip, or null. A key press on a cell is a click too, but has
 *  no coordinates. */
export function indexAt(event, from) {
  const target = [...$("cells").children].indexOf(event.target.closest("button"));
  const place = Math.floor((event.clientX - $("cells").getBoundingClientRect().left) / size.cell);
  const cell = target >= 0 ? target : place;
  return cell >= 0 && cell < size.cells ? from + cell : null;
}

/** Put a frame around the columns [begin, end), as far as they are visible. */
function frame(id, begin, end, from) {
  const [first, last] = [Math.max(begin - from, 0), Math.min(end - from, size.cells)];
  $(id).hidden = first >= last;
  $(id).style.left = `${left(first) - 1}px`;
  $(id).style.width = `${left(last) - left(first) + 1}px`;
}

/** Draw the visible characters and the frames around their columns.
 *
 *  shown      what is on the stage: { ids, tokens, at, masked, position }; tokens: the ids that have a column, which get a
 *             cell; at: the index of the next character in ids, if not after the tokens
 *  computed   how many of the newest columns this step computed with the cache
 *  incorrect  the index of an incorrect or changed character, or null
 *  weights    how much attention each column gets, or null
 */
export const drawCells = remember((chars, shown, from, computed, incorrect, marked, weights) => {
  const { ids, tokens, masked, position } = shown;
  const fed = tokens.length;
  const at = shown.at ?? fed;
  const end = Math.min(fed, from + size.cells);
  const inSight = (index) => index !== null && index >= from && index < end;
  const reachable = inSight(marked) ? marked : end - 1; // with the Tab key
  [...$("cells").children].forEach((cell, i) => {
    const [index, number, char] = [from + i, from + i + 1, chars[tokens[from + i]]];
    const there = inSight(index);
    cell.textContent = there ? glyph(char) : "";
    cell.dataset.number = there && (number % 10 === 0 || index === marked) ? number : "";
    cell.tabIndex = index === reachable ? 0 : -1;
    cell.disabled = !there;
    classes(cell, { fresh: index === fed - 1, incorrect: there && index === incorrect, marked: index === marked });
    const share = weights ? `, ${percent(weights[index] ?? 0)} of the attention` : "";
    cell.ariaLabel = there ? `character ${number}, ${quoted(char)}${share}` : "no character yet";
  });

  frame("recomputed-frame", 0, fed, from);
  frame("computed-frame", fed - computed, fed, from);
  frame("kept-frame", 0, position ?? 0, from);
  frame("masked-frame", masked ?? 0, (masked ?? -1) + 1, from);
  frame("marked-frame", marked ?? 0, inSight(marked) ? marked + 1 : 0, from);
  const newest = fed - from;
  $("asks").hidden = newest < 1 || newest > size.cells;
  $("asks").style.left = `${left(newest)}px`;
  $("asks").style.width = `${left(size.cells) + size.gap + size.cell / 2 - left(newest)}px`;

  $("asking").textContent = fed ? `“${glyph(chars[tokens[fed - 1]])}”` : "?";
  $("next-cell").textContent = fed && at < ids.length ? glyph(chars[ids[at]]) : "?";
  classes($("next-cell"), { incorrect: fed && incorrect === at });
  $("earlier").textContent = from ? `← ${from}` : "";
  $("later").textContent = fed > end ? `${fed - end} →` : "";
});

/** Animate a step: orange sweeps over the columns that are computed again without a cache, and the new one arrives. */
export function animateStep() {
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  const sweep = [{ clipPath: "inset(0 100% 0 0)", opacity: 1 }, { clipPath: "inset(0)", opacity: 1 }, { opacity: 0 }];
  $("recomputed-frame").animate(sweep, 180);
  $("computed-frame").animate([{ translate: "0 -0.6rem", opacity: 0 }, {}], 180);
}

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
 *  shown      what is on the stage: { kept }
 *  run        its columns of the prompt set the unit of the shades, so no later column changes them
 *  beyond     what is drawn beyond the strip, or null: a Float32Array (head size)
 *  strengths  of the columns, 0 to 1, or null: all 1
 *  matched    the index of a key that is compared with what is beyond the strip, or null
 */
function laneView(kind, name) {
  return remember((shown, run, layer, head, beyond, strengths, from, matched) => {
    const canvas = $(name);
    const { context, height } = blank(canvas);
    const { headSize, length } = shown.kept;
    const lane = shown.kept.lane(layer, kind, head);
    const scale = unit(run.kept.lane(layer, kind, head).subarray(0, run.given * headSize));
    const [ink, empty] = [colour(name), colour("empty")];
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
    if (beyond && matched !== null && matched >= from && matched < Math.min(length, from + size.cells)) {
      drawMatch(context, lane.subarray(matched * headSize, (matched + 1) * headSize), beyond, matched - from, height);
    }
    canvas.ariaLabel = `The ${name} of layer ${layer + 1}, head ${head + 1}: ${length} columns`;
  });
}

/** Lay the query next to the key in a cell, and draw the product of each pair of numbers as a bar: to the right where they
 *  agree, and a pale one to the left where they do not. The sum of the products is the score. */
function drawMatch(context, key, query, cell, height) {
  const products = key.map((x, i) => x * query[i]);
  const most = Math.max(...products.map(Math.abs));
  const [own, bars] = [Math.floor(size.cell) - 1, 4 * size.cell];
  const isLast = left(cell + 1) + own + bars > left(size.cells);
  const queryX = isLast ? left(cell) - own - 1 : left(cell + 1);
  const barsX = isLast ? queryX - bars : queryX + own + 1;
  const ink = context.fillStyle;
  context.fillStyle = colour("paper");
  context.fillRect(Math.min(queryX, barsX) - 1, 0, own + bars + 2, height);
  context.fillStyle = colour("keys");
  drawColumn(context, query, unit(query), queryX, own, height, 1);
  const step = height / products.length;
  const zero = barsX + bars / 2;
  products.forEach((product, row) => {
    const width = (Math.abs(product) / most) * (bars / 2 - 2);
    context.globalAlpha = product > 0 ? 1 : 0.3;
    context.fillRect(product > 0 ? zero : zero - width, Math.round(row * step), width, Math.max(1, Math.round(step) - 1));
  });
  context.globalAlpha = 1;
  context.fillStyle = ink;
}

export const drawKeys = laneView(0, "keys");
export const drawValues = laneView(1, "values");

/** Draw how well each key matches the query: up for a score above zero, down for one below. */
export const drawScores = remember((scores, from) => {
  const finite = scores?.filter(Number.isFinite) ?? [];
  const most = Math.max(1e-6, ...finite.map(Math.abs));
  [...$("scores").children].forEach((bar, i) => {
    const score = scores?.[from + i];
    bar.style.height = Number.isFinite(score) ? `${(50 * Math.abs(score)) / most}%` : 0;
    classes(bar, { below: score < 0 });
  });
  const best = scores?.indexOf(Math.max(...finite));
  const label = `Scores: the key of character ${best + 1} matches the query best, ${scores?.[best]?.toFixed(1)}`;
  $("scores").ariaLabel = scores ? label : "No scores yet";
});

/** Draw how much of its attention the newest character gives to each column. The bars are scaled to the same height in
 *  every head, so the tallest visible one is labelled with its share. */
export const drawAttention = remember((weights, from) => {
  const most = weights ? Math.max(...weights) : 1;
  const shares = Array.from({ length: size.cells }, (_, i) => weights?.[from + i] ?? 0);
  const tallest = shares.indexOf(Math.max(...shares));
  [...$("attention").children].forEach((bar, i) => {
    bar.style.height = `${(100 * shares[i]) / most}%`;
    bar.dataset.share = weights && i === tallest ? percent(shares[i]) : "";
  });
  const label = `Attention: character ${weights?.indexOf(most) + 1} gets the most, ${percent(most)}`;
  $("attention").ariaLabel = weights ? label : "No attention yet";
});

/** Draw two computed below the columns, one without the cache and one with it. They are lights: solid for columns that this
 *  step computed, rings for those it kept. Or, with `marks`, they show which keys and which values differ.
 *
 *  marks   a list of booleans for the keys and one for the values: whether they differ; or null
 *  isChange  whether they differ because a character was changed: the rest stay and are drawn like kept columns
 *  length  how many columns there are; off, on: how many this step computed without the cache, and with it
 */
export const drawBelow = remember((marks, isChange, length, off, on, from) => {
  document.body.dataset.below = marks ? "marks" : "lights";
  if (marks) return marks.forEach((differs, row) => drawMarks(row, differs, isChange, from));
  const kept = length - on;
  const without = (cell, index) => classes(cell, { lit: index < off });
  const withIt = (cell, index) => classes(cell, { lit: index >= kept && index < length, kept: index < kept });
  drawRow(0, from, without, length ? `${off} computed` : "");
  drawRow(1, from, withIt, length ? `${on} computed, ${kept} kept` : "");
});

function drawMarks(row, differs, isChange, from) {
  const [all, count] = [differs.length, differs.filter((each) => each).length];
  const mark = (cell, index) => {
    const equal = differs[index] === false;
    cell.textContent = differs[index] ? "≠" : equal && !isChange ? "=" : "";
    classes(cell, { differs: differs[index], kept: equal && isChange });
  };
  drawRow(row, from, mark, isChange ? `${all - count} stay, ${count} change` : `${count} of ${all} incorrect`);
}

function drawRow(row, from, look, count) {
  [...$(`row-${row}`).children].forEach((cell, i) => {
    cell.textContent = "";
    look(cell, from + i);
  });
  $(`row-${row}`).ariaLabel = $(`end-${row}`).textContent = count;
}
