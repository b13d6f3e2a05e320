"""Export a trained model: to ONNX with the KV cache in the graph, to a Hugging Face folder, to a web page.

    python export.py --format onnx       out/onnx/model.onnx, for ONNX Runtime and sample.py --engine onnx
    python export.py --format hf         out/hf, for transformers, Optimum, transformers.js and vLLM
    python export.py --format web        out/web, a page that generates in the browser, for any static server

Every export ends with a check. The library that will read the files computes logits and greedy text, and both are
compared with PyTorch's.
"""

import gzip
import importlib.metadata
import importlib.util
import itertools
import json
import math
import tempfile
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
from torch.nn import functional as F

from kvgpt.checkpoint import load_checkpoint
from kvgpt.cli import Parser, fail, note, one_line_errors, path, pick_checkpoint, run_main
from kvgpt.decoding.ngrams import order_of
from kvgpt.decoding.verify import NEAR_TIE, first_difference, near_tie
from kvgpt.engines.onnx import OnnxGPT, quantize, write_onnx
from kvgpt.export.hf import GRAPH, model_type, write_folder
from kvgpt.files import lock_folder, read_tree, write_tree
from kvgpt.training.data import load_dataset
from kvgpt.training.objective import evaluate
from model import Sampling

HERE = Path(__file__).resolve().parent
ONNX = ("onnx", "onnxscript", "onnxruntime")
PACKAGES = {"onnx": ONNX, "hf": ("transformers", "tokenizers", "safetensors"), "web": ONNX}


def missing(packages):
    return [name for name in packages if importlib.util.find_spec(name) is None]


# -- checks ------------------------------------------------------------------------------------------------------------


def real_text(chars, block_size, data_dir):
    """Return (ids, val): the text for the checks, `(2, block_size)` int64, and the val split in data_dir.

    val is None if data_dir holds no prepared text, or a text of other characters. data/sample.txt then gives the ids.
    """
    try:
        dataset = load_dataset(data_dir, block_size)
        val = dataset.val if dataset.chars == chars else None
    except ValueError:
        val = None
    if val is None:
        text = (HERE / "data" / "sample.txt").read_text(encoding="utf-8")
        ids = [chars.index(char) for char in text if char in chars] or [0]
    else:
        ids = val[: 2 * block_size].tolist()
    ids *= math.ceil(2 * block_size / len(ids))  # a short text is repeated
    return torch.tensor(ids[: 2 * block_size]).view(2, block_size), val


@torch.no_grad()
def check(name, model, ids, logits, greedy, exact=True):
    """Print how far an exported model is from `model`. Exit if it should be exact and is not.

    name    name of the exported model in the messages
    ids     (2, block_size) int64
    logits  the exported model's for ids, `(2, block_size, V)`
    greedy  a function of a prompt `(1, T)`: the exported model's list of block_size ids, the prompt first
    """
    block_size, T = model.config.block_size, max(1, model.config.block_size // 16)
    difference = (model(ids)[0] - logits).abs().max().item()
    prompt = ids[:1, :T]
    ours, theirs = model.generate(prompt, block_size, temperature=0)[0].tolist(), greedy(prompt)
    position = first_difference(ours, theirs)
    num_equal = block_size if position is None else position
    line = f"{name}: logits within {difference:.1e} of PyTorch's"
    line += f", greedy text the same for {num_equal - T} of {block_size - T}"
    tie = False
    if position is not None:
        picks = ours[position], theirs[position]
        tie = near_tie(model, ours[:position], 0, position - T, picks, Sampling(temperature=0, seed=0))
    print(line + (", then a near-tie" if tie else ""), flush=True)
    if exact and not (difference <= NEAR_TIE and (position is None or tie)):  # NaN is not below
        fail(f"{name} is not the model: the logits must be within {NEAR_TIE}, and the greedy text the same")


def check_onnx(model, file, ids, exact=True):
    """Load an ONNX file, `check` it and return it as an OnnxGPT."""
    onnx = OnnxGPT(file)

    def greedy(prompt):
        return torch.cat((prompt, *onnx.stream(prompt, ids.size(1), temperature=0)), dim=1)[0].tolist()

    check(file.name, model, ids, chunked_logits(onnx, ids), greedy, exact)
    return onnx


def chunked_logits(onnx, ids):
    """Return the logits of ids `(B, T)`, computed through the cache in several calls.

    The first call prefills half of the tokens. The second takes a quarter as one chunk. The others take one token each.
    A graph without cache takes all tokens in one call.
    """
    T, past, logits = ids.size(1), [], []
    edges = sorted({0, T // 2, *range(T * 3 // 4, T + 1)}) if onnx.cached else [0, T]
    for begin, end in itertools.pairwise(edges):
        logits.append(onnx(ids[:, begin:end], past))
        past = onnx.past
    return torch.cat(logits, dim=1)


class WithLoss(nn.Module):
    """An OnnxGPT with the interface of GPT.forward that `evaluate` uses: (x, y) -> (logits, loss)."""

    def __init__(self, onnx):
        super().__init__()
        self.onnx = onnx

    def forward(self, x, y):
        logits = self.onnx(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten())


# -- formats -----------------------------------------------------------------------------------------------------------


def to_onnx(checkpoint, model, folder, args):
    chars, block_size = checkpoint.chars, model.config.block_size
    ids, val = real_text(chars, block_size, Path(args.data_dir))
    names = ["model.onnx", *["model_cacheless.onnx"] * args.cacheless, *["model_int8.onnx"] * args.int8]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:
        # make
        made = Path(made)
        write_onnx(model, chars, made / "model.onnx")
        if args.cacheless:
            write_onnx(model, chars, made / "model_cacheless.onnx", cached=False)
        if args.int8:
            quantize(made / "model.onnx", made / "model_int8.onnx")

        # check
        engines = {name: check_onnx(model, made / name, ids, exact="int8" not in name) for name in names}
        files = read_tree(made)

    # write; an earlier export's files may be another model's
    write_tree(folder, files, stale={"model_cacheless.onnx", "model_int8.onnx"} - set(names))

    # report sizes and losses
    sizes = {"PyTorch": sum(p.nbytes for p in model.parameters())}
    sizes |= {name: len(files[name]) for name in names}
    for name, size in sizes.items():
        loss = ""
        if val is not None:
            network = WithLoss(engines[name]) if name in engines else model
            loss = f", val loss {evaluate(network, val, block_size, torch.device('cpu'), nullcontext()):.4f}"
        print(f"{name}: {size / 1e6:.2f} MB{loss}", flush=True)
    if val is None:
        print(f"no val loss: {args.data_dir} holds no text of these characters (python data/prepare.py)")


def to_hf(checkpoint, model, folder, args):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    chars, block_size, graph = checkpoint.chars, model.config.block_size, not missing(ONNX)
    ids, _ = real_text(chars, block_size, Path(args.data_dir))

    def check_made(made):
        """Check the tokenizer, the network and the graph in a temporary folder."""
        hf, tokenizer = AutoModelForCausalLM.from_pretrained(made).eval(), AutoTokenizer.from_pretrained(made)
        text = "".join(chars[i] for i in ids[0])
        if tokenizer(text)["input_ids"] != ids[0].tolist() or tokenizer.decode(ids[0]) != text:
            fail(f"the tokenizer for {folder} does not give the text back")
        with torch.no_grad():
            logits = hf(ids).logits

        def greedy(prompt):
            # generate raises an error if max_length leaves no room for a new token
            out = hf.generate(prompt, max_length=block_size, do_sample=False) if block_size > 1 else prompt
            return out[0].tolist()

        check(f"{folder}, {type(hf).__name__}", model, ids, logits, greedy)
        if graph:
            check_onnx(model, made / GRAPH, ids)

    write_folder(model, chars, folder, graph, check_made)
    if not graph:
        note(f"{folder} lacks {GRAPH}, because it needs more packages: pip install {' '.join(ONNX)} and export again")


def to_web(checkpoint, model, folder, args):
    runtime = HERE / "web" / "node_modules" / "onnxruntime-web" / "dist"
    if not runtime.is_dir():
        fail(f"the page needs onnxruntime-web, and {runtime} is not there: make web fetches it (npm ci in web)")

    with one_line_errors():
        ngrams = ngrams_bytes(checkpoint.checked_ngrams())

    # write and check the model
    chars, config, loss = checkpoint.chars, model.config, checkpoint.best_val_loss
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:
        write_onnx(model, chars, Path(made) / "model.onnx")
        check_onnx(model, Path(made) / "model.onnx", real_text(chars, config.block_size, Path(args.data_dir))[0])
        graph = (Path(made) / "model.onnx").read_bytes()
    about = dict(
        chars=chars,
        block_size=config.block_size,
        n_layer=config.n_layer,
        n_kv_head=config.num_kv_heads,
        head_size=config.head_size,
        pos_emb=config.pos_emb,
        parameters=sum(p.numel() for p in model.parameters()),
        val_loss=float(loss) if math.isfinite(loss) else None,  # JSON has no infinity
    )

    # add the page; pack what is large, because a plain server packs nothing
    files = read_tree(HERE / "web" / "page")
    for name in ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs"):
        files[f"ort/{name}"] = (runtime / name).read_bytes()
    packed = {
        "ort/ort-wasm-simd-threaded.wasm.gz": (runtime / "ort-wasm-simd-threaded.wasm").read_bytes(),
        "ngrams.bin.gz": ngrams,
        "model.onnx.gz": graph,
    }
    files |= {name: gzip.compress(content, mtime=0) for name, content in packed.items()}
    write_tree(folder, files | {"model.json": json.dumps(about).encode()})
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{folder}: {size / 1e6:.1f} MB")
    print(f"serve it with  python -m http.server --directory {folder}  and open http://localhost:8000")


def ngrams_bytes(ngrams):
    """Return n-grams as uint32: order, the differences of the codes, the counts. No bytes for None."""
    if ngrams is None:
        return b""
    codes, counts = (ngrams[name].numpy().astype("<u4") for name in ("codes", "counts"))
    differences = np.diff(codes, prepend=np.uint32(0))  # small, so gzip makes them smaller
    return np.concatenate(([np.uint32(order_of(ngrams))], differences, counts)).astype("<u4").tobytes()


FORMATS = {"onnx": to_onnx, "hf": to_hf, "web": to_web}


def parse_args():
    parser = Parser(__doc__)
    add = parser.add_argument
    add(
        "--format",
        choices=FORMATS,
        required=True,
        help="output format; the files go to a folder of that name in --out_dir",
    )
    add("--out_dir", type=path, help="default: out")
    add(
        "--ckpt",
        type=path,
        metavar="FILE",
        help="default: ckpt.pt in --out_dir; without both, the model in the box",
    )
    add("--meta", type=path, metavar="FILE", help="the meta.pkl of a nanoGPT checkpoint")
    add("--int8", action="store_true", help="with onnx: also model_int8.onnx, a quarter of the size")
    add("--cacheless", action="store_true", help="with onnx: also model_cacheless.onnx, (token_ids) -> logits")
    add("--data_dir", type=path, default=str(HERE / "data"), help="the prepared text for val losses (default: data)")
    args = parser.parse_args()
    if args.format != "onnx" and (args.int8 or args.cacheless):
        parser.error(f"{'--int8' if args.int8 else '--cacheless'} goes with --format onnx, not {args.format}")
    return args


def main():
    args = parse_args()
    packages = PACKAGES[args.format]
    if missing(packages):
        fail(f"--format {args.format} needs more packages: pip install {' '.join(packages)}")
    if args.format == "hf" and int(importlib.metadata.version("transformers").split(".")[0]) < 5:
        fail("--format hf needs transformers 5 or newer (version 4 can read its folders): pip install -U transformers")
    with one_line_errors():
        checkpoint = load_checkpoint(pick_checkpoint(args.ckpt, args.out_dir), args.meta)
        model, _ = checkpoint.build_language_model()
        if args.format == "hf":
            model_type(model.config)
    if args.cacheless and model.config.block_size < 3:
        fail(f"--cacheless needs a context of 3 at least, and this model's is {model.config.block_size}")
    folder = Path(args.out_dir or "out") / args.format
    folder.parent.mkdir(parents=True, exist_ok=True)
    # beside the folder, because people publish all that is in it
    with lock_folder(folder.parent, f".{args.format}.lock"):
        FORMATS[args.format](checkpoint, model, folder, args)


if __name__ == "__main__":
    run_main(main)
