"""Generate text with a trained model: prefill the prompt, then decode one character per step from the KV cache.

    python sample.py --prompt "O Romeo, " --kv_cache
    python sample.py --prompt "O Romeo, " --no-kv_cache            the same text without the cache
    python sample.py --prompt FILE:start.txt --verify              both, compared character by character
    python sample.py --prompt "O Romeo, " --draft ngram --compile  the same text, as fast as this kit can
    python sample.py --prompt "O Romeo, " --engine onnx            the same text by ONNX Runtime
    python sample.py --engine hf --ckpt FOLDER --verify            is the cache of a model of transformers right?

The text goes to stdout. The report of time and memory goes to stderr.
"""

import argparse
import math
import sys
import time
from pathlib import Path

import torch

from kvgpt.checkpoint import load_checkpoint, load_model
from kvgpt.cli import Parser, fail, note, number, one_line_errors, path, pick_checkpoint, pick_device, run_main
from kvgpt.decoding.compile import CompileError
from kvgpt.decoding.decode import Decoder
from kvgpt.decoding.explain import explain
from kvgpt.decoding.sampling import Sampling, text_context_start
from kvgpt.decoding.stop import cut_at_stop, num_undecided
from kvgpt.decoding.timing import Timing
from kvgpt.decoding.verify import verify
from kvgpt.engines.hf import HuggingFaceGPT
from kvgpt.engines.onnx import OnnxGPT, weights_sha256
from kvgpt.vocabulary import character_vocabulary, tokenizer_vocabulary
from model import GPTConfig

SEPARATOR = "\n---------------\n"  # between samples

# -- the command line --------------------------------------------------------------------------------------------------


def parse_args(argv=None):
    parser = Parser(__doc__)
    add = parser.add_argument
    # text and cache
    add("--prompt", action="append", help="text to continue, or FILE:path; repeat it for a batch (default: a newline)")
    add(
        "--kv_cache",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="decode from the cache, or recompute the whole text for every character (default: --kv_cache)",
    )
    add(
        "--max_new_tokens",
        type=number(int, f"[0, {2**31})"),
        metavar="N",
        help="new characters per sample (default: until the context is full; 1000 with --overflow slide)",
    )
    add("--stop", action="append", metavar="TEXT", help="end before this text; repeat it for several")
    # sampling
    add(
        "--temperature",
        type=number(float, "[0, 1e30)"),
        default=Sampling.temperature,
        help=f"0 is greedy, 1 the model's own distribution (default: {Sampling.temperature})",
    )
    add("--top_k", type=number(int, f"[1, {2**31})"), metavar="K", help="sample from the K likeliest characters")
    add(
        "--top_p",
        type=number(float, "(0, 1]"),
        metavar="P",
        help="sample from the likeliest with probability P together",
    )
    add(
        "--seed",
        type=number(int, f"[0, {2**64})"),
        default=1337,
        help="the same seed gives the same text (default: 1337)",
    )
    add(
        "--overflow",
        choices=("stop", "slide"),
        default="stop",
        help="at a full context: stop, or keep its newest half and go on (default: stop)",
    )
    add(
        "--num_samples",
        type=number(int, f"[1, {2**20})"),
        default=1,
        metavar="N",
        help="samples per prompt (default: 1)",
    )
    # speed
    add("--draft", choices=("ngram",), help="guess the next characters from n-grams and verify them in one forward")
    add("--compile", action="store_true", help="decode by the step in C, which takes a second to compile")
    add(
        "--engine",
        choices=("torch", "onnx", "hf"),
        default="torch",
        help="onnx: ONNX Runtime, a file of export.py; hf: transformers, any causal model (default: torch)",
    )
    # files and device
    add("--out_dir", type=path, help="folder of ckpt.pt, onnx/model.onnx and hf (default: out)")
    add("--ckpt", type=path, metavar="FILE", help="another checkpoint: last.pt, nanoGPT's, a .onnx file, an hf folder")
    add("--meta", type=path, metavar="FILE", help="the meta.pkl that belongs to a nanoGPT checkpoint")
    add("--device", default="auto", help="cpu, cuda or mps; auto takes cuda if there is one (default: auto)")
    dtypes = ("float32", "bfloat16", "float16")
    add("--dtype", choices=dtypes, default="float32", help="dtype of weights and cache (default: float32)")
    # checks
    add("--verify", action="store_true", help="also generate the other way, with or without the cache, and compare")
    add("--explain", action="store_true", help="print the tensor shapes of a prefill and two decode steps instead")
    args = parser.parse_args(argv)
    args.prompt, args.stop = args.prompt or ["\n"], args.stop or []
    refuse_conflicts(args, parser.error)
    return args


def refuse_conflicts(args, error):
    """Call error(message) if two flags exclude each other."""
    need_cache = {"--draft": args.draft, "--compile": args.compile, "a batch of prompts": len(args.prompt) > 1}
    if not args.kv_cache and any(need_cache.values()):
        error(f"{next(filter(need_cache.get, need_cache))} needs the cache: leave out --no-kv_cache")
    if args.verify and args.dtype != "float32":
        error(f"--verify needs --dtype float32: rounding in {args.dtype} changes tokens")
    if args.meta and not (args.ckpt or args.out_dir):
        error("--meta belongs to a checkpoint of nanoGPT: name that, too, with --ckpt")
    if "" in args.stop:
        error("--stop needs a text, and this one is empty")
    not_plain = (args.draft, args.compile, args.verify, args.num_samples > 1, args.engine != "torch", not args.kv_cache)
    not_plain += (len(args.prompt) > 1, args.overflow != "stop", args.stop)
    if args.explain and any(not_plain):
        error("--explain shows one prompt and the plain cache: leave out flags that change either")
    if args.engine != "torch":
        torch_only = [f"--{name}" for name in ("draft", "compile", "meta") if getattr(args, name)]
        torch_only += [f"--dtype {args.dtype}"] * (args.dtype != "float32")
        torch_only += [f"--device {args.device}"] * (args.device not in ("auto", "cpu"))
        if torch_only:
            error(f"{torch_only[0]} goes with --engine torch, not with {args.engine}")
    if args.engine == "hf" and args.stop:
        error("--stop goes with models whose tokens are characters, not with --engine hf")


# -- model and prompts -------------------------------------------------------------------------------------------------


def open_engine(args):
    """Return (engine, model, vocabulary, ngrams).

    engine  generates: a GPT, an OnnxGPT or a HuggingFaceGPT
    model   --verify compares with its plain loop; None if that is not needed
    Raises FileNotFoundError or ValueError with one line.
    """
    if args.engine == "torch":
        device = pick_device(args.device)
        ckpt = load_checkpoint(pick_checkpoint(args.ckpt, args.out_dir), args.meta)
        model, chars = ckpt.build_language_model()
        model.to(device, getattr(torch, args.dtype))
        return model, model, character_vocabulary(chars), ckpt.checked_ngrams() if args.draft else None

    if args.engine == "hf":
        engine = HuggingFaceGPT(args.ckpt or Path(args.out_dir or "out") / "hf")
        return engine, engine, tokenizer_vocabulary(engine.tokenizer, engine.config.vocab_size), None

    file = args.ckpt or Path(args.out_dir or "out") / "onnx" / "model.onnx"
    engine, model = OnnxGPT(file), None
    if args.kv_cache and not engine.cached:
        raise ValueError(f"{file} has no cache in its graph: give --no-kv_cache")
    if args.verify:
        checkpoint = pick_checkpoint(None, args.out_dir)
        model, chars = load_model(checkpoint)
        if weights_sha256(model) != engine.weights_sha256:
            raise ValueError(f"--verify compares with {checkpoint}, and {file} is of another model: export it again")
    return engine, model, character_vocabulary(engine.chars), None


def read_prompt(prompt, vocabulary):
    """Return the prompt's token ids. Exits with one line for a file that cannot be read, or an unknown character."""
    if prompt.startswith("FILE:"):
        name = prompt.removeprefix("FILE:") or fail("--prompt FILE: needs the name of a file behind the colon")
        try:
            prompt = Path(name).read_bytes().decode("utf-8-sig")
        except OSError as error:
            fail(f"cannot read the prompt from {name}: {error.strerror}")
        except UnicodeDecodeError:
            fail(f"the prompt in {name} is not UTF-8")
    if not prompt:
        prompt = vocabulary.start
        note(f"the prompt is empty: starting from {prompt!r}")
    with one_line_errors():
        return vocabulary.encode(prompt)


def check_stops(stops, chars):
    """Exit with one line for a stop text that the model cannot write."""
    for stop in stops:
        unknown = sorted(set(stop) - set(chars))
        if unknown:
            never = ", ".join(map(repr, unknown[:20]))
            fail(f"--stop {stop!r} would never end a text, because the model never saw {never}: leave it out")


def choose_num_new(args, lengths, block_size):
    """Return the number of new tokens per row, capped where the shortest prompt fills the context.

    lengths  of the prompts. Exits with one line for prompts that the context cannot hold.
    """
    asked, longest = args.max_new_tokens, max(lengths)
    unit = "tokens" if args.engine == "hf" else "characters"
    equal = ["--overflow slide"] * (args.overflow == "slide") + [f"--engine {args.engine}"] * (args.engine != "torch")
    if equal and len(set(lengths)) > 1:
        counts = " and ".join(str(n) for n in sorted(set(lengths)))
        fail(f"{equal[0]} takes prompts of one length in a batch, and these have {counts} {unit}")
    if args.overflow == "slide":
        return 1000 if asked is None else asked
    if asked == 0:
        return 0
    if longest >= block_size:
        fail(
            f"the prompt has {longest} {unit} and the context {block_size}: at most {block_size - 1} leave room "
            f"for a new one (--overflow slide takes the newest {max(1, block_size // 2)} of a longer prompt)"
        )
    most = block_size - min(lengths)
    if asked is not None and asked > most:
        note(f"--max_new_tokens {asked} reaches past the context of {block_size}: capped at {most}")
    return most if asked is None else min(asked, most)


# -- generation --------------------------------------------------------------------------------------------------------


def start_generation(args, engine, ngrams, prompts, num_new, sampling):
    """Return (stream, decoder). The stream prefills, then decodes. Yields a block of new tokens `(B, n)` per step.

    decoder  a Decoder for drafts, a compiled step or several prompts; None: the plain loop, GPT.stream
    """
    settings = vars(sampling)
    if args.engine == "torch" and (args.draft or args.compile or len(args.prompt) > 1):
        decoder = Decoder(engine, args.draft, ngrams, args.compile)
        try:
            return decoder.stream(prompts, num_new, **settings), decoder
        except CompileError as error:
            note(f"{error}: decoding without --compile")
        decoder = Decoder(engine, args.draft, ngrams)
        return decoder.stream(prompts, num_new, **settings), decoder
    return engine.stream(torch.stack(prompts), num_new, kv_cache=args.kv_cache, **settings), None


def write_stream(stream, rows, vocabulary, stops, timing, engine, num_new, leave):
    """Write the first row to stdout as its tokens arrive, then the other rows. Extends `rows`, lists of ids.

    leave  called with the number of a row that has met a stop text
    Returns (cache_bytes, stopped): the engine's cache_bytes() after the last step, and whether a stop text was met.
    """
    cache_bytes, lengths = None, [len(row) for row in rows]  # of the prompts
    running = set(range(len(rows)))  # the rows that have met no stop text
    sys.stdout.write(vocabulary.decode(rows[0]))
    sys.stdout.flush()
    before, written = 0, lengths[0]  # tokens of the first row: where the last piece of text began, and where it ended
    for block in stream:
        new = block.tolist()
        timing.record(block.size(1))
        for i in sorted(running):
            rows[i] += [token for token in new[i] if token >= 0]  # -1: this row's context is full
            if stops:
                num_tokens = len(rows[i])
                rows[i] = cut_at_stop(rows[i], lengths[i], vocabulary.names, stops)
                if len(rows[i]) < num_tokens:
                    running -= {i}
                    leave(i)
        last = not running or sum(timing.sizes) == num_new
        if last:
            cache_bytes = engine.cache_bytes()  # before the stream ends and releases the cache
        # the text of a token depends on the tokens before it
        text = vocabulary.decode(rows[0][before:])[len(vocabulary.decode(rows[0][before:written])) :]
        waits = not last and 0 in running
        if waits and stops:  # tokens are characters
            text = text[: len(text) - num_undecided(text, stops)]
            before = written = written + len(text)
        elif waits and text.endswith("\ufffd"):  # a part of a character
            text = ""
        else:
            before, written = written, len(rows[0])
        sys.stdout.write(text)
        sys.stdout.flush()
        if not running:
            break
    for row in rows[1:]:
        sys.stdout.write(SEPARATOR + vocabulary.decode(row))
    if sys.stdout.isatty():
        sys.stdout.write("\n")
    sys.stdout.flush()
    return cache_bytes, len(running) < len(rows)


def report(config, itemsize, timing, rows, prompts, cache_bytes, stopped):
    """Print what a generation cost.

    itemsize     bytes per number in the cache
    rows         the texts, prompts included
    cache_bytes  (used, reserved), or None without a cache
    stopped      whether stop texts have ended rows
    """
    produced = sum(map(len, rows)) - sum(map(len, prompts))
    figures, num_steps, per_row = timing.summary(produced), len(timing.times), sum(timing.sizes)
    line = f"{produced} tokens: TTFT {figures['ttft_ms']:.2f} ms"
    if num_steps > 1:
        line += f", TPOT {figures['tpot_ms']:.3f} ms"
        line += f", ITL p50 {figures['itl_p50_ms']:.3f} ms, p99 {figures['itl_p99_ms']:.3f} ms"
        line += f" per chunk of {per_row / num_steps:.2f}" if per_row > num_steps else ""
    note(f"{line}, E2E {figures['e2e_ms']:.1f} ms, {figures['tokens_per_s']:,.0f} tokens/s")
    if cache_bytes is None:
        note("KV cache: off")
        return
    note(f"KV cache: {cache_bytes[0]:,} bytes used of {cache_bytes[1]:,} reserved")
    if stopped:  # texts of different lengths
        return
    cached = max(map(len, rows)) - 1  # the last token is never fed
    cached -= text_context_start(config.block_size, max(map(len, prompts)), cached)
    if not isinstance(config, GPTConfig):  # a model of transformers may keep anything in its cache
        return
    factors = (config.n_layer, config.num_kv_heads, config.head_size, cached, len(rows))
    formula = "2 * {} layers * {} kv heads * {} head size * {} tokens * {} rows".format(*factors)
    note(f"KV cache: {formula} * {itemsize} bytes = {2 * math.prod(factors) * itemsize:,}")


def main():
    if sys.stdout is None:
        fail("there is no stdout to write to")

    # load the model, read the prompts
    args, began = parse_args(), time.perf_counter()
    with one_line_errors():
        engine, model, vocabulary, ngrams = open_engine(args)
    prompts = [read_prompt(prompt, vocabulary) for prompt in args.prompt]
    check_stops(args.stop, vocabulary.names)
    num_new = choose_num_new(args, [len(ids) for ids in prompts], engine.config.block_size)

    # one row per sample: the samples of the first prompt, then those of the next
    device = model.lm_head.weight.device if args.engine == "torch" else "cpu"
    prompts = [torch.tensor(ids, device=device) for ids in prompts for _ in range(args.num_samples)]
    samples = list(range(args.num_samples)) * len(args.prompt)
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed, samples, args.overflow)
    if args.explain:
        explain(model, vocabulary.names, prompts[0][None], min(3, num_new), **vars(sampling))
        return

    # generate
    rows = [prompt.tolist() for prompt in prompts]
    stream, decoder = (), None
    if num_new:
        stream, decoder = start_generation(args, engine, ngrams, prompts, num_new, sampling)
    loaded = time.perf_counter() - began
    timing = Timing(torch.device(device))
    cache_bytes, stopped = write_stream(
        stream, rows, vocabulary, args.stop, timing, engine, num_new, decoder.leave if decoder else lambda row: None
    )

    # report on stderr
    if timing.times:
        print(file=sys.stderr)
        itemsize = getattr(torch, args.dtype).itemsize
        report(engine.config, itemsize, timing, rows, prompts, cache_bytes if args.kv_cache else None, stopped)
        compiled = decoder is not None and decoder.compile
        note(f"loading: {loaded:.1f} s for the model{' and the compiled step' if compiled else ''}")
    if decoder and decoder.offered:
        rate = decoder.accepted / decoder.offered
        source = "n-grams of the training text" if decoder.table else "the text so far: the checkpoint has no n-grams"
        note(f"draft: {decoder.accepted} of {decoder.offered} guesses accepted ({rate:.0%}), from {source}")
    if args.verify and not num_new:
        note("verify: no new tokens, so there is nothing to compare")
    elif args.verify:
        began = time.perf_counter()
        num_new = sum(timing.sizes)  # fewer after a stop text
        same, lines = verify(model, prompts, rows, num_new, not args.kv_cache, sampling, vocabulary.names, args.stop)
        seconds = timing.times[-1], time.perf_counter() - began
        cached, uncached = seconds if args.kv_cache else seconds[::-1]
        for line in lines:
            note(f"verify: {line}")
        if same and num_new > 1:
            speedup = f"{uncached / cached:.1f} times as fast"
            note(f"verify: {cached:.2f} s with the cache, {uncached:.2f} s without: {speedup}")
        sys.exit(0 if same else 1)


if __name__ == "__main__":
    run_main(main, memory_hint="fewer --num_samples or --max_new_tokens, or a smaller model, would fit")
