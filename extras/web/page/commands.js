// What the page can ask for. Each command is called with isStopped() and the arguments of the call.
import { fetched, part } from "./files.js";
import { begin, changedText, compareMistake, rewind, step, takeColumnOut, whoseTurn } from "./generate.js";
import { createNetwork } from "./network.js";

const RUNTIME = "ort/ort-wasm-simd-threaded.wasm.gz";
const MOST_WITH_MISTAKE = 120; // new tokens

let network, run;

/** Set the network that the commands work with. */
export function use(created) {
  network = created;
}

export const COMMANDS = {
  /** Load the model. info: model.json */
  async load(_, info) {
    const arriving = [RUNTIME, "model.onnx.gz"].map((name) => part(name, () => fetched(name)));
    const module = part("ort/ort.wasm.min.mjs", () => import("./ort/ort.wasm.min.mjs"));
    const [wasm, model, ort] = await Promise.all([...arriving, module]);
    ort.env.logLevel = "error";
    ort.env.wasm.numThreads = 1; // more would need headers that http.server does not send
    ort.env.wasm.wasmPaths = new URL("ort/", import.meta.url).href;
    ort.env.wasm.wasmBinary = wasm;
    use(await part("The model", () => createNetwork(ort, new Uint8Array(model), info)));
    return true;
  },

  /** Start a run, called `name` in its events. */
  begin(_, name, prompt, steps, sampling) {
    run = { name, ...begin(network, prompt, steps, sampling) };
  },

  /** Take `count` steps of the run, one every `delay` milliseconds, or race. An event "step" reports each. */
  async advance(isStopped, count, { racing = false, delay = 0 } = {}) {
    for (let i = 0; i < count; i++) {
      const name = whoseTurn(run, racing);
      if (!name || isStopped()) return;
      postMessage({ event: "step", run: run.name, [name]: await step(run, name) });
      await (delay ? new Promise((resolve) => setTimeout(resolve, delay)) : breathe());
    }
  },

  /** Take back steps until the run has at most `steps`. */
  rewind(_, steps) {
    rewind(run, steps);
  },

  takeOut: (isStopped, candidates) => takeColumnOut(run, candidates, isStopped, breathe),

  async change(isStopped, position, id) {
    await breathe(); // many may come at once, and only the newest counts
    return isStopped() ? null : changedText(run, position, id);
  },

  mistake(isStopped, name) {
    const steps = Math.min(run.total - run.prompt.length, MOST_WITH_MISTAKE);
    return compareMistake(run, steps, name, isStopped, breathe);
  },
};

/** Let messages such as "stop" in. setTimeout would wait for four milliseconds. */
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
