// Step 5: what a cache costs in models of real size. A calculator, which needs nothing of the run.
import { $, element, inEnglish } from "./draw.js";

const FIELDS = ["layers", "heads", "size", "bytes", "tokens"];
const LLAMA = "Llama 3 8B";

/** Make the calculator. info: model.json, because the model of this page is one of the choices. */
export function makeScale({ n_layer, n_kv_head, head_size, block_size }) {
  const models = {
    "this page": [n_layer, n_kv_head, head_size, 4, block_size],
    "GPT-2": [12, 12, 64, 2, 1024],
    [LLAMA]: [32, 8, 128, 2, 8192],
    "Llama 3 70B": [80, 8, 128, 2, 8192],
  };
  const field = (name) => $(`scale-${name}`);
  const choose = () => {
    models[field("model").value]?.forEach((value, i) => (field(FIELDS[i]).value = value));
    calculate();
  };
  const calculate = () => {
    const [layers, heads, size, bytes, tokens] = FIELDS.map((name) => Number(field(name).value));
    const token = 2 * layers * heads * size * bytes;
    const factors = `${layers} layers × ${heads} heads × ${size} numbers × ${bytes} bytes`;
    $("scale-formula").textContent = `A key and a value: 2 × ${factors} = ${inEnglish(token)} bytes.`;
    field("token").textContent = inBytes(token);
    field("text").textContent = inBytes(token * tokens);
    field("length").textContent = `${inEnglish(tokens)} token${tokens === 1 ? "" : "s"}`;
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

/** Return a number of bytes in the largest unit that leaves at least 1: 131072 is "128 KiB". */
function inBytes(count) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"];
  const power = Math.min(units.length - 1, Math.max(0, Math.floor(Math.log2(count || 1) / 10)));
  return `${Number((count / 1024 ** power).toPrecision(4))} ${units[power]}`;
}
