"""A server that runs the project's scripts in forks of itself, so that a call takes milliseconds and not an import.

It imports the libraries once and computes nothing, because threads do not survive a fork. It reads one request per line
from stdin and answers with one line, both JSON. Forks is the client.
"""

import atexit
import importlib
import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MEMORY = 6 * 2**30  # bytes of address space that a call may take beyond the server's
LIBRARIES = "requests tqdm matplotlib.figure torch torch._dynamo torch.export torch.onnx safetensors.torch".split()
LIBRARIES += "onnx onnxruntime onnxruntime.quantization onnxscript onnxscript.evaluator onnxscript.optimizer".split()
LIBRARIES += "torch.onnx._internal.exporter._core torch._inductor transformers".split()
CHANGES = {"os.mkdir", "os.link", "os.rename", "os.remove", "os.rmdir", "shutil.copyfile"}  # audit events


class Forks:
    """Runs scripts by a server process. Close it in the end."""

    def __init__(self):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1", "PYTHONHASHSEED": "0"}
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.num_calls = 0
        self.server = subprocess.Popen([sys.executable, __file__], cwd=ROOT, env=env, **pipes)

    def run(self, script, args, folder, timeout=20, **request):
        """Run `python SCRIPT ARGS` with `folder` as the current folder. Returns (exit code, stdout, stderr).

        The exit code of a process that a signal has killed is the signal's number, negative. That of a call that takes
        more than `timeout` seconds is "hang".
        env           variables that the call has besides, as a dict
        streams       redirections: {1: None} closes stdout, {2: "/dev/full"} opens stderr anew
        kill_at       kill the process before its n-th change of a file
        kill_after    kill it after these seconds
        limit         largest size of a file in bytes, as on a full disk
        """
        self.num_calls += 1
        request |= dict(script=str(script), args=list(map(str, args)), folder=str(folder), timeout=timeout)
        self.server.stdin.write(json.dumps(request).encode() + b"\n")
        self.server.stdin.flush()
        answer = json.loads(self.server.stdout.readline())
        return answer["code"], *(bytes.fromhex(answer[name]).decode("utf-8", "replace") for name in ("out", "err"))

    def close(self):
        self.server.stdin.close()
        self.server.wait()


def serve():
    import_libraries()
    out = os.dup(1)
    os.dup2(2, 1)  # a print of a library must not be taken for an answer
    for line in sys.stdin.buffer:
        os.write(out, json.dumps(answer(json.loads(line))).encode() + b"\n")


def import_libraries():
    sys.path[:0] = [str(ROOT), str(ROOT / "data"), str(ROOT / "assets")]
    for name in LIBRARIES:
        importlib.import_module(name)
    transformers = importlib.import_module("transformers")
    transformers.AutoModelForCausalLM, transformers.AutoTokenizer  # noqa: B018  an attribute is imported on first use
    for file in (ROOT / "kvgpt").rglob("*.py"):
        importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))


def answer(request):
    """Return the answer to a request: the exit code and the output of a fork that has run it."""
    outputs = {"out": os.memfd_create("out"), "err": os.memfd_create("err")}
    pid = os.fork()
    if pid == 0:
        run_in_fork(request, *outputs.values())
    code = wait(pid, request)
    contents = {}
    for name, number in outputs.items():
        contents[name] = os.pread(number, os.fstat(number).st_size, 0).hex()
        os.close(number)
    return {"code": code, **contents}


def wait(pid, request):
    """Wait for a fork, and kill it when its time is over. Returns the exit code."""
    began, kill_after = time.monotonic(), request.get("kill_after")
    pause, killed = 0.001, False
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        seconds = time.monotonic() - began
        if done:
            return os.waitstatus_to_exitcode(status)
        if seconds > request["timeout"]:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "hang"
        if kill_after is not None and seconds > kill_after and not killed:
            killed = True
            os.kill(pid, signal.SIGKILL)
        time.sleep(pause)
        pause = min(2 * pause, 0.01)


def run_in_fork(request, out, err):
    """Become the process of the request. Does not return."""
    try:
        code = run_script(request, out, err)
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)


def run_script(request, out, err):
    """Run the script as `python SCRIPT` would. Returns the exit code."""
    # streams, folder and limits
    os.setpgid(0, 0)
    null = os.open(os.devnull, os.O_RDONLY)
    for number, target in enumerate((null, out, err)):
        os.dup2(target, number)
    for number, target in request.get("streams", {}).items():
        os.close(int(number))
        if target is None:
            setattr(sys, ("stdin", "stdout", "stderr")[int(number)], None)
        else:
            os.open(target, os.O_RDWR)  # takes the lowest free number, which is this one
    os.chdir(request["folder"])
    os.environ.update(request.get("env", {}))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if request.get("limit"):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["limit"], request["limit"]))
    if request.get("kill_at"):
        kill_at_change(request["kill_at"])

    # the script, and what the interpreter does after it
    script = ROOT / request["script"]
    sys.argv = [request["script"], *request["args"]]
    sys.path.insert(0, str(script.parent))
    code = 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            code = 120
    return code & 255


def kill_at_change(at):
    """Kill this process before its at-th change of a file or folder."""
    changes = 0

    def hook(event, args):
        nonlocal changes
        opens = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
        if event in CHANGES or opens:
            changes += 1
            if changes == at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


if __name__ == "__main__":
    serve()
