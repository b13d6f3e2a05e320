// The stage: the text, and a strip of characters with each one's column below it and its part in the newest step.
import { attend } from "../attention.js";
import { ROUNDING } from "../mistakes.js";
import { glyph, percent, quoted } from "../words.js";
import { $, classes, element, say, shades, shape, unit } from "./draw.js";
import { drawText } from "./text.js";

const MOST_CELLS = 40;
export const size = { cells: MOST_CELLS, cell: 20, gap: 14 }; // in CSS pixels

/** Choose how many cells there are, and return it. They fill the lane, and the query has its own cell beyond them. */
export function measure() {
  const em = parseFloat(getComputedStyle(document.documentElement).fontSize);
  const least = em * (matchMedia("(pointer: coarse)").matches ? 1.4 : 1.05);
  const width = $("keys").getBoundingClientRect().width;
  if (!width) return size.cells; // the strip is hidden
  size.gap = 0.7 * em;
  size.cells = Math.max(1, Math.min(MOST_CELLS, Math.floor((width - size.gap) / least) - 1));
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

/** Return what the stage shows, in the layer and the head that the reader chose:
 *
 *  shown      the run or an answer: { ids, tokens, kept, ... }; tokens: the ids that have a column, which get a cell
 *  fed, at    how many of them there are, and the index in ids of the character that follows
 *  incorrect  the index of an incorrect character, or null; marked: of the one that the reader points to
 *  next       the character that follows
 *  query, scores, weights, mix   of the newest character: see attention.js
 *  marks      which keys and which values are incorrect, two lists of booleans, or null
 *  stepOf(i)  the step that chose character i, if it is known
 */
export function sceneOf(state) {
  const { info, run, answer, layer, head, from, pointed } = state;
  const shown = answer ?? run;
  const fed = shown.tokens.length;
  const at = shown.at ?? fed;
  const keyHead = Math.floor((head * info.n_kv_head) / info.n_head); // it may serve several query heads
  return {
    chars: info.chars, run, answer, shown, layer, head, keyHead, from, fed, at,
    incorrect: answer?.first >= 0 ? answer.first : null,
    marked: pointed,
    next: at < shown.ids.length && fed ? glyph(info.chars[shown.ids[at]]) : "?",
    marks: answer?.differences?.slice(2 * layer, 2 * layer + 2).map((each) => [...each].map((x) => x > ROUNDING)) ?? null,
    stepOf: (index) => (answer?.kind === "mistake" ? undefined : run.on[index - run.given]),
    ...attentionOf(shown, layer, head, keyHead, info.head_size),
  };
}

function attentionOf({ kept, queries, masked }, layer, head, keyHead, size) {
  if (!queries) return { query: null, scores: null, weights: null, mix: null };
  const query = queries[layer].subarray(head * size, (head + 1) * size);
  return { query, ...attend(query, kept.lane(layer, 0, keyHead), kept.lane(layer, 1, keyHead), masked) };
}

/** Draw the text, and the strip if it is to be seen. */
export function drawStage(scene, isStrip) {
  $("stage").hidden = false;
  drawText({ ...scene, fed: scene.at });
  $("three").hidden = isStrip;
  $("strip").hidden = document.querySelector("#stage [data-holds]").hidden = !isStrip;
  if (!isStrip) return;
  drawCells(scene);
  const { weights } = scene;
  const most = Math.max(...(weights ?? []));
  drawLane(scene, 0, "keys", scene.query, null);
  drawLane(scene, 1, "values", scene.mix, scene.marks ? null : weights?.map((weight) => 0.12 + 0.88 * Math.sqrt(weight / most)));
  drawScores(scene);
  drawAttention(scene);
  drawMarks(scene);
}

const left = (i) => i * size.cell; // where a cell starts

/** Return the index of the character at an event on the strip, or null. A key press on a cell is a click too, but has
 *  no coordinates. */
export function indexAt(event, from) {
  const pressed = event.target.closest("button");
  if (pressed) return Number(pressed.dataset.index);
  const cell = Math.floor((event.clientX - $("cells").getBoundingClientRect().left) / size.cell);
  return cell >= 0 && cell < size.cells ? from + cell : null;
}

/** Put a frame around the columns [begin, end), as far as they are visible. */
function frame(id, begin, end, from) {
  const [first, last] = [Math.max(begin - from, 0), Math.min(end - from, size.cells)];
  $(id).hidden = first >= last;
  $(id).style.left = `${left(first) - 1}px`;
  $(id).style.width = `${left(last) - left(first) + 1}px`;
}

export const tenth = (score) => (Number.isFinite(score) ? score.toFixed(1).replace("-", "−") : "hidden");

/** A column as a screen reader says it. */
export function columnInWords({ chars, shown, scores, weights }, index) {
  const numbers = weights ? `: score ${tenth(scores[index])}, ${percent(weights[index] ?? 0)} of the attention` : "";
  return `character ${index + 1}, ${quoted(chars[shown.tokens[index]])}${numbers}`;
}

/** Draw the visible characters, and what the frames mark. */
function drawCells(scene) {
  const { chars, shown, from, fed, at, incorrect, marked, next } = scene;
  const { tokens, masked } = shown;
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
    cell.dataset.index = index;
    cell.ariaLabel = there ? columnInWords(scene, index) : "no character yet";
  });

  frame("masked-frame", masked ?? 0, (masked ?? -1) + 1, from);
  frame("marked-frame", marked ?? 0, inSight(marked) ? marked + 1 : 0, from);
  const newest = fed - from;
  $("asks").hidden = newest < 1 || newest > size.cells;
  $("asks").style.left = `${left(newest)}px`;
  $("asks").style.width = `${left(size.cells) + size.gap + size.cell / 2 - left(newest)}px`;

  $("asking").textContent = fed ? `“${glyph(chars[tokens[fed - 1]])}”` : "?";
  say("next-cell", next);
  classes($("next-cell"), { incorrect: fed && incorrect === at });
  $("earlier").textContent = from ? `← ${from}` : "";
  $("later").textContent = fed > end ? `${fed - end} →` : "";
}

/** Draw the keys (kind 0) or the values (kind 1): a column of shades per character, and one beyond the strip, the query or
 *  the mix. The prompt sets the unit of the shades, so no later column changes them. strengths: of the columns, 0 to 1. */
function drawLane({ shown, run, layer, head, keyHead, from, fed }, kind, name, beyond, strengths) {
  const lane = (each) => each.kept.lane(layer, kind, keyHead);
  const { headSize } = shown.kept;
  const scale = unit(lane(run).subarray(0, run.given * headSize));
  const there = Math.max(0, Math.min(size.cells, fed - from));
  const columns = Array.from({ length: there }, (_, i) => {
    const numbers = lane(shown).subarray((from + i) * headSize, (from + i + 1) * headSize);
    return shades(numbers, name, [i, 0.95], strengths?.[from + i] ?? 1, scale);
  });
  if (beyond) columns.push(shades(beyond, name, [size.cells + size.gap / size.cell, 0.95]));
  const empty = shape("rect", { class: "empty", x: there, width: size.cells - there, height: 10 });
  $(name).setAttribute("viewBox", `0 0 ${size.cells + 1 + size.gap / size.cell} 10`);
  $(name).replaceChildren(empty, ...columns);
  $(name).ariaLabel = `The ${name} of layer ${layer + 1}, head ${head + 1}, of ${fed} characters`;
}

/** Draw how well each key matches the query: up for a score above zero, down for one below. */
function drawScores({ scores, from }) {
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
}

/** Draw how much of its attention the newest character gives to each column. The bars are scaled to the same height in
 *  every head, so the tallest visible one is labelled with its share. */
function drawAttention({ weights, from }) {
  const most = weights ? Math.max(...weights) : 1;
  const shares = Array.from({ length: size.cells }, (_, i) => weights?.[from + i] ?? 0);
  const tallest = shares.indexOf(Math.max(...shares));
  [...$("attention").children].forEach((bar, i) => {
    bar.style.height = `${(100 * shares[i]) / most}%`;
    bar.dataset.share = weights && i === tallest ? percent(shares[i]) : "";
  });
  const label = `Attention: character ${weights?.indexOf(most) + 1} gets the most, ${percent(most)}`;
  $("attention").ariaLabel = weights ? label : "No attention yet";
}

/** Mark below each column whether its key and its value are correct, in two rows. */
function drawMarks({ marks, from }) {
  $("strip").classList.toggle("checked", marks !== null);
  marks?.forEach((differs, row) => {
    [...$(`row-${row}`).children].forEach((cell, i) => {
      cell.textContent = { true: "≠", false: "=" }[differs[from + i]] ?? "";
      classes(cell, { differs: differs[from + i] });
    });
    const count = differs.filter((each) => each).length;
    $(`row-${row}`).ariaLabel = $(`end-${row}`).textContent = `${count} of ${differs.length} incorrect`;
  });
}

/** Describe the marked character. */
export function drawAbout({ chars, run, answer, shown, marked, scores, weights, stepOf }) {
  if (marked === null) return say("about", "");
  const step = stepOf(marked);
  const about = [`Character ${marked + 1} is ${quoted(chars[answer?.tokens[marked] ?? shown.ids[marked]])}.`];
  if (marked < run.given) about.push("It is from the prompt.");
  else if (step) about.push(`The model gave it a probability of ${percent(step.probabilities[shown.ids[marked]])}.`);
  if (Number.isFinite(scores?.[marked])) {
    about.push(`Its key scores ${tenth(scores[marked])}, so the newest gives it ${percent(weights[marked])} of its attention.`);
  }
  say("about", about.join(" "));
}
