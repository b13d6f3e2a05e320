"""Generate text with a trained model: prefill the prompt, then decode one token per step from the KV cache.

    python sample.py --prompt "O Romeo, " --kv_cache
    python sample.py --prompt "O Romeo, " --no-kv_cache            the same text without the cache
    python sample.py --prompt FILE:start.txt --verify              both, compared token by token
    python sample.py --prompt "O Romeo, " --draft ngram --compile  the same text, as fast as we can
    python sample.py --ckpt gpt2 --prompt "To be, or"              GPT-2, from its Hugging Face folder

The text goes to stdout, and a report on time and memory to stderr. A token is a character, unless the model has a
tokenizer. Tokenizers, Hugging Face folders and some of the flags need the folder extras.
"""

import argparse
import difflib
import math
import signal
import sys
import time
from dataclasses import fields
from pathlib import Path

try:  # importing torch takes a second, in which Ctrl-C may come
    import torch

    from model import Sampling, build_model, char_tokenizer, generate, load_checkpoint, pick_device, sample_token
except ModuleNotFoundError as error:
    sys.exit(f"sample.py: {error}: activate the environment, or install it as README.md says")
except KeyboardInterrupt:
    sys.exit(130)

SEPARATOR = "\n---------------\n"  # between samples
PRETRAINED = Path(__file__).resolve().parent / "assets" / "shakespeare.pt"
EXTRAS_FLAGS = ("--draft", "--compile", "--engine", "--weights", "--explain", "--meta")
NEEDS_EXTRAS = "needs the folder extras of the repository, next to model.py"
# A full and a cached forward differ by up to 5e-5, so rounding can reorder logits that are closer than NEAR_TIE.
NEAR_TIE = 1e-4
SMALL_STEP = 2**22  # multiply-adds; a step with fewer gains nothing from a second thread
GPU_STEP = 2**23  # about where an H100, which waits for Python to launch each operation, overtakes two CPU cores

# -- the command line --------------------------------------------------------------------------------------------------


def make_parser():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    # errors in one line, without argparse's usage
    hint = ("expected one argument", "expected one argument; one that starts with - needs an =, as in --prompt=-a")
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message.replace(*hint)} (--help lists the flags)\n")
    add = parser.add_argument
    # text and cache
    add("--prompt", action="append", help="text to continue, or FILE:path; repeat for a batch (default: a newline)")
    add("--start", action="append", dest="prompt", metavar="PROMPT", help="nanoGPT's name for --prompt")
    add("--kv_cache", type=boolean, nargs="?", const=True, default=True, metavar="True|False", help="default: True")
    no_help = "the same as --kv_cache False: recompute everything for every token"
    add("--no-kv_cache", "--no_kv_cache", action="store_false", dest="kv_cache", help=no_help)
    add("--max_new_tokens", type=int, metavar="N", help="default: until the context is full; 1000 with slide")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeat for several")
    # sampling
    add("--temperature", type=float, default=0.8, help="0 is greedy, 1 the model's own distribution (default: 0.8)")
    add("--top_k", type=int, metavar="K", help="sample from the K most likely tokens")
    add("--top_p", type=float, metavar="P", help="sample from the most likely tokens whose probabilities add up to P")
    add("--seed", type=int, default=1337, help="the same seed gives the same text (default: 1337)")
    add("--overflow", choices=("stop", "slide"), default="stop", help="slide keeps the newest half of a full context")
    add("--num_samples", type=int, default=1, metavar="N", help="per prompt (default: 1)")
    # files and device
    add("--out_dir", help="folder with ckpt.pt (default: out)")
    add("--ckpt", metavar="FILE", help="a checkpoint from elsewhere")
    add("--device", default="auto", help="cpu, cuda or mps; auto: cuda if that is faster, else cpu (default: auto)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of weights and cache")
    add("--verify", action="store_true", help="generate again, with the cache and without, and compare")
    return parser


def parse_args(parser):
    args, unknown = parser.parse_known_args()
    if unknown:
        name = unknown[0].partition("=")[0]
        if name in EXTRAS_FLAGS:
            parser.error(f"{name} {NEEDS_EXTRAS}")
        similar = difflib.get_close_matches(name, parser._option_string_actions, n=1, cutoff=0.7)
        hint = f": did you mean {similar[0]}?" if similar else "" if name[:1] == "-" else ': type --prompt "TEXT"'
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if args.verify and args.dtype != "float32":
        parser.error(f"--verify needs --dtype float32: rounding in {args.dtype} changes tokens")
    if "" in (args.ckpt, args.out_dir, *args.stop):
        parser.error("--ckpt, --out_dir or --stop is empty")
    for name, most in (("max_new_tokens", 2**31), ("num_samples", 2**12)):
        value = getattr(args, name)
        if value is not None and not 1 <= value <= most:
            parser.error(f"--{name} {value} is not from 1 to {most}")
    for texts in (args.prompt or [], args.stop):  # line ends as when reading a file
        texts[:] = [text.replace("\r\n", "\n").replace("\r", "\n") for text in texts]
    return args


def boolean(text):
    if text.lower() not in ("true", "false", "1", "0"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")
    return text.lower() in ("true", "1")


def note(message):
    print(f"sample.py: {message}", file=sys.stderr)


# -- the model and the prompts -----------------------------------------------------------------------------------------


def find_checkpoint(ckpt=None, out_dir=None):
    """Return the path of the model: a file, or a Hugging Face folder. Without flags: that in out, or the pretrained."""
    folder = Path(ckpt or out_dir or "out")
    if (ckpt or out_dir) and not folder.is_dir():
        return folder
    for path in (folder / "ckpt.pt", folder / "last.pt"):  # a run has no ckpt.pt before its first evaluation
        if path.exists():
            return path
    if ckpt and (folder / "config.json").exists():
        return folder
    return folder / "ckpt.pt" if ckpt or out_dir else PRETRAINED


def multiply_adds(args, model):
    """Return those of a step: one per parameter and token that is fed."""
    fed = len(args.prompt or [""]) * args.num_samples * (1 if args.kv_cache else model.config.block_size)
    return fed * sum(p.numel() for p in model.parameters())


def put_on_device(model, args):
    """Move a model to --device in --dtype. Raises ValueError."""
    small = args.device == "auto" and args.dtype == "float32" and multiply_adds(args, model) < GPU_STEP
    if small and torch.cuda.is_available():
        note("using the CPU, which is faster than a GPU for a step this small (--device cuda takes the GPU)")
    device = pick_device("cpu" if small else args.device)
    model.to(device, getattr(torch, args.dtype))
    if device.type == "cuda":  # the first prefill and the first step take half a second to load libraries
        model.generate(torch.zeros(1, 16, dtype=torch.int64, device=device), 2, seed=0, overflow="slide")


def num_threads(multiply_adds):
    return 1 if multiply_adds < SMALL_STEP else torch.get_num_threads()


def encode_prompt(prompt, tokenizer):
    if prompt.startswith("FILE:"):
        name = prompt.removeprefix("FILE:")
        try:
            prompt = Path(name).read_text(encoding="utf-8-sig")
        except OSError as error:
            raise ValueError(f"cannot read the prompt from the file {name!r}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ValueError(f"the prompt in {name} is not UTF-8: convert it first") from None
    if not prompt:
        prompt = tokenizer.default_prompt
        note(f"the prompt is empty: starting from {prompt!r}")
    return tokenizer.encode(prompt)


def read_prompts(args, tokenizer, block_size):
    """Return (prompts, num_new): the ids of each prompt, and the number of new tokens. Raises ValueError."""
    prompts = [encode_prompt(prompt, tokenizer) for prompt in args.prompt or [tokenizer.default_prompt]]
    for stop in args.stop:
        tokenizer.encode(stop)  # the model could never generate an unknown character
    num_new = args.max_new_tokens
    if args.overflow == "slide":
        return prompts, num_new or 1000
    longest = max(map(len, prompts))
    if longest >= block_size:
        fits = f"use at most {block_size - 1} (or --overflow slide, which keeps the newest {max(1, block_size // 2)})"
        raise ValueError(f"the prompt has {longest} {tokenizer.unit}, but a context of {block_size} is full: {fits}")
    room = block_size - min(map(len, prompts))
    if num_new and num_new > room:
        note(f"--max_new_tokens {num_new} is capped at {room}, the end of the context (--overflow slide continues)")
    return prompts, min(num_new or room, room)


def sampling_of(args, num_prompts):
    """Return the Sampling of the flags. The samples of every prompt use the same noise. Raises ValueError."""
    settings = {f.name: getattr(args, f.name) for f in fields(Sampling) if hasattr(args, f.name)}
    try:
        return Sampling(samples=list(range(args.num_samples)) * num_prompts, **settings)
    except ValueError as error:  # it starts with the name of a setting, which is also a flag
        raise ValueError(f"--{error}") from None


# -- text as it arrives ------------------------------------------------------------------------------------------------


class GeneratedText:
    """A prompt and its continuation, whose tokens are characters.

    ids    all tokens so far, including those of a stop string
    text   their text, without the first stop string in the continuation. If two end at once, the longer one counts
    ended  whether there was one
    """

    def __init__(self, ids, tokenizer, stops=()):
        self.ids = list(ids)
        self.tokenizer = tokenizer
        self.stops = stops
        self.text = tokenizer.decode(ids)
        self.prompt_length = len(self.text)
        self.ended = False

    def add(self, token):
        self.ids.append(token)
        self.text += self.tokenizer.decode([token])
        completed = [stop for stop in self.stops if self.text.endswith(stop, self.prompt_length)]
        if completed:
            self.ended = True
            self.text = self.text[: -len(max(completed, key=len))]

    def settled(self):
        """Return the text that no later token can change. Its last characters may be the first of a stop string."""
        waiting = 0 if self.ended else max(map(len, self.stops), default=1) - 1
        return self.text[: max(self.prompt_length, len(self.text) - waiting)]


def write_texts(blocks, texts, ended):
    """Write the first of `texts` to stdout as its tokens arrive, and then the rest. Returns the arrival of each block.

    blocks  new tokens, `(B, n)` each; shorter rows are padded with -1
    ended   B booleans: we set one to True when that text has reached a stop string
    """
    began = time.perf_counter()
    times = []
    written = sys.stdout.write(texts[0].settled())
    sys.stdout.flush()
    for block in blocks:
        rows = block.tolist()  # waits for the device
        times.append(time.perf_counter() - began)
        for i, (text, tokens) in enumerate(zip(texts, rows)):
            for token in tokens:
                if token >= 0 and not text.ended:
                    text.add(token)
            ended[i] = text.ended
        written += sys.stdout.write(texts[0].settled()[written:])
        sys.stdout.flush()
        if all(ended):
            break
    sys.stdout.write(texts[0].text[written:])
    for text in texts[1:]:
        sys.stdout.write(SEPARATOR + text.text)
    if sys.stdout.isatty():
        sys.stdout.write("\n")
    sys.stdout.flush()
    return times


def num_slots(T, num_new, block_size):  # of the cache
    kept = T if T <= block_size else max(1, block_size // 2)  # --overflow slide keeps the newest half
    return min(block_size, kept + num_new)


def report(args, config, slots, texts, lengths, times):
    """Write time and memory to stderr. lengths: of the prompts, in tokens; times: as write_texts returns them."""
    new = [len(text.ids) - length for text, length in zip(texts, lengths)]
    line = f"{sum(new)} tokens: TTFT {times[0] * 1e3:.2f} ms, "  # time to first token, and time per output token
    if max(new) > 1:
        line += f"TPOT {(times[-1] - times[0]) / (max(new) - 1) * 1e3:.3f} ms, "
    print(file=sys.stderr)
    note(f"{line}{sum(new) / times[-1]:,.0f} tokens/s")
    if not args.kv_cache:
        note("KV cache: off")
        return
    factors = (config.n_layer, config.n_kv_head, config.head_size, slots, len(texts))
    formula = "2 * {} layers * {} kv heads * {} head size * {} slots * {} rows".format(*factors)
    itemsize = getattr(torch, args.dtype).itemsize
    note(f"KV cache: {formula} * {itemsize} bytes = {2 * math.prod(factors) * itemsize:,} bytes")


# -- --verify ----------------------------------------------------------------------------------------------------------


def near_tie(logits, noise, picks, sampling):
    """Return whether rounding alone can explain two different picks, token ids, from the same logits `(V,)`.

    Each must win after some shift of the logits by at most NEAR_TIE / 2. Three shifts can help a pick: raise it alone;
    raise it and all that are less likely, so that top_p keeps it; or lower the other one and all that are less likely,
    so that top_p drops that.
    """
    logits = logits.float()
    for pick, other in (picks, picks[::-1]):
        ids = torch.arange(len(logits), device=logits.device)
        raised = (ids == pick, logits <= logits[pick], (logits > logits[other]) | (ids == pick))
        moved = torch.stack([logits + torch.where(up, NEAR_TIE / 2, -NEAR_TIE / 2) for up in raised])
        if pick not in sample_token(moved, noise, sampling).tolist():
            return False
    return True


def verify(model, idx, texts, num_new, sampling, tokenizer, numbers=None):
    """Feed texts to the plain loop, with the cache and without: does it pick the same tokens, from the same logits?

    model, idx, num_new, sampling  those of the run: what `generate` accepts
    texts                          its B GeneratedTexts
    numbers                        row numbers for messages; None: 0 to B - 1
    Returns (tied, seconds): the numbers of the rows with a near-tie, or None if a text differs otherwise, and the
    seconds that the loop took with the cache, and without, a tensor `(2,)`.
    """
    T = idx.size(1)
    numbers = numbers or range(len(texts))
    new = [text.ids[T:] for text in texts]
    asked = sampling.num_new_tokens(T, num_new, model.config.block_size)
    for number, text, tokens in zip(numbers, texts, new):
        if len(tokens) < asked and not text.ended:
            note(f"verify: DIFFERENT at row {number}: it ends after {len(tokens)} of {asked} new tokens")
            return None, None

    steps = max(map(len, new))
    forced = torch.tensor([tokens + [0] * (steps - len(tokens)) for tokens in new], device=idx.device)
    runs = [generate(model, idx, steps, sampling, kv_cache, forced=forced) for kv_cache in (True, False)]
    tied = set()
    seconds = torch.zeros(2)
    apart = 0.0
    for step, noise in enumerate(sampling.noise(len(texts), steps, model.config.vocab_size, idx.device)):
        found = []  # with the cache, and without
        for i, loop in enumerate(runs):
            began = time.perf_counter()
            picks, logits = next(loop)
            found.append((picks.tolist(), logits))  # tolist waits for the device
            seconds[i] += time.perf_counter() - began
        apart = max(apart, (found[0][1] - found[1][1]).abs().max().item())
        for row, tokens in enumerate(new):
            ways = ("with", "without") if found[0][0][row] != found[1][0][row] else ("with and without",)
            for way, (picks, logits) in zip(ways, found):
                if step >= len(tokens) or picks[row] == tokens[step]:
                    continue
                both = [tokens[step], picks[row]]
                tie = near_tie(logits[row], noise[row], both, sampling)
                ours, theirs = (repr(tokenizer.decode([token])) for token in both)
                a, b = (" and ".join(f"{x:.5f}" for x in each[row, both].tolist()) for _, each in found)
                note(
                    f"verify: {'near-tie, which rounding decides,' if tie else 'DIFFERENT'} at row {numbers[row]}, "
                    f"new token {step}: the text has {ours}, but {way} the cache, the model picks {theirs}. "
                    f"Logits of the two: {a} with the cache, {b} without"
                )
                if not tie:
                    return None, seconds
                tied.add(numbers[row])
    if apart > 100 * NEAR_TIE:  # far beyond rounding, though no pick has changed
        note(f"verify: DIFFERENT: the tokens agree, but logits with and without the cache are up to {apart:.5f} apart")
        return None, seconds
    return tied, seconds


def report_verify(new, tied, seconds):
    """Report that texts of `new` tokens each agree, but for near-ties in the rows `tied`. Returns the exit code."""
    if tied is None:
        return 1
    found = f"OK{' up to near-ties' if tied else ''}, {sum(new)} tokens are the same with and without the cache"
    note(f"verify: {found} ({len(new) - len(tied)} of {len(new)} samples)")
    cached, recomputed = seconds.tolist()
    note(f"verify: {cached:.2f} s with the cache, {recomputed:.2f} s without: {recomputed / cached:.1f} times as fast")
    return 0


# -- main --------------------------------------------------------------------------------------------------------------


def main():
    parser = make_parser()
    try:
        from extras import generation as extras
    except ImportError as error:
        if error.name != "extras":
            raise
        extras = None
    if extras:  # it adds its flags
        extras.add_flags(parser)
        extras.share_cores()
    args = parse_args(parser)
    if extras and extras.wanted(args, parser.error):  # for its flags, and for several samples, which share a prefill
        return extras.main(args)
    if args.ckpt and args.out_dir:
        parser.error("--ckpt and --out_dir both say which model: pass one of them")

    # the model and the prompts
    try:
        path = find_checkpoint(args.ckpt, args.out_dir)
        read = extras.load_checkpoint if extras else load_checkpoint  # extras reads nanoGPT's files, too
        checkpoint = None if path.is_dir() else read(path)
        if checkpoint is None or "chars" not in checkpoint:
            if extras:
                return extras.main(args, checkpoint)
            raise ValueError(f"{path} {NEEDS_EXTRAS}")
        model = build_model(checkpoint).eval()
        tokenizer = char_tokenizer(checkpoint)
        put_on_device(model, args)
        prompts, num_new = read_prompts(args, tokenizer, model.config.block_size)
        T = len(prompts[0])
        if any(len(prompt) != T for prompt in prompts):
            raise ValueError(f"a batch of prompts of different lengths {NEEDS_EXTRAS}")
        sampling = sampling_of(args, len(prompts))
    except (ValueError, OSError) as error:
        sys.exit(f"sample.py: {error}")
    note(f"using {path}, step {checkpoint.get('iter_num', 'unknown')}")

    # generate: a row per sample, those of the first prompt, then those of the next
    rows = [prompt for prompt in prompts for _ in range(args.num_samples)]
    texts = [GeneratedText(row, tokenizer, args.stop) for row in rows]
    idx = torch.tensor(rows, device=model.lm_head.weight.device)
    all_threads = torch.get_num_threads()
    torch.set_num_threads(num_threads(multiply_adds(args, model)))
    blocks = (new[:, None] for new, _ in generate(model, idx, num_new, sampling, args.kv_cache))
    times = write_texts(blocks, texts, [False] * len(rows))

    # report, and check
    report(args, model.config, num_slots(T, num_new, model.config.block_size), texts, [T] * len(rows), times)
    if args.verify:
        torch.set_num_threads(all_threads)
        tied, seconds = verify(model, idx, texts, num_new, sampling, tokenizer)
        sys.exit(report_verify([len(text.ids) - T for text in texts], tied, seconds))


if __name__ == "__main__":
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's stdout has no reconfigure
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace", newline="\n")  # on Windows too
        if hasattr(signal, "SIGPIPE"):
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly when `head` has read enough
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
