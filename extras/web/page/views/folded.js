// Folded away below the stage: the shapes of the newest step, and the bytes of the cache.
import { inEnglish } from "../words.js";
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
