// Step 6: the list of mistakes, each with its text, its largest error in a logit, and its line of code.
import { MISTAKES, NAMES, ROUNDING } from "../mistakes.js";
import { $, element, say } from "../views/draw.js";
import { drawNext } from "../views/next.js";
import { drawAbout, drawStage, sceneOf } from "../views/stage.js";
import { counted, glyph, quoted } from "../words.js";

const EXCERPT = 34; // characters

/** Show the text that each mistake gives, around its first incorrect character. */
function drawMistakes({ info, run, mistakes, answer }) {
  for (const label of $("mistakes").querySelectorAll("label")) {
    const [radio, small, output] = label.querySelectorAll("input, small, output");
    const own = mistakes.get(radio.value);
    radio.checked = radio.value === answer?.name;
    radio.disabled = !own;
    const off = own?.largest < ROUNDING ? "all correct" : `logits off by ${own?.largest.toFixed(1)}`;
    small.textContent = own ? off : "";
    output.replaceChildren(...(own ? excerpt(info.chars, run.given, own) : []));
  }
  const { bug, correct } = MISTAKES[answer?.name] ?? {};
  $("bug").replaceChildren(...(bug ? [element("b", bug), element("span", `# correct: ${correct}`)] : []));
}

function excerpt(chars, given, { ids, first }) {
  const text = (from, to) => ids.slice(from, to).map((id) => (chars[id] === " " ? " " : glyph(chars[id]))).join("");
  const shown = first < 0 ? given : first;
  const from = Math.max(given, shown - EXCERPT / 2);
  const mark = element("mark", first < 0 ? "" : text(first, first + 1));
  return [text(from, shown), mark, text(first < 0 ? shown : shown + 1, from + EXCERPT)];
}

/** Describe the answer to a mistake: see compareMistake in generate.js. */
export function mistakeInWords({ info, answer }) {
  const { name, ids, first, should, largest, differences } = answer;
  const { meaning } = MISTAKES[name];
  if (largest < ROUNDING) return `${meaning} Everything is correct this time, because no step reads what it spoils.`;
  const [keys, values] = differences.slice(0, 2).map((each) => each.filter((x) => x > ROUNDING).length);
  const count = (number, what) => (number ? [counted(number, what)] : []);
  const some = [...count(keys, "key"), ...count(values, "value")].join(" and ");
  const layer = some ? `Incorrect in layer 1: ${some}.` : "In layer 1, all keys and values are correct.";
  const off = `A logit is off by up to ${largest.toFixed(2)}. ${layer}`;
  if (first < 0) return `${meaning} The cache is incorrect, but no character has changed. ${off}`;
  const [is, ought] = [ids[first], should].map((id) => quoted(info.chars[id]));
  return `${meaning} The first incorrect character is number ${first + 1}: ${is} instead of ${ought}. ${off}`;
}

export const breaks = {
  next: "What does it cost?",
  prepares: true,
  make(store) {
    for (const [name, { title }] of Object.entries(MISTAKES)) {
      const radio = element("input", "", { type: "radio", name: "mistake", value: name, onclick: () => store.showMistake(name) });
      const label = element("label");
      label.append(radio, element("b", title), element("small"), element("output"));
      $("mistakes").append(label);
    }
  },
  enter: (store, { mistake }) => store.askMistakes(NAMES.includes(mistake) ? mistake : NAMES[0]),
  click(store, index) {
    store.turnTo(index);
    store.point(index); // without a mouse, only a click points
  },
  draw(state) {
    const scene = sceneOf(state);
    drawStage(scene, true);
    $("all").hidden = true;
    drawAbout(scene);
    drawNext(scene);
    drawMistakes(state);
    say("verdict-6", state.answer ? mistakeInWords(state) : "");
  },
};
