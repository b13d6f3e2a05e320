// The probabilities of a character: the next one, or the one that the reader points to.
import { glyph, percent, quoted } from "../words.js";
import { $, element, remember } from "./draw.js";

const COUNT = 5;

/** name: whose probabilities these are; picked: the id that was drawn; after: those of another forward, or null. */
export const drawNext = remember((chars, name, probabilities, picked, after) => {
  $("next-name").textContent = name;
  $("drawn").textContent = "";
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
  if (picked === undefined || after) return;
  $("drawn").textContent = `drawn: ${glyph(chars[picked])}, ${percent(probabilities[picked])}`;
});

function bar(share, className) {
  const bar = element("i", "", { className });
  bar.style.width = `${100 * share}%`;
  return bar;
}
