// The page, drawn from the state. Nothing in this folder changes it.
import { attend } from "../attention.js";
import { ROUNDING } from "../mistakes.js";
import { STEPS } from "../steps.js";
import { percent, quoted } from "../words.js";
import { drawControls } from "./controls.js";
import { $, remember, say } from "./draw.js";
import { drawShapes } from "./folded.js";
import { drawMistakes } from "./mistakes.js";
import { drawNext } from "./next.js";
import * as stage from "./stage.js";
import { drawSums } from "./sums.js";
import { drawText, drawTextWithout } from "./text.js";

export function draw(state) {
  drawControls(state);
  if (state.run && state.phase !== "preparing") drawRun(state); // the stage keeps its picture until the next one is there
}

/** What the newest character looks at, in a layer and a head, and how strongly to draw the values that it gets. */
const attentionOf = remember(({ kept, queries, masked }, layer, head, keyHead, size) => {
  if (!queries) return {};
  const [keys, values] = [0, 1].map((kind) => kept.lane(layer, kind, keyHead));
  const query = queries[layer].subarray(head * size, (head + 1) * size);
  const { scores, weights, mix } = attend(query, keys, values, masked);
  const most = Math.max(...weights);
  return { query, scores, weights, mix, strengths: weights.map((weight) => 0.12 + 0.88 * Math.sqrt(weight / most)) };
});

/** Whether the keys and values of a layer differ from what they were, or from what they should be. */
const marksOf = remember((answer, layer) => {
  const most = answer?.kind === "change" ? 0 : ROUNDING;
  return answer?.differences?.slice(2 * layer, 2 * layer + 2).map((each) => [...each].map((x) => x > most)) ?? null;
});

function drawRun(state) {
  const { info, run, answer, layer, head, from } = state;
  const { chars } = info;
  const shown = answer ?? run;
  const marked = state.pointed ?? state.clicked;
  const incorrect = answer?.position ?? (answer?.first >= 0 ? answer.first : null);
  const [on, off] = [run.on.at(-1), run.off.at(-1)];

  // the text
  const newest = shown.at ?? shown.tokens.length;
  drawText(chars, { ...shown, fed: newest }, run.given, incorrect, marked);
  const without = [...run.ids.slice(0, run.given), ...run.off.map(({ id }) => id)];
  drawTextWithout(chars, { ids: without, fed: null, version: run.version }, run.given, null, null);

  // the strip; a query head's key/value head may serve several of them
  const keyHead = Math.floor((head * info.n_kv_head) / info.n_head);
  const attention = attentionOf(shown, layer, head, keyHead, info.head_size);
  const { query = null, scores = null, weights = null, mix = null, strengths } = attention;
  const marks = marksOf(answer, layer);
  const computed = marks ? 0 : (on?.computed ?? 0);
  const lanes = [shown, run, layer, keyHead];
  const { mixes } = STEPS[state.step - 1];
  stage.drawCells(chars, shown, from, computed, incorrect, marked, weights);
  stage.drawKeys(...lanes, query, null, from, marked);
  stage.drawValues(...lanes, mix, mixes ? strengths : null, from, null);
  stage.drawScores(scores, from);
  stage.drawAttention(weights, from);
  stage.drawBelow(marks, answer?.kind === "change", run.kept.length, off?.computed ?? 0, computed, from);

  // what comes next, and the work
  drawCandidates(state, marked);
  say("about", marked === null ? "" : aboutCharacter(state, marked, scores, weights));
  drawSums(run, info.block_size, info.parameters);
  drawMistakes(chars, run.given, state.mistakes, answer?.name);
  drawShapes(info, on, off, run.kept.length);
}

/** The step that chose a character, or undefined if it is from the prompt, or if a mistake is on the stage. */
function stepOf({ run, answer }, index) {
  return answer?.kind === "mistake" ? undefined : run.on[index - run.given];
}

/** Draw the probabilities of the marked character, or else of the next one. */
function drawCandidates(state, marked) {
  const { info, run, answer } = state;
  const { chars } = info;
  const { ids } = answer ?? run;
  const step = stepOf(state, marked ?? ids.length - 1);
  const name = (index) => `character ${index + 1}`;
  if (marked !== null && step && !answer) drawNext(chars, name(marked), step.probabilities, ids[marked], null);
  else if (answer?.at) drawNext(chars, name(answer.at), answer.before, ids[answer.at], answer.after);
  else drawNext(chars, "next", run.on.at(-1)?.probabilities, ids.at(-1), answer?.probabilities);
}

/** Describe the marked character. */
function aboutCharacter(state, marked, scores, weights) {
  const { info, run, answer } = state;
  const { ids } = answer ?? run;
  const step = stepOf(state, marked);
  const about = [`Character ${marked + 1} is ${quoted(info.chars[answer?.tokens[marked] ?? ids[marked]])}.`];
  if (marked === answer?.position) about.push("You put it there.");
  else if (marked < run.given) about.push("It is from the prompt.");
  else if (step) about.push(`The model gave it a probability of ${percent(step.probabilities[ids[marked]])}.`);
  if (weights?.[marked] === undefined) return about.join(" ");
  const score = scores[marked].toFixed(1).replace("-", "−");
  about.push(`Its key scores ${score}, so the newest gives it ${percent(weights[marked])} of its attention.`);
  return about.join(" ");
}
