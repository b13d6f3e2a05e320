"""data/prepare.py in this process, a text, and a server: for test_prepare.py and extras/tests/test_prepare_tokens.py.

The network is a server on 127.0.0.1. Nothing leaves the machine.
"""

import ast
import http.server
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

import prepare
from helpers import assert_one_line, exit_code, tree

# the end of data/prepare.py, which calls main and turns errors into one line
MAIN = ast.unparse(ast.parse(Path(prepare.__file__).read_text(encoding="utf-8")).body[-1])
BODY = "Whan that Aprille, with his shoures soote,\r\nThe droghte of März\rhath\0 perced to the 😀\n\n ".encode() * 20


@pytest.fixture
def call(monkeypatch, capsys):
    """call(*args, **constants): data/prepare.py in this process, with other values for constants."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    def call(*args, **constants):
        monkeypatch.setattr("sys.argv", ["prepare.py", *map(str, args)])
        for name, value in constants.items():
            monkeypatch.setattr(prepare, name, value)
        code = 0
        try:
            exec(MAIN, vars(prepare) | {"__name__": "__main__"})
        except SystemExit as error:
            code = exit_code(error)
        except KeyboardInterrupt:  # would end pytest
            code = "a traceback"
        return subprocess.CompletedProcess(args, code, *capsys.readouterr())

    return call


@pytest.fixture
def old(data_dir, tmp_path):
    """A folder that holds data/sample.txt, prepared with --input."""
    return Path(shutil.copytree(data_dir, tmp_path / "old"))


@pytest.fixture
def text(tmp_path):
    """A file with BODY in it."""
    (tmp_path / "in.txt").write_bytes(BODY)
    return tmp_path / "in.txt"


class Handler(http.server.BaseHTTPRequestHandler):
    """Always gives the server's `answer`: a status, headers and a body."""

    def do_GET(self):
        self.server.asked.append(self.path)
        status, headers, body = self.server.answer
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    """A server whose `answer` is BODY. Its `url`, and in `asked` the paths that it was asked for."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.url, server.asked, server.answer = f"http://127.0.0.1:{server.server_port}/text", [], (200, {}, BODY)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


def assert_nothing_changed(result, folder, before, *words):
    """One line that has the words, nothing on stdout, and not a byte changed in the folder."""
    assert_one_line(result, *words)
    assert result.stdout == "" and tree(folder) == before
