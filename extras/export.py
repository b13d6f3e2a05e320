"""Export a trained model: to ONNX with the KV cache in the graph, to a Hugging Face folder, to a web page.

    python -m extras.export --format onnx       out/onnx/model.onnx, for ONNX Runtime and sample.py --engine onnx
    python -m extras.export --format hf         out/hf, for transformers and vLLM
    python -m extras.export --format hf --onnx  with onnx/model.onnx in it, for Optimum and transformers.js too
    python -m extras.export --format web        out/web, a page that generates in the browser, for any static server

Every export ends with a check: the library that will read the files computes logits and greedy text, and we compare
both with PyTorch's.
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # for python extras/export.py

from extras.cli import Parser, fail, lock_folder, need, note, one_line_errors, run_main, writing_to
from extras.formats.checkpoint import load_checkpoint
from extras.formats.hf_read import known_ids
from extras.formats.onnx import export_onnx  # before ONNX Runtime itself, because it turns telemetry off
from extras.formats.tokenizer import build_tokenizer
from model import build_model, find_checkpoint

ONNX = ("onnx", "onnxscript", "onnxruntime")
PACKAGES = {"onnx": ONNX, "hf": ("transformers", "tokenizers", "safetensors"), "web": ONNX}


def parse_args():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--format", choices=PACKAGES, required=True, help="output format, and the name of the folder in --out_dir")
    add("--out_dir", help="the folder of the run, with ckpt.pt, where the export goes too (default: out)")
    add("--ckpt", metavar="FILE", help="default: ckpt.pt in --out_dir, or the pretrained model")
    add("--onnx", action="store_true", help="with --format hf: write onnx/model.onnx too, which takes longest")
    add("--meta", metavar="FILE", help="for a nanoGPT checkpoint: its meta.pkl, or its tokenizer")
    args = parser.parse_args()
    if args.onnx and args.format != "hf":
        parser.error(f"--onnx adds a graph to --format hf, not to --format {args.format}: leave it out")
    return args


def main():
    args = parse_args()
    with one_line_errors():
        need(f"--format {args.format}", *PACKAGES[args.format], *(ONNX if args.onnx else ()))
        checkpoint = load_checkpoint(find_checkpoint(args.ckpt or args.out_dir), args.meta)
        tokenizer = build_tokenizer(checkpoint)
        model = build_model(checkpoint).eval()
    note(f"using {model.source}")
    size = sum(p.nbytes for p in model.state_dict().values())
    if (args.onnx or args.format == "onnx") and size > 2**31 - 2**24:
        fail("an ONNX file cannot hold more than 2 GB: use --format hf, without --onnx")
    folder = Path(args.out_dir or "out") / args.format
    hint = "pass a folder that you can write to as --out_dir, and the model as --ckpt"
    with one_line_errors(), writing_to(folder.parent, hint):
        # the lock is next to the folder, because people publish everything inside it
        lock = lock_folder(folder.parent, f".{args.format}.lock")
    with lock, one_line_errors(), writing_to(folder, hint):
        if args.format == "onnx":
            found = checkpoint.get("special_tokens") or {}
            export_onnx(model, tokenizer, folder, known_ids(found.get("eos", []), len(tokenizer.vocab)))
        elif args.format == "hf":
            from extras.formats.hf_write import export_hf

            export_hf(model, tokenizer, folder, checkpoint.get("special_tokens"), args.onnx)
        else:
            from extras.formats.webpage import export_web

            export_web(model, tokenizer, folder)


if __name__ == "__main__":
    run_main(main)
