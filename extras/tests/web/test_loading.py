"""How the exported page loads in Chromium, from a server that counts requests and breaks files. See loading.mjs."""

import gzip
import hashlib
import re
from pathlib import Path

import pytest

from extras.tests.web.conftest import Handler

pytestmark = pytest.mark.slow

MODEL, RUNTIME = "model.onnx.gz", "ort/ort-wasm-simd-threaded.wasm.gz"
FETCHED = [MODEL, RUNTIME, "model.json"]

CHECK = "Check your connection and reload."
AGAIN = "Reload the page. If that does not help, export it again: python -m extras.export --format web."
# name: the broken file, how it is broken, and what the page says
BROKEN = {
    "whole": (None, None, ""),
    "no answer for the worker": ("worker.js", "none", f"worker.js could not be downloaded. {CHECK}"),
    "no answer for its modules": ("network.js", "none", f"A module of the page did not load. {CHECK}"),
    "no answer for a view": ("views/draw.js", "none", f"Part of the page did not load. {CHECK}"),
    "no answer for ort": ("ort/ort-wasm-simd-threaded.mjs", "none", f"The model could not be downloaded. {CHECK}"),
    "model missing": (MODEL, "missing", f"The server answered 404 for {MODEL}. {AGAIN}"),
    "model cut off": (MODEL, "cut off", f"{MODEL} could not be downloaded. {CHECK}"),
    "model damaged": (MODEL, "damaged", f"{MODEL} is damaged. {AGAIN}"),
    "model unpacked": (MODEL, "unpacked", ""),  # as some servers send what ends in .gz
}


class BrokenHandler(Handler):
    """Serves the page at /NAME/, with the one file broken that BROKEN names."""

    def do_GET(self):
        _, page, name = self.path.partition("?")[0].split("/", 2)
        page = page.replace("%20", " ")
        broken, how, _ = BROKEN.get(page, (None, None, None))
        self.server.requests.append((page, name))
        self.path = f"/{name}"
        if name != broken:
            return super().do_GET()
        self.close_connection = True
        if how == "missing":
            return self.send_error(404)
        if how == "none":
            return
        content = Path(self.directory, name).read_bytes()
        body = gzip.decompress(content) if how == "unpacked" else content[: len(content) // 2]
        self.send_response(200)
        self.send_header("Content-Length", len(content) if how == "cut off" else len(body))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture(scope="module")
def seen(serve, drive, page):
    """What loading.mjs saw, the requests, a list of (page, file), and the folder of the page."""
    server = serve(BrokenHandler)
    urls = {name: f"{server.address}/{name}/" for name in BROKEN}
    urls["file"] = (page / "index.html").as_uri()
    return drive("loading.mjs", dict(urls=urls)) | {"requests": server.requests, "folder": page}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_does_not_arrive_is_named_with_the_way_out(seen, name):
    said = seen[name]["said"]
    assert said.startswith(BROKEN[name][2]) and "http.server" not in said
    assert ("python" in said) == (AGAIN in BROKEN[name][2])
    assert BROKEN[name][2] or seen[name]["state"] == "ready"


def test_a_page_opened_as_a_file_asks_to_be_served(seen):
    assert "python -m http.server" in seen["file"]["said"]


def test_files_are_requested_only_once_and_the_large_ones_last(seen):
    assert seen["whole"]["state"] not in ("loading", "failed")
    names = [name for page, name in seen["requests"] if page == "whole"]
    assert all(names.count(name) == 1 for name in FETCHED)
    small = max(names.index(name) for name in ("model.json", "app.js", "style.css"))
    assert small < min(names.index(MODEL), names.index(RUNTIME))


def test_all_files_of_the_page_exist_and_two_exports_are_never_mixed(seen):
    """The files that the page fetches have a hash in their address, so a browser cannot reuse older ones."""
    html = (seen["folder"] / "index.html").read_text(encoding="utf-8")
    names = re.findall(r'(?:href|src|property="og:image" content)="([^"#]+)"', html)
    assert {"page.png", "icon.svg", "style.css"} <= set(names)
    for name, _, version in (name.partition("?") for name in names if "://" not in name):
        content = (seen["folder"] / name).read_bytes()
        assert version == (hashlib.sha256(content).hexdigest()[:8] if name in FETCHED else "")
