"""What people may mean who type a flag or a word that train.py or sample.py does not know."""

import difflib
import os
import shlex
from pathlib import Path

# what a flag of nanoGPT or of another script is called here
ELSEWHERE = {
    ("train.py", "--resume"): "type --init_from resume",
    ("train.py", "--dataset"): "type --data_dir FOLDER, one that data/prepare.py wrote",
    ("train.py", "--input"): "run python data/prepare.py --input FILE first",
    ("train.py", "--ckpt"): "type --init_from FILE",
    ("train.py", "--lr"): "type --learning_rate",
    ("train.py", "--tokenizer"): "that is a flag of data/prepare.py",
    ("train.py", "--vocab_size"): "that is a flag of data/prepare.py",
    ("sample.py", "--init_from"): "type --ckpt for a model from elsewhere, and nothing for your last run",
    ("sample.py", "--resume"): "without --ckpt, it is your last run",
    ("sample.py", "--data_dir"): "the checkpoint has the vocabulary, so leave it out",
    ("sample.py", "--dataset"): "the checkpoint has the vocabulary, so leave it out",
}


def hint(message, parser):
    """Return what may help with an error of argparse, as the end of its message: ": type --ckpt FILE"."""
    if message.endswith("expected one argument"):
        return "; one that starts with - needs an =, as in --prompt=-a"
    _, found, words = message.partition("unrecognized arguments: ")
    if not found:
        return ""
    words = words.split(" ")  # of which several may be one file name
    names = (" ".join(words[:n]) for n in range(len(words), 0, -1))
    word = next(filter(os.path.exists, names), words[0])
    name = "--" + word.partition("=")[0].lstrip("-").replace("-", "_")
    if said := ELSEWHERE.get((parser.prog, name)):
        return f": {said}"
    path = Path(word)
    if parser.prog in ("train.py", "sample.py") and os.path.exists(word):  # Path.exists raises for a long name
        trains = parser.prog == "train.py"
        word = shlex.quote(word)
        if path.suffix == ".txt":
            return f": run python data/prepare.py --input {word} first" if trains else f": type --prompt FILE:{word}"
        data = path.is_dir() and not any((path / name).exists() for name in ("ckpt.pt", "last.pt", "config.json"))
        return f": type {'--ckpt' if not trains else '--data_dir' if data else '--init_from'} {word}"
    if parser.prog == "sample.py" and not word.startswith("-"):
        return ': type --prompt "TEXT"'
    known = [flag[2:] for flag in parser._option_string_actions if flag.startswith("--")]
    begun = [flag for flag in known if len(name) > 4 and flag.startswith(name[2:])]
    if similar := begun or difflib.get_close_matches(name[2:], known, n=1, cutoff=0.7):
        return f": did you mean --{similar[0]}?"
    return ": docs/interop.md lists what nanoGPT's flags are called here" if parser.prog == "train.py" else ""
