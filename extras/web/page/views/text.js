// The text, character by character. Each is an element, so that it can be pointed at, marked and clicked.
import { glyph } from "../words.js";
import { $, classes, element } from "./draw.js";

const LABEL = "correct:"; // above the prompt, where it fits

let drawn = []; // the ids that have an element
let paired = false; // whether they are below the correct ones
let seen; // the place that the pane was scrolled to

const inOneLine = (char) => (char === "\n" ? glyph(char) : char);

/** Draw the text of what is on the stage. The newest character and the one after it look as in the strip. With a mistake,
 *  each character is below the correct one in the same place. */
export function drawText({ chars, run, shown, fed, incorrect, marked }) {
  const pane = $("text");
  const { ids, correct } = shown;
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
    classes(each, { ...names, marked: i === marked, given: i < run.given, "line-end": each.textContent === "\n" });
    if (correct && i >= run.given) each.dataset.correct = inOneLine(chars[correct[i]]);
  });
  if (correct && run.given > LABEL.length) pane.firstChild.dataset.correct = LABEL;
  const end = incorrect ?? (correct ? fed : ids.length - 1);
  const { offsetTop = 0, offsetHeight = 0 } = pane.children[end] ?? {};
  const place = [end, pane.clientWidth, pane.clientHeight].join(); // the reader may scroll until it changes
  if (place !== seen) pane.scrollTop = offsetTop + (correct ? 0 : offsetHeight / 2) - pane.clientHeight / 2; // of a pair: between the two
  seen = place;
}

/** Return the index of the character at a pointer event, or null. */
export function characterAt(event) {
  const index = [...$("text").children].indexOf(event.target);
  return index < 0 ? null : index;
}
