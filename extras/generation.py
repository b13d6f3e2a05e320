"""Runs sample.py when it needs extras: for the flags of this folder, prompts of different lengths, and tokenizers.

sample.py adds the flags to its parser with add_flags, and calls main if `wanted` says so.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

import sample
from extras.cli import note_model
from extras.decode.decoder import NUM_DRAFTS, start_generation
from extras.decode.speculate import select_rows
from extras.formats.checkpoint import build_model, load_checkpoint
from extras.formats.tokenizer import IdTokenizer, build_tokenizer
from extras.text import IdText, PartialText
from extras.threads import share_cores
from model import generate

__all__ = ["add_flags", "load_checkpoint", "main", "share_cores", "wanted"]  # what sample.py uses


def add_flags(parser):
    add = parser.add_argument
    add("--draft", choices=("ngram",), help="draft the next tokens from n-grams, and check them in one forward")
    compile_help = "decode with the C backend, or on a GPU with a CUDA graph (default: False)"
    boolean = dict(type=sample.boolean, nargs="?", const=True, default=False, metavar="True|False")
    add("--compile", **boolean, help=compile_help)
    engine_help = "onnx: ONNX Runtime, with a file from extras.export (default: torch)"
    add("--engine", choices=("torch", "onnx"), default="torch", help=engine_help)
    weights_help = "int8: round the weights, which makes --compile faster but changes the text (default: float32)"
    add("--weights", choices=("float32", "int8"), default="float32", help=weights_help)
    meta_help = "for a nanoGPT checkpoint: its meta.pkl, or the folder of its tokenizer"
    add("--meta", metavar="FILE", help=meta_help)
    add("--explain", action="store_true", help="instead, print the tensor shapes of a prefill and two decode steps")


def wanted(args, error):
    """Return whether this folder generates: for its flags and for several rows, which can share the prefill.

    Calls error(message) if flags contradict each other.
    """
    num_prompts = len(args.prompt or [""])
    for name in ("draft", "compile"):
        if getattr(args, name) and not args.kv_cache:
            error(f"--{name} needs the cache: leave out --no-kv_cache")
    if args.meta == "":
        error("--meta is empty")
    if args.meta and not (args.ckpt or args.out_dir):
        error("--meta is for a checkpoint of nanoGPT: add --ckpt FILE")
    if args.ckpt and Path(args.ckpt).suffix == ".onnx" and args.engine == "torch":
        error(f"--ckpt {args.ckpt} needs --engine onnx")
    not_plain = (args.draft, args.compile, args.verify, args.stop, args.overflow != "stop", args.engine != "torch")
    if args.explain and (any(not_plain) or args.num_samples > 1 or num_prompts > 1 or not args.kv_cache):
        error("--explain shows one prompt with the plain cache: leave out flags that change that")
    for name, default in dict(draft=None, compile=False, meta=None, dtype="float32", weights="float32").items():
        if args.engine == "onnx" and getattr(args, name) != default:
            error(f"--{name} works with --engine torch, not with onnx")
    if args.ckpt and args.out_dir and not (args.engine == "onnx" and args.verify):
        error("--ckpt and --out_dir both say which model: pass one of them")
    flags = (args.draft, args.compile, args.engine == "onnx", args.weights != "float32", args.explain, args.meta)
    return any(flags) or num_prompts > 1 or args.num_samples > 1


def open_model(args, checkpoint):
    """Return (model, tokenizer, checkpoint); with --engine onnx, there is no checkpoint.

    Raises FileNotFoundError or ValueError with one line.
    """
    if args.engine == "onnx":
        from extras.formats.onnx import OnnxGPT

        model = OnnxGPT(args.ckpt or args.out_dir or "out")
        model.refuse_stale()
        return model, model.tokenizer, None
    checkpoint = checkpoint or load_checkpoint(sample.find_checkpoint(args.ckpt, args.out_dir), args.meta)
    if args.draft and not checkpoint.get("ngrams"):
        raise ValueError(
            f"--draft ngram needs n-gram counts, and {checkpoint['path']} has none (train.py saves them for "
            "vocabularies of up to 2,895 tokens): leave it out"
        )
    has_vocabulary = checkpoint.keys() & {"chars", "tokenizer"}
    vocab_size = checkpoint["model_args"]["vocab_size"]
    tokenizer = build_tokenizer(checkpoint) if has_vocabulary else IdTokenizer(vocab_size)
    model = build_model(checkpoint).eval()
    if args.weights == "int8":
        from extras.decode.quantize import round_weights

        round_weights(model)
    sample.put_on_device(model, args)
    return model, tokenizer, checkpoint


def refuse_lengths(args, prompts, unit):
    """Raise ValueError if prompts that must have equal lengths do not."""
    equal = "--overflow slide" if args.overflow == "slide" else "--engine onnx" if args.engine == "onnx" else None
    equal = equal or (None if args.kv_cache else "--no-kv_cache")
    lengths = {len(prompt) for prompt in prompts}
    if equal and len(lengths) > 1:
        counts = " and ".join(str(n) for n in sorted(lengths))
        raise ValueError(f"{equal} needs prompts of equal length in a batch, but these have {counts} {unit}")


def open_blocks(args, model, checkpoint, prompts, num_new, sampling, ended):
    """Return (blocks, slots): an iterator over new tokens `(B, n)`, and the slots of its cache.

    The blocks come from the plain loop, from a Generation, which does the same for drafts, the C backend and several
    prompts, or from a CUDA graph. We choose the number of threads for it.
    """
    slots = sample.num_slots(max(map(len, prompts)), num_new, model.config.block_size)
    if args.engine == "onnx":
        torch.set_num_threads(1)  # it has threads of its own
        return plain_blocks(model, prompts, num_new, sampling, args.kv_cache), slots
    threads = sample.num_threads(sample.multiply_adds(args, model) * (NUM_DRAFTS + 1 if args.draft else 1))
    if args.draft or args.compile or len({len(prompt) for prompt in prompts}) > 1:
        how = dict(draft=args.draft, compile=args.compile, weights=args.weights, threads=threads, slots=slots)
        how["ngrams"] = checkpoint.get("ngrams")
        blocks = start_generation(model, prompts, num_new, sampling, ended, **how)
        return blocks, getattr(blocks, "slots", slots)
    torch.set_num_threads(threads)
    cache = None
    T = len(prompts[0])
    one_prompt = len(args.prompt or [""]) == 1
    if one_prompt and args.kv_cache and 1 < T <= model.config.block_size:  # its samples share the prefill
        cache = model.new_cache(1, slots)
        model.next_logits(prompts[0][None, :-1], 0, cache)
        select_rows(cache, [0] * len(prompts))
    return plain_blocks(model, prompts, num_new, sampling, args.kv_cache, cache), slots


def plain_blocks(model, prompts, num_new, sampling, kv_cache, cache=None):
    """Yield the new tokens of the plain loop, `(B, 1)` per step."""
    for new, _ in generate(model, torch.stack(prompts), num_new, sampling, kv_cache, cache):
        yield new[:, None]


def main(args, checkpoint=None):
    """Generate and report as sample.py does. Exits with its code.

    checkpoint  the model, if sample.py has read it already
    """
    # the model and the prompts
    try:
        model, tokenizer, checkpoint = open_model(args, checkpoint)
        reference = model  # what --verify compares with
        if args.verify and args.engine == "onnx":
            reference = model.exported_from(load_checkpoint(sample.find_checkpoint(None, args.out_dir)))
        encoded, num_new = sample.read_prompts(args, tokenizer, model.config.block_size)
        refuse_lengths(args, encoded, tokenizer.unit)
        sampling = sample.sampling_of(args, len(encoded))
    except (ValueError, OSError) as error:
        sys.exit(f"sample.py: {error}")
    if checkpoint:
        note_model(checkpoint)
    if tokenizer.unit == "ids":
        sample.note("the checkpoint has no vocabulary, so this is ids; --meta takes nanoGPT's meta.pkl or a tokenizer")
    device = model.lm_head.weight.device if isinstance(model, torch.nn.Module) else torch.device("cpu")
    prompts = [torch.tensor(ids, device=device) for ids in encoded for _ in range(args.num_samples)]
    if args.explain:
        from extras.decode.explain import explain

        explain(model, tokenizer, prompts[0][None], min(3, num_new), sampling)
        return

    # generate
    text_class = {"tokens": PartialText, "ids": IdText}.get(tokenizer.unit, sample.GeneratedText)
    texts = [text_class(prompt.tolist(), tokenizer, args.stop) for prompt in prompts]
    ended = [False] * len(prompts)
    all_threads = torch.get_num_threads()
    blocks, slots = open_blocks(args, model, checkpoint, prompts, num_new, sampling, ended)
    times = sample.write_texts(blocks, texts, ended)

    # report, and check
    sample.report(args, model.config, slots, texts, [len(prompt) for prompt in prompts], times)
    if args.draft and getattr(blocks, "offered", 0):  # a CUDA graph has no drafts
        sample.note(f"draft: {blocks.accepted} of {blocks.offered} draft tokens accepted")
    if args.verify:
        torch.set_num_threads(all_threads)
        sys.exit(verify(reference, prompts, texts, num_new, sampling, tokenizer))


def verify(reference, prompts, texts, num_new, sampling, tokenizer):
    """Compare the texts with the plain loop, and report, as sample.py does, for prompts of any length.

    Returns the exit code.
    """
    tied = set()
    seconds = 0
    samples = sampling.samples_of(len(prompts), "cpu").tolist()
    for T in sorted({len(prompt) for prompt in prompts}):
        rows = [row for row, prompt in enumerate(prompts) if len(prompt) == T]
        idx = torch.stack([prompts[row] for row in rows])
        group = [texts[row] for row in rows]
        settings = replace(sampling, samples=[samples[row] for row in rows])
        found, took = sample.verify(reference, idx, group, num_new, settings, tokenizer, rows)
        if found is None:
            return 1
        tied |= found
        seconds = seconds + took
    new = [len(text.ids) - len(prompt) for text, prompt in zip(texts, prompts)]
    return sample.report_verify(new, tied, seconds)
