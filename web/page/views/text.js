// The whole text. A character is an element, so that it can be pointed at, marked and clicked.
import { $, classes, element, remember } from "./draw.js";

let drawn = []; // the ids that have an element
let shown; // the character that the pane was scrolled to

/** Draw `ids`. The last one is boxed.
 *
 *  count   how many they are, because the list grows
 *  given   how many of them are the prompt
 *  behind  the index of the newest character of the text without the cache, if that is behind, else null
 *  wrong, marked  the index of the first wrong character, and of the one that the reader marks, or null
 */
export const drawText = remember((chars, ids, count, given, behind, wrong, marked) => {
  const pane = $("text");

  // keep the elements of the characters that are still there
  let same = 0;
  while (same < drawn.length && drawn[same] === ids[same]) same++;
  for (let i = drawn.length; i > same; i--) pane.lastChild.remove();
  for (const id of ids.slice(same)) pane.append(element("span", chars[id]));
  drawn = ids.slice();

  [...pane.children].forEach((each, i) => {
    const names = { newest: i === count - 1, behind: i === behind, wrong: i === wrong, marked: i === marked };
    classes(each, { ...names, given: i < given, "line-end": each.textContent === "\n" });
  });
  const end = wrong ?? count - 1;
  if (end !== shown) pane.scrollTop = (pane.children[end]?.offsetTop ?? 0) - pane.clientHeight / 2;
  shown = end;
});

/** Return the index of the character that a pointer event is about, or null. */
export function characterAt(event) {
  const index = [...$("text").children].indexOf(event.target);
  return index < 0 ? null : index;
}
