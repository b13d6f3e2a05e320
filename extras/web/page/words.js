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

export const counted = (count, what) => `${count} ${what}${count === 1 ? "" : "s"}`;

/** Compare the texts of a run, as far as both have been generated. */
export function runInWords({ on, off, given, request }) {
  const same = Math.min(on.length, off.length);
  const different = off.findIndex(({ id }, i) => i < same && id !== on[i].id);
  const rounding = "Rounding can decide between two candidates closer than 0.0001. Anything else is a bug.";
  if (different >= 0) return `The texts differ from character ${given + different + 1} on. ${rounding}`;
  const all = same === request.steps && same > 1 ? "all " : "";
  return same ? `The text is the same with and without the cache: ${all}${counted(same, "character")}.` : "";
}
