// The whole text. Each character is an element, so that it can be pointed at, marked and clicked.
import { $, classes, element, glyph, onForget, remember } from "./draw.js";

let drawn = []; // the ids that have an element
let paired = false; // whether they are below the right ones
let shown; // the character that the pane was scrolled to
onForget(() => (shown = undefined)); // the line breaks may have moved
$("text").onscroll = ({ target }) => target.classList.toggle("cut", target.scrollTop > 0);

/** Draw the text of what is on the stage: { ids, fed, right }. The newest character and the one after it look as in the
 *  strip. `right` holds the ids of the right text, if any: each is shown above the character in the same place.
 *
 *  given   how many of the ids are the prompt
 *  behind  the index of the newest character of the text without the cache, if that is behind, else null
 *  wrong, marked  the index of the first wrong character, and of the one that the reader marked, or null
 */
export const drawText = remember((chars, { ids, fed, right }, given, behind, wrong, marked) => {
  const pane = $("text");
  if (paired !== Boolean(right)) {
    paired = pane.classList.toggle("pairs");
    pane.replaceChildren();
    drawn = [];
  }

  // keep the elements of the characters that are still there
  let same = 0;
  while (same < drawn.length && drawn[same] === ids[same]) same++;
  for (let i = drawn.length; i > same; i--) pane.lastChild.remove();
  for (const id of ids.slice(same)) pane.append(element("span", right ? inOneLine(chars[id]) : chars[id]));
  drawn = ids.slice();

  [...pane.children].forEach((each, i) => {
    const names = { fresh: i === fed - 1, following: i === fed, behind: i === behind, wrong: i === wrong };
    classes(each, { ...names, marked: i === marked, given: i < given, "line-end": each.textContent === "\n" });
    if (right && i >= given) each.dataset.right = inOneLine(chars[right[i]]);
  });
  const end = wrong ?? ids.length - 1;
  const { offsetTop = 0, offsetHeight = 0 } = pane.children[end] ?? {};
  if (end !== shown) pane.scrollTop = offsetTop + (offsetHeight - pane.clientHeight) / 2;
  shown = end;
});

const inOneLine = (char) => (char === "\n" ? glyph(char) : char);

/** Return the index of the character at a pointer event, or null. */
export function characterAt(event) {
  const index = [...$("text").children].indexOf(event.target);
  return index < 0 ? null : index;
}
