"""Take a trained model elsewhere: ONNX with the KV cache in the graph, a Hugging Face folder, a web page.

    python export.py --format onnx       out/onnx/model.onnx, for ONNX Runtime and sample.py --engine onnx
    python export.py --format hf         out/hf, for transformers' AutoModelForCausalLM and AutoTokenizer
    python export.py --format web        out/web, a page that generates in the browser, for any static server

Each ends by comparing what it wrote with the model, as the library that will read it sees it, on real text.
"""

import argparse
import copy
import importlib.metadata
import importlib.util
import itertools
import json
import logging
import math
import shutil
import sys
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn as nn

from checkpoint import load_checkpoint, load_model, write_atomically
from hf import model_type, write_folder
from onnx_gpt import OnnxGPT
from sample import NEAR_TIE, OneLineParser, near_tie, path
from train import evaluate, load_data

HERE = Path(__file__).resolve().parent
ONNX = ("onnx", "onnxscript", "onnxruntime")
NEEDS = {"onnx": ONNX, "hf": ("transformers", "tokenizers", "safetensors"), "web": ONNX}

# -- ONNX --------------------------------------------------------------------------------------------------------------


class Past:
    """A layer's cache as a graph has it: what came in goes out with this call's keys and values behind it.

    Stands in for a layer's KVCache, of which a forward calls nothing but `write`.
    """

    def __init__(self, key, value):
        self.key, self.value = key, value

    def write(self, pos, k, v, end):
        self.key = torch.cat((self.key, k), dim=2)
        self.value = torch.cat((self.value, v), dim=2)
        return self.key, self.value


class Stateless(nn.Module):
    """A GPT whose cache is an argument and a result: the model's own layers, with a Past in each."""

    def __init__(self, model):
        super().__init__()
        self.model = copy.deepcopy(model)

    def forward(self, input_ids, attention_mask, position_ids, past_key_values):
        """Logits `(B, T, vocab_size)` and every layer's (key, value), `(B, n_kv_head, past + T, head_size)` each.

        input_ids, position_ids  (B, T) int64
        attention_mask           (B, past + T) int64: 0 where a slot holds padding
        past_key_values          n_layer pairs (key, value), `(B, n_kv_head, past, head_size)` each; past may be 0
        """
        caches = [Past(*pair) for pair in past_key_values]
        for block, cache in zip(self.model.transformer["h"], caches):
            block.attn.cache = cache
        slot = torch.arange(attention_mask.size(1), device=input_ids.device)
        query = torch.arange(input_ids.size(1), device=input_ids.device)[:, None] + past_key_values[0][0].size(2)
        # padding sees itself: a softmax over nothing makes NaNs, and what is masked is still multiplied, by 0
        mask = (slot <= query) & (attention_mask[:, None, None] != 0) | (slot == query)
        logits = self.model.lm_head(self.model.features(input_ids, position_ids, mask=mask))
        return logits, [(cache.key, cache.value) for cache in caches]


class Cacheless(nn.Module):
    """A GPT's forward and nothing else."""

    def __init__(self, model):
        super().__init__()
        self.model = copy.deepcopy(model)

    def forward(self, token_ids):
        return self.model(token_ids)[0]


@contextmanager
def quiet():
    """Inside, libraries say nothing below an error: their advice is for those who build a graph by hand."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def write_onnx(model, chars, file, cached=True):
    """Write the model to `file`: one ONNX file of opset 20, dynamic in batch and lengths, whole or not at all.

    cached  with the KV cache as inputs `past_key_values.{i}.key|value` and outputs `present.{i}.key|value`; False:
            (token_ids) -> logits
    Axes have the names that Optimum and transformers.js give them. The metadata holds the characters and the
    model_args: the file is enough to generate from.
    """
    config = model.config
    layers, heads, size = config.n_layer, config.kv_heads, config.head_size
    batch, length, past = "batch_size", "sequence_length", "past_sequence_length"
    ids = torch.zeros(2, 3, dtype=torch.int64)  # an example; its sizes are not 1, which would be taken for constant
    if cached:
        pairs = [(torch.zeros(2, heads, 5, size), torch.zeros(2, heads, 5, size)) for _ in range(layers)]
        inputs = (ids, torch.ones(2, 8, dtype=torch.int64), torch.arange(5, 8).repeat(2, 1), pairs)
        names = ["input_ids", "attention_mask", "position_ids"]
        axes = [{0: batch, 1: length}, {0: batch, 1: f"{past} + {length}"}, {0: batch, 1: length}]
        axes.append([({0: batch, 2: past},) * 2] * layers)
    else:
        inputs, names, axes = (ids,), ["token_ids"], [{0: batch, 1: length}]
    slots = [f"{i}.{kind}" for i in range(layers) for kind in ("key", "value")] if cached else []
    with quiet():
        proto = torch.onnx.export(
            (Stateless if cached else Cacheless)(model).eval(),
            inputs,
            input_names=names + [f"past_key_values.{slot}" for slot in slots],
            output_names=["logits"] + [f"present.{slot}" for slot in slots],
            dynamic_shapes=tuple(axes),
            opset_version=20,
            dynamo=True,
            verbose=False,
        ).model_proto
    for key, value in (("chars", chars), ("model_args", json.dumps(asdict(config)))):
        proto.metadata_props.add(key=key, value=value)
    write_atomically(file, proto.SerializeToString())


def quantize(file, to):
    """Write the model in `file` again with the matrices of its products in int8, a quarter of the bytes."""
    from onnxruntime.quantization import quantize_dynamic

    with quiet():
        quantize_dynamic(file, to, op_types_to_quantize=["MatMul"])


# -- the checks --------------------------------------------------------------------------------------------------------


def real_text(chars, block_size, data_dir):
    """(ids, val): real text to check on, `(2, block_size)` int64, and the val split in data_dir if its characters are
    these, else None."""
    try:
        known, data, _ = load_data(data_dir, block_size)
        val = data["val"] if known == chars else None
    except ValueError:
        val = None
    text = (HERE / "data" / "sample.txt").read_text(encoding="utf-8")
    ids = [chars.index(char) for char in text if char in chars] or [0]
    ids = ids if val is None else val[: 2 * block_size].tolist()
    return torch.tensor((ids * (2 * block_size))[: 2 * block_size]).view(2, block_size), val


@torch.no_grad()
def check(what, model, ids, logits, greedy, exact=True):
    """Print how far `what` is from the model, and exit if it is to be exact and is another model.

    ids     (2, block_size) int64
    logits  of all of them; greedy: a function of a prompt `(1, T)`, its greedy text with it, a list of block_size ids
    """
    S, T = model.config.block_size, max(1, model.config.block_size // 16)
    difference = (model(ids)[0] - logits).abs().max().item()
    ours, theirs = model.generate(ids[:1, :T], S, temperature=0)[0].tolist(), greedy(ids[:1, :T])
    same = next((i for i, picks in enumerate(zip(ours, theirs)) if picks[0] != picks[1]), S)
    line = f"{what}: logits within {difference:.1e} of PyTorch's, greedy text the same for {same - T} of {S - T}"
    tie = same < S and near_tie(model, ours[:same], 0, same - T, (ours[same], theirs[same]), 0, 0.0, None, None)
    print(line + (", then a near-tie" if tie else ""), flush=True)
    if exact and (difference > NEAR_TIE or (same < S and not tie)):
        fail(f"{what} is not the model: the logits must be within {NEAR_TIE}, and the greedy text the same")


def stepwise(onnx, ids):
    """ONNX Runtime's logits of ids `(B, S)`: half of them prefilled, a quarter in one chunk, then one by one; all at
    once where there is no cache."""
    if not onnx.cached:
        return torch.from_numpy(onnx(ids.numpy()))
    S, past, logits = ids.size(1), None, []
    for begin, end in itertools.pairwise(sorted({0, S // 2, *range(S * 3 // 4, S + 1)})):
        logits.append(torch.from_numpy(onnx(ids[:, begin:end].numpy(), past)))
        past = onnx.past
    return torch.cat(logits, dim=1)


def check_onnx(model, file, ids, exact=True):
    """`check` of a file that write_onnx or quantize wrote. Returns it, loaded."""
    onnx = OnnxGPT(file)

    def greedy(prompt):
        return [*prompt[0].tolist(), *(token.item() for token in onnx.stream(prompt, ids.size(1), temperature=0))]

    check(file.name, model, ids, stepwise(onnx, ids), greedy, exact)
    return onnx


class WithLoss(nn.Module):
    """An OnnxGPT as train.evaluate calls a model: (x, y) -> (logits, loss)."""

    def __init__(self, onnx):
        super().__init__()
        self.onnx = onnx

    def forward(self, x, y):
        logits = torch.from_numpy(self.onnx(x.numpy()))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


# -- the formats -------------------------------------------------------------------------------------------------------


def to_onnx(model, chars, folder, args):
    S = model.config.block_size
    ids, val = real_text(chars, S, Path(args.data_dir))
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("model_int8.onnx", "model_cacheless.onnx"):
        (folder / name).unlink(missing_ok=True)  # nothing of another model beside this one
    made = ["model.onnx"]
    write_onnx(model, chars, folder / "model.onnx")
    if args.cacheless:
        made.append("model_cacheless.onnx")
        write_onnx(model, chars, folder / "model_cacheless.onnx", cached=False)
    if args.int8:
        made.append("model_int8.onnx")
        quantize(folder / "model.onnx", folder / "model_int8.onnx")
    losses = {"PyTorch": model}
    for name in made:
        losses[name] = WithLoss(check_onnx(model, folder / name, ids, exact="int8" not in name))
    for name, each in losses.items():
        size = (folder / name).stat().st_size if name in made else sum(p.nbytes for p in model.parameters())
        loss = "" if val is None else f", val loss {evaluate(each, val, S, torch.device('cpu'), nullcontext()):.4f}"
        print(f"{name}: {size / 1e6:.2f} MB{loss}", flush=True)
    if val is None:
        print(f"no val loss: {args.data_dir} holds no text of these characters (python data/prepare.py)")


def to_hf(model, chars, folder, args):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    S = model.config.block_size
    write_folder(model, chars, folder)
    hf, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    ids, _ = real_text(chars, S, Path(args.data_dir))
    text = "".join(chars[i] for i in ids[0])
    if tokenizer(text)["input_ids"] != ids[0].tolist() or tokenizer.decode(ids[0]) != text:
        fail(f"the tokenizer in {folder} does not give the text back")
    with torch.no_grad():
        logits = hf(ids).logits
    check(
        f"{folder}, {type(hf).__name__}",
        model,
        ids,
        logits,
        lambda prompt: (hf.generate(prompt, max_length=S, do_sample=False) if S > 1 else prompt)[0].tolist(),
    )


def to_web(model, chars, folder, args):
    runtime = HERE / "web" / "node_modules" / "onnxruntime-web" / "dist"
    if not runtime.is_dir():
        fail(f"the page needs onnxruntime-web, and {runtime} is not there: make web fetches it (npm ci in web)")
    config = model.config
    (folder / "ort").mkdir(parents=True, exist_ok=True)
    for name in ("index.html", "style.css", "app.js"):
        shutil.copy(HERE / "web" / name, folder)
    for name in ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm"):
        shutil.copy(runtime / name, folder / "ort")
    write_onnx(model, chars, folder / "model.onnx")
    check_onnx(model, folder / "model.onnx", real_text(chars, config.block_size, Path(args.data_dir))[0])
    loss = load_checkpoint(args.ckpt).get("best_val_loss", math.nan)
    about = dict(
        chars=chars,
        block_size=config.block_size,
        n_layer=config.n_layer,
        n_kv_head=config.kv_heads,
        head_size=config.head_size,
        parameters=sum(p.numel() for p in model.parameters()),
        val_loss=float(loss) if math.isfinite(loss) else None,  # JSON has no infinity
    )
    write_atomically(folder / "model.json", json.dumps(about).encode())
    print(f"{folder}: serve it with  python -m http.server --directory {folder}  and open http://localhost:8000")


FORMATS = {"onnx": to_onnx, "hf": to_hf, "web": to_web}


def fail(message):
    sys.exit(f"export.py: {message}")


def main():
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--format", choices=FORMATS, required=True, help="what to write, into a folder of that name in --out_dir")
    add("--out_dir", type=path, default="out", help="default: out")
    add("--ckpt", type=path, metavar="FILE", help="default: ckpt.pt in --out_dir")
    add("--meta", type=path, metavar="FILE", help="the meta.pkl that goes with a nanoGPT checkpoint")
    add("--int8", action="store_true", help="with onnx: model_int8.onnx too, a quarter of the size")
    add("--cacheless", action="store_true", help="with onnx: model_cacheless.onnx too, (token_ids) -> logits")
    add("--data_dir", type=path, default=str(HERE / "data"), help="the prepared text for val losses (default: data)")
    args = parser.parse_args()
    args.ckpt = args.ckpt or Path(args.out_dir) / "ckpt.pt"
    if args.format != "onnx" and (args.int8 or args.cacheless):
        parser.error(f"{'--int8' if args.int8 else '--cacheless'} goes with --format onnx, not {args.format}")
    if any(importlib.util.find_spec(name) is None for name in NEEDS[args.format]):
        fail(f"--format {args.format} needs more packages: pip install {' '.join(NEEDS[args.format])}")
    if args.format == "hf" and int(importlib.metadata.version("transformers").split(".")[0]) < 5:
        fail("--format hf needs transformers 5 or newer (what it writes, 4 can read): pip install -U transformers")
    try:
        model, chars = load_model(args.ckpt, args.meta)
        if args.format == "hf":
            model_type(model.config)
    except (FileNotFoundError, ValueError) as error:
        fail(error)
    if args.cacheless and model.config.block_size < 3:
        fail(f"--cacheless needs a context of 3 at least, and this model's is {model.config.block_size}")
    folder = Path(args.out_dir) / args.format
    FORMATS[args.format](model, chars, folder, args)


if __name__ == "__main__":
    if sys.stdout is not None:
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        main()
    except OSError as error:
        fail(f"cannot write {error.filename or 'its output'}: {error.strerror}")
    except KeyboardInterrupt:
        sys.exit(130)
