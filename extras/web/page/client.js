// The page's end of the worker: calls that return promises, and the steps that it takes.
import { download, part, unreachable } from "./files.js";

/** Start the worker. Returns { read(name), call(name, ...args), stop() }. onStep gets each step: see commands.js. */
export function startWorker(onStep) {
  const waiting = new Map();
  let calls = 0;
  let failure = null;
  const fail = (error) => {
    failure ??= error;
    worker.terminate();
    for (const { reject } of waiting.values()) reject(failure);
    waiting.clear();
  };

  const worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
  worker.onmessage = ({ data: { call, event, result, error, ...rest }, ports: [port] }) => {
    if (event === "file") return download(rest.name).then((blob) => port.postMessage(blob), fail);
    if (event === "step") return onStep(rest);
    const { resolve, reject } = waiting.get(call);
    waiting.delete(call);
    if (error === undefined) resolve(result);
    else reject(new Error(error));
  };
  worker.onerror = (event) => {
    event.preventDefault();
    fail(event.message ? new Error(event.message) : unreachable("worker.js"));
  };
  return {
    /** Return what a JSON file of the page holds. */
    read: (name) => part(name, async () => JSON.parse(await (await download(name)).text())),
    call: (name, ...args) =>
      new Promise((resolve, reject) => {
        if (failure) return reject(failure);
        waiting.set(++calls, { resolve, reject });
        worker.postMessage({ call: calls, name, args });
      }),
    /** End all earlier calls. */
    stop: () => worker.postMessage({ name: "stop" }),
  };
}
