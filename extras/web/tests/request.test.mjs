import assert from "node:assert/strict";
import { test } from "node:test";
import { FIELDS, readRequest } from "../page/request.js";

const CHARS = "\n !',-.ROabemo";
const info = { chars: [...CHARS], ids: new Map([...CHARS].map((char, id) => [char, id])), block_size: 16 };
const DEFAULT = { prompt: "O Romeo", temperature: "0.8", top_k: "", seed: "1337", max_new_tokens: "" };

/** The parts of the form that request.js looks at. */
function form(values = {}) {
  const field = (name) => ({
    value: values[name] ?? DEFAULT[name], defaultValue: DEFAULT[name], labels: [{ textContent: ` ${name} ` }],
  });
  return Object.fromEntries(FIELDS.map((name) => [name, field(name)]));
}

const read = (values) => readRequest(form(values), info);
const textOf = ({ ids }) => ids.map((id) => CHARS[id]).join("");

test("the default form fills the context", () => {
  const { ids, steps, sampling } = read();
  assert.deepEqual(ids, [..."O Romeo"].map((char) => CHARS.indexOf(char)));
  assert.equal(steps, 16 - 7);
  assert.deepEqual(sampling, { temperature: 0.8, topK: null, seed: 1337n });
});

test("the key changes with the meaning of each field, not with its spelling", () => {
  const others = { prompt: "Romeo", temperature: "0.9", top_k: "3", seed: "1", max_new_tokens: "4" };
  const keys = FIELDS.map((name) => read({ [name]: others[name] }).key);
  assert.equal(new Set([...keys, read().key]).size, 6);
  assert.equal(read({ temperature: " .80 ", seed: "01337", max_new_tokens: "9" }).key, read().key);
});

test("what a phone types becomes what the model knows", () => {
  assert.equal(textOf(read({ prompt: "a\u2019\u00a0\u2014\u2026" })), "a' --...");
  assert.equal(textOf(read({ prompt: "" })), "\n");
});

const MISTAKES = {
  prompt: ["a\u20ac#\u20ac", "a".repeat(16), "\u{1d54f}"],
  temperature: ["abc", "", "-1", "0,5", "1e31", "NaN", "0x1", "Infinity"],
  top_k: ["0", "-1", "1.5", "2147483648", "x"],
  seed: ["", "-1", "1.5", "18446744073709551616"],
  max_new_tokens: ["0", "-3", "1e3", "10"],
};

test("a mistake is refused, with its field, and without changing the form", () => {
  for (const [name, values] of Object.entries(MISTAKES)) {
    for (const value of values) {
      const fields = form({ [name]: value });
      assert.throws(
        () => readRequest(fields, info),
        (error) => error.field === fields[name] && error.message.length > 10,
        `${name} ${value}`,
      );
      assert.equal(fields[name].value, value);
    }
  }
  assert.throws(() => read({ prompt: "a\u20ac#\u20ac" }), /never saw "#", "\u20ac"\./); // each once
});

test("the largest that is allowed is allowed", () => {
  assert.equal(read({ seed: "18446744073709551615" }).sampling.seed, 2n ** 64n - 1n);
  assert.equal(read({ top_k: "2147483647" }).sampling.topK, 2 ** 31 - 1);
  assert.equal(read({ temperature: "0" }).sampling.temperature, 0);
  assert.equal(read({ max_new_tokens: "9" }).steps, 9);
  assert.equal(read({ prompt: "a".repeat(15) }).steps, 1);
});
