// What the page can ask for. Each command gets { isStopped, delay } and the arguments of the call.
import { fetcher, part } from "./files.js";
import {
  begin, generateWithGuesses, generateWithMistake, influences, LARGEST_SHIFT, nextProbabilities, stepBoth,
} from "./generate.js";
import { createNetwork, differences, emptyCache, forward } from "./network.js";
import { readNgrams } from "./ngrams.js";

const RUNTIME = "ort/ort-wasm-simd-threaded.wasm.gz";
const MOST_WITH_MISTAKE = 200; // new tokens

let about, table, run, right;

export const COMMANDS = {
  /** Load everything. Returns model.json. */
  async load() {
    const fetched = fetcher((received, total) => postMessage({ event: "loading", received, total }));
    const files = ["model.json", RUNTIME, "model.onnx.gz", "ngrams.bin.gz"];
    const arriving = files.map((name) => part(name, () => fetched(name)));
    const module = part("ort/ort.wasm.min.mjs", () => import("./ort/ort.wasm.min.mjs"));
    const [json, wasm, model, ngrams, ort] = await Promise.all([...arriving, module]);
    about = await part("model.json", () => JSON.parse(new TextDecoder().decode(json)));
    about.chars = [...about.chars]; // by code points, as Python counts
    ort.env.logLevel = "error";
    ort.env.wasm.numThreads = 1; // more would ask the server for headers that http.server does not send
    ort.env.wasm.wasmPaths = new URL("ort/", import.meta.url).href;
    ort.env.wasm.wasmBinary = wasm;
    await part("The model", () => createNetwork(ort, new Uint8Array(model), about));
    if (ngrams.byteLength) table = await part("ngrams.bin.gz", () => readNgrams(ngrams, about.chars.length));
    return { ...about, guesses: Boolean(table) };
  },

  begin(_, prompt, sampling) {
    run = begin(prompt, sampling);
    right = null;
  },

  /** Add `count` tokens to both texts. An event "step" reports each. */
  async advance({ isStopped, delay }, count) {
    for (let i = 0; i < count; i++) {
      for (const began = performance.now(); i && performance.now() - began < delay() && !isStopped(); ) {
        await new Promise((resolve) => setTimeout(resolve, 10)); // the delay may change meanwhile
      }
      if (isStopped()) break;
      const step = await stepBoth(run);
      postMessage({ event: "step", ...step }, step.on.columns.map((data) => data.buffer));
      await breathe();
    }
  },

  /** Return the next token's probabilities, and how far the cache is from a forward of the whole text. */
  async look() {
    const { ids, cache } = run.on;
    const again = await forward(ids.slice(0, -1), emptyCache(), { keep: true });
    const difference = Math.max(...differences(cache, again.cache).flatMap((layer) => [...layer]));
    return { probabilities: await nextProbabilities(run.on), difference };
  },

  influences: ({ isStopped }) => influences(run.on, isStopped, breathe),

  changeCache: (_, change) => nextProbabilities(run.on, change),

  /** Return per layer the difference of each column if the character at `position` were `id`. */
  async changeText(_, position, id) {
    const changed = run.on.ids.with(position, id);
    const [a, b] = [
      await forward(run.on.ids, emptyCache(), { keep: true }),
      await forward(changed, emptyCache(), { keep: true }),
    ];
    return differences(a.cache, b.cache);
  },

  guess: ({ isStopped }, steps) => generateWithGuesses(run, steps, table, isStopped, breathe),

  /** Return { ids, right }: the text with a mistake, and without it. */
  async mistake({ isStopped }, name, other, steps) {
    const room = about.block_size - LARGEST_SHIFT - run.prompt.length;
    const count = Math.min(steps, room, MOST_WITH_MISTAKE);
    if (count < 1) throw new Error(`the prompt leaves no room: at most ${about.block_size - LARGEST_SHIFT - 1} characters`);
    if (right?.length !== run.prompt.length + count) {
      right = await generateWithMistake(run, count, "none", other, isStopped, breathe);
    }
    const ids = await generateWithMistake(run, count, name, other, isStopped, breathe);
    return ids && right && { ids, right };
  },
};

/** Let messages in, such as "stop". setTimeout would wait for four milliseconds. */
function breathe() {
  return new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(null);
  });
}
