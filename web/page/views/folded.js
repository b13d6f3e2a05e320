// Folded away below the stage: the shapes of the newest step, the bytes of the cache, and the guesses.
import { glyph, inEnglish } from "../words.js";
import { $, element, remember } from "./draw.js";

export const drawShapes = remember((info, on, off, columns) => {
  const { n_layer, n_kv_head, head_size } = info;
  const formula = `2 × ${n_layer} layers × ${n_kv_head} heads × ${head_size} numbers × ${columns} columns`;
  const bytes = 2 * n_layer * n_kv_head * head_size * columns * 4;
  $("bytes").textContent = columns ? `The cache holds ${formula} × 4 bytes = ${inEnglish(bytes)} bytes.` : "";
  const uncached = new Map(off?.shapes.map(([, name, dims]) => [name, dims]));
  const shape = (dims) => (dims ? `(${dims.join(", ")})` : "");
  const layer0 = (on?.shapes ?? []).filter(([, name]) => !/\.[1-9]\d*\b/.test(name)); // the others are the same
  const rows = layer0.map(([direction, name, dims]) => {
    const row = element("tr");
    row.append(...[direction, name, shape(dims), shape(uncached.get(name))].map((cell) => element("td", cell)));
    return row;
  });
  $("shapes").tBodies[0].replaceChildren(...rows);
});

/** Draw a text and, on a second line, the guesses below its characters. run: the ids that have been generated. */
export const drawGuesses = remember((chars, given, guesses, run) => {
  const { ids, rounds } = guesses ?? { ids: [], rounds: [] };
  const pairs = ids.map((id) => element("span", glyph(chars[id])));
  const note = (index, id, tag) => pairs[index].append(element(tag, glyph(chars[id])));
  let end = given;
  for (const { right, wrong } of rounds) {
    for (const id of right) note(end++, id, "i");
    if (wrong.length) note(end, wrong[0], "s");
    end++; // the model's own pick
  }
  $("guessed").replaceChildren(...pairs);
  const accepted = rounds.flatMap(({ right }) => right).length;
  const offered = accepted + rounds.flatMap(({ wrong }) => wrong).length;
  const runs = `${rounds.length} model runs instead of ${ids.length - given}`;
  const same = run.every((id, i) => id === ids[i]) ? "The text is the same." : "The text differs.";
  const verdict = `${runs}; ${accepted} of ${offered} guesses were right. ${same}`;
  $("guess-verdict").textContent = guesses ? verdict : "";
});
