// Step 4: the list of mistakes, each with its text, its bug and its largest difference of a logit.
import { $, element, glyph, quoted } from "./draw.js";

// name: [cause, what was done, the line with the bug, the right line]
const MISTAKES = {
  "never moves": ["Wrong position", "standing still", "position = len(prompt)", "position = len(text)"],
  overwritten: ["Slot overwritten", "each time", "cache[len(prompt)] = column", "cache[len(text)] = column"],
  "another prompt": ["Another prompt’s cache", "", "cache = caches[0]", "cache = caches[user]"],
  "fed twice": ["Wrong input", "one fed twice", "model(prompt); logits = model(prompt[-1])", "logits = model(prompt)"],
  mask: ["Mask", "hides the one before", "visible = slots != position - 1", "visible = slots <= position"],
  "one too far": ["Wrong position", "one too far", "position = len(text) + 1", "position = len(text)"],
};
export const NAMES = Object.keys(MISTAKES);
const EXCERPT = 34; // characters
const SAME = 1e-3; // a logit that differs by less is not wrong

const labels = {}; // name => element

/** Make the list. onPick(name) is called for the one that the reader picks. */
export function makeMistakes(onPick) {
  for (const [name, [cause, detail]] of Object.entries(MISTAKES)) {
    const radio = element("input", "", { type: "radio", name: "mistake", value: name, onclick: () => onPick(name) });
    labels[name] = element("label");
    const title = element("span");
    title.append(element("b", cause), ` ${detail}`);
    labels[name].append(radio, title, element("small"), element("output"));
    $("mistakes").append(labels[name]);
  }
}

/** Show what a mistake makes of the text, around the first character that is wrong. given: characters of the prompt. */
export function drawMistake(chars, name, given, { ids, first, largest }) {
  const text = (from, to) => ids.slice(from, to).map((id) => (chars[id] === " " ? " " : glyph(chars[id]))).join("");
  const wrong = first < 0 ? given : first;
  const from = Math.max(given, wrong - EXCERPT / 2);
  const mark = element("mark", first < 0 ? "" : text(first, first + 1));
  const [small, output] = labels[name].querySelectorAll("small, output");
  output.replaceChildren(text(from, wrong), mark, text(first < 0 ? wrong : wrong + 1, from + EXCERPT));
  small.textContent = largest < SAME ? "nothing wrong" : `off by ${largest.toFixed(1)}`;
}

/** Return the answer as sentences. keys, values: how many of the first layer are wrong. */
export function mistakeInWords(chars, { ids, first, should, largest }, keys, values) {
  if (largest < SAME) return "Nothing is wrong this time, because no step reads what is.";
  const count = (number, name) => `${number || "no"} ${name}${number === 1 ? "" : "s"}`;
  const layer = `In layer 1, where it begins, ${count(keys, "key")} and ${count(values, "value")} are wrong.`;
  const logit = `A logit is off by up to ${largest.toFixed(2)}. ${layer}`;
  if (first < 0) return `Wrong, but no character flipped this time. ${logit}`;
  const [is, ought] = [ids[first], should].map((id) => quoted(chars[id]));
  return `The first wrong character is number ${first + 1}: ${is} instead of ${ought}. ${logit}`;
}

/** Show which mistake is on the stage, or none, and its line of code. */
export function choose(name) {
  for (const radio of $("mistakes").querySelectorAll("input")) radio.checked = radio.value === name;
  const [, , bug, right] = MISTAKES[name] ?? [];
  $("bug").replaceChildren(...(bug ? [element("b", bug), `  # right: ${right}`] : []));
}

export function clearMistakes() {
  for (const text of $("mistakes").querySelectorAll("output, small")) text.replaceChildren();
}
