"""The exported page of a small random model, which all tests here share."""

import json
import os
import queue
import shutil
import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from helpers import ROOT, ok, random_model, run, save_model, tokens_differ
from model import GPTConfig

WEB = ROOT / "extras" / "web"
WIDE = "\U0001d54f"  # one character, two units of a JavaScript string
CHARS = "\n !,.:?<>&/ABCDEFGHROabcdefghijklmnopqrstuvwxyzé" + WIDE
CONFIG = GPTConfig(
    block_size=64, vocab_size=len(CHARS), n_layer=2, n_head=4, n_kv_head=2, n_embd=32, bias=False,
    activation="swiglu", pos_emb="rope", qk_norm=True,
)  # fmt: skip
DEFAULT = dict(prompt="O Romeo, ", temperature=0.8, top_k=None, seed=5, max_new_tokens=None)  # of the form


def ids_of(text):
    return [CHARS.index(char) for char in text]


def assert_text(model, text, job):
    """`text` is the prompt and PyTorch's continuation, without a cache."""
    filters = dict(job)
    prompt = filters.pop("prompt") or "\n"
    steps = filters.pop("max_new_tokens") or CONFIG.block_size
    seed = filters.pop("seed")
    assert text.startswith(prompt)
    expected = model.generate(torch.tensor([ids_of(prompt)]), steps, kv_cache=False, seed=seed, **filters)
    assert tokens_differ(model, torch.tensor([ids_of(text)]), expected, len(prompt), [0], seed, filters) is None


@pytest.fixture(scope="session")
def model():
    return random_model(CONFIG, seed=3)


@pytest.fixture(scope="session")
def page(model, tmp_path_factory):
    """The folder of the exported page."""
    if not (WEB / "node_modules" / "onnxruntime-web").is_dir():
        pytest.skip("no extras/web/node_modules: run npm install in extras/web")
    folder = tmp_path_factory.mktemp("out")
    save_model(folder, model, CHARS)
    ok(run("-m", "extras.export", "--format", "web", "--out_dir", folder))
    return folder / "web"


class Handler(SimpleHTTPRequestHandler):
    """Serves a folder as `python -m http.server` does. A page may post a report."""

    def do_POST(self):
        self.server.reports.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture(scope="session")
def serve(page):
    """Return a function that serves the page with a handler and returns the server, with its `address`."""
    servers = []

    def start(handler=Handler):
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=page))
        server.address = f"http://127.0.0.1:{server.server_port}"
        server.reports, server.requests = queue.Queue(), []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="session")
def drive():
    """Return a function that runs a script with a plan and returns what it reports. The plan gets `chromium`."""

    def start(script, plan):
        chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
        if not (chromium and shutil.which("node") and (WEB / "node_modules" / "playwright-core").is_dir()):
            pytest.skip("needs Chromium (or CHROMIUM=/path/to/it), Node.js and npm install in extras/web")
        command = ["node", WEB / "tests" / script, json.dumps(dict(plan, chromium=chromium))]
        return json.loads(ok(subprocess.run(command, capture_output=True, encoding="utf-8", timeout=240)).stdout)

    return start
