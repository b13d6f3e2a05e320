// The text, character by character. Each is an element, so that it can be pointed at, marked and clicked.
import { glyph } from "../words.js";
import { $, classes, element, onForget, remember } from "./draw.js";

const LABEL = "correct:"; // above the prompt, where it fits

/** Return the view of a text in the pane `id`. In step 2 there are two, with the cache and without. */
function textView(id) {
  const pane = $(id);
  let drawn = []; // the ids that have an element
  let paired = false; // whether they are below the correct ones
  let shown; // the character that the pane was scrolled to
  onForget(() => (shown = undefined)); // the line breaks may have moved
  pane.onscroll = () => pane.classList.toggle("cut", pane.scrollTop > 0);

  /** Draw the text of what is on the stage: { ids, fed, correct }. The newest character and the one after it look as in
   *  the strip. correct: the ids of the correct text, if any; each is shown above the character in the same place.
   *
   *  given  how many of the ids are the prompt
   *  incorrect, marked  the index of the first incorrect character, and of the one that the reader marked, or null
   */
  return remember((chars, { ids, fed, correct }, given, incorrect, marked) => {
    if (paired !== Boolean(correct)) {
      paired = pane.classList.toggle("pairs");
      pane.replaceChildren();
      drawn = [];
    }

    // keep the elements of the characters that are still there
    let same = 0;
    while (same < drawn.length && drawn[same] === ids[same]) same++;
    for (let i = drawn.length; i > same; i--) pane.lastChild.remove();
    for (const id of ids.slice(same)) pane.append(element("span", correct ? inOneLine(chars[id]) : chars[id]));
    drawn = ids.slice();

    [...pane.children].forEach((each, i) => {
      const names = { fresh: i === fed - 1, following: i === fed, incorrect: i === incorrect };
      classes(each, { ...names, marked: i === marked, given: i < given, "line-end": each.textContent === "\n" });
      if (correct && i >= given) each.dataset.correct = inOneLine(chars[correct[i]]);
    });
    if (correct && given > LABEL.length) pane.firstChild.dataset.correct = LABEL;
    const end = incorrect ?? (correct ? fed : ids.length - 1);
    const { offsetTop = 0, offsetHeight = 0 } = pane.children[end] ?? {};
    const middle = offsetTop + (correct ? 0 : offsetHeight / 2); // of a pair: between the two
    if (end !== shown) pane.scrollTop = middle - pane.clientHeight / 2;
    shown = pane.clientHeight ? end : undefined; // what is hidden does not scroll
  });
}

export const drawText = textView("text");
export const drawTextWithout = textView("text-off");

const inOneLine = (char) => (char === "\n" ? glyph(char) : char);

/** Return the index of the character at a pointer event, or null. */
export function characterAt(event) {
  const index = [...$("text").children].indexOf(event.target);
  return index < 0 ? null : index;
}
