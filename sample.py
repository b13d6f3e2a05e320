"""Generate text with a trained model: prefill the prompt, then decode one character at a time from the KV cache.

    python sample.py --prompt "O Romeo, " --kv_cache
    python sample.py --prompt "O Romeo, " --no-kv_cache      the same text, without the cache
    python sample.py --prompt FILE:start.txt --verify        both, compared character by character
    python sample.py --prompt "O Romeo, " --draft ngram --compile          the same text, as fast as it goes here
    python sample.py --prompt "O Romeo, " --engine onnx      the same text, by ONNX Runtime

The text goes to stdout; what it cost goes to stderr.
"""

import argparse
import math
import signal
import sys
import time
from pathlib import Path

import torch

from checkpoint import load_checkpoint, load_model
from decode import CompileError, Decoder, ngrams_fit
from explain import explain
from model import Head, eval_mode, gumbel_noise, sample_token, slide
from onnx_gpt import OnnxGPT

FILTERS = {"seed": None, "temperature": 1.0, "top_k": None, "top_p": None}
NEAR_TIE = 1e-4  # logits this close may change places by rounding: a full and a cached forward differ by up to 5e-5


def load_ngrams(path, vocab_size):
    """The n-gram counts that train.py keeps in a checkpoint, for `decode.Decoder`; None where there are none."""
    ngrams = load_checkpoint(path).get("ngrams")
    if ngrams is not None and not ngrams_fit(ngrams, vocab_size):
        raise ValueError(f"the n-grams in {path} are damaged: leave out --draft, or train again")
    return ngrams


def pick_device(name):
    """The torch.device for --device. Raises ValueError for one that cannot be used here."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=name).tolist()
    except Exception as error:  # each backend has its own way to be missing
        raise ValueError(f"--device {name} cannot be used here: {str(error).splitlines()[0][:150]}") from None
    return torch.device(name)


# -- the command line --------------------------------------------------------------------------------------------------


class OneLineParser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: {message} (--help lists the flags)\n")


def number(kind, interval):
    """An argparse type: an int or float in `interval`, written as in "[0, 1)"."""
    low, high = (float(bound) for bound in interval[1:-1].split(","))

    def parse(text):
        value = kind(text)
        inside = low <= value <= high and (value > low or interval[0] == "[") and (value < high or interval[-1] == "]")
        if not inside:
            raise argparse.ArgumentTypeError(f"{text} is not in {interval}")
        return value

    parse.__name__ = kind.__name__  # for argparse: "invalid int value: 'x'"
    return parse


def path(text):
    """An argparse type: an empty string, an unset shell variable most likely, is no path."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return text


def parse_args(argv=None):
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add(
        "--prompt",
        action="append",
        help="the text to continue, or FILE:path to read it from a file; repeated: a batch (default: a newline)",
    )
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
        help="default: as many as fit the context, 1000 with slide",
    )
    add("--temperature", type=number(float, "[0, 1e30)"), default=1.0, help="0 takes the likeliest (default: 1.0)")
    add("--top_k", type=number(int, f"[1, {2**31})"), metavar="K", help="sample among the K likeliest")
    add("--top_p", type=number(float, "(0, 1]"), metavar="P", help="sample among the likeliest that have probability P")
    add("--seed", type=number(int, f"[0, {2**64})"), default=1337, help="same seed, same text (default: 1337)")
    add(
        "--overflow",
        choices=("stop", "slide"),
        default="stop",
        help="at a full context: stop, or keep the newest half of it and go on (default: stop)",
    )
    add("--num_samples", type=number(int, f"[1, {2**20})"), default=1, metavar="N", help="of each prompt, in one batch")
    add("--draft", choices=("ngram",), help="guess the next characters from n-grams, and verify them in one forward")
    add("--compile", action="store_true", help="compile the decode step first: for long texts and many samples")
    add(
        "--engine",
        choices=("torch", "onnx"),
        default="torch",
        help="onnx: ONNX Runtime, with what export.py --format onnx wrote (default: torch)",
    )
    add("--out_dir", type=path, default="out", help="the folder of ckpt.pt, and of onnx/model.onnx (default: out)")
    add("--ckpt", type=path, metavar="FILE", help="another checkpoint: last.pt, one of nanoGPT, a .onnx file")
    add("--meta", type=path, metavar="FILE", help="the meta.pkl that goes with a nanoGPT checkpoint")
    add("--device", default="auto", help="cpu, cuda, mps; auto: cuda where there is one (default: auto)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of weights and cache")
    add("--verify", action="store_true", help="generate with and without the cache, and compare token by token")
    add("--explain", action="store_true", help="print the shapes of the cache's way instead: three steps of one prompt")
    args = parser.parse_args(argv)
    args.prompt = args.prompt or ["\n"]
    cached = {"--draft": args.draft, "--compile": args.compile, "a batch of prompts": len(args.prompt) > 1}
    if not args.kv_cache and any(cached.values()):
        parser.error(f"{next(filter(cached.get, cached))} needs the cache: leave out --no-kv_cache")
    if args.verify and args.dtype != "float32":
        parser.error(f"--verify compares token by token, which {args.dtype} does not promise: use --dtype float32")
    others = (args.draft, args.compile, args.verify, args.num_samples > 1, args.engine != "torch", not args.kv_cache)
    if args.explain and (any(others) or len(args.prompt) > 1 or args.overflow != "stop"):
        parser.error("--explain shows one prompt on its plain way through the cache: leave out what changes that")
    if args.engine == "onnx":
        others = [f"--{name}" for name in ("draft", "compile", "meta") if getattr(args, name)]
        others += [f"--dtype {args.dtype}"] * (args.dtype != "float32")
        others += [f"--device {args.device}"] * (args.device not in ("auto", "cpu"))
        if others:
            parser.error(f"{others[0]} goes with --engine torch, not with onnx")
    return args


def fail(message):
    sys.exit(f"sample.py: {message}")


def note(message):
    print(f"sample.py: {message}", file=sys.stderr)


def read_prompt(prompt, chars):
    """The prompt's token ids; exits with one line if they cannot be had."""
    if prompt.startswith("FILE:"):
        name = prompt.removeprefix("FILE:")
        try:
            prompt = Path(name).read_bytes().decode("utf-8-sig")
        except OSError as error:
            fail(f"cannot read the prompt from {name}: {error.strerror}")
        except UnicodeDecodeError:
            fail(f"the prompt in {name} is not UTF-8")
    if not prompt:
        prompt = "\n" if "\n" in chars else chars[0]
        note(f"the prompt is empty: starting from {prompt!r}")
    ids = {char: i for i, char in enumerate(chars)}
    unknown = sorted(set(prompt) - set(ids))
    if unknown:
        known = repr(chars if len(chars) <= 200 else f"{chars[:200]}...")
        fail(f"the model never saw {', '.join(map(repr, unknown[:20]))}; it knows {known}")
    return [ids[char] for char in prompt]


# -- generation --------------------------------------------------------------------------------------------------------


def cache_bytes(model):
    """(used, reserved) bytes of all Heads' caches: what has been written, and what has been allocated for it. An
    OnnxGPT's is as long as what it holds."""
    if isinstance(model, OnnxGPT):
        return (sum(value.numpy().nbytes for value in model.past),) * 2
    heads = [module for module in model.modules() if isinstance(module, Head) and module.key_cache is not None]
    views = [view for head in heads for view in (head.key_cache, head.value_cache)]
    buffers = {view.untyped_storage().data_ptr(): view.untyped_storage().nbytes() for view in views}
    return sum(view.nbytes for view in views), sum(buffers.values())


def context_begin(block_size, prompt_tokens, tokens):
    """Where the context begins in a text that has grown from `prompt_tokens` to `tokens` tokens."""
    begin = 0
    for end in range(prompt_tokens, tokens + 1):
        begin = slide(begin, end, block_size)
    return begin


def report(config, itemsize, arrivals, rows, prompts, cache):
    """Print what a generation cost. itemsize: bytes of a number in the cache; arrivals: for each step, the seconds from
    the start until it was done, and the places of the continuation that came of it; rows and prompts: all texts, and
    what they began with; cache: see cache_bytes."""
    seconds = torch.tensor([when for when, _ in arrivals], dtype=torch.float64)
    places, gaps = sum(n for _, n in arrivals), seconds.diff() * 1e3
    produced = sum(map(len, rows)) - sum(map(len, prompts))
    line = f"{produced} tokens: TTFT {seconds[0] * 1e3:.2f} ms"
    if len(gaps):
        p50, p99 = torch.quantile(gaps, torch.tensor([0.5, 0.99], dtype=torch.float64)).tolist()
        line += f", TPOT {gaps.sum() / (places - arrivals[0][1]):.3f} ms, ITL p50 {p50:.3f} ms, p99 {p99:.3f} ms"
        line += f" a chunk of {places / len(arrivals):.2f}" if places > len(arrivals) else ""
    note(f"{line}, E2E {seconds[-1] * 1e3:.1f} ms, {produced / seconds[-1]:,.0f} tokens/s")
    if cache is None:
        note("KV cache: off")
        return
    tokens = max(map(len, rows)) - 1  # the last token is never fed back
    tokens -= context_begin(config.block_size, max(map(len, prompts)), tokens)
    heads = (config.n_layer, config.kv_heads, config.head_size)
    factors = (*heads, tokens, len(rows))
    formula = "2 * {} layers * {} kv heads * {} head size * {} tokens * {} rows".format(*factors)
    note(f"KV cache: {cache[0]:,} bytes used of {cache[1]:,} reserved")
    note(f"KV cache: {formula} * {itemsize} bytes = {2 * math.prod(factors) * itemsize:,}")


@torch.no_grad()
def near_tie(model, prefix, sample, step, picks, seed, temperature, top_k, top_p):
    """Whether rounding alone can have led two paths to different `picks` after the context `prefix`, token ids.

    So it is if each pick wins after logits move by no more than NEAR_TIE, or the edge of top_p does.
    """
    with eval_mode(model):
        logits = model(torch.tensor([prefix], device=model.lm_head.weight.device))[0][:, -1].float()
    noise = gumbel_noise(
        seed, *(torch.tensor([i], device=logits.device) for i in (sample, step)), vocab_size=logits.size(-1)
    )[:, 0]
    winners = set()
    for favoured, other in (picks, picks[::-1]):
        shifted = logits.clone()
        shifted[:, favoured] += NEAR_TIE / 2
        shifted[:, other] -= NEAR_TIE / 2
        edges = {top_p}
        if top_p is not None and temperature > 0:
            edges |= {min(1.0, top_p + NEAR_TIE / temperature), max(1e-9, top_p - NEAR_TIE / temperature)}
        for edge in edges:
            winners.add(sample_token(shifted, noise, temperature, top_k, edge).item())
    return set(picks) <= winners


def verify(model, prompts, ours, samples, max_new_tokens, kv_cache, sampling):
    """Compare `ours`, texts as lists of ids, with what the plain loop makes of the prompts, with or without the cache.

    Reports the match, a near-tie or a difference; True unless it is one. prompts: B int64 tensors of one dimension;
    kv_cache: of the plain loop, the opposite of what made `ours`; sampling: as in `GPT.stream`, with the seed given.
    """
    filters = {name: sampling.get(name, default) for name, default in FILTERS.items()}
    how, equal = "with" if kv_cache else "without", 0
    for T in sorted({len(prompt) for prompt in prompts}):
        rows = [row for row, prompt in enumerate(prompts) if len(prompt) == T]
        drawn = sampling | {"samples": [samples[row] for row in rows]}
        idx = torch.stack([prompts[row] for row in rows])
        theirs = model.generate(idx, max_new_tokens, kv_cache=kv_cache, **drawn).tolist()
        for row, b in zip(rows, theirs):
            a = ours[row]
            step = next((i for i in range(max(len(a), len(b)) - T) if a[T + i :][:1] != b[T + i :][:1]), None)
            equal += step is None
            if step is None:
                continue
            picks = (*a[T + step :][:1], *b[T + step :][:1])
            where = f"row {row}, new token {step}: {' and '.join(f'id {i}' for i in picks)} {how} the cache"
            context = a[context_begin(model.config.block_size, T, T + step) : T + step]
            if len(picks) < 2 or not near_tie(model, context, samples[row], step, picks, **filters):
                note(f"verify: DIFFERENT at {where}")
                return False
            note(f"verify: near-tie at {where}; rounding may choose between two so close, and all before is equal")
    tokens = sum(len(a) - len(prompt) for a, prompt in zip(ours, prompts))
    note(f"verify: {tokens} new tokens, compared with those {how} the cache: {equal} of {len(ours)} samples match")
    return True


def main():
    args = parse_args()
    began = time.perf_counter()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit like any other: compiled steps clean up then
    dtype = getattr(torch, args.dtype)
    try:
        device = pick_device("cpu" if args.engine == "onnx" else args.device)
        checkpoint = Path(args.out_dir) / "ckpt.pt"
        if args.engine == "onnx":
            file = args.ckpt or Path(args.out_dir) / "onnx" / "model.onnx"
            engine = OnnxGPT(file)
            chars = engine.chars
            if args.kv_cache and not engine.cached:
                raise ValueError(f"{file} has no cache in its graph: give --no-kv_cache")
            model, known = load_model(checkpoint) if args.verify else (None, chars)
            if model and (known, model.config) != (chars, engine.config):
                raise ValueError(
                    f"--verify compares with {checkpoint}, and {file} is of another model: export it again"
                )
        else:
            engine, chars = load_model(args.ckpt or checkpoint, args.meta)
            model = engine.to(device, dtype)
        ngrams = load_ngrams(args.ckpt or checkpoint, len(chars)) if args.draft else None
    except (FileNotFoundError, ValueError) as error:
        fail(error)

    prompts = [read_prompt(prompt, chars) for prompt in args.prompt]
    longest, block_size = max(map(len, prompts)), engine.config.block_size
    room = block_size - longest
    steps = args.max_new_tokens
    for option in ("--overflow slide", "--engine onnx"):
        name, value = option.removeprefix("--").split()
        if getattr(args, name) == value and len(set(map(len, prompts))) > 1:
            lengths = " and ".join(str(n) for n in sorted(set(map(len, prompts))))
            fail(f"{option} takes prompts of one length in a batch, and these have {lengths} characters")
    if args.overflow == "slide":
        steps = 1000 if steps is None else steps
    elif room < 1 and steps != 0:
        fail(
            f"the prompt has {longest} characters and the context {block_size}: at most {block_size - 1} leave room "
            f"for a new one (--overflow slide takes the newest {max(1, block_size // 2)} of a longer prompt)"
        )
    else:
        most = block_size - min(map(len, prompts))
        if steps is not None and steps > most:
            note(f"--max_new_tokens {steps} reaches past the context of {block_size}: capped at {most}")
        steps = most if steps is None else min(steps, most)
    # row by row, each prompt with samples 0 .. num_samples - 1
    samples = list(range(args.num_samples)) * len(prompts)
    prompts = [torch.tensor(ids, device=device) for ids in prompts for _ in range(args.num_samples)]
    sampling = {name: getattr(args, name) for name in (*FILTERS, "overflow")}

    if args.explain:
        explain(model, chars, prompts[0][None], min(3, steps), **sampling)
        return
    rows, arrivals, cache, decoder = [prompt.tolist() for prompt in prompts], [], None, None
    if steps < 1:
        stream = ()
    elif args.engine == "torch" and (args.draft or args.compile or len(args.prompt) > 1):
        decoder = Decoder(model, args.draft, ngrams, args.compile)
        try:
            stream = decoder.stream(prompts, steps, samples=samples, **sampling)
        except CompileError as error:
            note(f"{error}: decoding without --compile")
            decoder = Decoder(model, args.draft, ngrams)
            stream = decoder.stream(prompts, steps, samples=samples, **sampling)
    else:
        stream = engine.stream(torch.stack(prompts), steps, kv_cache=args.kv_cache, samples=samples, **sampling)

    # the first text is shown as it comes, the other rows of the batch when they are whole
    sys.stdout.write("".join(chars[i] for i in rows[0]))
    sys.stdout.flush()
    ready, began = time.perf_counter() - began, time.perf_counter()
    for place, tokens in enumerate(stream):
        new = tokens.tolist()
        if decoder is None or decoder.forwards > len(arrivals):
            arrivals.append((time.perf_counter() - began, 1))
        else:  # of the same step as the place before
            arrivals[-1] = (arrivals[-1][0], arrivals[-1][1] + 1)
        for row, token in zip(rows, new):
            if token >= 0:
                row.append(token)
        if new[0] >= 0:
            sys.stdout.write(chars[new[0]])
            sys.stdout.flush()
        if args.kv_cache and place + 1 == steps:
            cache = cache_bytes(engine)
    for row in rows[1:]:
        sys.stdout.write("\n---------------\n" + "".join(chars[i] for i in row))
    if sys.stdout.isatty():
        sys.stdout.write("\n")
    sys.stdout.flush()
    if arrivals:
        print(file=sys.stderr)
        report(engine.config, dtype.itemsize, arrivals, rows, prompts, cache)
        note(f"before that: {ready:.1f} s to load the model{' and the compiled step' if args.compile else ''}")
    if decoder and decoder.offered:
        rate = decoder.accepted / decoder.offered
        source = (
            "n-grams of the training text" if decoder.table else "earlier in the text: the checkpoint has no n-grams"
        )
        note(f"draft: {decoder.accepted} of {decoder.offered} guesses accepted ({rate:.0%}), from {source}")
    if args.verify and steps > 0 and not verify(model, prompts, rows, samples, steps, not args.kv_cache, sampling):
        sys.exit(1)


if __name__ == "__main__":
    if sys.stdout is None:
        fail("there is no stdout to write to")
    sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # whatever the terminal's code page, and no \r on Windows
    try:
        main()
    except OSError as error:
        sys.stdout = None  # nothing more goes there
        if isinstance(error, BrokenPipeError):  # the reader, `head` say, has seen enough
            sys.exit(1)
        fail(f"cannot write: {error.strerror}")
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        fail("out of memory: fewer --num_samples or --max_new_tokens, or a smaller model, would fit")
    except KeyboardInterrupt:
        sys.exit(130)
