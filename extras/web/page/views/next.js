// The probabilities of a character: the next one, or the one that the reader points to.
import { glyph, percent, quoted } from "../words.js";
import { $, element, say } from "./draw.js";

const COUNT = 4;

/** Return { name, probabilities, picked, after }: whose probabilities to show, the id that was drawn, and the probabilities
 *  after a character was hidden or the cache was broken, if any. */
function candidatesOf({ run, answer, shown, marked, stepOf }) {
  const { ids } = shown;
  const step = stepOf(marked ?? ids.length - 1);
  const name = (index) => `character ${index + 1}`;
  if (marked !== null && step && !answer) return { name: name(marked), probabilities: step.probabilities, picked: ids[marked] };
  if (answer?.at) return { name: name(answer.at), probabilities: answer.before, picked: ids[answer.at], after: answer.after };
  return { name: "next", probabilities: run.on.at(-1)?.probabilities, picked: ids.at(-1), after: answer?.probabilities };
}

export function drawNext(scene) {
  const { chars } = scene;
  const { name, probabilities, picked, after } = candidatesOf(scene);
  say("next-name", name);
  say("next-after", after ? `. Hollow: ${scene.answer.kind === "take" ? "without the hidden one" : "with the mistake"}` : "");
  if (!probabilities) return $("next").replaceChildren();
  const size = (id) => Math.max(probabilities[id], after?.[id] ?? 0);
  const ids = [...probabilities.keys()].sort((a, b) => size(b) - size(a)).slice(0, COUNT);
  if (picked !== undefined && !ids.includes(picked)) ids[ids.length - 1] = picked;
  $("next").replaceChildren(
    ...ids.map((id) => {
      const item = element("li", "", { className: id === picked ? "picked" : "" });
      const bars = element("span", "", { className: "bars" });
      bars.append(bar(probabilities[id], "before"));
      if (after) bars.append(bar(after[id], "after"));
      const share = after ? `${percent(probabilities[id])} → ${percent(after[id])}` : percent(probabilities[id]);
      const char = element("b", glyph(chars[id]), { title: quoted(chars[id]) });
      item.append(char, element("span", share, { className: "share" }), bars);
      return item;
    }),
  );
}

const bar = (share, className) => element("i", "", { className, style: `width: ${100 * share}%` });
