// The page: connects the store, the controls and the views, and loads the model.
import { momentOf, readForm, readStep, writeAddress } from "./address.js";
import { startWorker } from "./client.js";
import { listen } from "./controls.js";
import { STEPS } from "./steps.js";
import { createStore } from "./store.js";
import { $, element } from "./views/draw.js";
import { draw } from "./views/page.js";
import { inEnglish } from "./words.js";

const fields = $("form").elements;
const worker = startWorker((step) => store.receive(step));
const store = createStore(worker, changed);
const { state } = store;

let due = false;

/** Draw the newest state, with the next frame. */
function changed() {
  document.body.dataset.state = state.phase;
  keepAddress();
  if (due) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    draw(state);
  });
}

let writing;

/** Put what is on the page into the address, a little later: browsers limit how often it may change. */
function keepAddress() {
  clearTimeout(writing);
  writing = setTimeout(() => {
    if (!state.refused && ["ready", "paused", "done"].includes(state.phase)) writeAddress(fields, momentOf(store));
  }, 200);
}

async function load() {
  const info = await worker.read("model.json").catch(store.fail);
  if (!info) return;
  info.chars = [...info.chars]; // by code points, as Python counts
  info.ids = new Map(info.chars.map((char, id) => [char, id]));
  info.heads = info.n_layer * info.n_head;
  makePage(info);
  store.set({ info, step: readStep(), changed: info.ids.get("q") ?? 0 });
  const controls = listen(store);
  store.enter();

  const loaded = await worker.call("load", info).catch(store.fail);
  if (!loaded) return;
  store.set({ phase: "ready" });
  controls.submit();
}

/** Fill in what depends on the model. */
function makePage(info) {
  const said = { ...info, weights: inEnglish(info.parameters), millions: (info.parameters / 1e6).toFixed(2) };
  for (const each of document.querySelectorAll("[data-info]")) each.textContent = said[each.dataset.info];
  for (const [name, count] of [["layer", info.n_layer], ["head", info.n_head]]) {
    for (let i = 0; i < count; i++) {
      const label = element("label");
      label.append(element("input", "", { type: "radio", name, value: i }), element("span", i + 1));
      $(name).append(label);
    }
  }
  for (const { make } of STEPS) make?.(store, info);
  for (const name of ["prompt", "temperature", "seed"]) fields[name].value = fields[name].defaultValue = info.start[name];
  readForm(fields);

  // on GitHub Pages, the address tells where the code is
  const owner = location.hostname.match(/^([\w-]+)\.github\.io$/)?.[1];
  if (!owner) return;
  const path = `github.com/${owner}/${location.pathname.split("/")[1]}`;
  Object.assign($("repository").querySelector("a"), { href: `https://${path}`, textContent: path });
  $("repository").hidden = false;
}

load();
