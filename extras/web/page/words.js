// What the page says: characters and numbers as a reader would say them, and the sentences about a run or an answer.

/** Return a character as one glyph. */
export function glyph(char) {
  return { " ": "␣", "\n": "⏎", "\t": "⇥" }[char] ?? char;
}

/** Return a character as a reader would say it. */
export function quoted(char) {
  return { " ": "a space", "\n": "a line break", "\t": "a tab" }[char] ?? `“${char}”`;
}

export function percent(share) {
  if (share > 0 && share < 0.0005) return "0.0%";
  return `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)}%`;
}

export const inEnglish = (number) => number.toLocaleString("en");

export function characters(count) {
  return `${count} character${count === 1 ? "" : "s"}`;
}

/** Compare the texts of a run, as far as both have been generated. */
export function runInWords({ on, off, given, request }) {
  const same = Math.min(on.length, off.length);
  const different = off.findIndex(({ id }, i) => i < same && id !== on[i].id);
  const rounding = "Rounding can decide between two candidates closer than 0.0001. Anything else is a bug.";
  if (different >= 0) return `The texts differ from character ${given + different + 1} on. ${rounding}`;
  const all = same === request.steps && same > 1 ? "all " : "";
  return same ? `The text is the same with and without the cache: ${all}${characters(same)}.` : "";
}

/** Describe a column that was taken out. answer.most: the one that moves the prediction most. */
export function takenInWords({ info, run, answer }) {
  const name = ({ masked }) => `column ${masked + 1}, ${quoted(info.chars[run.ids[masked]])}`;
  const share = ({ moved }) => percent(moved);
  const { most } = answer;
  const isMost = answer.masked === most.masked;
  const rank = isMost ? ", more than for any other column shown." : `. For ${name(most)}, it is ${share(most)}.`;
  return `Without ${name(answer)}, ${share(answer)} of the probability moves to other characters${rank}`;
}

/** Describe what a changed character changes in the layer on the stage, and why the rest can be kept. */
export function changeInWords({ info, run, answer, layer, expected }) {
  const { position, differences } = answer;
  const [keys, values] = differences.slice(2 * layer, 2 * layer + 2);
  const moved = keys.filter((x, i) => x > 0 || values[i] > 0).length;
  const left = Math.max(0, ...keys.subarray(0, position), ...values.subarray(0, position));
  const from = keys.length - position;
  const which = moved === from ? `all ${from} columns` : `${moved} of the ${from} columns`;
  const there = `Character ${position + 1} was ${quoted(info.chars[run.ids[position]])}. In layer ${layer + 1}`;
  const first = `${there}, only its own column changes, because keys and values there depend on a single character.`;
  const zero = left || "exactly 0";
  const later = `${there}, ${which} from there on change, because their characters looked at it. All ${position} to its left stay the same: the difference is ${zero}.`;
  const verdicts = { right: "You were right. ", left: "It is the other way round. ", all: "Not all of them change. " };
  const reason = "No character may look to its right. And writing only ever appends on the right, so nothing that comes later can change a column, and we may keep it.";
  return `${verdicts[expected] ?? ""}${layer ? later : first} ${reason}`;
}
