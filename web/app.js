// The page: load the exported model, generate with and without the KV cache, draw what a step costs.
//
// A classic script, not a module: opened from file:// a browser refuses modules, and nothing could say what to do then.
"use strict";

const $ = (id) => document.getElementById(id);
const form = $("form");
const fields = form.elements;
const WAY_OUT = "Write the folder again (python export.py --format web) and serve it (python -m http.server).";

let ort, session, info; // the runtime, the model in it, and what model.json says of the model
const runs = { off: null, on: null }; // the newest of each setting: what the chart, the table and the verdict are about
let stopped = false;

// -- the model --------------------------------------------------------------------------------------------------------

async function load() {
  if (location.protocol === "file:") {
    const how = "run python -m http.server in this folder, then open http://localhost:8000";
    throw new Error(`A browser lets no page read its neighbours from a disk. Serve this folder: ${how}.`);
  }
  async function fetched(file) {
    // a newer export must not meet an older one's half from the browser's cache
    const response = await fetch(file, { cache: "no-cache" });
    if (!response.ok) throw new Error(`${response.status} ${response.statusText}`);
    return response;
  }
  info = await part("model.json", async () => {
    const about = await (await fetched("model.json")).json();
    const chars = [...about.chars]; // by code points, as Python counts
    const ids = new Map(chars.map((char, id) => [char, id]));
    const slots = Array.from({ length: about.n_layer }, (_, i) => [`${i}.key`, `${i}.value`]).flat();
    return { ...about, chars, ids, slots };
  });
  ort = await part("ort/ort.wasm.min.mjs", () => import("./ort/ort.wasm.min.mjs"));
  ort.env.logLevel = "error";
  ort.env.wasm.numThreads = 1; // more would ask the server for headers that http.server does not send
  ort.env.wasm.wasmPaths = new URL("ort/", document.baseURI).href;
  const bytes = await part("model.onnx", async () => (await fetched("model.onnx")).arrayBuffer());
  session = await part("The model", () => ort.InferenceSession.create(bytes, { executionProviders: ["wasm"] }));

  await part("The model", async () => {
    // a full context shows a file that does not fit its model.json, and makes the browser compile what is to be measured
    const most = info.block_size - 1;
    const { cache } = await forward(Array(most).fill(0), 0, emptyCache(), true);
    const { logits } = await forward([0], most, cache, true);
    if (logits.length !== info.chars.length) throw new Error("model.onnx and model.json are of different models");
    if (!logits.every(Number.isFinite)) throw new Error("its outputs are no finite numbers");
  });
}

async function part(name, work) {
  try {
    return await work();
  } catch (error) {
    throw new Error(`${name} did not load: ${reason(error)}. ${WAY_OUT}`);
  }
}

function emptyCache() {
  const shape = [1, info.n_kv_head, 0, info.head_size];
  return info.slots.map(() => new ort.Tensor("float32", new Float32Array(0), shape));
}

/** Feed `ids` at the positions from `start`, behind what `cache` holds. The logits of the last, and the cache grown by
 *  them, where it is wanted. */
async function forward(ids, start, cache, grow) {
  const end = start + ids.length;
  const row = (length, value) =>
    new ort.Tensor("int64", BigInt64Array.from({ length }, (_, i) => BigInt(value(i))), [1, length]);
  const feeds = {
    input_ids: row(ids.length, (i) => ids[i]),
    attention_mask: row(end, () => 1),
    position_ids: row(ids.length, (i) => start + i),
  };
  info.slots.forEach((slot, i) => (feeds[`past_key_values.${slot}`] = cache[i]));
  const present = info.slots.map((slot) => `present.${slot}`);
  const outputs = await session.run(feeds, grow ? ["logits", ...present] : ["logits"]);
  return {
    logits: outputs.logits.data.slice(-outputs.logits.dims.at(-1)),
    cache: grow ? present.map((name) => outputs[name]) : cache,
  };
}

/** The loop of the kit's GPT.stream: prefill, then one character a step, each fed back at the next; without the cache
 *  every step is a prefill. Yields each step's id, its milliseconds and the bytes of the cache after it. */
async function* stream(prompt, steps, cached, { temperature, topK, seed }) {
  const ids = [...prompt];
  const noise = gumbelNoise(seed);
  let cache = emptyCache();
  for (let step = 0, start = 0; step < steps; step++) {
    const began = performance.now();
    const result = await forward(ids.slice(start), start, cache, cached);
    if (cached) [cache, start] = [result.cache, ids.length];
    const id = pick(result.logits, (candidate) => noise(step, candidate), temperature, topK);
    const ms = performance.now() - began;
    ids.push(id);
    yield { id, ms, bytes: cache.reduce((sum, tensor) => sum + tensor.data.byteLength, 0) };
  }
}

// -- the sampler: the same picks as model.py's sample_token and gumbel_noise, in the same float32 --------------------

function pick(logits, noise, temperature, topK) {
  let candidates = [...logits.keys()];
  // a stable sort: ties go to the lowest id
  if (topK) candidates = candidates.sort((a, b) => logits[b] - logits[a]).slice(0, topK);
  const scale = Math.fround(temperature);
  const score = (id) => Math.fround(logits[id] + Math.fround(scale * noise(id)));
  let best = candidates[0], most = score(best);
  for (const id of candidates.slice(1)) {
    const own = score(id);
    if (own > most) [best, most] = [id, own];
  }
  return best;
}

/** (step, id) => standard Gumbel noise of the first sample of a seed, a BigInt below 2**64. */
function gumbelNoise(seed) {
  const mix = (h) => {
    h = Math.imul(h ^ (h >>> 16), 0x7feb352d);
    h = Math.imul(h ^ (h >>> 15), 0x846ca68b);
    return (h ^ (h >>> 16)) >>> 0;
  };
  const absorb = (h, counter) => mix(h ^ mix(counter + 0x9e3779b9));
  const sample = 0;
  const begin = [Number(seed & 0xffffffffn), Number(seed >> 32n), sample].reduce(absorb, 0);
  return (step, id) => {
    const h = absorb(absorb(begin, step), id);
    const uniform = Math.min(Math.fround(Math.fround(h) + 0.5) * 2 ** -32, 1 - 2 ** -24);
    return -Math.fround(Math.log(-Math.fround(Math.log1p(-uniform))));
  };
}

// -- what the reader asks for -----------------------------------------------------------------------------------------

/** The form, checked. Throws an Error with the `field` that cannot be. */
function readRequest() {
  const refuse = (field, message) => {
    throw Object.assign(new Error(message), { field });
  };
  const number = (field, pattern, fits, must) => {
    const text = field.value.trim();
    if (!pattern.test(text) || !fits(text)) refuse(field, `${labelOf(field)} is “${text}”: it must be ${must}.`);
    return text;
  };
  const whole = /^\d+$/;
  const most = 2 ** 31;
  const count = (field) =>
    field.value.trim() === ""
      ? null
      : Number(number(field, whole, (text) => text >= 1 && text < most, "empty, or a whole number from 1 to 2³¹ − 1"));

  const notes = [];
  let prompt = [...fields.prompt.value];
  if (!prompt.length) {
    prompt = [info.ids.has("\n") ? "\n" : info.chars[0]];
    notes.push(`The prompt is empty: starting from ${JSON.stringify(prompt[0])}.`);
  }
  const unknown = [...new Set(prompt)].filter((char) => !info.ids.has(char)).sort();
  if (unknown.length) {
    const known = info.chars.slice(0, 200).join("") + (info.chars.length > 200 ? "…" : "");
    const names = unknown.slice(0, 20).map((char) => JSON.stringify(char)).join(", ");
    refuse(fields.prompt, `The model never saw ${names}; it knows ${JSON.stringify(known)}.`);
  }
  const room = info.block_size - prompt.length;
  if (room < 1) {
    const size = `The prompt has ${prompt.length} characters and the context ${info.block_size}`;
    refuse(fields.prompt, `${size}: at most ${info.block_size - 1} leave room for a new one.`);
  }
  const decimal = /^(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i;
  const sampling = {
    temperature: Number(number(fields.temperature, decimal, (text) => text < 1e30, "a number from 0 to below 1e30")),
    topK: count(fields.top_k),
    seed: BigInt(number(fields.seed, whole, (text) => BigInt(text) < 2n ** 64n, "a whole number from 0 to 2⁶⁴ − 1")),
  };
  const asked = count(fields.max_new_tokens) ?? room;
  if (asked > room) notes.push(`${asked} new characters reach past the context of ${info.block_size}: ${room} fit.`);
  const ids = prompt.map((char) => info.ids.get(char));
  const key = [ids, ...Object.values(sampling)].join();
  return { ids, steps: Math.min(asked, room), sampling, notes, key };
}

/** Generate once for each setting in `settings`, "on" or "off", with what the form says now. */
async function generate(settings) {
  say("");
  for (const field of fields) field.removeAttribute("aria-invalid");
  let request;
  try {
    request = readRequest();
  } catch (error) {
    error.field?.setAttribute("aria-invalid", "true");
    error.field?.focus();
    return say(error.message);
  }
  stopped = false;
  state("running", "Generating…");
  if (document.activeElement === $("compare")) $("generate").focus(); // a disabled button would swallow the next key
  $("compare").disabled = true;
  $("generate").textContent = "Stop";
  await breathe();
  try {
    for (const setting of settings) if (!stopped) await run(request, setting);
    state("done", [...request.notes, stopped ? "Stopped." : "", verdict(request)].filter(Boolean).join(" "));
  } catch (error) {
    state("failed", "");
    say(`Generating failed: ${reason(error)}.`);
  }
  $("compare").disabled = false;
  $("generate").textContent = "Generate";
}

async function run({ ids, steps, sampling, key }, setting) {
  const record = (runs[setting] = { key, first: ids.length, ids: [], ms: [], bytes: 0 });
  $("given").textContent = ids.map((id) => info.chars[id]).join("");
  const continuation = new Text();
  $("continuation").replaceChildren(continuation);
  let shown = performance.now();
  for await (const { id, ms, bytes } of stream(ids, steps, setting === "on", sampling)) {
    record.ids.push(id);
    record.ms.push(ms);
    record.bytes = bytes;
    continuation.appendData(info.chars[id]);
    if (performance.now() - shown > 12) {
      draw();
      await breathe();
      shown = performance.now();
    }
    if (stopped) break;
  }
  draw();
}

/** Let the browser paint, and hear a Stop. */
function breathe() {
  return new Promise((resolve) => setTimeout(resolve));
}

function verdict({ key }) {
  const { on, off } = runs;
  const newest = [on, off].filter((run) => run?.key === key);
  if (newest.length < 2) return `${newest[0]?.ids.length ?? 0} characters.`;
  const length = Math.min(on.ids.length, off.ids.length);
  const place = on.ids.slice(0, length).findIndex((id, i) => id !== off.ids[i]);
  if (place < 0) return `With and without the cache the text is the same, all ${length} characters.`;
  const [a, b] = [on, off].map((run) => JSON.stringify(info.chars[run.ids[place]]));
  const rounding = "Rounding may choose between two candidates closer than 0.0001; anything else is a bug.";
  return `The texts differ from new character ${place + 1} on: ${a} with the cache, ${b} without. ${rounding}`;
}

// -- what the reader sees ---------------------------------------------------------------------------------------------

const WINDOW = 16; // steps behind a point of a curve

/** [position, ms]: means of WINDOW steps, less their fastest and slowest quarter, at the middle of the window. A median
 *  would not do: many browsers' clocks tick in whole milliseconds, and a step takes less. The first step, which reads
 *  the prompt, is in none of them. */
function curve({ ms, first }) {
  const size = Math.min(WINDOW, ms.length - 1), quarter = Math.floor(size / 4);
  const points = [];
  for (let from = 1; size > 0 && from + size <= ms.length; from++) {
    const middle = ms.slice(from, from + size).sort((a, b) => a - b).slice(quarter, size - quarter);
    points.push([first + from + (size - 1) / 2, middle.reduce((sum, x) => sum + x) / middle.length]);
  }
  return points;
}

function draw() {
  if (!info) return;
  const svg = $("chart");
  const { clientWidth: width, clientHeight: height } = svg;
  const [left, right, top, bottom] = [40, width - 2, 28, height - 48];
  const curves = Object.entries(runs).flatMap(([setting, run]) => (run ? [[setting, run, curve(run)]] : []));
  const heights = curves.flatMap(([, run, points]) => (points.length ? points.map(([, ms]) => ms) : run.ms));
  const highest = Math.max(1e-3, ...heights) * 1.1; // a lone slow step may be above: it would flatten all others
  const x = (position) => (left + ((right - left) * position) / info.block_size).toFixed(1);
  const y = (ms) => (bottom - ((bottom - top) * ms) / highest).toFixed(1);

  let axes = '<text x="0" y="12">milliseconds per token</text>';
  axes += `<text x="${right}" y="${height - 4}" class="end">position in the text</text>`;
  if (curves.length) {
    const step = [1, 2, 5, 10].map((n) => n * 10 ** Math.floor(Math.log10(highest / 4))).find((n) => highest / n <= 5);
    for (let i = 0; i * step <= highest; i++) {
      const label = Number((i * step).toPrecision(3));
      axes += `<line x1="${left}" x2="${right}" y1="${y(i * step)}" y2="${y(i * step)}"/>`;
      axes += `<text x="${left - 8}" y="${y(i * step)}" class="end" dy="4">${label}</text>`;
    }
  } else {
    axes += `<line x1="${left}" x2="${right}" y1="${bottom}" y2="${bottom}"/>`;
    const [x, y] = [(left + right) / 2, (top + bottom) / 2];
    axes += `<text x="${x}" y="${y}" class="middle">every step will be a point here</text>`;
  }
  for (const quarter of [0, 1, 2, 3, 4]) {
    const position = Math.round((info.block_size * quarter) / 4);
    axes += `<text x="${x(position)}" y="${bottom + 20}" class="${quarter < 4 ? "middle" : "end"}">${position}</text>`;
  }
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  $("axes").innerHTML = axes;

  let description = "Milliseconds per token against position.";
  for (const [setting, run, points] of curves) {
    const dots = run.ms.map((ms, i) => (ms <= highest ? `M${x(run.first + i)} ${y(ms)}h0` : ""));
    $(`dots-${setting}`).setAttribute("d", dots.join(""));
    $(`curve-${setting}`).setAttribute("points", points.map(([position, ms]) => `${x(position)},${y(ms)}`).join(" "));
    const seconds = run.ms.reduce((sum, ms) => sum + ms, 0) / 1e3;
    const [from, to] = points.length ? [points[0], points.at(-1)].map(([, ms]) => ms.toFixed(2)) : [];
    const rate = seconds > 0 ? Math.round(run.ids.length / seconds).toLocaleString("en") : "";
    const cells = [run.ids.length, rate, from ? `${from} → ${to}` : ""];
    [...$(`row-${setting}`).querySelectorAll("td")].forEach((cell, i) => (cell.textContent = cells[i]));
    const last = run.first + run.ms.length - 1;
    if (from) description += ` KV cache ${setting}: from ${from} to ${to}, positions ${run.first} to ${last}.`;
  }
  svg.setAttribute("aria-label", description);

  if (runs.on?.ids.length) {
    const positions = runs.on.first + runs.on.ids.length - 1; // the newest character has not been fed yet
    const formula = `2 × ${info.n_layer} layers × ${info.n_kv_head} heads × ${info.head_size} × ${positions} positions`;
    $("cache").textContent = `The cache: ${formula} × 4 bytes = ${runs.on.bytes.toLocaleString("en")} bytes.`;
  }
}

function say(message) {
  $("message").textContent = message;
  if (message) $("message").scrollIntoView({ block: "nearest" });
}

function state(name, status) {
  document.body.dataset.state = name;
  $("status").textContent = status;
}

function labelOf(field) {
  return field.labels[0].textContent.trim();
}

function reason(error) {
  return String(error?.message ?? error).trim().replace(/\.$/, "");
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (document.body.dataset.state === "running") stopped = true;
  else if (!$("generate").disabled) generate([fields.kv_cache.checked ? "on" : "off"]);
});
$("compare").addEventListener("click", () => generate(["off", "on"]));
fields.prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
new ResizeObserver(draw).observe($("chart"));

load().then(
  () => {
    const loss = info.val_loss === null ? "" : `, validation loss ${info.val_loss.toFixed(3)}`;
    const size = `${(info.parameters / 1e6).toFixed(2)} million parameters${loss}`;
    const shape = `${info.n_layer} layers of ${info.n_kv_head} key/value heads of ${info.head_size}`;
    $("model").textContent = `${size}; ${shape}; a context of ${info.block_size} characters.`;
    const { prompt } = fields;
    if (prompt.value === prompt.defaultValue && [...prompt.value].some((char) => !info.ids.has(char))) prompt.value = "";
    $("generate").disabled = $("compare").disabled = false;
    state("ready", "Ready. Ctrl+Enter in the prompt generates.");
    draw();
  },
  (error) => {
    state("failed", "");
    say(error.message);
  },
);
