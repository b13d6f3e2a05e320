"""Firefox and WebKit, driven with the standard library alone.

Firefox listens for Marionette's commands: JSON over TCP. They are the commands that geckodriver would send.
WebKitWebDriver listens for the same commands by WebDriver's paths: JSON over HTTP.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

PATIENCE = 120  # seconds until something that does not happen is an error
MINIBROWSER = map(str, Path("/usr/lib").glob("*/webkit2gtk-4*/MiniBrowser"))  # in no folder of PATH
PROGRAMS = {  # what a browser needs, and where each program may be
    "Firefox": {"Firefox": [os.environ.get("FIREFOX"), "firefox-esr", "firefox"]},
    "WebKit": {
        "MiniBrowser": [os.environ.get("MINIBROWSER"), *MINIBROWSER],
        "WebKitWebDriver": ["WebKitWebDriver"],
        "Xvfb": ["Xvfb"],
    },
}


def program(browser, name):
    """Return the path of a program, or None if it is not installed."""
    return next(filter(None, map(shutil.which, filter(None, PROGRAMS[browser][name]))), None)


def missing(browser):
    """Return the names of the programs that are not installed."""
    return [name for name in PROGRAMS[browser] if not program(browser, name)]


def until(condition):
    """Return the first value of condition() that is true."""
    end = time.monotonic() + PATIENCE
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"not within {PATIENCE} seconds")
        time.sleep(0.05)
    return value


class Browser:
    """A page in a browser. `send(firefox_name, method, path, body)` is a command under both of its names."""

    def __init__(self, send):
        self.send = send

    def open(self, url):
        self.send("Navigate", "POST", "/url", {"url": url})

    def run(self, script, *args):
        """Return what `script`, the body of a JavaScript function, returns."""
        return self.send("ExecuteScript", "POST", "/execute/sync", {"script": script, "args": args})

    def click(self, selector):
        """Click as a mouse does. An element that is covered or disabled gets no click."""
        found = self.send("FindElement", "POST", "/element", {"using": "css selector", "value": selector})
        (element,) = found.values()
        self.send("ElementClick", "POST", f"/element/{element}/click", {"id": element})

    def wait(self, script):
        return until(lambda: self.run(script))


@contextlib.contextmanager
def child(command, **kwargs):
    """Run a program inside the block."""
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **kwargs) as process:
        try:
            yield process
        finally:
            process.terminate()


@contextlib.contextmanager
def firefox(home):
    # a proxy that does not exist, because Firefox would ask for news of its own
    prefs = {"marionette.port": 0, "network.proxy.type": 1, "network.proxy.http": "127.0.0.1"}
    prefs |= {"network.proxy.http_port": 9, "network.proxy.ssl": "127.0.0.1", "network.proxy.ssl_port": 9}
    lines = [f"user_pref({json.dumps(name)}, {json.dumps(value)});\n" for name, value in prefs.items()]
    (home / "user.js").write_text("".join(lines), encoding="utf-8")
    command = [program("Firefox", "Firefox"), "--headless", "--no-remote", "--marionette", "--profile", home]
    port = home / "MarionetteActivePort"
    with contextlib.ExitStack() as stack:
        stack.enter_context(child(command, stdout=subprocess.DEVNULL, env={**os.environ, "HOME": str(home)}))
        until(lambda: port.exists() and port.read_text(encoding="utf-8"))
        address = ("127.0.0.1", int(port.read_text(encoding="utf-8")))
        connection = stack.enter_context(socket.create_connection(address, timeout=PATIENCE))
        stream = stack.enter_context(connection.makefile("rb"))

        def receive():
            length = b""
            while (digit := stream.read(1)) != b":":
                assert digit, "Firefox has ended"
                length += digit
            return json.loads(stream.read(int(length)))

        def send(name, method=None, path=None, body=None):
            message = json.dumps([0, 0, f"WebDriver:{name}", body or {}]).encode()
            connection.sendall(b"%d:%b" % (len(message), message))
            _, _, error, result = receive()
            assert not error, error
            return result.get("value", result)

        receive()  # the greeting
        send("NewSession")
        yield Browser(send)


@contextlib.contextmanager
def webkit(home):
    with contextlib.ExitStack() as stack:
        screen = ["Xvfb", "-displayfd", "1", "-screen", "0", "1280x1000x24", "-nolisten", "tcp"]
        display = stack.enter_context(child(screen, stdout=subprocess.PIPE, text=True)).stdout.readline().strip()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        env = {**os.environ, "HOME": str(home), "XDG_RUNTIME_DIR": str(home), "DISPLAY": f":{display}"}
        command = ["WebKitWebDriver", "--host=127.0.0.1", f"--port={port}"]
        stack.enter_context(child(command, stdout=subprocess.DEVNULL, env=env | {"GDK_BACKEND": "x11"}))
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

        def request(method, path, body=None):
            url, data = f"http://127.0.0.1:{port}{path}", None if body is None else json.dumps(body).encode()
            try:
                with opener.open(urllib.request.Request(url, data, method=method), timeout=PATIENCE) as answer:
                    return json.load(answer)["value"]
            except urllib.error.HTTPError as error:
                raise AssertionError(error.read().decode()) from None

        def listens():
            with contextlib.suppress(urllib.error.URLError):
                return request("GET", "/status")["ready"]

        until(listens)
        options = dict(binary=program("WebKit", "MiniBrowser"), args=["--automation"])
        wanted = {"capabilities": {"alwaysMatch": {"webkitgtk:browserOptions": options}}}
        session = request("POST", "/session", wanted)
        path = f"/session/{session['sessionId']}"
        stack.callback(request, "DELETE", path)  # ends MiniBrowser
        yield Browser(lambda _, method, end, body: request(method, path + end, body))


@contextlib.contextmanager
def launch(name):
    """Start a browser with an empty profile. It ends with the block."""
    start = {"Firefox": firefox, "WebKit": webkit}[name]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home, start(Path(home)) as browser:
        yield browser
