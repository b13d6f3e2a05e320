// What the reader asks for: the form, checked.
import { counted } from "./words.js";

export const FIELDS = ["prompt", "temperature", "top_k", "seed", "max_new_tokens"];

// Phones type these characters instead of those on a keyboard. The first counterpart that the model knows wins.
const COUNTERPARTS = new Map(
  Object.entries({
    "‘": ["'"], "’": ["'"], "‚": [","], "“": ['"', "'"], "”": ['"', "'"], "„": ['"', "'"],
    "–": ["-"], "—": ["--", "-"], "‑": ["-"], "…": ["..."], "\u00a0": [" "], "\t": [" "], "\r": [""],
  }),
);

/** Return { ids, steps, sampling, key } of the form. Throws an Error with the `field` that is wrong. */
export function readRequest(fields, info) {
  const prompt = readPrompt(fields.prompt, info);
  const room = info.block_size - prompt.length;
  if (room < 1) refuse(fields.prompt, `The prompt has ${counted(prompt.length, "character")}. At most ${info.block_size - 1} fit.`);
  const decimal = /^(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i;
  const sampling = {
    temperature: Number(number(fields.temperature, decimal, (text) => text < 1e30, "a number from 0 to 1e30")),
    topK: count(fields.top_k),
    seed: BigInt(number(fields.seed, /^\d+$/, (text) => BigInt(text) < 2n ** 64n, "a whole number from 0 to 2⁶⁴ − 1")),
  };
  const steps = count(fields.max_new_tokens) ?? room;
  if (steps > room) refuse(fields.max_new_tokens, `After this prompt, the context has room for ${counted(room, "character")}.`);
  const ids = prompt.map((char) => info.ids.get(char));
  return { ids, steps, sampling, key: [ids, steps, ...Object.values(sampling)].join() };
}

/** Return the characters of the prompt, with counterparts for characters that the model does not know. */
function readPrompt(field, info) {
  const prompt = [...field.value].flatMap((char) => {
    if (info.ids.has(char)) return [char];
    return [...(COUNTERPARTS.get(char)?.find((text) => [...text].every((each) => info.ids.has(each))) ?? char)];
  });
  if (!prompt.length) return [info.ids.has("\n") ? "\n" : info.chars[0]];
  const unknown = [...new Set(prompt)].filter((char) => !info.ids.has(char)).sort();
  if (unknown.length) {
    const names = unknown.slice(0, 20).map((char) => JSON.stringify(char)).join(", ");
    refuse(field, `The model never saw ${names}. It knows ${JSON.stringify(info.chars.slice(0, 200).join(""))}.`);
  }
  return prompt;
}

function refuse(field, message) {
  throw Object.assign(new Error(message), { field });
}

function number(field, pattern, fits, must) {
  const text = field.value.trim();
  const label = field.labels[0].textContent.trim();
  if (!pattern.test(text) || !fits(text)) refuse(field, `${label} is “${text}”, but must be ${must}.`);
  return text;
}

/** Return a positive whole number, or null for an empty field. */
function count(field) {
  const fits = (text) => !text || (text >= 1 && text < 2 ** 31);
  return Number(number(field, /^\d*$/, fits, "empty or a whole number from 1 to 2³¹ − 1")) || null;
}
