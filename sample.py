"""Generate text with a trained model: prefill the prompt, then decode one token per step from the KV cache.

    python sample.py --prompt "O Romeo, " --kv_cache
    python sample.py --prompt "O Romeo, " --no-kv_cache            the same text without the cache
    python sample.py --prompt FILE:start.txt --verify              both, compared token by token
    python sample.py --prompt "O Romeo, " --draft ngram --compile  the same text, as fast as we can
    python sample.py --prompt "O Romeo, " --engine onnx            the same text, run by ONNX Runtime
    python sample.py --ckpt gpt2 --prompt "To be, or"              GPT-2, from its Hugging Face folder
    python sample.py --engine hf --ckpt FOLDER --verify            any causal model, run and cached by transformers

A token is a character, unless the model has a tokenizer. The text goes to stdout, and a report on time and memory to
stderr.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

from kvgpt.checkpoint import load_checkpoint, load_model, pick_checkpoint
from kvgpt.cli import Parser, boolean, fail, note, number, one_line_errors, path, pick_device, run_main
from kvgpt.cores import num_threads, share_cores
from kvgpt.decoding.sequence import Sequence
from kvgpt.decoding.timing import Timing, report
from model import Sampling, stream_tokens

SEPARATOR = "\n---------------\n"  # between samples

# -- the command line --------------------------------------------------------------------------------------------------


def parse_args(argv=None):
    parser = Parser(__doc__)
    add, count = parser.add_argument, number(int, f"[1, {2**31})")
    # text and cache
    add("--prompt", action="append", help="text to continue, or FILE:path; repeat for a batch (default: a newline)")
    add("--start", action="append", dest="prompt", metavar="PROMPT", help="nanoGPT's name for --prompt")
    add(
        "--kv_cache",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="decode from the cache, or recompute everything for every token (default: --kv_cache)",
    )
    add(
        "--max_new_tokens",
        type=count,
        metavar="N",
        help="new tokens per sample (default: until the context is full; 1000 with --overflow slide; 64 with hf)",
    )
    add("--stop", action="append", metavar="TEXT", help="end before this text; repeat for several")
    # sampling
    add(
        "--temperature",
        type=number(float, "[0, 1e30)"),
        default=Sampling.temperature,
        help=f"0 is greedy, 1 the model's own distribution (default: {Sampling.temperature})",
    )
    add("--top_k", type=count, metavar="K", help="sample from the K most likely tokens")
    top_p_help = "sample from the most likely tokens whose probabilities add up to P"
    add("--top_p", type=number(float, "(0, 1]"), metavar="P", help=top_p_help)
    seed_help = "the same seed gives the same text (default: 1337)"
    add("--seed", type=number(int, f"[0, {2**64})"), default=1337, help=seed_help)
    add(
        "--overflow",
        choices=("stop", "slide"),
        default="stop",
        help="when the context is full: stop, or keep its newest half and continue (default: stop)",
    )
    add("--num_samples", type=number(int, f"[1, {2**20})"), default=1, metavar="N", help="per prompt (default: 1)")
    # speed
    add("--draft", choices=("ngram",), help="guess the next tokens from n-grams, and check them in one forward")
    compile_help = "decode with the step in C, which takes a second to compile (default: False)"
    add("--compile", type=boolean, nargs="?", const=True, default=False, metavar="True|False", help=compile_help)
    add(
        "--engine",
        choices=("torch", "onnx", "hf"),
        default="torch",
        help="onnx: ONNX Runtime, with a file from export.py; hf: a causal model of transformers (default: torch)",
    )
    weights_help = "int8: round the weights, which makes --compile faster but changes the text (default: float32)"
    add("--weights", choices=("float32", "int8"), default="float32", help=weights_help)
    # files and device
    add("--out_dir", type=path, help="folder with ckpt.pt, onnx/model.onnx or hf (default: out)")
    add("--ckpt", type=path, metavar="FILE", help="a checkpoint, Hugging Face folder or .onnx file from elsewhere")
    meta_help = "for a nanoGPT checkpoint: its meta.pkl, or the folder of its tokenizer"
    add("--meta", type=path, metavar="FILE", help=meta_help)
    add("--device", default="auto", help="cpu, cuda or mps; auto: cuda if there is one, else cpu (default: auto)")
    dtypes = ("float32", "bfloat16", "float16")
    add("--dtype", choices=dtypes, default="float32", help="dtype of weights and cache (default: float32)")
    # checks
    add("--verify", action="store_true", help="generate again the other way, with or without the cache, and compare")
    add("--explain", action="store_true", help="print the tensor shapes of a prefill and two decode steps instead")
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        from kvgpt.nanogpt import refuse_unknown

        refuse_unknown(parser, unknown)
    args.stop = args.stop or []
    refuse_conflicts(args, parser.error)
    return args


def refuse_conflicts(args, error):
    """Call error(message) if flags contradict each other."""
    num_prompts = len(args.prompt or [""])
    need_cache = {"--draft": args.draft, "--compile": args.compile, "a batch of prompts": num_prompts > 1}
    if not args.kv_cache and any(need_cache.values()):
        error(f"{next(filter(need_cache.get, need_cache))} needs the cache: leave out --no-kv_cache")
    if args.verify and args.dtype != "float32":
        error(f"--verify needs --dtype float32: rounding in {args.dtype} changes tokens")
    if args.meta and not (args.ckpt or args.out_dir):
        error("--meta is for a checkpoint of nanoGPT: add --ckpt FILE")
    if "" in args.stop:
        error("--stop needs a text that is not empty")
    not_plain = (args.draft, args.compile, args.verify, args.stop, args.overflow != "stop", args.engine != "torch")
    if args.explain and (any(not_plain) or args.num_samples > 1 or num_prompts > 1 or not args.kv_cache):
        error("--explain shows one prompt with the plain cache: leave out flags that change that")
    if args.engine != "torch":
        torch_only = [f"--{name}" for name in ("draft", "compile", "meta") if getattr(args, name)]
        torch_only += [f"--dtype {args.dtype}"] * (args.dtype != "float32")
        torch_only += ["--weights int8"] * (args.weights == "int8")
        torch_only += [f"--device {args.device}"] * (args.device not in ("auto", "cpu"))
        if torch_only:
            error(f"{torch_only[0]} works with --engine torch, not with {args.engine}")


# -- model and prompts -------------------------------------------------------------------------------------------------


def open_engine(args):
    """Return (engine, tokenizer, ngrams): a model for stream_tokens, and n-gram counts for --draft, or None.

    Raises FileNotFoundError or ValueError with one line.
    """
    if args.engine == "torch":
        ckpt = load_checkpoint(pick_checkpoint(args.ckpt, args.out_dir), args.meta)
        model, tokenizer = ckpt.build_language_model()
        if args.weights == "int8":
            from kvgpt.decoding.quantize import round_weights

            round_weights(model)
        return model.to(pick_device(args.device), getattr(torch, args.dtype)), tokenizer, ckpt.ngrams

    if args.engine == "hf":
        from kvgpt.interop.transformers import HuggingFaceGPT

        engine = HuggingFaceGPT(args.ckpt or Path(args.out_dir or "out") / "hf")
    else:
        from kvgpt.interop.onnx import OnnxGPT

        engine = OnnxGPT(args.ckpt or Path(args.out_dir or "out") / "onnx" / "model.onnx")
    return engine, engine.tokenizer, None


def model_to_verify(args, engine):
    """Return the model for --verify to generate with: for an ONNX file, the GPT that it was exported from.

    Raises FileNotFoundError or ValueError with one line.
    """
    if args.engine != "onnx":
        return engine
    from kvgpt.interop.onnx import weights_sha256

    checkpoint = pick_checkpoint(None, args.out_dir)
    model, _ = load_model(checkpoint)
    if weights_sha256(model) != engine.weights_sha256:
        raise ValueError(f"--verify needs {engine.file} to be exported from {checkpoint}: export it again")
    return model


def read_prompt(prompt, tokenizer):
    """Return the token ids of the prompt. Exits with one line if a file cannot be read or a character is unknown."""
    if prompt.startswith("FILE:"):
        name = prompt.removeprefix("FILE:") or fail("--prompt FILE: needs a file name after the colon")
        try:
            prompt = Path(name).read_bytes().decode("utf-8-sig")
        except OSError as error:
            fail(f"cannot read the prompt from {name}: {error.strerror}")
        except UnicodeDecodeError:
            fail(f"the prompt in {name} is not UTF-8")
    if not prompt:
        prompt = tokenizer.default_prompt
        note(f"the prompt is empty: starting from {prompt!r}")
    with one_line_errors():
        return tokenizer.encode(prompt)


def choose_num_new(args, lengths, block_size, unit):
    """Return how many new tokens to ask for. A row whose context is full stops earlier.

    lengths  of the prompts in tokens
    unit     what messages call tokens
    Exits with one line for prompts that do not fit the context.
    """
    asked, longest, most = args.max_new_tokens, max(lengths), block_size - min(lengths)
    equal = ["--overflow slide"] * (args.overflow == "slide") + [f"--engine {args.engine}"] * (args.engine != "torch")
    if equal and len(set(lengths)) > 1:
        counts = " and ".join(str(n) for n in sorted(set(lengths)))
        fail(f"{equal[0]} needs prompts of equal length in a batch, but these have {counts} {unit}")
    if args.overflow == "slide":
        return asked or 1000
    if longest >= block_size:
        fail(
            f"the prompt has {longest} {unit}, but a context of {block_size} needs room for a new one: use at most "
            f"{block_size - 1} (or --overflow slide, which keeps the newest {max(1, block_size // 2)})"
        )
    if asked and asked > most:
        note(f"--max_new_tokens {asked} is capped at {most}, the end of the context (--overflow slide continues)")
    return asked or (min(64, most) if args.engine == "hf" else most)  # hf models often have a context of 131,072 tokens


# -- generation --------------------------------------------------------------------------------------------------------


def make_decoder(args, model, ngrams):
    """Return a Decoder for guesses, the step in C or several prompts. None means the plain loop, stream_tokens."""
    if not (args.draft or args.compile or len(args.prompt) > 1):
        return None
    from kvgpt.decoding.decode import Decoder

    draft, ngrams = args.draft, ngrams if args.draft else None
    if args.compile:
        from kvgpt.decoding.compile import CompileError

        try:
            return Decoder(model, draft, ngrams, compile=True, weights=args.weights)
        except CompileError as error:
            note(f"{error}: decoding without --compile")
    return Decoder(model, draft, ngrams) if draft or len(args.prompt) > 1 else None


def write_stream(stream, sequences, timing):
    """Write the first sequence to stdout as its tokens arrive, then the rest. Extends `sequences`.

    stream  from stream_tokens, or a Generation, which can leave a row that has reached a stop text
    Returns the number of new tokens in the longest sequence, including those of a stop text.
    """
    first, written, num_new = sequences[0], len(sequences[0].text), [0] * len(sequences)
    sys.stdout.write(first.text)
    sys.stdout.flush()
    for block in stream:
        # append
        new = [[token for token in tokens if token >= 0] for tokens in block.tolist()]  # -1 pads shorter rows
        timing.record(sum(map(len, new)) / len(new))
        for i, sequence in enumerate(sequences):
            if not sequence.ended:
                sequence.add(new[i])
                num_new[i] += len(new[i])
                if sequence.ended and hasattr(stream, "leave"):
                    stream.leave(i)

        # write
        text = first.final(written)
        written += len(text)
        sys.stdout.write(text)
        sys.stdout.flush()
        if all(sequence.ended for sequence in sequences):
            break
    sys.stdout.write(first.text[written:])
    for sequence in sequences[1:]:
        sys.stdout.write(SEPARATOR + sequence.text)
    if sys.stdout.isatty():
        sys.stdout.write("\n")
    sys.stdout.flush()
    return max(num_new)


def step_work(args, engine, decoder, num_rows):
    """Return the number of multiply-adds that torch does per step, about one per weight and token."""
    if args.engine == "onnx" or (decoder and decoder.program):
        return 0
    tokens = 1 + (decoder.num_drafts if decoder else 0) if args.kv_cache else engine.config.block_size
    return num_rows * tokens * sum(p.numel() for p in engine.parameters())


def compare(args, model, tokenizer, prompts, texts, num_new, sampling, seconds):
    """Generate again, with the cache if it was without and vice versa. Returns whether the texts are the same.

    texts    the generated ids, a list per row
    seconds  how long they took
    """
    from kvgpt.decoding.verify import verify

    began = time.perf_counter()
    same, lines = verify(model, prompts, texts, num_new, not args.kv_cache, sampling, tokenizer, args.stop)
    for line in lines:
        note(f"verify: {line}")
    both = seconds, time.perf_counter() - began
    cached, uncached = both if args.kv_cache else both[::-1]
    if args.engine == "hf":
        folder = args.ckpt or "FOLDER"
        note(f"verify: this compared tokens. python -m check_cache {folder} compares logits, in many more ways")
    if same and num_new > 1:
        speedup = f"{uncached / cached:.1f} times as fast"
        note(f"verify: {cached:.2f} s with the cache, {uncached:.2f} s without: {speedup}")
    return same


def main():
    # load the model, read the prompts
    args, began = parse_args(), time.perf_counter()
    share_cores()
    with one_line_errors():
        engine, tokenizer, ngrams = open_engine(args)
        model = model_to_verify(args, engine) if args.verify else None
    args.prompt = args.prompt or [tokenizer.default_prompt]
    prompts = [read_prompt(prompt, tokenizer) for prompt in args.prompt]
    with one_line_errors():
        for stop in args.stop:  # the model could never generate an unknown character
            tokenizer.encode(stop)
    num_new = choose_num_new(args, [len(ids) for ids in prompts], engine.config.block_size, tokenizer.unit)

    # one row per sample: the samples of the first prompt, then those of the next
    device = engine.lm_head.weight.device if args.engine == "torch" else torch.device("cpu")
    prompts = [torch.tensor(ids, device=device) for ids in prompts for _ in range(args.num_samples)]
    samples = list(range(args.num_samples)) * len(args.prompt)
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed, samples, args.overflow)
    if args.explain:
        from kvgpt.decoding.explain import explain

        explain(engine, tokenizer, prompts[0][None], min(3, num_new), sampling)
        return

    # generate
    sequences = [Sequence(prompt.tolist(), tokenizer, args.stop) for prompt in prompts]
    decoder = make_decoder(args, engine, ngrams)
    all_threads = torch.get_num_threads()
    torch.set_num_threads(num_threads(step_work(args, engine, decoder, len(prompts))))
    if decoder:
        stream = decoder.generation(prompts, num_new, sampling)
    else:
        stream = stream_tokens(engine, torch.stack(prompts), num_new, sampling, args.kv_cache)
    loaded, timing = time.perf_counter() - began, Timing(device)
    most_new = write_stream(stream, sequences, timing)

    # report on stderr
    print(file=sys.stderr)
    texts = [sequence.ids for sequence in sequences]
    for line in report(engine.config, args.dtype, args.kv_cache, timing, texts, prompts):
        note(line)
    note(f"loading: {loaded:.1f} s for the model{' and the step in C' if decoder and decoder.program else ''}")
    if decoder and stream.offered:
        rate = stream.accepted / stream.offered
        source = "n-grams of the training text" if decoder.table else "the text so far: the checkpoint has no n-grams"
        note(f"draft: {stream.accepted} of {stream.offered} guesses accepted ({rate:.0%}), from {source}")
    if args.verify:
        torch.set_num_threads(all_threads)
        same = compare(args, model, tokenizer, prompts, texts, most_new, sampling, timing.times[-1])
        sys.exit(0 if same else 1)


if __name__ == "__main__":
    run_main(main, memory_hint="fewer --num_samples or --max_new_tokens, or a smaller model, would fit")
