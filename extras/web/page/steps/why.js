// Step 4: the causal staircase. A character is changed, and only the rows from there on change with it.
import { $, element, say } from "../views/draw.js";
import { letter, makeStairs, pathOf } from "../views/stairs.js";
import { glyph, quoted } from "../words.js";

const ROWS = 40; // how many characters fit

/** Return { from, to }: the characters that are shown, the newest ones or those from the changed one on. */
function windowOf({ length }, position = Infinity) {
  const from = Math.max(0, Math.min(length - ROWS, position));
  return { from, to: Math.min(length, from + ROWS) };
}

/** Return which characters have a different key or value in a layer, a list of booleans, and the largest difference
 *  before the changed one. */
export function changeOf({ differences, position }, layer) {
  const [keys, values] = differences.slice(2 * layer, 2 * layer + 2);
  const most = [...keys].map((x, i) => Math.max(x, values[i]));
  return { moved: most.map((x) => x > 0), before: Math.max(0, ...most.slice(0, position)) };
}

function drawStairs({ info, run, answer, layer }) {
  const { tokens } = answer ?? run;
  const { from, to } = windowOf(tokens, answer?.position);
  const moved = answer ? changeOf(answer, layer).moved : [];
  const rows = Array.from({ length: to - from }, (_, row) => [0, row + 1]);
  const only = (isShown) => rows.map((row, i) => (isShown(from + i) ? row : [0, 0]));
  const column = (answer?.position ?? 0) - from;
  const svg = document.querySelector(".why svg");
  const size = Math.max(rows.length, 33); // a short text gets squares of the usual size
  const paths = makeStairs(svg, [-2, 0, size + 2, size], ["kept", "changed", "off"]);
  paths[0].setAttribute("d", pathOf(only((i) => !moved[i])));
  paths[1].setAttribute("d", pathOf(only((i) => moved[i])));
  paths[2].setAttribute("d", pathOf(rows.map((_, i) => (moved[from + i] && i >= column ? [column, column + 1] : [0, 0]))));
  rows.forEach((_, i) => {
    const made = letter(info.chars[tokens[from + i]], -1.6, i);
    made.classList.add(moved[from + i] ? "off" : "on");
    svg.append(made);
  });
  svg.ariaLabel = `A row per character, ${rows.length} in all. ${moved.filter(Boolean).length} of them change.`;
}

function drawVerdict({ info, run, answer, layer }) {
  const { length } = (answer ?? run).tokens;
  $("change-at").max = length;
  $("verdict-4").classList.toggle("waiting", !answer);
  if (!answer) return;
  const { position, ids } = answer;
  const { moved, before } = changeOf(answer, layer);
  const changed = moved.filter(Boolean).length;
  if (document.activeElement !== $("change-at")) $("change-at").value = position + 1; // or it would fight the reader
  say("stay", length - changed);
  say("change", changed);
  say("changes", changed === 1 ? "changes, and is computed again" : "change, and are computed again");
  say("difference", layer ? `difference: ${before || "exactly 0"}` : "");
  const [is, was] = [ids, run.ids].map((each) => quoted(info.chars[each[position]]));
  say("looked", layer ? `They looked at the new ${is}, which was ${was}.` : "In layer 1, a key and a value depend on their own character alone.");
}

export const why = {
  next: "What are keys and values?",
  prepares: true,
  look: { layer: 1 },
  make(store, { chars }) {
    $("changed").append(...chars.map((char, id) => element("option", glyph(char), { value: id })));
    $("changed").oninput = ({ target }) => store.changeCharacter(undefined, chars[target.value]);
    $("change-at").oninput = ({ target }) => store.changeCharacter(target.value - 1);
  },
  enter(store, { change, to }) {
    const shown = windowOf(store.state.run.tokens);
    store.changeCharacter(change ? change - 1 : Math.floor((shown.from + shown.to) / 2), to);
  },
  draw(state) {
    drawStairs(state);
    drawVerdict(state);
    $("changed").value = state.changed;
  },
};
