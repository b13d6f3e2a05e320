"""Damage small files of our own formats at random, and run the scripts on them, each in a forked child.

    python extras/tests/fuzz.py checkpoint 0 2000     seeds 0 to 1999 of one of KINDS: a line for each fault
    python extras/tests/fuzz.py checkpoint 7 8 out    leaves the damaged files of seed 7 in the folder out

A run must end by itself, within the limits below, in one of two ways: exit code 0, or one line on stderr. Where a file
has a checksum and was damaged behind its back, exit code 0 needs the text of the whole file, too.
"""

import hashlib
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import types
import zipfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "extras" / "tests")]
os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # a child of fork has no threads

import onnx  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402, which an optimizer imports

from extra_helpers import STABLELM, TOKENIZER, bpe  # noqa: E402
from helpers import CHARS, TINY, here, ok, tiny, write, write_ids  # noqa: E402

SECONDS, MEMORY = 10, 2**31  # of a run: CPU time, and bytes more than this process has

# -- damage: each function gets a Random and returns what it did -------------------------------------------------------

NUMBERS = [0, -1, 1, 2, 2.5, math.nan, math.inf, 1e300, 10**9, 2**31, 2**63, 10**30]
STRANGE = [None, True, False, "", "x", "é", [], {}, [0], {"a": 1}, *NUMBERS]
TENSORS = [
    lambda t: t[:0],
    lambda t: t[None],
    lambda t: t.flatten(),
    lambda t: t.double(),
    lambda t: t.bool(),
    lambda t: t.long(),
    lambda t: t.to(torch.complex64),
    lambda t: t.float().to_sparse(),
    lambda t: t.to("meta"),
    lambda t: t.float() * math.nan,
    lambda t: t.float() * 1e38,
    lambda t: -t.float(),
    lambda t: t.tolist(),
    lambda t: t.expand(2, *t.shape),
]


def changed(value, chance):
    """Return (a copy of nested dicts and lists with one change somewhere, what that is)."""
    if isinstance(value, (dict, list)) and value and chance.random() < 0.9:
        copy = value.copy()
        key = chance.choice(list(value)) if isinstance(value, dict) else chance.randrange(len(value))
        act = chance.random()
        if act < 0.1:
            return copy, f"without {copy.pop(key)!r:.30}"
        if act < 0.2 and isinstance(value, dict):
            new = chance.choice(["x", "n_layer", f"{key}s", "", *([7] if torch.is_tensor(copy[key]) else [])])
            copy[new] = copy[key] if chance.random() < 0.5 else copy.pop(key)
            return copy, f"{key!r} also or only as {new!r}"
        copy[key], what = changed(value[key], chance)
        return copy, f"{key!r}: {what}"
    if torch.is_tensor(value) and chance.random() < 0.8:
        i = chance.randrange(len(TENSORS))
        return TENSORS[i](value), f"tensor by {i}"
    near = [value + 1, -value, value * 2] if isinstance(value, (int, float)) else []
    near += [value[:-1], value + value[:1]] if isinstance(value, (str, list)) else []
    new = chance.choice(near if near and chance.random() < 0.3 else STRANGE)
    return new, f"{value!r:.30} -> {new!r:.30}"


def changed_bytes(content, chance):
    """Return (other bytes, what they are)."""
    at = chance.randrange(max(1, len(content)))
    if chance.random() < 0.5:  # near an end, where the headers are
        at = chance.choice([at % 200, max(0, len(content) - 1 - at % 1500)])
    n = chance.choice([1, 2, 4, 8, 100])
    act = chance.choice(["flip", "cut", "zeros", "more", "repeat", "random"])
    if act == "flip" and content:
        return content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :], f"a bit at {at}"
    if act == "cut":
        return content[:at], f"cut at {at}"
    new = {"zeros": bytes(n), "more": content[at : at + n] * 2, "repeat": content, "random": chance.randbytes(n)}
    new = new.get(act, b"")
    return content[:at] + new + content[at + (0 if act in ("more", "repeat") else n) :], f"{act}, {n} bytes at {at}"


def bytes_in(file, chance):
    content, what = changed_bytes(file.read_bytes(), chance)
    file.write_bytes(content)
    return f"bytes of {file.name}: {what}"


def json_in(file, chance):
    content, what = changed(json.loads(file.read_bytes()), chance)
    file.write_text(json.dumps(content), encoding="utf-8")
    return f"{file.name}: {what}"


def ids_in(file, chance):
    """Other bytes, with the checksum of those."""
    what = bytes_in(file, chance)
    meta = json.loads((file.parent / "meta.json").read_bytes())
    meta["sha256"][file.stem] = hashlib.sha256(file.read_bytes()).hexdigest()
    (file.parent / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    return f"new {what}"


def torch_in(file, chance):
    content, what = changed(torch.load(file, weights_only=True), chance)
    torch.save(content, file)
    return f"{file.name}: {what}"


def zip_in(file, chance):
    with zipfile.ZipFile(file) as archive:
        entries = [(name, archive.read(name)) for name in archive.namelist()]
    i = chance.randrange(len(entries))
    name, content = entries[i]
    act = chance.choice(["drop", "rename", "bytes", "bytes", "twice", "pickle"])
    if act == "drop":
        del entries[i]
    elif act == "rename":
        entries[i] = (name + "x", content)
    elif act == "twice":
        entries.append((f"{name}2", content))
    else:
        i = i if act == "bytes" else next(j for j, (name, _) in enumerate(entries) if name.endswith("data.pkl"))
        name, content = entries[i]
        entries[i] = (name, changed_bytes(content, chance)[0])
    with zipfile.ZipFile(file, "w", chance.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as archive:
        for entry in entries:
            archive.writestr(*entry)
    return f"zip: {act} {name}"


def safetensors_in(file, chance):
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header, what = changed(json.loads(content[8:end]), chance)
    header = json.dumps(header).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
    return f"header of {file.name}: {what}"


def onnx_in(file, chance):
    proto = onnx.load(file)
    graph = proto.graph
    act = chance.choice(["metadata", "metadata", "tensor", "node", "value", "without"])
    if act == "metadata":
        entry = chance.choice(proto.metadata_props)
        try:
            new, what = changed(json.loads(entry.value), chance)
            entry.value = json.dumps(new)
        except ValueError:
            new, what = changed(entry.value, chance)
            entry.value = str(new)
        act += f" {entry.key}: {what}"
    elif act == "tensor":
        tensor = chance.choice(graph.initializer)
        what = chance.choice(["dims", "raw_data", "data_type"])
        if what == "dims":
            tensor.dims[:] = chance.choice([[], [1], [*tensor.dims, 2], [2 * d for d in tensor.dims], [-1], [2**40]])
        elif what == "raw_data":
            tensor.raw_data = changed_bytes(tensor.raw_data, chance)[0]
        else:
            tensor.data_type = chance.randrange(20)
        act += f" {tensor.name}: {what}"
    elif act == "node":
        node = chance.choice(graph.node)
        other = chance.choice(graph.node)
        if node.input and chance.random() < 0.5:
            node.input[chance.randrange(len(node.input))] = chance.choice([*other.output, "x", ""])
        elif node.attribute and chance.random() < 0.7:
            attribute = chance.choice(node.attribute)
            attribute.i = chance.choice([0, -1, 7, 2**40])
        else:
            node.op_type = chance.choice([other.op_type, "Nothing"])
        act += f" {node.name}"
    elif act == "value":
        value = chance.choice([*graph.input, *graph.output])
        if chance.random() < 0.4:
            value.type.tensor_type.elem_type = chance.randrange(20)
        elif chance.random() < 0.7 and value.type.tensor_type.shape.dim:
            chance.choice(value.type.tensor_type.shape.dim).dim_value = chance.choice([0, 1, 3, 2**40])
        else:
            value.name += "x"
        act += f" {value.name}"
    else:
        several = chance.choice([graph.node, graph.initializer, graph.input, graph.output, proto.metadata_props])
        del several[chance.randrange(len(several))]
    file.write_bytes(proto.SerializeToString())
    return act


# -- the kinds: how to make a folder, to damage one of its files, and to read it ---------------------------------------

SAMPLE = "--prompt ab --max_new_tokens 9 --device cpu".split()


def a_run(folder):
    """A run with ckpt.pt and last.pt, and its data, ids that are characters."""
    (folder / "text").write_text((CHARS + "abcab\n") * 30, encoding="utf-8")
    write_ids(folder / "data", TOKENIZER, (CHARS + "abcab\n") * 30)
    size = "--n_layer 1 --n_head 1 --n_embd 8 --block_size 16".split()
    flags = ["--data_dir", folder / "data", "--out_dir", folder, *TINY, *size, "--loss", "extras.targets"]
    ok(here(*flags, "--max_iters", 4, "--eval_interval", 2))


def data(folder):
    write_ids(folder / "data", TOKENIZER, (CHARS + "abcab\n") * 30)
    write(folder / "ids", {"vocab_size": 70000}, 70000, [69999, 5] * 100, [5, 69999] * 100)


def hf_folder(folder):
    from extras.formats.hf_write import to_transformers, write_folder

    for name, model in (("stablelm", tiny(**STABLELM)), ("gpt2", tiny()), ("shards", tiny())):
        (folder / name).mkdir()
        write_folder(model, TOKENIZER, folder / name)
    (folder / "shards" / "model.safetensors").unlink()
    to_transformers(tiny()).save_pretrained(folder / "shards", max_shard_size="20KB")


def tokenizers(folder):
    from extras.formats.bpe import to_json

    (folder / "text").write_text("The cat sat on the mat. é 東\n" * 30, encoding="utf-8")
    (folder / "bpe.json").write_text(bpe(300), encoding="utf-8")
    (folder / "characters.json").write_text(to_json(TOKENIZER), encoding="utf-8")
    (folder / "chars").write_text(CHARS * 30, encoding="utf-8")


def onnx_file(folder):
    from extras.formats.onnx import write_onnx

    write_onnx(tiny(n_layer=1, block_size=16), TOKENIZER, folder / "model.onnx")


TRAIN = "--n_layer 1 --n_head 1 --n_embd 8 --block_size 16 --batch_size 1 --max_iters 1 --device cpu".split()
# kind: what makes the folder, (files that may be damaged, functions that damage them), command lines
KINDS = {
    "checkpoint": (
        a_run,
        [(["ckpt.pt"], [torch_in, torch_in, zip_in, bytes_in])],
        [
            ["sample.py", "--ckpt", "ckpt.pt", *SAMPLE],
            ["sample.py", "--ckpt", "ckpt.pt", *SAMPLE, "--draft", "ngram"],
            ["sample.py", "--ckpt", "ckpt.pt", *SAMPLE, "--draft", "ngram", "--compile"],
            ["train.py", "--init_from", "ckpt.pt", "--data_dir", "data", "--out_dir", "new", "--eval_only"],
        ],
    ),
    "resume": (
        a_run,
        [(["last.pt"], [torch_in, torch_in, zip_in, bytes_in])],
        [["train.py", "--init_from", "resume", "--out_dir", ".", "--data_dir", "data", "--max_iters", "5"]],
    ),
    "data": (
        data,
        [
            (["data/meta.json", "ids/meta.json"], [json_in, json_in, bytes_in]),
            (["data/train.bin", "data/val.bin", "ids/train.bin"], [ids_in, ids_in, bytes_in]),
        ],
        [
            ["train.py", "--data_dir", "data", "--out_dir", "new", *TRAIN],
            ["train.py", "--data_dir", "ids", "--out_dir", "new", *TRAIN, "--ngram_targets", "0"],
        ],
    ),
    "folder": (
        hf_folder,
        [
            ([f"{name}/config.json" for name in ("gpt2", "stablelm", "shards")], [json_in, json_in, json_in, bytes_in]),
            (["stablelm/model.safetensors", "gpt2/model.safetensors"], [safetensors_in, bytes_in]),
            (["shards/model.safetensors.index.json", "gpt2/tokenizer.json"], [json_in, bytes_in]),
            (["gpt2/tokenizer_config.json", "gpt2/generation_config.json"], [json_in, bytes_in]),
        ],
        [["sample.py", "--ckpt", name, *SAMPLE] for name in ("gpt2", "stablelm", "shards")],
    ),
    "tokenizer": (
        tokenizers,
        [(["bpe.json", "characters.json"], [json_in, json_in, json_in, bytes_in])],
        [
            ["data/prepare.py", "--input", "text", "--tokenizer", "bpe.json", "--data_dir", "new"],
            ["data/prepare.py", "--input", "chars", "--tokenizer", "characters.json", "--data_dir", "new"],
        ],
    ),
    "onnx": (
        onnx_file,
        [(["model.onnx"], [onnx_in, onnx_in, onnx_in, bytes_in])],
        [["sample.py", "--engine", "onnx", "--ckpt", "model.onnx", *SAMPLE]],
    ),
}


def damage(kind, folder, chance):
    """Damage one file in the folder. Returns (what was done, a command line that reads this file)."""
    _, files, commands = KINDS[kind]
    names, ways = chance.choice(files)
    name = chance.choice(names)
    what = chance.choice(ways)(folder / name, chance)
    part = name.split("/")[0]
    command = chance.choice([command for command in commands if part in command] or commands)
    return what, command


# -- running -----------------------------------------------------------------------------------------------------------


@cache
def code_of(script):
    return compile((ROOT / script).read_text(encoding="utf-8"), ROOT / script, "exec")


def as_main(command):
    """Run a script as __main__ in this process, to the end of the process."""
    script, *flags = command
    main = types.ModuleType("__main__")
    main.__file__ = str(ROOT / script)
    sys.modules["__main__"] = main
    sys.argv = [script, *flags]
    code = 0
    try:
        exec(code_of(script), main.__dict__)
    except SystemExit as error:
        code = error.code or 0
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(command, folder):
    """Run a command line in the folder, in a forked child with limits. Returns (status, stdout, stderr)."""
    child = os.fork()
    if not child:
        os.chdir(folder)
        for number, name in ((1, ".stdout"), (2, ".stderr")):
            os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
        sys.stdout, sys.stderr = (open(i, "w", encoding="utf-8", closefd=False) for i in (1, 2))  # noqa: SIM115
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
        signal.alarm(6 * SECONDS)  # for a child that waits, on a machine that may be busy
        as_main(command)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status, *((folder / name).read_text("utf-8", "replace") for name in (".stdout", ".stderr"))


def problem(result, expected):
    """Return what is wrong with (status, stdout, stderr). None: nothing. `expected` is the stdout for exit code 0."""
    status, stdout, stderr = result
    lines = [line for line in stderr.strip().splitlines() if ": using " not in line]
    if status < 0:
        return f"{signal.Signals(-status).name}: {lines[-1:]}"
    if "Traceback" in stderr:
        frames = re.findall(r'File "' + re.escape(f"{ROOT}/") + r'(?!\.venv)([^"]+)", line \d+, in (\w+)', stderr)
        return f"{' '.join(frames[-1]) if frames else ''}: {lines[-1]}"
    if status and len(lines) != 1:
        return f"{len(lines)} lines: {lines[:1]}"
    if not status and expected is not None and text_of(stdout) != expected:
        return "another text"
    return None


def text_of(stdout):
    """The text in what sample.py prints, or train.py, after times and speeds."""
    return stdout.partition("A sample:\n")[2] or stdout


def fuzz(kind, seeds, keep=None):
    """Yield (seed, what was done, problem) for the seeds that show one."""
    with tempfile.TemporaryDirectory() as made:
        whole = Path(made) / "whole"
        whole.mkdir()
        KINDS[kind][0](whole)
        texts = {}
        for command in KINDS[kind][2]:
            fresh = shutil.copytree(whole, Path(made) / "fresh")
            result = run(command, fresh)
            assert result[0] == 0, result
            texts[str(command)] = text_of(result[1])
            shutil.rmtree(fresh)
        for seed in seeds:
            chance = random.Random(f"{kind} {seed}")
            folder = shutil.copytree(whole, keep or Path(made) / "work")
            what, command = damage(kind, folder, chance)
            checked = kind in ("checkpoint", "resume", "data") and what.startswith(("bytes", "meta.json"))
            if why := problem(run(command, folder), texts[str(command)] if checked else None):
                yield seed, f"{what} ({' '.join(command)})", why
            if not keep:
                shutil.rmtree(folder)


def main():
    kind, first, end, *keep = sys.argv[1:]
    for seed, what, why in fuzz(kind, range(int(first), int(end)), *map(Path, keep)):
        print(json.dumps(dict(seed=seed, damage=what, problem=why)), flush=True)


if __name__ == "__main__":
    main()
