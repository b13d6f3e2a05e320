// Step 7: what a cache costs in models of real size. A calculator, independent of the run.
import { inEnglish } from "../words.js";
import { $, element, refuse } from "../views/draw.js";

const FIELDS = ["parameters", "layers", "heads", "size", "bytes", "tokens"]; // tokens: a power of 2
const GPU = 80e9; // bytes
const LLAMA = "Llama 3 8B";

/** Make the calculator. The model of this page is one of the choices. */
function make(store, { n_layer, n_head, n_kv_head, head_size, block_size, parameters }) {
  const models = {
    "this page": [parameters / 1e9, n_layer, n_kv_head, head_size, 4, Math.log2(block_size), n_head],
    "GPT-2": [0.124, 12, 12, 64, 2, 10, 12],
    [LLAMA]: [8.03, 32, 8, 128, 2, 13, 32],
    "Llama 3 70B": [70.6, 80, 8, 128, 2, 13, 64],
  };
  const field = (name) => $(`scale-${name}`);
  const choose = () => {
    FIELDS.forEach((name, i) => (field(name).value = models[field("model").value]?.[i] ?? field(name).value));
    calculate();
  };
  const calculate = () => {
    const empty = FIELDS.map(field).find(({ value }) => !(value > 0));
    refuse("scale-refused", FIELDS.map(field), empty, "A number above 0, please.");
    $("scale-result").hidden = $("scale-formula").hidden = Boolean(empty);
    const [billions, layers, heads, size, bytes, power] = FIELDS.map((name) => Number(field(name).value));
    $("scale-sharing").textContent = sharing(models[field("model").value]?.at(-1), heads);
    if (empty) return;
    const tokens = 2 ** power;
    const token = 2 * layers * heads * size * bytes;
    const factors = `${layers} layers × ${heads} heads × ${size} numbers × ${bytes} bytes`;
    $("scale-formula").textContent = `A key and a value: 2 × ${factors} = ${inEnglish(token)} bytes.`;
    field("token").textContent = inBytes(token);
    field("text").textContent = inBytes(token * tokens);
    field("length").textContent = field("tokens").ariaValueText = `${inEnglish(tokens)} tokens`;
    drawGpu(billions * 1e9 * bytes, token * tokens, inEnglish(tokens));
  };
  field("model").append(...Object.keys(models).map((name) => element("option", name)), element("option", "your own"));
  field("model").value = LLAMA;
  field("model").onchange = choose;
  for (const name of FIELDS) {
    field(name).oninput = () => {
      if (name !== "tokens") field("model").value = "your own";
      calculate();
    };
  }
  choose();
}

/** Draw the memory of a GPU: the weights, and the cache of each user who fits next to them. */
function drawGpu(weights, user, tokens) {
  const users = Math.max(0, Math.floor((GPU - weights) / user));
  const part = (bytes) => `${(100 * bytes) / GPU}%`;
  const bar = element("i", "weights", { className: "weights", style: `width: ${part(Math.min(weights, GPU))}` });
  const drawn = Math.min(users, 200);
  const style = `width: calc(${part((user * users) / drawn)} - 1px)`;
  const caches = Array.from({ length: drawn }, () => element("i", "", { style }));
  $("gpu").replaceChildren(bar, ...caches);
  const fit = `holds the weights and the caches of ${inEnglish(users)} user${users === 1 ? "" : "s"} with ${tokens} tokens each.`;
  const none = weights > GPU ? "is too small for the weights alone." : "holds the weights, but not one cache as long as this.";
  $("scale-users").textContent = `An 80 GB GPU ${users ? fit : none}`;
  $("gpu").ariaLabel = $("scale-users").textContent;
}

/** Return how many query heads share a key/value head, in words, or "" if the number of query heads is unknown. */
function sharing(queryHeads, heads) {
  if (!queryHeads) return "";
  const has = `This model has ${queryHeads} query heads in each layer, and`;
  const ratio = queryHeads / heads;
  if (ratio === 1) return `${has} each has its own key/value head.`;
  return `${has} every ${ratio} of them share one key/value head. Without that, its cache would be ${ratio} times as large.`;
}

/** Return a number of bytes in the largest unit of which there is at least one: 131072 is "128 KiB". */
function inBytes(count) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"];
  const power = Math.min(units.length - 1, Math.max(0, Math.floor(Math.log2(count || 1) / 10)));
  return `${Number((count / 1024 ** power).toPrecision(4))} ${units[power]}`;
}

export const cost = { make };
