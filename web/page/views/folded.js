// Folded away below the stage: the shapes of the newest step, the bytes of the cache, and guesses.
import { $, element, glyph, inEnglish, remember } from "./draw.js";

export const drawShapes = remember((info, on, off, columns) => {
  const { n_layer, n_kv_head, head_size } = info;
  const formula = `2 × ${n_layer} layers × ${n_kv_head} heads × ${head_size} numbers × ${columns} columns`;
  const bytes = 2 * n_layer * n_kv_head * head_size * columns * 4;
  $("bytes").textContent = columns ? `The cache holds ${formula} × 4 bytes = ${inEnglish(bytes)} bytes.` : "";
  const uncached = new Map(off?.shapes.map(([, name, dims]) => [name, dims]));
  const shape = (dims) => (dims ? `(${dims.join(", ")})` : "");
  const rows = (on?.shapes ?? [])
    .filter(([, name]) => !/\.[1-9]\d*\b/.test(name)) // layer 0 stands for all
    .map(([direction, name, dims]) => [direction, name, shape(dims), shape(uncached.get(name))]);
  $("shapes").tBodies[0].replaceChildren(
    ...rows.map((cells) => {
      const row = element("tr");
      row.append(...cells.map((cell) => element("td", cell)));
      return row;
    }),
  );
});

/** Draw a text and, on a second line, the guesses under its characters. same: whether the text is the run's. */
export function drawGuesses(chars, given, { ids, rounds }, same) {
  const guesses = []; // per index of the text: [id, whether it is right]
  let end = given;
  for (const { right, wrong } of rounds) {
    right.forEach((id, i) => (guesses[end + i] = [id, true]));
    end += right.length;
    if (wrong.length) guesses[end] = [wrong[0], false];
    end++;
  }
  $("guessed").replaceChildren(
    ...ids.map((id, i) => {
      const pair = element("span", glyph(chars[id]));
      const [guess, right] = guesses[i] ?? [];
      pair.append(element(right === false ? "s" : "i", guess === undefined ? "" : glyph(chars[guess])));
      return pair;
    }),
  );
  const offered = rounds.reduce((sum, { right, wrong }) => sum + right.length + wrong.length, 0);
  const accepted = rounds.reduce((sum, { right }) => sum + right.length, 0);
  const counts = `${rounds.length} forwards instead of ${ids.length - given}; ${accepted} of ${offered} guesses right.`;
  $("guess-verdict").textContent = `${counts} ${same ? "The text is the same." : "The text differs."}`;
}
