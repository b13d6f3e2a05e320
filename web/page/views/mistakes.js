// Step 4: the list of mistakes, each with its text, its bug and its largest error in a logit.
import { $, element, glyph, quoted } from "./draw.js";

// name: [what was done, what that means, the line with the bug, the right line]
const MISTAKES = {
  "never moves": [
    "Position never advances",
    "The position says where in the text a character is. Here, all new characters are in the same place.",
    "position = len(prompt)", "position = len(text)",
  ],
  overwritten: [
    "Slot overwritten each time",
    "A slot is the cache’s place for one column. Here, each new column overwrites the one before it.",
    "cache[len(prompt)] = column", "cache[len(text)] = column",
  ],
  "another prompt": [
    "Another prompt’s cache",
    "The model continues somebody else’s prompt.",
    "cache = caches[0]", "cache = caches[user]",
  ],
  "fed twice": [
    "Last character fed twice",
    "The prompt’s last character gets a second column, so everything after it is one place too far.",
    "model(prompt); logits = model(prompt[-1])", "logits = model(prompt)",
  ],
  mask: [
    "Previous character hidden",
    "The mask says which columns a character may look at. Here, it hides the one just before.",
    "visible = slots != position - 1", "visible = slots <= position",
  ],
  "one too far": [
    "Position off by one",
    "The position says where in the text a character is. Here, each new one is one place too far.",
    "position = len(text) + 1", "position = len(text)",
  ],
};
export const NAMES = Object.keys(MISTAKES);
const EXCERPT = 34; // characters
const SAME = 1e-3; // a logit that differs by less is not wrong

const labels = {}; // name => element

/** Make the list. onPick(name) is called for the one that the reader picks. */
export function makeMistakes(onPick) {
  for (const [name, [title]] of Object.entries(MISTAKES)) {
    const radio = element("input", "", { type: "radio", name: "mistake", value: name, onclick: () => onPick(name) });
    labels[name] = element("label");
    labels[name].append(radio, element("b", title), element("small"), element("output"));
    $("mistakes").append(labels[name]);
  }
}

/** Show the text that a mistake gives, around the first wrong character. given: characters of the prompt. */
export function drawMistake(chars, name, given, { ids, first, largest }) {
  const text = (from, to) => ids.slice(from, to).map((id) => (chars[id] === " " ? " " : glyph(chars[id]))).join("");
  const wrong = first < 0 ? given : first;
  const from = Math.max(given, wrong - EXCERPT / 2);
  const mark = element("mark", first < 0 ? "" : text(first, first + 1));
  const [small, output] = labels[name].querySelectorAll("small, output");
  output.replaceChildren(text(from, wrong), mark, text(first < 0 ? wrong : wrong + 1, from + EXCERPT));
  small.textContent = largest < SAME ? "nothing wrong" : `logits off by ${largest.toFixed(1)}`;
}

/** Return the answer to a mistake in sentences. keys, values: how many are wrong in the first layer. */
export function mistakeInWords(chars, name, { ids, first, should, largest }, keys, values) {
  const [, meaning] = MISTAKES[name];
  if (largest < SAME) return `${meaning} Nothing is wrong this time, because no step reads what it spoils.`;
  const count = (number, what) => `${number || "no"} ${what}${number === 1 ? "" : "s"}`;
  const layer = `In layer 1, where it starts, ${count(keys, "key")} and ${count(values, "value")} are wrong.`;
  const wrong = `A logit is off by up to ${largest.toFixed(2)}. ${layer}`;
  if (first < 0) return `${meaning} The cache is wrong, but no character changed this time. ${wrong}`;
  const [is, ought] = [ids[first], should].map((id) => quoted(chars[id]));
  return `${meaning} The first wrong character is number ${first + 1}: ${is} instead of ${ought}. ${wrong}`;
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
