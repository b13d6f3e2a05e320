"""python -m check_cache FOLDER, or module:function"""

import argparse
import importlib
import json
import sys
import warnings
from pathlib import Path

import torch

from check_cache.check import check_cache
from check_cache.report import first_line, plot


def load(name):
    """Return what module:function returns, or the model in a transformers folder."""
    module, _, function = name.rpartition(":")
    if module and function.isidentifier():
        return getattr(importlib.import_module(module), function)()
    if not Path(name, "config.json").is_file():
        raise ValueError("neither a transformers folder with a config.json, nor module:function")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(name, local_files_only=True, trust_remote_code=False)


def main():
    parser = argparse.ArgumentParser(prog="check_cache", description="Is the KV cache of a model right?")
    add = parser.add_argument
    add("model", help="a transformers folder, or the module:function that returns a model or an adapter")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--device", help="for example cuda (default: where the model is)")
    add("--modes", nargs="+", metavar="WORD", help="only the ways whose name contains one of these: chunks padding")
    add("--length", type=int, help="tokens per row (default: 300, or three sliding windows, at most the context)")
    add("--json", action="store_true", help="print JSON")
    add("--plot", metavar="FILE", help="plot how far off each way is at each position")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    try:
        dtype = getattr(torch, args.dtype)
        report = check_cache(load(args.model), length=args.length, dtype=dtype, device=args.device, modes=args.modes)
        if args.plot:
            plot(report, args.plot)
    except (Exception, SystemExit) as error:
        own = args.model.partition(":")[0] == getattr(error, "name", None)  # the module that the argument names
        install = f": pip install {error.name}" if isinstance(error, ModuleNotFoundError) and not own else ""
        parser.exit(2, f"check_cache: {args.model}: {type(error).__name__}: {first_line(error)}{install}\n")
    if args.json:
        results = [{key: x for key, x in vars(result).items() if key != "errors"} for result in report.results]
        print(json.dumps({**vars(report), "exit_code": report.exit_code, "results": results}))
    else:
        print(report)
    sys.exit(report.exit_code)


if __name__ == "__main__":
    main()
