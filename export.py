"""Export a trained model: to ONNX with the KV cache in the graph, to a Hugging Face folder, to a web page.

    python export.py --format onnx       out/onnx/model.onnx, for ONNX Runtime and sample.py --engine onnx
    python export.py --format hf         out/hf, for transformers, Optimum, transformers.js and vLLM
    python export.py --format web        out/web, a page that generates in the browser, for any static server

Every export ends with a check. The library that will read the files computes logits and greedy text, and both are
compared with PyTorch's.
"""

import importlib.util
from pathlib import Path

from kvgpt.checkpoint import load_checkpoint
from kvgpt.cli import Parser, fail, note, one_line_errors, path, pick_checkpoint, run_main
from kvgpt.files import lock_folder

ONNX = ("onnx", "onnxscript", "onnxruntime")
PACKAGES = {"onnx": ONNX, "hf": ("transformers", "tokenizers", "safetensors"), "web": ONNX}


def parse_args():
    parser = Parser(__doc__)
    add = parser.add_argument
    add(
        "--format",
        choices=PACKAGES,
        required=True,
        help="output format; the files go to a folder of that name in --out_dir",
    )
    add("--out_dir", type=path, help="default: out")
    add(
        "--ckpt",
        type=path,
        metavar="FILE",
        help="default: ckpt.pt in --out_dir; without both, the model in the box",
    )
    add("--meta", type=path, metavar="FILE", help="the meta.pkl of a nanoGPT checkpoint")
    add("--int8", action="store_true", help="with onnx: also model_int8.onnx, a quarter of the size")
    data = Path(__file__).resolve().parent / "data"
    add("--data_dir", type=path, default=str(data), help="the prepared text for val losses (default: data)")
    args = parser.parse_args()
    if args.int8 and args.format != "onnx":
        parser.error(f"--int8 goes with --format onnx, not {args.format}")
    return args


def missing(packages):
    return [name for name in packages if importlib.util.find_spec(name) is None]


def main():
    args = parse_args()
    if missing(PACKAGES[args.format]):
        fail(f"--format {args.format} needs more packages: pip install {' '.join(PACKAGES[args.format])}")
    with one_line_errors():
        checkpoint = load_checkpoint(pick_checkpoint(args.ckpt, args.out_dir), args.meta)
        model, chars = checkpoint.build_language_model()
    folder = Path(args.out_dir or "out") / args.format
    folder.parent.mkdir(parents=True, exist_ok=True)
    # the lock stands beside the folder, because people publish all that is in it
    with lock_folder(folder.parent, f".{args.format}.lock"):
        if args.format == "onnx":
            from kvgpt.export.onnx import export_onnx

            export_onnx(model, chars, folder, Path(args.data_dir), args.int8)
        elif args.format == "hf":
            from kvgpt.export.hf import export_hf

            export_hf(model, chars, folder, graph=not missing(ONNX))
            if missing(ONNX):
                note(f"{folder} has no ONNX graph, which needs more packages: pip install {' '.join(ONNX)}")
        else:
            from kvgpt.export.web import export_web

            export_web(model, checkpoint, folder)


if __name__ == "__main__":
    run_main(main)
