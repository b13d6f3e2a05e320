"""Random commands in a folder of their own: prepare, train, resume, sample, damage and kills. Needs Linux.

python tests/fuzz.py --minutes 30          `make fuzz` does this
python tests/fuzz.py --seed 7 --calls 1    one call again

The rule: a command ends with exit code 0 and the right result, or with one line on stderr and every file as it was. A
sampled text is the one of the plain loop without a cache, up to near-ties. After a kill no file is lost, and if we
run the command again it ends as it would have without the kill.
"""

import argparse
import io
import os
import random
import runpy
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "data")]
os.environ["OMP_NUM_THREADS"] = "1"  # threads do not survive a fork

import torch  # noqa: E402
import torch._dynamo  # noqa: E402  every optimizer imports it

from helpers import random_model, same, tree  # noqa: E402
from model import GPTConfig  # noqa: E402

PATIENCE = 60  # seconds; a command that takes longer hangs
SHAPE = "--n_layer 1 --n_head 2 --n_embd 16 --block_size 16 --batch_size 2 --device cpu --data_dir data".split()
TRAIN = ["train.py", *SHAPE, "--max_iters", "12", "--save_interval", "3", "--eval_interval", "4", "--log_interval", "1"]
RESUME = ["train.py", "--init_from", "resume", "--max_iters", "18", "--save_interval", "1"]
PREPARE = ["data/prepare.py", "--input", "text", "--data_dir", "data"]
SAMPLE = ["sample.py", "--prompt", "the ", "--device", "cpu"]

# -- a command, in a fork that has imported everything already --------------------------------------------------------


def run(command, folder, kill_at=None):
    """Run `python COMMAND` in `folder`. Returns (exit code, stdout, stderr).

    kill_at  kill the process before its n-th change of a file in the folder; the exit code is then negative
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = os.fork()
        if pid == 0:
            signal.alarm(PATIENCE)
            os._exit(run_here(command, folder, out, err, kill_at))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code != -signal.SIGALRM, f"hangs: python {shlex.join(command)}"
        out.seek(0), err.seek(0)
        return code, out.read().decode(), err.read().decode()


def run_here(command, folder, out, err, kill_at):
    """Become the process of a command. Returns its exit code."""
    for number, file in ((1, out), (2, err)):
        os.dup2(file.fileno(), number)
    os.chdir(folder)
    if kill_at:
        kill_at_change(kill_at, str(folder))
    script = ROOT / command[0]
    sys.argv[:], sys.path[0], code = command, str(script.parent), 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as error:
        code = error.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush(), sys.stderr.flush()
    return code


def kill_at_change(at, folder):
    """Kill this process before its at-th change of a file or folder below `folder`."""
    changes = 0

    def hook(event, args):
        nonlocal changes
        opens = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)
        if opens or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            paths = [os.path.abspath(os.fspath(arg)) for arg in args if isinstance(arg, (str, os.PathLike))]
            changes += any(path.startswith(folder) and ".lock" not in path for path in paths)
            if changes == at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


# -- the world of a command --------------------------------------------------------------------------------------------


class World:
    """A folder with a text, its data and a run. Every call is made in a copy, always at the same place."""

    def __init__(self, folder):
        self.original, self.folder, self.known = Path(folder) / "world", Path(folder) / "call", {}
        self.original.mkdir()
        text = (ROOT / "data" / "sample.txt").read_text(encoding="utf-8")
        (self.original / "text").write_text(text[:3000][::-1], encoding="utf-8")  # not the text of the run
        source = str(ROOT / "data" / "sample.txt")
        for command in (["data/prepare.py", "--input", source, "--data_dir", "data"], [*TRAIN, "--out_dir", "out"]):
            code, _, err = run(command, self.original)
            assert code == 0, err
        content = torch.load(self.original / "out" / "ckpt.pt", weights_only=True)
        content["model"] = random_model(
            GPTConfig(**content["model_args"])
        ).state_dict()  # a few steps leave weights small
        torch.save(content, self.original / "out" / "ckpt.pt")
        self.files = tree(self.original)

    def renew(self):
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.original, self.folder)

    def call(self, command, kill_at=None):
        """Run a command in the copy. Returns (exit code, stdout, files, what to tell about it)."""
        code, out, err = run(command, self.folder, kill_at)
        story = f"python {shlex.join(command)}\nkill_at={kill_at}, exit code {code}\nstdout: {out}\nstderr: {err}"
        if code > 0:
            assert code < 128 and len(err.strip().splitlines()) == 1, story
        return code, out, tree(self.folder), story

    def undisturbed(self, command):
        """Return (exit code, stdout, files) of a command in an undamaged copy."""
        if tuple(command) not in self.known:
            self.renew()
            self.known[tuple(command)] = self.call(command)[:3]
        return self.known[tuple(command)]


# -- the rule, whose first half is in World.call -----------------------------------------------------------------------


def check_nothing_lost(before, after, story):
    """Each file is as it was. A new run may have moved the earlier one to a folder `previous`."""
    moved = {(Path(name).name, raw) for name, raw in after.items() if "/previous" in name}
    lost = [name for name, raw in before.items() if after.get(name) != raw and (Path(name).name, raw) not in moved]
    assert not lost, f"{lost} lost\n{story}"


def check_same_result(command, expected, ours, story):
    """A training has the weights of the undisturbed one, a preparation its files. Both are {name: bytes}."""
    if command[0] == "train.py":
        a, b = (torch.load(io.BytesIO(files["out/last.pt"]), weights_only=True) for files in (expected, ours))
        assert all(same(a[name], b[name]) for name in ("model", "optimizer", "iter_num")), story
    else:
        assert {name for name in expected if expected[name] != ours.get(name)} == set(), story


# -- what is tried: each call returns what it has shown, for the count at the end --------------------------------------

ODD = ["", "x", "-1", "0", "0.5", "1e30", "nan", "9" * 400, "é", "FILE:nowhere", "out", "a" * 300]
SAMPLE_FLAGS = {
    "--prompt": ["the ", "O", "", "T" * 15, "T" * 16, "T" * 17, "T" * 60, "ünknown", "FILE:text"],
    "--max_new_tokens": ["0", "1", "5", "40"],
    "--stop": ["e", "\n", "the"],
    "--temperature": ["0", "0.8", "2"],
    "--top_k": ["1", "5", "1000"],
    "--seed": ["0", "18446744073709551615"],
    "--overflow": ["stop", "slide", "slide"],
    "--num_samples": ["1", "2", "7"],
    "--draft": ["ngram"],
    **dict.fromkeys(["--kv_cache", "--no-kv_cache", "--compile", "--verify"]),
}
FAST = {"--kv_cache", "--compile", "--verify", "--draft=ngram"}  # these change how a text is made, and not the text
TRAIN_FLAGS = {
    "--preset": ["cpu", "nanogpt-cpu", "lecture"],
    "--recipe": ["modern", "nanogpt"],
    "--init_from": ["resume", "nowhere"],
    "--out_dir": ["out", "other", "data"],
    "--data_dir": ["data", "out"],
    "--n_head": ["1", "4", "3"],
    "--n_kv_head": ["1", "2", "3"],
    "--block_size": ["2", "33", "2147483647"],
    "--learning_rate": ["0", "1e30"],
}
FILES = ["data/meta.json", "data/train.bin", "data/val.bin", "out/ckpt.pt", "out/last.pt", "out/log.csv"]


def some_flags(table, rng):
    """Return up to four flags of a table, now and then with a value that makes no sense."""
    flags = []
    for name in rng.sample(sorted(table), rng.randint(0, 4)):
        values = ODD if rng.random() < 0.15 else table[name]
        flags.append(name if table[name] is None else f"{name}={rng.choice(values)}")
    return flags


def try_text(world, rng):
    flags = some_flags(SAMPLE_FLAGS, rng)
    plain = [*SAMPLE, *(flag for flag in flags if flag not in FAST), "--no-kv_cache"]
    plain_code, expected, _ = world.undisturbed(plain)
    world.renew()
    code, out, files, story = world.call([*SAMPLE, *flags])
    check_nothing_lost(world.files, files, story)
    if code:
        return "mistake in sample.py, one line"
    if plain_code or out != expected:  # a near-tie, or prompts that need the cache; --verify finds anything else
        code, again, _, verified = world.call([*SAMPLE, *flags, "--verify"])
        assert code == 0 and again == out, f"{story}\nwithout the cache: {expected}\nverify: {verified}"
        return "text, verified"
    return "text, equal to that without the cache"


def try_training(world, rng):
    flags = some_flags(TRAIN_FLAGS, rng)
    world.renew()
    code, _, files, story = world.call([*TRAIN, *flags])
    if code:
        check_nothing_lost(world.files, files, story)
        return "mistake in train.py, one line"
    folder = next((flag.partition("=")[2] for flag in reversed(flags) if flag.startswith("--out_dir=")), "out")
    last = torch.load(io.BytesIO(files[f"{folder}/last.pt"]), weights_only=True)
    assert all(weight.isfinite().all() for weight in last["model"].values()), story
    code, _, _, sampled = world.call(["sample.py", "--device=cpu", "--max_new_tokens=5", f"--ckpt={folder}/last.pt"])
    assert code == 0, f"{story}\n{sampled}"
    return "training, readable"


def try_damage(world, rng):
    """Cut a file, or flip a bit in it."""
    file = rng.choice(FILES)
    command = SAMPLE if file == "out/ckpt.pt" else RESUME
    _, expected, whole = world.undisturbed(command)
    world.renew()
    raw = bytearray(world.files[file])
    at = rng.randrange(len(raw))
    if rng.random() < 0.5:
        raw[at] ^= 1 << rng.randrange(8)
    else:
        del raw[at:]
    (world.folder / file).write_bytes(raw)
    before = tree(world.folder)
    code, out, files, story = world.call(command)
    story = f"{file} is damaged at {at}\n{story}"
    if code:
        check_nothing_lost(before, files, story)
        return "damage, one line"
    if command == SAMPLE:
        assert out == expected, story
    else:
        check_same_result(command, whole, files, story)
    return "damage, right result"


def try_kill(world, rng):
    command, kill_at = rng.choice([TRAIN, RESUME, RESUME, PREPARE]), rng.randint(1, 24)
    _, _, whole = world.undisturbed(command)
    world.renew()
    code, _, files, story = world.call(command, kill_at)
    if command == TRAIN:
        check_nothing_lost({name: world.files[name] for name in ("out/ckpt.pt", "out/last.pt")}, files, story)
    begun = command == TRAIN and files.get("out/last.pt") not in (None, world.files["out/last.pt"])
    again = [*command, "--init_from", "resume"] if begun else command
    code_again, _, ours, ended = world.call(again)
    assert code_again == 0, f"{story}\nagain: {ended}"
    check_same_result(command, whole, ours, story)
    return f"{command[0]} {'killed' if code else 'undisturbed'}, ended the same"


# -- the loop ----------------------------------------------------------------------------------------------------------

CALLS = [try_text, try_text, try_training, try_damage, try_kill]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30, help="begin no call after these (default: 30)")
    parser.add_argument("--calls", type=int, help="end after these (default: no end)")
    parser.add_argument("--seed", type=int, help="of the first call (default: random)")
    args = parser.parse_args()
    first = random.SystemRandom().randrange(2**32) if args.seed is None else args.seed
    torch.set_num_threads(1)
    for script in ("data/prepare.py", "train.py", "sample.py"):
        runpy.run_path(str(ROOT / script))  # imports what every fork needs
    began, seed, counts = time.monotonic(), first, Counter()
    memory = Path("/dev/shm")  # a disk that others write to can sync for minutes
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        world = World(Path(folder).resolve())
        while time.monotonic() - began < 60 * args.minutes and seed - first != args.calls:
            rng = random.Random(seed)
            try:
                counts[rng.choice(CALLS)(world, rng)] += 1
            except AssertionError as error:
                sys.exit(f"FOUND: python tests/fuzz.py --seed {seed} --calls 1\n{error}")
            seed += 1
    for shown, times in sorted(counts.items()):
        print(f"{times:6} {shown}")
    print(f"{seed - first} calls in {(time.monotonic() - began) / 60:.1f} minutes from seed {first}: nothing found")


if __name__ == "__main__":
    main()
