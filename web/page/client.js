// The page's end of the worker: calls that return promises, and events.

/** Start the worker. Returns { call(name, ...args), stop(), setDelay(ms) }. onEvent gets the worker's events. */
export function startWorker(onEvent) {
  const worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
  const waiting = new Map();
  let calls = 0;
  worker.onmessage = ({ data: { call, event, result, error, ...rest } }) => {
    if (event) return onEvent(event, rest);
    const { resolve, reject } = waiting.get(call);
    waiting.delete(call);
    if (error === undefined) resolve(result);
    else reject(new Error(error));
  };
  worker.onerror = (event) => {
    event.preventDefault();
    const error = new Error(event.message ?? "the worker did not start");
    for (const { reject } of waiting.values()) reject(error);
    waiting.clear();
  };
  return {
    call: (name, ...args) =>
      new Promise((resolve, reject) => {
        waiting.set(++calls, { resolve, reject });
        worker.postMessage({ call: calls, name, args });
      }),
    /** End all calls that were made before. */
    stop: () => worker.postMessage({ name: "stop" }),
    setDelay: (ms) => worker.postMessage({ name: "delay", args: [ms] }),
  };
}
