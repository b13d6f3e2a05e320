"""Damage small files of our own formats at random, and run the scripts on them, each in a forked child.

    python extras/tests/fuzz.py checkpoint 0 2000     seeds 0 to 1999 of one of KINDS: a line for each fault
    python extras/tests/fuzz.py checkpoint 7 8 out    leaves the damaged files of seed 7 in the folder out

A run must end by itself, within the limits below, in one of two ways: exit code 0, or one line on stderr. Where a file
has a checksum and was damaged behind its back, exit code 0 needs the text of the whole file, too. Other values in a
last.pt, under its checksum, can only be somebody's edit: they may also end in a traceback.
"""

import hashlib
import json
import math
import os
import random
import re
import resource
import runpy
import shutil
import signal
import sys
import tempfile
import traceback
import zipfile
from contextlib import suppress
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "extras" / "tests")]
os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # a child of fork has no threads

import onnx  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402, which an optimizer imports
from google.protobuf import json_format  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from extra_helpers import STABLELM, TOKENIZER, bpe  # noqa: E402
from helpers import CHARS, TINY, exit_code, here, ok, tiny, write, write_ids  # noqa: E402

SECONDS, MEMORY = 10, 2**31  # of a run: CPU time, and bytes more than this process has

# -- damage ------------------------------------------------------------------------------------------------------------

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


def changed(value, chance, others):
    """Return (a copy of nested dicts and lists with one change somewhere, what that is).

    others  values that may take the place of one
    """
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
        copy[key], what = changed(value[key], chance, others)
        return copy, f"{key!r}: {what}"
    if isinstance(value, bytes):
        return changed_bytes(value, chance)
    if torch.is_tensor(value) and chance.random() < 0.8:
        i = chance.randrange(len(TENSORS))
        return TENSORS[i](value), f"tensor by {i}"
    if isinstance(value, str) and value[:2] + value[-1:] == '{"}' and chance.random() < 0.9:  # metadata of ONNX
        new, what = changed(json.loads(value), chance, others)
        return json.dumps(new), what
    near = [value + 1, -value, value * 2] if isinstance(value, (int, float)) else []
    near += [value[:-1], value + value[:1]] if isinstance(value, (str, list)) else []
    new = chance.choice(chance.choice([near or STRANGE, STRANGE, STRANGE, others]))
    return new, f"{value!r:.30} -> {new!r:.30}"


def changed_bytes(content, chance):
    """Return (other bytes, what they are)."""
    at = chance.randrange(max(1, len(content)))
    if chance.random() < 0.5:  # near an end, where the headers are
        at = chance.choice([at % 200, max(0, len(content) - 1 - at % 1500)])
    n = chance.choice([1, 2, 4, 8, 100])
    here, after = content[at : at + n], content[at + n :]
    ways = {
        "a bit of": bytes([here[0] ^ 1 << chance.randrange(8)]) + here[1:] + after if here else b"",
        "cut before": b"",
        "zeros for": bytes(n) + after,
        "twice": here + here + after,
        "the whole file in": here + content + after,
        "random": chance.randbytes(n) + after,
    }
    what = chance.choice(list(ways))
    return content[:at] + ways[what], f"{what} {n} bytes at {at}"


# -- the formats: how to read what is in a file, and how to write something else ---------------------------------------


def write_bytes(content, file):
    file.write_bytes(content)


def read_json(file):
    return json.loads(file.read_bytes())


def write_json(content, file):
    file.write_text(json.dumps(content), encoding="utf-8")


def read_zip(file):
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write_zip(content, file, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, entry in content.items():
            archive.writestr(name, entry)


def read_pickle(file):
    return next(entry for name, entry in read_zip(file).items() if name.endswith("data.pkl"))


def write_pickle(content, file):
    write_zip({name: content if name.endswith("data.pkl") else entry for name, entry in read_zip(file).items()}, file)


def read_header(file):
    """The names, shapes and places of the tensors in a safetensors file."""
    content = file.read_bytes()
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


def write_header(header, file):
    content = file.read_bytes()
    tensors = content[8 + int.from_bytes(content[:8], "little") :]
    header = json.dumps(header).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + tensors)


def write_bin(content, file):
    """Other bytes, with their checksum."""
    file.write_bytes(content)
    meta = read_json(file.with_name("meta.json"))
    meta["sha256"][file.stem] = hashlib.sha256(content).hexdigest()
    write_json(meta, file.with_name("meta.json"))


def write_graph(content, file):
    file.write_bytes(json_format.ParseDict(content, onnx.ModelProto()).SerializeToString())


FORMATS = {
    ".pt": [
        (partial(torch.load, weights_only=True), torch.save),
        (read_zip, write_zip),
        (read_zip, partial(write_zip, compression=zipfile.ZIP_DEFLATED)),
        (read_pickle, write_pickle),
    ],
    ".json": [(read_json, write_json)],
    ".bin": [(Path.read_bytes, write_bin)],
    ".safetensors": [(read_header, write_header)],
    ".onnx": [(lambda file: json_format.MessageToDict(onnx.load(file)), write_graph)],
}

# -- the kinds: how to make a folder, and to read it -------------------------------------------------------------------

SAMPLE = "--prompt ab --max_new_tokens 9 --device cpu"


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

    (folder / "bpe.txt").write_text("The cat sat on the mat. é 東\n" * 30, encoding="utf-8")
    (folder / "bpe.json").write_text(bpe(300), encoding="utf-8")
    (folder / "chars.txt").write_text(CHARS * 30, encoding="utf-8")
    (folder / "chars.json").write_text(to_json(TOKENIZER), encoding="utf-8")


def onnx_file(folder):
    from extras.formats.onnx import write_onnx

    write_onnx(tiny(n_layer=1, block_size=16), TOKENIZER, folder / "model.onnx")


TRAIN = "--n_layer 1 --n_head 1 --n_embd 8 --block_size 16 --batch_size 1 --max_iters 1 --device cpu"
# kind: what makes the folder, the files of which one is damaged, command lines
KINDS = {
    "checkpoint": (
        a_run,
        ["ckpt.pt"],
        [
            f"sample.py --ckpt ckpt.pt {SAMPLE}",
            f"sample.py --ckpt ckpt.pt {SAMPLE} --draft ngram",
            f"sample.py --ckpt ckpt.pt {SAMPLE} --draft ngram --compile",
            "train.py --init_from ckpt.pt --data_dir data --out_dir new --eval_only",
        ],
    ),
    "resume": (a_run, ["last.pt"], ["train.py --init_from resume --out_dir . --data_dir data --max_iters 5"]),
    "data": (
        data,
        ["data/meta.json", "ids/meta.json", "data/train.bin", "data/val.bin", "ids/train.bin"],
        [
            f"train.py --data_dir data --out_dir new {TRAIN}",
            f"train.py --data_dir ids --out_dir new {TRAIN} --ngram_targets 0",
        ],
    ),
    "folder": (
        hf_folder,
        [
            *("gpt2/config.json", "stablelm/config.json", "shards/config.json", "shards/model.safetensors.index.json"),
            *("gpt2/tokenizer.json", "gpt2/tokenizer_config.json", "gpt2/generation_config.json"),
            *("gpt2/model.safetensors", "stablelm/model.safetensors"),
        ],
        [f"sample.py --ckpt {name} {SAMPLE}" for name in ("gpt2", "stablelm", "shards")],
    ),
    "tokenizer": (
        tokenizers,
        ["bpe.json", "chars.json"],
        [
            "data/prepare.py --input bpe.txt --tokenizer bpe.json --data_dir new",
            "data/prepare.py --input chars.txt --tokenizer chars.json --data_dir new",
        ],
    ),
    "onnx": (onnx_file, ["model.onnx"], [f"sample.py --engine onnx --ckpt model.onnx {SAMPLE}"]),
}


def damage(kind, folder, chance):
    """Damage one file. Returns (what was done, a command line that reads it, whether a checksum has to show it)."""
    _, names, commands = KINDS[kind]
    name = chance.choice(names)
    file = folder / name
    behind = chance.random() < 0.25
    read, write = (Path.read_bytes, write_bytes) if behind else chance.choice(FORMATS[file.suffix])
    content, written = read(file), False
    while not written:
        new, what = changed(content, chance, tree_leaves(content))
        with suppress(Exception):  # where the format has no place for it
            write(new, file)
            written = True
    commands = [command for command in commands if name.split("/")[0] in command] or commands
    checked = kind in ("checkpoint", "resume", "data") and (behind or file.name == "meta.json")
    return f"{name}: {what}", chance.choice(commands), checked


# -- running -----------------------------------------------------------------------------------------------------------


def run(command, folder):
    """Run a script with flags in the folder, in a forked child with limits. Returns (status, stdout, stderr)."""
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
        sys.argv, code = command.split(), 0
        try:
            runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
        except SystemExit as error:
            code = exit_code(error)
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status, *((folder / name).read_text("utf-8", "replace") for name in (".stdout", ".stderr"))


def problem(result, expected, loud=False):
    """Return what is wrong with (status, stdout, stderr). None: nothing.

    expected  the stdout for exit code 0
    loud      whether a traceback is no fault
    """
    status, stdout, stderr = result
    lines = [line for line in stderr.strip().splitlines() if ": using " not in line]
    if status < 0:
        return f"{signal.Signals(-status).name}: {lines[-1:]}"
    if "Traceback" in stderr and loud:
        return None
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
            texts[command] = text_of(result[1])
            shutil.rmtree(fresh)
        for seed in seeds:
            chance = random.Random(f"{kind} {seed}")
            folder = shutil.copytree(whole, keep or Path(made) / "work")
            what, command, checked = damage(kind, folder, chance)
            expected = texts[command] if checked else None
            if why := problem(run(command, folder), expected, loud=kind == "resume" and not checked):
                yield seed, f"{what} ({command})", why
            if not keep:
                shutil.rmtree(folder)


def main():
    kind, first, end, *keep = sys.argv[1:]
    for seed, what, why in fuzz(kind, range(int(first), int(end)), *map(Path, keep)):
        print(json.dumps(dict(seed=seed, damage=what, problem=why)), flush=True)


if __name__ == "__main__":
    main()
