"""The web page: the model and ONNX Runtime for browsers, as files for any static server."""

import gzip
import hashlib
import json
import re
import tempfile
from pathlib import Path

import torch

from extras.decode.explain import attention_weights
from extras.formats.compare import own_text
from extras.formats.folder import read_tree, write_tree
from extras.formats.onnx import compare_onnx, write_onnx

WEB = Path(__file__).resolve().parent.parent / "web"
# the defaults of the page's form, and the moment at which it opens: after `new` characters
START = dict(prompt="O Romeo, ", temperature=0.8, seed=5, new=25)


def export_web(model, tokenizer, folder):
    """Write the page for a GPT into `folder`. Tokens must be characters.

    Raises ValueError, and does not touch the folder, if the graph does not compute what the model does.
    """
    chars = tokenizer.state_dict().get("chars")
    if not chars:
        why = "the page needs a model whose tokens are characters, but this one has a tokenizer"
        raise ValueError(f"{why}: see --format onnx and hf")
    runtime = WEB / "node_modules" / "onnxruntime-web" / "dist"
    if not runtime.is_dir():
        raise ValueError(f"the page needs {runtime}: make web installs it (npm install --prefix extras/web)")

    # make and check the graph
    config = model.config
    with tempfile.TemporaryDirectory() as made:
        file = Path(made) / "model.onnx"
        write_onnx(model, tokenizer, file, queries=True)
        compare_onnx(file, model, own_text(model))
        fits = set(START["prompt"]) <= set(chars) and len(START["prompt"]) < config.block_size
        start = START | previous_token_head(model) | ({} if fits else dict(prompt=""))
        graph = file.read_bytes()
    sizes = ("block_size", "n_layer", "n_head", "n_kv_head", "head_size", "pos_emb")
    about = dict(chars=chars, start=start, opening=opening(model, chars, start))
    about |= {name: getattr(config, name) for name in sizes}
    about["parameters"] = sum(p.numel() for p in model.parameters())

    # add the page, and compress large files, because a plain server compresses nothing
    packed = {
        "ort/ort-wasm-simd-threaded.wasm.gz": (runtime / "ort-wasm-simd-threaded.wasm").read_bytes(),
        "model.onnx.gz": graph,
    }
    files = read_tree(WEB / "page") | {name: gzip.compress(content, mtime=0) for name, content in packed.items()}
    for name in ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs"):
        files[f"ort/{name}"] = (runtime / name).read_bytes()
    files["model.json"] = json.dumps(about, separators=(",", ":")).encode()
    files["page.png"] = (WEB.parent.parent / "assets" / "page.png").read_bytes()  # the preview of links to the page
    html = with_modules(files["index.html"].decode(), files)
    files["index.html"] = with_versions(html, files).encode()
    write_tree(folder, files)
    print(f"{folder}: {sum(map(len, files.values())) / 1e6:.1f} MB")
    print(f"serve it with  python -m http.server --directory {folder}  and open http://localhost:8000")


def with_modules(html, files):
    """Preload all modules. Otherwise the browser requests them one after the other, as it finds the imports."""
    modules = [name for name in sorted(files) if name.endswith((".js", ".mjs")) and f'src="{name}"' not in html]
    lines = [f'<link rel="modulepreload" href="{name}">' for name in modules]
    return html.replace("<!-- the exporter adds the modules here -->", "\n  ".join(lines))


def with_versions(html, files):
    """Add a hash to the address of each file that the page fetches, so that no browser mixes two exports."""
    fetched = r'(?<=href=")[^"]+(?=" as="fetch")'
    return re.sub(fetched, lambda name: f"{name[0]}?{hashlib.sha256(files[name[0]]).hexdigest()[:8]}", html)


def previous_token_head(model):
    """Return the head that looks most at the token before, as dict(layer=, head=, previous=).

    previous  the attention that it gives that token, on average over text that the model generates
    """
    text = own_text(model)
    shares = []
    for layer in range(model.config.n_layer):
        weights = attention_weights(model, text, layer)
        shares.append(weights.diagonal(-1, 2, 3).mean((0, 2)))
    shares = torch.stack(shares)  # (layers, heads)
    layer, head = divmod(shares.argmax().item(), model.config.n_head)
    return dict(layer=layer, head=head, previous=round(shares.max().item(), 2))


def opening(model, chars, start):
    """Return the text of the first picture, which is there before the model has arrived."""
    prompt = start["prompt"] or ("\n" if "\n" in chars else chars[0])  # as in request.js
    steps = min(start["new"], -(-7 * (model.config.block_size - len(prompt)) // 10))  # as in store.js
    sampling = {name: start[name] for name in ("temperature", "seed")}
    ids = model.generate(torch.tensor([[chars.index(char) for char in prompt]]), steps, **sampling)
    return dict(ids=ids[0].tolist(), given=len(prompt))
