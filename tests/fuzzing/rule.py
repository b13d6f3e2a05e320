"""What must be true after a call: exit code 0 and the right thing done, or one line and nothing changed."""

import io
import json

import torch

from fuzzing.world import damage, files_of
from helpers import same

# flags that change how a text is made, and not the text
FAST = {"--kv_cache", "--no-kv_cache", "--compile", "--verify", "--draft=ngram"}


def check(world, call):
    """Make the call in a copy of the world. Raises AssertionError, with the whole story, if the rule does not hold."""
    with world.copy() as folder:
        for file, kind, place in call.damage:
            damage(folder / file, kind, place)
        before = files_of(folder)
        code, out, err = world.forks.run(call.script, call.args, folder, **call.request)
        after = files_of(folder)
        story = f"{call}\nexit code {code}\nstdout: {out[-600:]}\nstderr: {err[-3000:]}"
        if "kill_at" in call.request or "kill_after" in call.request:
            check_killed(world, call, folder, before, after, story)
            return code
        assert code != "hang" and "Traceback" not in err, story
        if code != 0:
            check_one_line(call, code, err, story)
        if code == 0 or "the files are in place" in err:  # the words about a finished work could not be written
            check_done(world, call, folder, before, after, out, story)
        elif "limit" in call.request and out.startswith("resuming"):
            check_full_disk(world, call, folder, before, after, story)
        else:
            check_unchanged(call, before, after, story)
        return code


def check_one_line(call, code, err, story):
    """One line says what is wrong, if stderr is there."""
    assert 0 < code < 128, story  # below: a crash
    if 2 not in call.request.get("streams", {}):
        lines = err.strip().splitlines()
        assert len(lines) == 1 and lines[0].isprintable(), story


def check_unchanged(call, before, after, story):
    """No file is lost, changed or left."""
    lost = [name for name, raw in before.items() if not is_kept(name, raw, after)]
    assert not lost, f"{lost} lost\n{story}"
    if call.script != "bench.py":  # which has written its first files when it fails at another
        left = [name for name in after if name not in before and not is_of_a_run(name)]
        assert not left, f"{left} left\n{story}"


def check_full_disk(world, call, folder, before, after, story):
    """A resume that found no room may have saved better weights. With room, it ends as it would have at once."""
    ours = {name for name in before if name in ("out/ckpt.pt", "out/log.csv", "out/samples.txt")}
    check_unchanged(call, {name: raw for name, raw in before.items() if name not in ours}, after, story)
    assert ours <= after.keys(), f"{ours - after.keys()} lost\n{story}"
    code, _, expected = world.result(call.script, call.args)
    again, out, err = world.forks.run(call.script, call.args, folder)
    assert again == code, f"{story}\nagain: exit code {again}\n{out}\n{err}"
    if code == 0 and not any(kind == "a value" for _, kind, _ in call.damage):
        check_same_run(expected["out/last.pt"], files_of(folder)["out/last.pt"], story)


def check_same_run(expected, ours, story):
    """Two last.pt, as bytes, hold the same state."""
    a, b = (torch.load(io.BytesIO(raw), weights_only=True) for raw in (expected, ours))
    assert all(same(a[name], b[name]) for name in ("model", "optimizer", "iter_num")), story


def is_kept(name, raw, after):
    """Return whether a file is as it was, or in a folder of earlier runs."""
    base = name.rpartition("/")[2]
    moved = (other for other in after if "/previous" in other and other.rpartition("/")[2] == base)
    return after.get(name) == raw or any(after[other] == raw for other in moved)


def is_of_a_run(name):
    """Return whether a run that fails on its way may leave a file of this name."""
    return "/previous" in name or name.rpartition("/")[2] in ("ckpt.pt", "last.pt", "log.csv", "samples.txt")


def check_done(world, call, folder, before, after, out, story):
    """The right thing, per script. export.py and bench.py check their results themselves."""
    if call.script == "sample.py" and 1 not in call.request.get("streams", {}) and "--explain" not in call.args:
        check_text(world, call, folder, out, story)
    if call.script == "train.py":
        check_run(world, call, folder, before, after, story)
    if call.script == "data/prepare.py":
        check_data(call, folder, story)


def value_of(args, name, default=None):
    """Return the last value of a flag, as argparse takes it."""
    found = default
    for i, arg in enumerate(args):
        if arg == name:
            found = args[i + 1]
        elif arg.startswith(f"{name}="):
            found = arg.partition("=")[2]
    return found


def check_text(world, call, folder, out, story):
    """The text of a call is that of the same call without the cache, in a world without damage."""
    if any(kind == "a value" for _, kind, _ in call.damage):  # a file may say something else
        return
    if value_of(call.args, "--dtype", "float32") != "float32":  # rounding changes tokens
        return
    args = [arg for arg in call.args if arg not in FAST]
    code, expected, _ = world.result("sample.py", [*args, "--no-kv_cache"])
    if code != 0:  # several prompts need the cache
        code, expected, _ = world.result("sample.py", args)
    if code == 0 and out == expected:
        return
    # a near-tie; anything else fails --verify
    code, again, err = world.forks.run("sample.py", [*call.args, "--verify"], folder)
    assert code == 0 and again == out and not call.damage, f"{story}\nexpected: {expected}\nverify: {err}"


def check_run(world, call, folder, before, after, story):
    """The run has ended, with finite weights that sample.py reads. A resume ends as it does without damage."""
    out_dir = value_of(call.args, "--out_dir", "out")
    last = torch.load(folder / out_dir / "last.pt", weights_only=True)
    max_iters = value_of(call.args, "--max_iters")
    assert last["iter_num"] >= int(max_iters) or value_of(call.args, "--patience") or "already" in story, story
    assert all(tensor.isfinite().all() for tensor in last["model"].values()), story
    if (folder / out_dir / "ckpt.pt").is_file():
        reader = ["--device=cpu", f"--ckpt={out_dir}/ckpt.pt", "--overflow=slide", "--max_new_tokens=20"]
        code, _, err = world.forks.run("sample.py", reader, folder)
        assert code == 0, f"{story}\nsample.py: {err}"
    lost = [name for name, raw in before.items() if name.startswith("data/") and after.get(name) != raw]
    assert not lost, f"{lost} changed\n{story}"
    if value_of(call.args, "--init_from") == "resume" and not any(kind == "a value" for _, kind, _ in call.damage):
        code, _, files = world.result("train.py", call.args)
        assert code == 0, story
        check_same_run(files[f"{out_dir}/last.pt"], (folder / out_dir / "last.pt").read_bytes(), story)


def check_data(call, folder, story):
    """The ids decode to the text."""
    data, source = folder / value_of(call.args, "--data_dir"), value_of(call.args, "--input")
    meta = json.loads((data / "meta.json").read_text(encoding="utf-8"))
    ids = b"".join((data / f"{split}.bin").read_bytes() for split in ("train", "val"))
    text = "".join(meta["chars"][i] for i in memoryview(ids).cast("H"))
    assert text.encode() == (folder / source).read_bytes(), story


def check_killed(world, call, folder, before, after, story):
    """No earlier run is lost, and the same command again, or a resume, ends as it would have without the kill."""
    # an earlier run
    resumes = "resume" in call.args
    if call.script == "train.py" and not resumes:
        earlier = [name for name in before if name.startswith("out/") and name.count("/") == 1]
        lost = [name for name in earlier if not is_kept(name, before[name], after)]
        assert not lost, f"{lost} lost\n{story}"

    # the same command again
    saved = after.get("out/last.pt") not in (None, before.get("out/last.pt"))
    more = ["--init_from", "resume"] if call.script == "train.py" and saved else []
    code, out, err = world.forks.run(call.script, [*call.args, *more], folder)
    assert code == 0, f"{story}\nagain: exit code {code}\n{out}\n{err}"
    expected, ours = world.result(call.script, call.args)[2], files_of(folder)
    if call.script == "train.py":
        check_same_run(expected["out/last.pt"], ours["out/last.pt"], story)
    else:
        changed = [name for name in expected if expected[name] != ours.get(name)]
        left = [name for name in ours if name not in expected]
        assert not changed and not left, f"{changed} differ, {left} left\n{story}"
