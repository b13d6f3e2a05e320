"""check-cache FOLDER, or module:function"""

import argparse
import importlib
import sys
import warnings
from pathlib import Path

from check_cache.check import check_cache
from check_cache.report import first_line


def load(name):
    """Return what module:function returns, or the model in a transformers folder."""
    module, _, function = name.rpartition(":")
    if module and function.isidentifier():
        sys.path.insert(0, "")  # the module may be in this folder
        return getattr(importlib.import_module(module), function)()
    if not Path(name, "config.json").is_file():
        raise ValueError("neither a transformers folder with a config.json, nor module:function")
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(name, local_files_only=True, trust_remote_code=False)


def main():
    parser = argparse.ArgumentParser("check-cache", description="Checks whether the KV cache of a model is correct")
    add = parser.add_argument
    add("model", help="a transformers folder, or the module:function that returns a model or an adapter")
    add("--dtype", help="of weights and cache: float32 (default), bfloat16 or float16")
    add("--length", type=int, help="tokens per row (default: 300, or three sliding windows, at most the context)")
    add("--scenarios", nargs="+", metavar="WORD", help="only those whose name contains one of these: chunks padding")
    add("--skip", nargs="+", metavar="WORD", help="not the scenarios whose name contains one of these")
    add("--may_miss", nargs="+", metavar="WORD", help="scenarios that need not run, of decode, chunks and left padding")
    args = vars(parser.parse_args())
    model = args.pop("model")
    warnings.simplefilter("ignore")
    try:
        report = check_cache(load(model), **args)
    except (Exception, SystemExit) as error:
        parser.exit(2, f"check-cache: {model}: {type(error).__name__}: {first_line(error)}\n")
    print(report)
    sys.exit(report.exit_code)


if __name__ == "__main__":
    main()
