"""What other people's CI runs: the command and its report for programs, and one pytest test per scenario."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import jsonschema
import pytest
import torch

from bugs import Cache, Decoder, tiny
from check_cache import check_cache
from check_cache.__main__ import main
from test_families import FAMILIES

FOLDER = Path(__file__).parent.parent
SCHEMA = json.loads((FOLDER / "report.schema.json").read_text(encoding="utf-8"))
ENV = os.environ | dict(PYTHONPATH=os.pathsep.join(map(str, (FOLDER.parent, FOLDER / "tests"))), OMP_NUM_THREADS="1")


def run(*arguments, cwd, **options):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=ENV, capture_output=True, text=True, encoding="utf-8", **options)


# -- the report for programs -------------------------------------------------------------------------------------------


def test_the_report_for_programs_is_as_its_schema_says():
    model = Decoder()
    correct = check_cache(model, length=24, caches="own", scenarios=["decode", "lengths"]).to_json()
    assert correct["versions"]["torch"] == torch.__version__ and correct["exit_code"] == correct["seed"] == 0
    assert (correct["decoder"], correct["length"], correct["dtype"]) == ("Decoder", 24, "float32")
    new = lambda rows, length: None  # noqa: E731
    reports = [correct]
    for step in (
        lambda ids, cache, pos: (model(ids, cache, None, pos * 0), Cache()),
        lambda ids, cache, pos: (model(ids, cache, None, pos) / (pos.max() < 9), cache or Cache()),
        lambda ids: None,
    ):
        reports.append(check_cache(full=model.full, new=new, step=step, length=24, scenarios=["decode"]).to_json())
    statuses = [result["status"] for report in reports for result in report["results"]]
    assert {*statuses} >= {"correct", "wrong", "not run", "error"}, statuses
    for report in reports:
        text = json.dumps(report, allow_nan=False)  # JSON has no infinity
        jsonschema.validate(json.loads(text), SCHEMA, jsonschema.Draft202012Validator)
    wrong = next(result for result in reports[1]["results"] if result["scenario"] == "decode")
    assert wrong["error"] > wrong["limit"] > 0 and wrong["step"] == (3, 8) and wrong["cause"], wrong
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(correct | dict(exit_code=3), SCHEMA)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two transformers folders, with and without weights, and a decoder that is correct, and one that is not."""
    folder = tmp_path_factory.mktemp("command")
    tiny("llama").save_pretrained(folder / "llama")
    tiny("gpt2").config.save_pretrained(folder / "gpt2")
    code = "from bugs import Cache, Decoder\n\ndef slow():\n    return Decoder()\n\ndef broken():\n"
    code += "    reorder = lambda self, rows: self.each(lambda x: x[rows.flip(0)])\n"
    code += "    Cache.reorder_cache = reorder\n    return Decoder()\n"
    (folder / "mine.py").write_text(code, encoding="utf-8")
    return folder


def command(*arguments, cwd):
    return run("-m", "check_cache", *arguments, cwd=cwd)


SHORT = ["--length", "24"]


@pytest.mark.slow
def test_what_the_command_requires(folder):
    some = [*SHORT, "--scenarios", "decode,batches", "--scenarios", "chunks that"]
    done = command("mine:slow", *some, "--require", "decode,chunks", "--json", "report.json", cwd=folder)
    assert done.returncode == 0 and done.stderr == "", done.stdout + done.stderr
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    jsonschema.validate(report, SCHEMA)
    ran = {result["scenario"] for result in report["results"]}
    assert ran == {"decode", "decode from 1 token", "batches of 1 to 8 rows", "chunks that double"}, ran
    done = command("mine:slow", *some, "--require", "rollback", "--json", "report.json", cwd=folder)
    assert done.returncode == 2 and "MISSING  required, but not run: rollback (not in this report)" in done.stdout
    assert json.loads((folder / "report.json").read_text(encoding="utf-8"))["missing"].keys() == {"rollback"}
    done = command("mine:broken", *SHORT, "--scenarios", "reorder", "--skip", "rollback,padding", cwd=folder)
    assert done.returncode == 1 and "WRONG    reorder (default cache): logits off by " in done.stdout, done.stdout
    done = command("mine:broken", *SHORT, "--scenarios", "reorder", "--atol", "100", "--verbose", cwd=folder)
    assert done.returncode == 0 and "not run" not in done.stdout, done.stdout


@pytest.mark.slow
def test_the_command_may_check_a_tiny_model_of_a_folder_without_weights(folder):
    done = command("gpt2", "--tiny", *SHORT, "--scenarios", "decode", cwd=folder)
    assert done.returncode == 0 and done.stdout.startswith("GPT2LMHeadModel: 4 of 4 scenarios ran"), done.stderr
    done = command("llama", *SHORT, "--scenarios", "decode", cwd=folder)
    assert done.returncode == 0 and done.stdout.startswith("LlamaForCausalLM: 4 of 4 scenarios ran"), done.stderr
    cannot = "not a transformers folder with a config.json"
    for model, flags, why in (
        ("mine:slow", ["--tiny"], cannot),
        ("nothing", [], cannot),
        ("mine:no", [], "AttributeErr"),
    ):
        done = command(model, *flags, *SHORT, cwd=folder)
        assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1 and why in done.stderr, done


# settings of which the authors have no default
NEEDS = dict(bamba=dict(attn_layer_indices=[3, 9]))


@pytest.mark.slow
def test_which_architectures_can_be_tiny(tmp_path):
    """All those whose caches test_families.py checks, with the sizes of their authors."""
    from transformers import AutoConfig

    from check_cache.huggingface import load_model

    for name in {name.split()[0] for name in FAMILIES} - {"git"}:  # whose vision_config is not small
        config = AutoConfig.for_model(name, **NEEDS.get(name, {}))
        config.save_pretrained(tmp_path / name)
        model = load_model(tmp_path / name, tiny=True)
        assert sum(parameter.numel() for parameter in model.parameters()) < 20e6, name
        kinds, small = ({*(getattr(each, "layer_types", None) or ())} for each in (config, model.config))
        assert kinds == small, name
        with torch.no_grad():
            model(torch.zeros(1, 8, dtype=torch.long))


def test_the_command_says_its_version(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["check-cache", "--version"])
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().out
    assert re.fullmatch(rf"check-cache [0-9.]+, torch {re.escape(version('torch'))}\n", said), said


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudoterminal")
def test_a_terminal_shows_the_progress(folder):
    import pty

    ours, theirs = pty.openpty()
    program = [sys.executable, "-m", "check_cache", "mine:slow", *SHORT, "--scenarios", "batches"]
    done = subprocess.run(program, cwd=folder, env=ENV, stdout=subprocess.PIPE, stderr=theirs, text=True)
    os.close(theirs)
    shown = os.read(ours, 10000).decode()
    os.close(ours)
    assert done.returncode == 0 and re.search(r"^1 of 2: batches of 1 to 8 rows *\r2 of 2: ", shown), shown


# -- pytest ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project of three files: a decoder, its tests, and the settings of pytest."""
    project = tmp_path_factory.mktemp("project")
    files = {
        "pytest.ini": "[pytest]\naddopts = -p no:cacheprovider -p no:xdist\n",
        "mine.py": "print('loaded')\nfrom bugs import *\n\nclass Mine(Decoder):\n"
        "    def new(self, rows, length):\n        return Cache()\n\n"
        "class Broken(Mine):\n    def step(self, ids, cache, mask, pos):\n"
        "        return super().step(ids, cache, mask, pos * (ids.size(1) > 1))\n",
        "test_cache.py": "from check_cache import parametrize_with_scenarios\n\n"
        "def load(name):\n    import mine\n    return getattr(mine, name)()\n\n"
        "@parametrize_with_scenarios(lambda: load('Mine'), length=24, require='speculative rollback')\n"
        "def test_mine(check):\n    check()\n\n"
        "@parametrize_with_scenarios(lambda: dict(model=load('Broken'), length=24), require='generate')\n"
        "def test_broken(check):\n    check()\n",
    }
    for name, text in files.items():
        (project / name).write_text(text, encoding="utf-8")
    return project


@pytest.mark.slow
def test_one_test_per_scenario(project):
    done = run("-m", "pytest", "-q", "-rs", "-k", "mine", cwd=project)
    assert done.returncode == 0, done.stdout
    assert re.search(r"23 passed, 5 skipped, 28 deselected", done.stdout), done.stdout
    assert "the step takes no lengths" in done.stdout and "there is no window" in done.stdout, done.stdout


@pytest.mark.slow
def test_k_chooses_scenarios_and_nothing_is_loaded_before_the_first_test(project):
    done = run("-m", "pytest", "-q", "-s", "--collect-only", "-k", "rollback", cwd=project)
    assert "6/56 tests collected" in done.stdout and "loaded" not in done.stdout, done.stdout
    assert "test_mine[speculative rollback]" in done.stdout, done.stdout
    done = run("-m", "pytest", "-q", "-s", "-k", "mine and rollback", cwd=project)
    assert done.stdout.count("loaded") == 1 and "3 passed" in done.stdout, done.stdout


@pytest.mark.slow
def test_a_failure_shows_the_report_and_not_our_lines(project):
    done = run("-m", "pytest", "-q", "-k", "broken and (double or generate or decode)", cwd=project)
    assert "3 failed, 1 passed, 1 skipped" in done.stdout, done.stdout
    assert "WRONG    decode: logits off by" in done.stdout and "its position is 0" in done.stdout, done.stdout
    assert "MISSING" not in done.stdout and "generate: there is no generate" in done.stdout, done.stdout
    for file in FOLDER.glob("*.py"):
        assert f"{file.name}:" not in done.stdout, done.stdout


def test_a_wrong_word_is_an_error_where_it_is_written():
    from check_cache import parametrize_with_scenarios

    for option in ("skip", "scenarios", "require"):
        with pytest.raises(ValueError, match="no scenario is called 'beams'"):
            parametrize_with_scenarios(Decoder, **{option: ["beams"]})
