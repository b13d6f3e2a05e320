"""The web page: the model, its n-grams and ONNX Runtime for browsers, as files for any static server."""

import gzip
import json
import re
import tempfile
from pathlib import Path

import numpy as np

from kvgpt.cli import fail
from kvgpt.decoding.ngrams import order_of
from kvgpt.interop.check import own_text
from kvgpt.interop.checksums import read_tree, sha256, write_tree
from kvgpt.interop.onnx import compare_onnx, write_onnx

WEB = Path(__file__).resolve().parent.parent.parent / "web"


def export_web(model, tokenizer, checkpoint, folder):
    """Write the page for a checkpoint, whose GPT is `model`, into `folder`. Tokens must be characters.

    If the graph does not compute what the model does, it exits with one line and does not touch the folder.
    """
    chars = tokenizer.state_dict().get("chars") or fail(
        "the page needs a model whose tokens are characters, but this one has a tokenizer: see --format onnx and hf"
    )
    runtime = WEB / "node_modules" / "onnxruntime-web" / "dist"
    if not runtime.is_dir():
        fail(f"the page needs onnxruntime-web, but {runtime} is missing: make web installs it (npm ci in web)")

    # make and check the graph
    config = model.config
    with tempfile.TemporaryDirectory() as made:
        file = Path(made) / "model.onnx"
        write_onnx(model, tokenizer, file, queries=True)
        compare_onnx(file, model, own_text(model))
        graph = file.read_bytes()
    about = dict(
        chars=chars,
        block_size=config.block_size,
        n_layer=config.n_layer,
        n_head=config.n_head,
        n_kv_head=config.num_kv_heads,
        head_size=config.head_size,
        pos_emb=config.pos_emb,
        parameters=sum(p.numel() for p in model.parameters()),
    )

    # add the page, and compress large files, because a plain server compresses nothing
    packed = {
        "ort/ort-wasm-simd-threaded.wasm.gz": (runtime / "ort-wasm-simd-threaded.wasm").read_bytes(),
        "ngrams.bin.gz": ngrams_bytes(checkpoint.get("ngrams")),
        "model.onnx.gz": graph,
    }
    files = read_tree(WEB / "page") | {name: gzip.compress(content, mtime=0) for name, content in packed.items()}
    for name in ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs"):
        files[f"ort/{name}"] = (runtime / name).read_bytes()
    files["model.json"] = json.dumps(about).encode()
    files["page.png"] = (WEB.parent / "assets" / "page.png").read_bytes()  # the preview of links to the page
    files["index.html"] = with_versions(files["index.html"].decode(), files).encode()
    write_tree(folder, files)
    print(f"{folder}: {sum(map(len, files.values())) / 1e6:.1f} MB")
    print(f"serve it with  python -m http.server --directory {folder}  and open http://localhost:8000")


def with_versions(html, files):
    """Add a hash to the address of each file that the page fetches, so that no browser mixes two exports."""
    fetched = r'(?<=href=")[^"]+(?=" as="fetch")'
    return re.sub(fetched, lambda name: f"{name[0]}?{sha256(files[name[0]])[:8]}", html)


def ngrams_bytes(ngrams):
    """Return n-grams as uint32: order, the differences of the codes, the counts. No bytes for None."""
    if ngrams is None:
        return b""
    codes, counts = (ngrams[name].numpy().astype("<u4") for name in ("codes", "counts"))
    differences = np.diff(codes, prepend=np.uint32(0))  # small numbers, which gzip compresses well
    return np.concatenate(([np.uint32(order_of(ngrams))], differences, counts)).astype("<u4").tobytes()
