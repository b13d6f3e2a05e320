// The page: connects the store, the controls and the views, and loads the model.
import { momentOf, readForm, readMoment, readStep, writeAddress } from "./address.js";
import { startWorker } from "./client.js";
import { listen } from "./controls.js";
import { STEPS } from "./steps.js";
import { createStore } from "./store.js";
import { $, element, forgetDrawings } from "./views/draw.js";
import { makeMistakes } from "./views/mistakes.js";
import { draw } from "./views/page.js";
import { makeScale } from "./views/scale.js";
import * as stage from "./views/stage.js";
import { glyph } from "./words.js";

const fields = $("form").elements;
const worker = startWorker((event, data) => {
  const { phase, step, run } = store.state;
  if (event !== "loading" && phase === "running" && STEPS[step - 1].sweeps && !run.racing) stage.animateStep();
  store.receive(event, data);
});
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
    if (!state.run || state.refused || ["loading", "preparing", "running"].includes(state.phase)) return;
    writeAddress(fields, momentOf(store));
  }, 200);
}

/** Draw everything again, in its new size or its new colours. */
function resize() {
  if (state.projector) document.body.dataset.projector = "on";
  else delete document.body.dataset.projector;
  forgetDrawings();
  store.set({ cells: stage.measure() });
}

/** Draw for paper, or for the screen again. */
function print(isPaper) {
  document.body.toggleAttribute("data-print", isPaper);
  resize();
  draw(state); // the picture is taken before the next frame
}

async function load() {
  const info = await worker.call("about").catch(store.fail);
  if (!info) return;
  info.ids = new Map(info.chars.map((char, id) => [char, id]));
  info.heads = info.n_layer * info.n_head;
  makePage(info);
  store.set({ info, step: readStep(), projector: Boolean(readMoment().projector), changed: info.ids.get("q") ?? 0 });
  const controls = listen(store, worker, resize);
  window.onbeforeprint = () => print(true);
  window.onafterprint = () => print(false);
  resize();
  if (info.opening && STEPS[state.step - 1].runs && !location.search) store.open();

  const loaded = await worker.call("load").catch(store.fail);
  if (!loaded) return;
  store.set({ phase: "ready" });
  controls.submit();
}

/** Fill in what depends on the model. */
function makePage(info) {
  for (const each of document.querySelectorAll("[data-info]")) each.textContent = info[each.dataset.info];
  const size = `${(info.parameters / 1e6).toFixed(2)} million parameters`;
  $("model").textContent = `The model has ${size} and a context of ${info.block_size} characters.`;
  for (const [name, count] of [["layer", info.n_layer], ["head", info.n_head]]) {
    for (let i = 0; i < count; i++) {
      const label = element("label");
      label.append(element("input", "", { type: "radio", name, value: i }), element("span", i + 1));
      $(name).append(label);
    }
  }
  $("changed").append(...info.chars.map((char, id) => element("option", glyph(char), { value: id })));
  makeMistakes(store.showMistake);
  makeScale(info);
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
