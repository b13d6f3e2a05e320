// Step 1: two staircases, of the opening in model.json, in slow motion. They are there before the model has arrived.
import { $, shape } from "../views/draw.js";
import { letter, makeStairs, pathOf, rowsOf, sizeOf, type } from "../views/stairs.js";

const SQUARE = 22; // milliseconds

/** Make one of the two staircases. Returns a function that draws it with so many of its squares computed. */
function makeLane(name, { chars, opening: { ids, given } }) {
  const [steps, isOn] = [ids.length - given, name === "on"];
  const figure = document.querySelector(`.idea figure.${name}`);
  const svg = figure.querySelector("svg");
  const work = rowsOf(given, steps, isOn);
  const [total, most] = [work, rowsOf(given, steps, false)].map(({ computed }) => sizeOf(computed));
  const paths = makeStairs(svg, [0, -1.2, ids.length + 3, steps + 1.2], [name, "kept"]);
  const letters = ids.slice(given).map((id, step) => letter(chars[id], given + step, step));
  const note = (x, y, text, kind = "note") => shape("text", { class: `${kind} ${name}`, x: given + x, y }, text);
  const every = note(6, 3.8, isOn ? "← decode: one position per step" : "← every step: all positions again");
  const result = shape("g");
  if (isOn) {
    svg.append(note(1.4, -0.3, "← prefill: the prompt, all at once"));
    result.append(note(13, 9.6, `${Math.round(most / total)}×`, "times"), note(13.1, 11, "fewer positions,"), note(13.1, 12.2, "the same text"));
  }
  svg.append(...ids.slice(0, given).map((id, i) => letter(chars[id], i, -1.2)), ...letters, every, result);
  svg.ariaLabel = `${steps} steps, ${total} positions: ${isOn ? "each step computes one and reads the rest" : "each step computes all so far"}.`;

  return (squares) => {
    let [left, done] = [squares, 0];
    const computed = work.computed.map(([from, to]) => {
      const end = Math.min(to, from + left);
      left = Math.max(0, left - (to - from));
      if (end === to) done++;
      return [from, end];
    });
    const kept = work.kept.map((row, step) => (step <= done ? row : [0, 0]));
    [computed, kept].forEach((rows, i) => paths[i].setAttribute("d", pathOf(rows)));
    letters.forEach((each, step) => each.classList.toggle("waiting", step >= done));
    result.classList.toggle("waiting", squares < most); // until the slower one is done
    figure.querySelector(".number").textContent = Math.min(squares, total);
    type(figure.querySelector(".typed"), chars, ids.slice(0, given + done), given);
    return squares < total;
  };
}

let lanes;
let began; // when the animation began
let due; // its next frame

function frame() {
  const isCalm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const squares = isCalm ? Infinity : Math.floor((performance.now() - began) / SQUARE);
  if (lanes.map((draw) => draw(squares)).some(Boolean)) due = requestAnimationFrame(frame);
}

export const idea = {
  next: "Race them on this computer",
  early: true,
  make(store, info) {
    lanes = ["off", "on"].map((name) => makeLane(name, info));
    $("replay").onclick = idea.enter;
  },
  enter() {
    cancelAnimationFrame(due);
    began = performance.now();
    frame();
  },
};
