// The worker: does the page's calls one after the other, so that a slow forward does not block the page.
//
// A message is { call, name, args }: do COMMANDS[name](...args), and answer { call, result } or { call, error }. "stop"
// ends all calls that came before it, and "delay" sets the pause between steps. Both are heard at once. COMMANDS also
// post events, { event, ... }.

let stops = 0;
let pause = 0; // milliseconds between steps

// not a static import, which is silent in Firefox if it fails
const commands = import("./commands.js").then(
  ({ COMMANDS }) => COMMANDS,
  () => {
    throw new Error("A module of the page did not arrive. Check the connection and reload.");
  },
);
let queue = commands.catch(() => {}); // each call reports the failure

onmessage = ({ data: { call, name, args } }) => {
  if (name === "stop") return stops++;
  if (name === "delay") return ([pause] = args);
  const before = stops;
  const control = { isStopped: () => stops !== before, delay: () => pause };
  queue = queue.then(async () => {
    try {
      const command = (await commands)[name];
      postMessage({ call, result: await command(control, ...args) });
    } catch (error) {
      postMessage({ call, error: String(error?.message ?? error).trim().replace(/\.$/, "") });
    }
  });
};
