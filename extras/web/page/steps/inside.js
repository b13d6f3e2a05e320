// Step 5: keys, values and the query. Three characters in large, or all of them, in any layer and head.
import { drawNext } from "../views/next.js";
import { $, element, say, shades, shape } from "../views/draw.js";
import { columnInWords, drawAbout, drawStage, sceneOf, tenth } from "../views/stage.js";
import { glyph, percent, quoted } from "../words.js";

const [SHADES, BARS, WIDE] = [3, 4, 7.4]; // widths in a picture that is 10 high: shades, bars, and both

/** Return the products of two lists of numbers as bars: to the right of the middle above zero, and paler to the left below. */
function products(key, query, most) {
  const bars = shape("g", { class: "keys" });
  const height = 10 / key.length;
  key.forEach((number, row) => {
    const product = (number * query[row]) / most;
    const width = Math.abs(product) * (BARS / 2);
    const place = { x: WIDE - BARS / 2 - (product < 0 ? width : 0), y: row * height, width, height: 0.8 * height };
    bars.append(shape("rect", { ...place, opacity: product < 0 ? 0.35 : 1 }));
  });
  return bars;
}

const picture = (width, parts, label) => {
  const svg = shape("svg", { viewBox: `0 0 ${width} 10`, role: "img", "aria-label": label, preserveAspectRatio: "none" });
  svg.append(...parts);
  return svg;
};

/** The marked and the hidden character, and those with the most attention, three in all, in the order of the text. */
const chosen = ({ shown, weights, marked, fed }) => {
  const rank = (i) => (i === marked || i === shown.masked ? 2 : weights[i]);
  return [...Array(fed).keys()].sort((a, b) => rank(b) - rank(a)).slice(0, 3).sort((a, b) => a - b);
};

/** Put the cells into the grid. The focus stays on its character, so cells that are there already must stay too. */
function replaceThree(cells) {
  const same = cells.map((each) => each.outerHTML).join("");
  if (same === $("three").innerHTML) return;
  const held = document.activeElement.closest("#three button")?.dataset.index;
  $("three").replaceChildren(...cells);
  if (held) ($("three").querySelector(`button[data-index="${held}"]`) ?? $("three").querySelector("button")).focus();
}

/** Draw three characters, each in a column of the grid, and the query with what comes out of it in the last one. */
function drawThree(scene) {
  const { chars, shown, layer, keyHead, query, scores, weights, mix, fed } = scene;
  if (!query) return $("three").replaceChildren();
  const lane = (kind, i) => shown.kept.lane(layer, kind, keyHead).subarray(i * query.length, (i + 1) * query.length);
  const char = (i) => chars[shown.tokens[i]];
  const three = chosen(scene);
  const largest = Math.max(...three.flatMap((i) => [...lane(0, i)].map((x, j) => Math.abs(x * query[j]))));
  const most = Math.max(...weights);
  const columns = three.map((i) => [
    element("button", glyph(char(i)), { type: "button", ariaLabel: columnInWords(scene, i) }),
    picture(WIDE, [shades(lane(0, i), "keys", [0, SHADES]), products(lane(0, i), query, largest)], `The key of ${quoted(char(i))}, and its products with the query`),
    element("span", tenth(scores[i])),
    element("b", percent(weights[i])),
    picture(WIDE, [shades(lane(1, i), "values", [0, SHADES], 0.15 + (0.85 * weights[i]) / most)], `The value of ${quoted(char(i))}`),
    element("span"),
  ]);
  columns.forEach((cells, i) => cells.forEach((each) => (each.dataset.index = three[i])));
  const rest = percent(Math.max(0, 1 - three.reduce((sum, i) => sum + weights[i], 0)));
  const asks = picture(SHADES, [shades(query, "keys", [0, SHADES])], "The query");
  const cells = [
    ...["", "key, and its products with the query", `their sum / √${query.length}: the score`, "softmax makes it a share: the attention", "value, weighted by its attention", ""].map((name) => element("small", name)),
    ...columns.flat(),
    element("b", `query of ${glyph(char(fed - 1))}`), asks, element("small", "used once, then thrown away"),
    element("small", fed > three.length ? `${rest} for the other ${fed - three.length}` : ""),
    picture(SHADES, [shades(mix, "values", [0, SHADES])], "The mix of all values"), element("b", `mix → next ${scene.next}`, { className: "value" }),
  ];
  replaceThree(cells);
}

/** Describe a column that was taken out. */
export function takenInWords({ info, run, answer: { masked, moved, isMost } }) {
  const name = `character ${masked + 1}, ${quoted(info.chars[run.ids[masked]])}`;
  const rank = isMost ? ", more than for any other one shown" : "";
  return `Without ${name}, ${percent(moved)} of the probability moves to other characters${rank}.`;
}

/** Say what the head at the start of the step does, if it clearly does that: see previous_token_head in webpage.py. */
function nameOfHead({ info, layer, head }) {
  const { start } = info;
  if (layer !== start.layer || head !== start.head || start.previous < 0.4) return "";
  const share = percent(start.previous);
  return `This is a previous-token head: it gives ${share} of its attention to the character just before, on average, more than any other head.`;
}

export const inside = {
  next: "Break it",
  prepares: true,
  look: "start",
  make(store) {
    const { state } = store;
    $("take").onclick = () => (state.answer ? store.show(null) : store.takeOut());
    $("all").onclick = () => store.set({ all: !state.all });
    $("three").onclick = ({ target }) => {
      const { index } = target.closest("[data-index]")?.dataset ?? {};
      if (index) store.click(Number(index));
    };
  },
  go: (store, count) => store.play(count),
  enter: (store, { take }) => take && store.takeOut(take - 1),
  click: (store, index) => (index === store.state.answer?.masked ? store.show(null) : store.takeOut(index)),
  draw(state) {
    const { info, run, answer, phase } = state;
    const scene = sceneOf(state);
    drawStage(scene, state.all);
    $("all").hidden = false;
    $("all").ariaExpanded = state.all;
    say("all", state.all ? "Three large ones" : `All characters, all ${info.heads} heads`);
    if (!state.all) drawThree(scene);
    $("take").disabled = run.kept.length < 2 || phase === "failed";
    say("take", answer ? "Undo" : "Show me");
    say("named", nameOfHead(state));
    say("verdict-5", answer ? takenInWords(state) : "");
    drawAbout(scene);
    drawNext(scene);
    say("run", phase === "running" ? "Pause" : "Run");
  },
};
