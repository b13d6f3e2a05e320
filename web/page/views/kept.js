// What is kept: a lane of keys and one of values, and what the next character would be with a column changed.
import { $, blank, colour, element, fillTable, inEnglish, quoted, visible } from "./draw.js";

const NUM_CANDIDATES = 6;

export function drawLanes({ info, kept }) {
  const [layer, head] = [Number($("layer").value), Number($("head").value)];
  const { head_size: size, block_size } = info;
  for (const [kind, name] of ["keys", "values"].entries()) {
    const canvas = $(name);
    const data = kept.lane(layer, kind, head);
    [canvas.width, canvas.height] = [block_size, size];
    const scale = 2.5 * Math.sqrt(data.reduce((sum, x) => sum + x * x, 0) / Math.max(1, data.length)) || 1;
    if (kept.length) {
      const context = canvas.getContext("2d");
      const image = context.createImageData(kept.length, size);
      data.forEach((x, i) => {
        const [column, row] = [Math.floor(i / size), i % size];
        const grey = 255 * Math.min(1, Math.max(0, 0.5 + x / (2 * scale)));
        image.data.set([grey, grey, grey, 255], 4 * (row * kept.length + column));
      });
      context.putImageData(image, 0, 0);
      context.fillStyle = colour("on");
      context.fillRect(kept.length - 1, 0, 1, size); // the newest
    }
    const label = `The ${name} of layer ${layer + 1}, head ${head + 1}: ${kept.length} of ${block_size} columns kept`;
    canvas.setAttribute("aria-label", label);
  }
  if (!kept.length) return ($("bytes").textContent = "");
  const formula = `2 × ${info.n_layer} layers × ${info.n_kv_head} heads × ${size} numbers × ${kept.length} columns`;
  $("bytes").textContent = `The cache has ${formula} × 4 bytes = ${inEnglish(kept.bytes())} bytes.`;
}

/** Draw how much the next character's distribution moves without each column. influences: null while unknown. */
export function drawInfluences({ info, influences, column }) {
  const { context, width, height } = blank($("influences"));
  const x = width / info.block_size;
  const most = Math.max(1e-9, ...(influences ?? []));
  (influences ?? []).forEach((each, i) => {
    const bar = (each / most) * height;
    context.fillStyle = colour(i === column ? "off" : "quiet");
    context.fillRect(i * x, height - bar, Math.max(1, x - 0.5), bar);
  });
  const largest = influences?.length ? influences.indexOf(Math.max(...influences)) : null;
  const label = largest === null ? "No influences yet" : `Column ${largest} matters most: without it ${percent(most)} of the probability moves`;
  $("influences").setAttribute("aria-label", label);
}

export function drawColumn({ info, kept, on, prompt, column }) {
  const known = kept.length > 0;
  $("column").max = Math.max(0, kept.length - 1);
  $("column").value = column;
  const char = info.chars[[...prompt, ...on][column]];
  $("column-name").textContent = known ? `Column ${column}, ${quoted(char)}` : "No column is kept yet.";
  for (const id of ["take-out", "write"]) $(id).disabled = !known;
}

/** Draw the probabilities of the next character, and those with the changed column, if there are any. */
export function drawNext({ info, before, after }) {
  const body = $("next").tBodies[0];
  if (!before) return fillTable(body, []);
  const size = (id) => Math.max(before[id], after?.[id] ?? 0);
  const ids = [...before.keys()].sort((a, b) => size(b) - size(a)).slice(0, NUM_CANDIDATES);
  fillTable(
    body,
    ids.map((id) => {
      const bars = element("td", "", { className: "bar" });
      bars.append(bar("before", before[id]));
      if (after) bars.append(bar("after", after[id]));
      const change = after ? `${percent(before[id])} → ${percent(after[id])}` : percent(before[id]);
      return [visible(info.chars[id]), bars, change];
    }),
  );
}

function bar(className, share) {
  const span = element("span", "", { className });
  span.style.width = `${100 * share}%`;
  return span;
}

function percent(share) {
  const digits = share >= 5e-4 && share < 0.1 ? 1 : 0;
  return `${(100 * share).toFixed(digits)} %`;
}
