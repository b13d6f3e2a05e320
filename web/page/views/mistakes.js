// Step 4: the list of mistakes, each with its text, its bug and its largest difference of a logit, here called a score.
import { $, element, glyph, quoted } from "./draw.js";

// name: [what was done, what that means, the line with the bug, the right line]
const MISTAKES = {
  "never moves": [
    "Position never advances",
    "The position says where in the text a character stands. Here all new characters stand in the same place.",
    "position = len(prompt)", "position = len(text)",
  ],
  overwritten: [
    "Slot overwritten each time",
    "A slot is the cache’s place for one column. Each new column goes into the same slot, and the one before is lost.",
    "cache[len(prompt)] = column", "cache[len(text)] = column",
  ],
  "another prompt": [
    "Another prompt’s cache",
    "The model goes on after a prompt that somebody else wrote.",
    "cache = caches[0]", "cache = caches[user]",
  ],
  "fed twice": [
    "Last character fed twice",
    "The prompt’s last character gets a second column, and all that follows stands one place too far.",
    "model(prompt); logits = model(prompt[-1])", "logits = model(prompt)",
  ],
  mask: [
    "Previous character hidden",
    "The mask says which columns a character may look at. Here it hides the one just before.",
    "visible = slots != position - 1", "visible = slots <= position",
  ],
  "one too far": [
    "Position off by one",
    "The position says where in the text a character stands. Here each new one stands one place too far.",
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

/** Return the answer to a mistake as sentences. keys, values: how many of the first layer are wrong. */
export function mistakeInWords(chars, name, { ids, first, should, largest }, keys, values) {
  const [, meaning] = MISTAKES[name];
  if (largest < SAME) return `${meaning} Nothing is wrong this time, because no step reads what is.`;
  const count = (number, what) => `${number || "no"} ${what}${number === 1 ? "" : "s"}`;
  const layer = `In layer 1, where it begins, ${count(keys, "key")} and ${count(values, "value")} are wrong.`;
  const score = `A score is off by up to ${largest.toFixed(2)}. ${layer}`;
  if (first < 0) return `${meaning} Wrong, but no character changed this time. ${score}`;
  const [is, ought] = [ids[first], should].map((id) => quoted(chars[id]));
  return `${meaning} The first wrong character is number ${first + 1}: ${is} instead of ${ought}. ${score}`;
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
