"""check-cache FOLDER, or module:function"""

import argparse
import json
import pkgutil
import re
import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from check_cache import __version__, check_cache
from check_cache.huggingface import load_model
from check_cache.report import first_line


def load(name, tiny):
    """Return what module:function returns, or the model in a transformers folder."""
    if Path(name, "config.json").is_file():
        return load_model(name, tiny)
    if tiny or ":" not in name:
        raise ValueError("not a transformers folder with a config.json, nor module:function, which cannot be --tiny")
    sys.path.insert(0, "")  # the module may be in this folder
    return pkgutil.resolve_name(name)()


def main() -> None:
    parser = argparse.ArgumentParser("check-cache", description="Checks whether the KV cache of a model is correct")
    add = parser.add_argument
    # the names of some scenarios contain a comma and a space
    words = dict(type=partial(re.split, ",(?! )"), action="extend", default=[], metavar="WORDS")
    add("model", help="a transformers folder, or the module:function that returns a model or an adapter")
    add("--dtype", help="of weights and cache: float32 (default), bfloat16 or float16")
    add("--length", type=int, help="tokens per row (default: 300, or three sliding windows, at most the context)")
    add("--atol", type=float, default=0.0, help="how far off a logit may be, if the cache rounds on purpose")
    add("--tiny", action="store_true", help="of the folder only the architecture: small sizes and random weights")
    add("--scenarios", **words, help="only those whose name contains one of these words: chunks,padding")
    add("--skip", **words, help="not the scenarios whose name contains one of these words; they need not run")
    add("--require", **words, help="for each word, a scenario whose name contains it must have run: decode,chunks")
    add("--json", metavar="FILE", help="write the report there, as report.schema.json describes it")
    add("--verbose", action="store_true", help="say of each scenario that was not run why")
    add("--version", action="version", version=f"check-cache {__version__}, torch {torch.__version__}")
    args = vars(parser.parse_args())
    model, tiny, require, file, verbose = map(args.pop, ("model", "tiny", "require", "json", "verbose"))
    warnings.simplefilter("ignore")
    try:
        show = partial(print, end="\r", file=sys.stderr, flush=True) if sys.stderr.isatty() else None
        report = check_cache(load(model, tiny), **args, progress=show)
        report = replace(report, must_run=(*report.must_run, *require))
        if file:
            Path(file).write_text(json.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8")
    except (Exception, SystemExit) as error:
        parser.exit(2, f"check-cache: {model}: {type(error).__name__}: {first_line(error)}\n")
    print(report.text(verbose))
    sys.exit(report.exit_code)


if __name__ == "__main__":
    main()
