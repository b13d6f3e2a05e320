// The worker. It runs the page's calls one after the other, so that a slow forward does not block the page.
//
// A message is { call, name, args }: run COMMANDS[name](...args) and answer { call, result } or { call, error }. "stop"
// ends all calls that came before it, at once. COMMANDS also post events, { event, ... }.

let stops = 0;

// not a static import, because that fails silently in Firefox
const commands = import("./commands.js").then(
  ({ COMMANDS }) => COMMANDS,
  () => {
    throw new Error("A module of the page did not load. Check your connection and reload.");
  },
);
let queue = commands.catch(() => {}); // each call reports the failure

onmessage = ({ data: { call, name, args } }) => {
  if (name === "stop") return stops++;
  const before = stops;
  const isStopped = () => stops !== before;
  queue = queue.then(async () => {
    try {
      const command = (await commands)[name];
      postMessage({ call, result: await command(isStopped, ...args) });
    } catch (error) {
      postMessage({ call, error: String(error?.message ?? error).trim().replace(/\.$/, "") });
    }
  });
};
