// Staircases, the picture that the page returns to: a row per step or per character, and a square per position. The lines
// that draw them are dashed, so that every unit is a square.
import { glyph } from "../words.js";
import { element, shape } from "./draw.js";

/** Return the path of rows: a list of [from, to], in squares. */
export const pathOf = (rows) => rows.map(([from, to], y) => (to > from ? `M${from} ${y + 0.5}H${to}` : "")).join("");

/** Give an SVG its size, in squares, and one path for each of the names, which are classes. Returns the paths. */
export function makeStairs(svg, [x, y, width, height], names) {
  svg.setAttribute("viewBox", `${x} ${y} ${width} ${height}`);
  const paths = names.map((name) => shape("path", { class: name }));
  svg.replaceChildren(...paths);
  return paths;
}

/** Return a character as one letter of an SVG, in the middle of a square. */
export const letter = (char, column, row) => shape("text", { class: "letter", x: column + 0.5, y: row + 0.8 }, glyph(char));

/** Split the work of a run into rows: what each step computes without the cache and with it, and what it keeps. */
export function rowsOf(given, steps, isOn) {
  const ends = Array.from({ length: steps }, (_, step) => given + step);
  const computed = ends.map((end, step) => [isOn && step ? end - 1 : 0, end]);
  return { computed, kept: computed.map(([from]) => [0, from]) };
}

export const sizeOf = (rows) => rows.reduce((sum, [from, to]) => sum + to - from, 0);

/** Write a text as far as it goes, the prompt in bold. The style sheet adds a caret. */
export function type(pane, chars, ids, given) {
  const text = ids.slice(given).map((id) => chars[id]).join("");
  if (pane.lastChild?.textContent === text && pane.dataset.given === String(given)) return;
  pane.dataset.given = given;
  const prompt = ids.slice(0, given).map((id) => chars[id]).join("");
  pane.replaceChildren(element("b", prompt), element("span", text));
  pane.scrollTop = pane.scrollHeight;
}
