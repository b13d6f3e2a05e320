// Step 4: the list of mistakes, each with its text, its largest error in a logit, and its line of code.
import { MISTAKES, ROUNDING } from "../mistakes.js";
import { glyph } from "../words.js";
import { $, element, remember } from "./draw.js";

const EXCERPT = 34; // characters

/** Make the list. onPick(name) is called for the one that the reader picks. */
export function makeMistakes(onPick) {
  for (const [name, { title }] of Object.entries(MISTAKES)) {
    const radio = element("input", "", { type: "radio", name: "mistake", value: name, onclick: () => onPick(name) });
    const label = element("label");
    label.append(radio, element("b", title), element("small"), element("output"));
    $("mistakes").append(label);
  }
}

/** Show the text that each mistake gives, around its first incorrect character. given: characters of the prompt;
 *  answers: a Map(name => answer); chosen: the name of the one on the stage, or undefined. */
export const drawMistakes = remember((chars, given, answers, chosen) => {
  for (const label of $("mistakes").querySelectorAll("label")) {
    const [radio, small, output] = label.querySelectorAll("input, small, output");
    const answer = answers.get(radio.value);
    radio.checked = radio.value === chosen;
    radio.disabled = !answer;
    const off = answer?.largest < ROUNDING ? "all correct" : `logits off by ${answer?.largest.toFixed(1)}`;
    small.textContent = answer ? off : "";
    output.replaceChildren(...(answer ? excerpt(chars, given, answer) : []));
  }
  const { bug, correct } = MISTAKES[chosen] ?? {};
  $("bug").replaceChildren(...(bug ? [element("b", bug), element("span", `# correct: ${correct}`)] : []));
});

function excerpt(chars, given, { ids, first }) {
  const text = (from, to) => ids.slice(from, to).map((id) => (chars[id] === " " ? " " : glyph(chars[id]))).join("");
  const shown = first < 0 ? given : first;
  const from = Math.max(given, shown - EXCERPT / 2);
  const mark = element("mark", first < 0 ? "" : text(first, first + 1));
  return [text(from, shown), mark, text(first < 0 ? shown : shown + 1, from + EXCERPT)];
}
