import assert from "node:assert/strict";
import { test } from "node:test";
import { readForm, writeAddress } from "../page/address.js";
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
  const { ids, steps, sampling, notes } = read();
  assert.deepEqual(ids, [..."O Romeo"].map((char) => CHARS.indexOf(char)));
  assert.equal(steps, 16 - 7);
  assert.deepEqual(sampling, { temperature: 0.8, topK: null, seed: 1337n });
  assert.deepEqual(notes, []);
});

test("the key changes with the meaning of each field, not with its spelling", () => {
  const others = { prompt: "Romeo", temperature: "0.9", top_k: "3", seed: "1", max_new_tokens: "4" };
  const keys = FIELDS.map((name) => read({ [name]: others[name] }).key);
  assert.equal(new Set([...keys, read().key]).size, 6);
  assert.equal(read({ temperature: " .80 ", seed: "01337", max_new_tokens: "9" }).key, read().key);
});

test("what a phone types becomes what the model knows, and a note says so", () => {
  const typed = read({ prompt: "a\u2019\u00a0\u2014\u2026" });
  assert.equal(textOf(typed), "a' --...");
  assert.deepEqual(typed.notes, ["Read \u2019 as ', \u00a0 as a space, \u2014 as --, \u2026 as ...."]);
  assert.equal(textOf(read({ prompt: "" })), "\n");
  assert.equal(read({ temperature: "0,5" }).sampling.temperature, 0.5);
});

test("more than fits becomes what fits", () => {
  assert.equal(read({ max_new_tokens: "5" }).steps, 5);
  const { steps, notes } = read({ max_new_tokens: "10" });
  assert.deepEqual([steps, notes.length], [9, 1]);
  assert.equal(read({ prompt: "a".repeat(15) }).steps, 1);
});

const MISTAKES = {
  prompt: ["a\u20ac#\u20ac", "a".repeat(16), "\u{1d54f}"],
  temperature: ["abc", "", "-1", "1e31", "NaN", "0x1", "Infinity"],
  top_k: ["0", "-1", "1.5", "2147483648", "x"],
  seed: ["", "-1", "1.5", "18446744073709551616"],
  max_new_tokens: ["0", "-3", "1e3"],
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
});

test("the address holds what differs from the default, and fills the form again", () => {
  const values = { prompt: "O & #?\nRomeo=+%", top_k: "5" };
  globalThis.location = { pathname: "/page/", search: "", hash: "#step-4" };
  globalThis.history = { replaceState: (_state, _title, address) => (globalThis.address = address) };
  writeAddress(form(values), { at: 3, take: null });
  const { search, hash } = new URL(globalThis.address, "http://localhost");
  assert.equal(hash, "#step-4");
  assert.deepEqual([...new URLSearchParams(search).keys()], ["prompt", "top_k", "at"]);

  globalThis.location.search = search;
  const fields = form();
  readForm(fields);
  assert.deepEqual(FIELDS.map((name) => fields[name].value), FIELDS.map((name) => values[name] ?? DEFAULT[name]));

  writeAddress(form(), {});
  assert.equal(globalThis.address, "/page/#step-4");
});
