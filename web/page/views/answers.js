// Answers to the reader's questions: a changed character, guesses, mistakes.
import { $, blank, colour, element, quoted } from "./draw.js";

// -- why they can be kept -----------------------------------------------------------------------------------------------

/** Draw per layer how much each column changed. layers: a Float32Array per layer; position: of the changed character. */
export function drawChanges(info, layers, position) {
  const body = $("changes").tBodies[0];
  const most = Math.max(...layers.map((layer) => Math.max(...layer)), 1e-9);
  body.replaceChildren(
    ...layers.map((layer, i) => {
      const row = element("tr");
      const canvas = element("canvas", "", { className: "change" });
      const changed = layer.filter((x) => x > 0).length;
      row.append(element("th", `layer ${i + 1}`, { scope: "row" }), element("td"), element("td", `${changed} changed`));
      row.children[1].append(canvas);
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `${changed} of ${layer.length} columns changed`);
      return row;
    }),
  );
  [...body.querySelectorAll("canvas")].forEach((canvas, i) => {
    const { context, width, height } = blank(canvas);
    const x = width / info.block_size;
    context.fillStyle = colour("wrong");
    layers[i].forEach((each, column) => {
      context.globalAlpha = each > 0 ? 0.15 + 0.85 * Math.sqrt(each / most) : 0;
      context.fillRect(column * x, 0, Math.max(x, 1), height);
    });
  });
  const left = Math.max(0, ...layers.flatMap((layer) => [...layer.subarray(0, position)]));
  const count = position === 1 ? "The column" : `All ${position} columns`;
  const verdict = left
    ? `The columns to the left differ by up to ${left.toExponential(1)}.`
    : `${count} to the left: the difference is exactly 0.`;
  $("change-verdict").textContent = position ? verdict : "No column is to the left.";
}

// -- guess ahead --------------------------------------------------------------------------------------------------------

/** Draw the rounds of a generation with guesses. same: whether its text is the text without guesses, or null: unknown. */
export function drawGuesses(info, prompt, { ids, rounds }, same) {
  const text = (list) => list.map((id) => info.chars[id]).join("");
  const parts = [element("b", text(prompt))];
  for (const { right, wrong, picked } of rounds) {
    if (right.length) parts.push(element("span", text(right), { className: "right" }));
    // a newline that was struck would break the line
    if (wrong.length) parts.push(element("s", text(wrong).replaceAll("\n", "↵")));
    parts.push(text([picked]));
  }
  $("guessed").replaceChildren(...parts);
  const guesses = rounds.reduce((sum, { right, wrong }) => sum + right.length + wrong.length, 0);
  const accepted = rounds.reduce((sum, { right }) => sum + right.length, 0);
  const counts = `${rounds.length} forwards instead of ${ids.length - prompt.length}; ${accepted} of ${guesses} guesses right.`;
  $("guess-verdict").textContent = `${counts} ${same ? "The text is the same." : "The text differs."}`;
}

// -- break it -----------------------------------------------------------------------------------------------------------

const MISTAKES = [
  ["too far", "New positions one too far"],
  ["standing still", "New positions stand still"],
  ["fed twice", "The last prompt character fed twice"],
  ["another prompt", "The cache of another prompt"],
  ["all too far", "Every position five too far"],
  ["fed twice in place", "The last prompt character fed twice at the same position"],
];
const EXCERPT = 40; // characters

/** Make the list of mistakes. onPick(name) is called for the one that the reader picks. */
export function makeMistakes(onPick) {
  for (const [name, label] of MISTAKES) {
    const row = element("div", "", { className: "mistake" });
    const radio = element("input", "", { type: "radio", name: "mistake", value: name });
    radio.addEventListener("change", () => onPick(name));
    const caption = element("label");
    caption.append(radio, label);
    row.append(caption, element("output"));
    $("mistakes").append(row);
  }
}

/** Show the text of a mistake from the prompt's end on, with a box around the first character that differs. */
export function drawMistake(info, name, prompt, { ids, right }) {
  const radio = $("mistakes").querySelector(`[value="${name}"]`);
  const output = radio.closest(".mistake").querySelector("output");
  const chars = (list) => list.map((id) => info.chars[id]).join("").replaceAll("\n", "↵");
  const first = ids.findIndex((id, i) => id !== right[i]);
  const end = prompt.length;
  if (first < 0) {
    const rotary = name === "all too far" && info.pos_emb === "rope";
    const why = rotary ? " Rotary positions know distances only. Learned positions would break." : "";
    output.replaceChildren(chars(ids.slice(end, end + EXCERPT)), element("span", `the same, all ${ids.length - end}.${why}`));
    return;
  }
  const begin = Math.max(end, first - EXCERPT / 2);
  output.replaceChildren(
    (begin > end ? "…" : "") + chars(ids.slice(begin, first)),
    element("mark", chars([ids[first]])),
    chars(ids.slice(first + 1, begin + EXCERPT)),
    element("span", `differs from new character ${first - end + 1} on: ${quoted(info.chars[ids[first]])} instead of ${quoted(info.chars[right[first]])}`),
  );
}

export function clearAnswers() {
  for (const id of ["change-verdict", "guess-verdict", "guessed"]) $(id).textContent = "";
  $("changes").tBodies[0].replaceChildren();
  for (const output of $("mistakes").querySelectorAll("output")) output.replaceChildren();
  for (const radio of $("mistakes").querySelectorAll("input")) radio.checked = false;
}
