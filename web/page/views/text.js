// The text, once: both runs write it together. The newest character is boxed, and a difference is marked.
import { $ } from "./draw.js";

export function drawText({ info, prompt, on, off }) {
  const text = (ids) => ids.map((id) => info.chars[id]).join("");
  const different = firstDifference(on, off);
  const newest = on.at(-1);
  $("given").textContent = text(prompt);
  $("continuation").textContent = text(on.slice(0, -1));
  $("newest").textContent = newest === undefined ? "" : info.chars[newest];
  $("newest").classList.toggle("newline", info.chars[newest] === "\n");
  $("text").classList.toggle("differs", different >= 0);
}

/** Return the index of the first token that differs, or -1. */
export function firstDifference(on, off) {
  return on.findIndex((id, i) => i < off.length && id !== off[i]);
}
