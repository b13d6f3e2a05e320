"""Generate text with a trained model: prefill the prompt, then decode one token per step from the KV cache.

    python sample.py --prompt "O Romeo, " --kv_cache
    python sample.py --prompt "O Romeo, " --no-kv_cache            the same text without the cache
    python sample.py --prompt FILE:start.txt --verify              both, compared token by token
    python sample.py --prompt "O Romeo, " --draft ngram --compile  the same text, as fast as we can
    python sample.py --prompt "O Romeo, " --engine onnx            the same text, run by ONNX Runtime
    python sample.py --ckpt gpt2 --prompt "To be, or"              GPT-2, from its Hugging Face folder

A token is a character, unless the model has a tokenizer. The text goes to stdout, and a report on time and memory to
stderr. --draft, --compile, --engine, --weights, --explain, several prompts, tokenizers and Hugging Face folders need
the folder extras. With it, threads also yield on a busy machine (extras/cores.py); that needs no flag.
"""

# Read it from top to bottom: the command line, the model and the prompts, text as it arrives, --verify, and main, which
# puts them together. The loop over the tokens, prefill and decode, is stream_tokens in model.py.

import argparse
import math
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import torch

from model import (
    Sampling,
    build,
    char_tokenizer,
    context_start,
    gumbel_noise,
    load,
    sample_token,
    stream_tokens,
)

SEPARATOR = "\n---------------\n"  # between samples
PRETRAINED = Path(__file__).resolve().parent / "assets" / "shakespeare.pt"
# A full and a cached forward differ by up to 5e-5, so rounding can reorder logits that are closer than NEAR_TIE.
NEAR_TIE = 1e-4
SMALL_STEP = 2**22  # multiply-adds; a step with fewer gains nothing from a second thread

# -- the command line --------------------------------------------------------------------------------------------------


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    # one line, without the usage
    hint = ("expected one argument", "expected one argument; one that starts with - needs an =, as in --prompt=-a")
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message.replace(*hint)} (--help lists the flags)\n")
    add = parser.add_argument
    flag = dict(type=boolean, nargs="?", const=True, metavar="True|False")
    # text and cache
    add("--prompt", action="append", help="text to continue, or FILE:path; repeat for a batch (default: a newline)")
    add("--start", action="append", dest="prompt", metavar="PROMPT", help="nanoGPT's name for --prompt")
    add("--kv_cache", default=True, **flag, help="False recomputes everything for every token (default: True)")
    add("--no-kv_cache", "--no_kv_cache", action="store_false", dest="kv_cache", help="the same as --kv_cache False")
    new_help = "new tokens per sample (default: until the context is full; 1000 with --overflow slide)"
    add("--max_new_tokens", type=positive, metavar="N", help=new_help)
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeat for several")
    # sampling
    add("--temperature", type=float, default=0.8, help="0 is greedy, 1 the model's own distribution (default: 0.8)")
    add("--top_k", type=int, metavar="K", help="sample from the K most likely tokens")
    top_p_help = "sample from the most likely tokens whose probabilities add up to P"
    add("--top_p", type=float, metavar="P", help=top_p_help)
    add("--seed", type=int, default=1337, help="the same seed gives the same text (default: 1337)")
    overflow_help = "when the context is full: stop, or keep its newest half and continue (default: stop)"
    add("--overflow", choices=("stop", "slide"), default="stop", help=overflow_help)
    add("--num_samples", type=positive, default=1, metavar="N", help="per prompt (default: 1)")
    # speed
    add("--draft", choices=("ngram",), help="draft the next tokens from n-grams, and check them in one forward")
    compile_help = "decode with the C backend, which takes a second to compile (default: False)"
    add("--compile", default=False, **flag, help=compile_help)
    engine_help = "onnx: ONNX Runtime, with a file from extras.export (default: torch)"
    add("--engine", choices=("torch", "onnx"), default="torch", help=engine_help)
    weights_help = "int8: round the weights, which makes --compile faster but changes the text (default: float32)"
    add("--weights", choices=("float32", "int8"), default="float32", help=weights_help)
    # files and device
    add("--out_dir", help="folder with ckpt.pt or onnx/model.onnx (default: out)")
    add("--ckpt", metavar="FILE", help="a checkpoint, Hugging Face folder or .onnx file from elsewhere")
    meta_help = "for a nanoGPT checkpoint: its meta.pkl, or the folder of its tokenizer"
    add("--meta", metavar="FILE", help=meta_help)
    add("--device", default="auto", help="cpu, cuda or mps; auto: cuda if there is one, else cpu (default: auto)")
    dtypes = ("float32", "bfloat16", "float16")
    add("--dtype", choices=dtypes, default="float32", help="dtype of weights and cache (default: float32)")
    # checks
    add("--verify", action="store_true", help="generate again the other way, with or without the cache, and compare")
    add("--explain", action="store_true", help="instead, print the tensor shapes of a prefill and two decode steps")
    args, unknown = parser.parse_known_args()
    if unknown:
        with suppress(ModuleNotFoundError):  # hints for people who come from nanoGPT
            from extras.nanogpt import refuse_unknown

            unknown = refuse_unknown(parser, unknown)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
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
    if "" in (args.ckpt, args.out_dir, args.meta):
        error("--ckpt, --out_dir or --meta is empty")
    if args.ckpt and args.out_dir and not (args.engine == "onnx" and args.verify):
        error("--ckpt and --out_dir both say which model: pass one of them")
    if args.ckpt and Path(args.ckpt).suffix == ".onnx" and args.engine == "torch":
        error(f"--ckpt {args.ckpt} needs --engine onnx")
    if "" in args.stop:
        error("--stop needs a text that is not empty")
    not_plain = (args.draft, args.compile, args.verify, args.stop, args.overflow != "stop", args.engine != "torch")
    if args.explain and (any(not_plain) or args.num_samples > 1 or num_prompts > 1 or not args.kv_cache):
        error("--explain shows one prompt with the plain cache: leave out flags that change that")
    for name, default in dict(draft=None, compile=False, meta=None, dtype="float32", weights="float32").items():
        if args.engine == "onnx" and getattr(args, name) != default:
            error(f"--{name} works with --engine torch, not with onnx")


def boolean(text):
    """An argparse type: True, False, 1 or 0."""
    if text.lower() not in ("true", "false", "1", "0"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")
    return text.lower() in ("true", "1")


def positive(text):
    """An argparse type: an int of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return int(text)


def note(message):
    print(f"sample.py: {message}", file=sys.stderr)


# -- the model ---------------------------------------------------------------------------------------------------------


def find_checkpoint(ckpt=None, out_dir=None):
    """Return the path of the checkpoint for --ckpt and --out_dir.

    --ckpt may be a file, the folder of a run, or a Hugging Face folder. Without either flag we look in out, and fall
    back to the pretrained model that comes with the code.
    """
    if ckpt and not Path(ckpt).is_dir():
        return Path(ckpt)
    folder = Path(ckpt or out_dir or "out")
    for file in (folder / "ckpt.pt", folder / "last.pt"):  # a run has no ckpt.pt before its first evaluation
        if file.exists():
            return file
    if ckpt and (folder / "config.json").exists():
        return folder
    if ckpt or out_dir or not PRETRAINED.exists():
        return folder / "ckpt.pt"  # load reports that it is missing
    note(f"no checkpoint in out: using the pretrained {PRETRAINED.name}")
    return PRETRAINED


def read_checkpoint(path, meta=None):
    """Return (checkpoint, tokenizer) of a file or of a Hugging Face folder, a Path.

    meta  for a nanoGPT checkpoint: the file of its vocabulary
    Raises FileNotFoundError or ValueError with one line.
    """
    if meta or path.is_dir():
        from extras.checkpoint import load_checkpoint

        checkpoint = load_checkpoint(path, meta)
    else:
        checkpoint = load(path)
    if "tokenizer" in checkpoint:
        from extras.checkpoint import build_tokenizer

        return checkpoint, build_tokenizer(checkpoint)
    return checkpoint, char_tokenizer(checkpoint)


def open_model(args):
    """Return (model, tokenizer, ngrams): a model for stream_tokens, and n-gram counts for --draft, or None.

    Raises FileNotFoundError or ValueError with one line.
    """
    if args.engine == "onnx":
        from extras.interop.onnx import OnnxGPT

        model = OnnxGPT(args.ckpt or args.out_dir or "out")
        model.refuse_stale()
        return model, model.tokenizer, None
    checkpoint, tokenizer = read_checkpoint(find_checkpoint(args.ckpt, args.out_dir), args.meta)
    model = build(checkpoint).eval()
    if args.weights == "int8":
        from extras.decoding.quantize import round_weights

        round_weights(model)
    model.to(device := pick_device(args.device), getattr(torch, args.dtype))
    if device.type == "cuda":  # the first forward takes a third of a second to load libraries
        model.next_logits(torch.zeros(1, 1, dtype=torch.int64, device=device))
    return model, tokenizer, checkpoint.get("ngrams")


def pick_device(name):
    """Return the torch.device for --device. "auto" is a GPU if there is one. Raises ValueError if it does not work."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=name).tolist()
    except Exception as error:  # every backend raises its own kind
        why = str(error).strip().partition("\n")[0]
        raise ValueError(f"--device {name} cannot be used here: {why[:150]}") from None
    return torch.device(name)


def device_of(model):
    """Return the device of a GPT, or the CPU for ONNX Runtime."""
    return model.lm_head.weight.device if isinstance(model, torch.nn.Module) else torch.device("cpu")


def num_threads(multiply_adds):
    """Return how many threads to use for a step with this many multiply-adds: one, or all that torch may use."""
    return 1 if multiply_adds < SMALL_STEP else torch.get_num_threads()


def open_stream(args, model, ngrams, prompts, num_new, sampling, ended):
    """Return an iterator over blocks of new tokens `(B, n)`, and choose the number of threads for it.

    It is the plain loop, stream_tokens, or a Generation of extras/decoding, which does the same for drafts, the C
    backend and several prompts.
    """
    if args.engine == "onnx":  # it has threads of its own
        torch.set_num_threads(1)
        return stream_tokens(model, torch.stack(prompts), num_new, sampling, args.kv_cache)
    fed = (4 if args.draft else 1) if args.kv_cache else model.config.block_size  # tokens per row and step
    threads = num_threads(len(prompts) * fed * sum(p.numel() for p in model.parameters()))  # about one per weight
    if args.draft or args.compile or len(args.prompt) > 1:
        from extras.decoding.choose import choose_stream

        ngrams = ngrams if args.draft else None
        how = dict(draft=args.draft, ngrams=ngrams, compile=args.compile, weights=args.weights, threads=threads)
        return choose_stream(model, prompts, num_new, sampling, ended, **how)
    torch.set_num_threads(threads)
    return stream_tokens(model, torch.stack(prompts), num_new, sampling, args.kv_cache)


# -- the prompts -------------------------------------------------------------------------------------------------------


def read_prompt(prompt, tokenizer):
    """Return the token ids of the prompt. Raises ValueError with one line."""
    if prompt.startswith("FILE:"):
        name = prompt.removeprefix("FILE:")
        try:
            prompt = Path(name).read_text(encoding="utf-8-sig")
        except OSError as error:
            raise ValueError(f"cannot read the prompt from the file {name!r}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ValueError(f"the prompt in {name} is not UTF-8: convert it first") from None
    prompt = prompt.replace("\r\n", "\n").replace("\r", "\n")  # as in a file
    if not prompt:
        prompt = tokenizer.default_prompt
        note(f"the prompt is empty: starting from {prompt!r}")
    return tokenizer.encode(prompt)


def choose_num_new(args, lengths, block_size, unit):
    """Return how many new tokens to ask for. A row whose context is full stops earlier.

    lengths  of the prompts, in tokens
    unit     what messages call tokens
    Raises ValueError for prompts that do not fit the context.
    """
    asked, longest, most = args.max_new_tokens, max(lengths), block_size - min(lengths)
    equal = "--overflow slide" if args.overflow == "slide" else "--engine onnx" if args.engine == "onnx" else ""
    if equal and len(set(lengths)) > 1:
        counts = " and ".join(str(n) for n in sorted(set(lengths)))
        raise ValueError(f"{equal} needs prompts of equal length in a batch, but these have {counts} {unit}")
    if args.overflow == "slide":
        return asked or 1000
    if longest >= block_size:
        raise ValueError(
            f"the prompt has {longest} {unit}, but a context of {block_size} needs room for a new one: use at most "
            f"{block_size - 1} (or --overflow slide, which keeps the newest {max(1, block_size // 2)})"
        )
    if asked and asked > most:
        note(f"--max_new_tokens {asked} is capped at {most}, the end of the context (--overflow slide continues)")
    return min(asked or most, most)


# -- text as it arrives ------------------------------------------------------------------------------------------------


class Sequence:
    """A prompt and its continuation, as tokens and as text.

    ids    the tokens, without those that reach into a stop string
    text   their text, as of the last update
    ended  whether a stop string has ended the sequence

    The text ends before the first stop string to be completed. If two are completed by the same character, the longer
    one wins. A prompt may contain a stop string, because only the continuation counts.
    """

    def __init__(self, ids, tokenizer, stops=()):
        self.ids, self.decode, self.stops, self.ended = list(ids), tokenizer.decode, stops, False
        self.byte_ids = getattr(tokenizer, "byte_ids", ())
        # `whole` is the text of ids[:end], which no later token changes. The text of a token depends on earlier ones,
        # which may hold the first bytes of its character. So we decode new tokens together with ids[begin:end], and
        # skip the text of those.
        self.text = self.whole = ""
        self.begin = self.end = self.skip = 0
        self.prompt_length = len(self.update())

    def add(self, tokens):
        """Append tokens, up to a stop string. Returns self."""
        for token in tokens:  # one by one, because the next may change what a run of bytes stands for
            self.ids.append(token)
            text = self.update() if self.stops else ""
            places = [(stop, text.find(stop, self.prompt_length)) for stop in self.stops]
            found = [(at + len(stop), at) for stop, at in places if at >= 0]
            if found:
                self.ended, self.text = True, text[: min(found)[1]]
                while len(self.decode(self.ids)) > len(self.text):
                    self.ids.pop()
                break
        return self

    def update(self):
        """Decode the tokens that are new since the last call. Returns the text so far."""
        if not self.ended and self.end < len(self.ids):
            window = self.decode(self.ids[self.begin :])
            self.text = self.whole + window[self.skip :]
            # the next token may complete the last character, or change all that a run of bytes stands for
            if not window.endswith("\ufffd") and self.ids[-1] not in self.byte_ids:
                self.whole, self.begin, self.end = self.text, self.end, len(self.ids)
                self.skip = len(self.decode(self.ids[self.begin :]))
        return self.text

    def final(self, begin):
        """Return text[begin:] without characters at the end that the next tokens may still change or cut off."""
        text = self.update()
        if self.ended:
            return text[begin:]
        if self.ids and self.ids[-1] in self.byte_ids:
            text = self.whole
        # an incomplete character decodes to one replacement character, or to one per byte, at most three
        text = text[: len(text) - min(3, len(text) - len(text.rstrip("\ufffd")))]
        return text[begin : len(text) - num_undecided(text[self.prompt_length :], self.stops)]


def num_undecided(text, stops):
    """Return how many characters at the end of `text` may be the beginning of a stop string.

    They have to wait for the next characters. A stop string that contains another one before its last character is
    never completed first, so nothing waits for it.
    """
    first = [stop for stop in stops if not any(other in stop[:-1] for other in stops)]
    lengths = [k for stop in first for k in range(1, len(stop)) if text.endswith(stop[:k])]
    return max(lengths, default=0)


def write_stream(stream, sequences, ended):
    """Write the first sequence to stdout as its tokens arrive, then the rest. Extends `sequences`.

    stream  blocks of new tokens, `(B, n)` each
    ended   B booleans: we set one to True when that row has reached a stop string
    Returns (num_new, times): the number of new tokens in the longest sequence, including those of a stop string, and
    the seconds from the start to the arrival of each block.
    """
    began, times = time.perf_counter(), []
    first, num_new = sequences[0], [0] * len(sequences)
    written = sys.stdout.write(first.final(0))
    sys.stdout.flush()
    for block in stream:
        new = [[token for token in tokens if token >= 0] for tokens in block.tolist()]  # -1 pads shorter rows
        times.append(time.perf_counter() - began)
        for i, sequence in enumerate(sequences):
            if not sequence.ended:
                sequence.add(new[i])
                num_new[i] += len(new[i])
                ended[i] = sequence.ended
        written += sys.stdout.write(first.final(written))
        sys.stdout.flush()
        if all(ended):
            break
    sys.stdout.write(first.update()[written:])
    for sequence in sequences[1:]:
        sys.stdout.write(SEPARATOR + sequence.update())
    if sys.stdout.isatty():
        sys.stdout.write("\n")
    sys.stdout.flush()
    return max(num_new), times


def report(args, config, slots, times, most_new, texts, prompts):
    """Write time and memory to stderr.

    slots            cache slots per row
    times, most_new  as write_stream returns them
    texts            lists of ids, prompts included
    """
    num_new = sum(len(text) - len(prompt) for text, prompt in zip(texts, prompts))
    line = f"{num_new} tokens: TTFT {times[0] * 1e3:.2f} ms, "  # time to first token, and time per output token
    if most_new > 1:
        line += f"TPOT {(times[-1] - times[0]) / (most_new - 1) * 1e3:.3f} ms, "
    note(f"{line}{num_new / times[-1]:,.0f} tokens/s")
    if not args.kv_cache:
        note("KV cache: off")
        return
    factors = (config.n_layer, config.num_kv_heads, config.head_size, slots, len(texts))
    formula = "2 * {} layers * {} kv heads * {} head size * {} slots * {} rows".format(*factors)
    itemsize = getattr(torch, args.dtype).itemsize
    note(f"KV cache: {formula} * {itemsize} bytes = {2 * math.prod(factors) * itemsize:,} bytes")


# -- --verify ----------------------------------------------------------------------------------------------------------


def text_context_start(block_size, prompt_length, end):
    """Return where the context of token `end` starts in a text that started with prompt_length tokens."""
    start = 0
    for i in range(prompt_length, end + 1):
        start = context_start(start, i, block_size)
    return start


@torch.no_grad()
def near_tie(model, context, sample, step, picks, sampling):
    """Return whether rounding alone can explain two different picks after the same context.

    context       token ids that the model sees
    sample, step  indices of the noise and of the new token
    picks         the two token ids
    sampling      a Sampling
    The picks are a near-tie if each of them wins once the logits move by at most NEAR_TIE in its favour.
    """
    logits = model(torch.tensor([context], device=next(model.parameters()).device))[0][:, -1].float()
    counters = (torch.tensor([i], device=logits.device) for i in (sample, step))
    noise = gumbel_noise(sampling.seed, *counters, logits.size(-1))[:, 0]

    # rounding also moves the probability at which top_p cuts
    top_p, temperature = sampling.top_p, sampling.temperature
    edges = {top_p}
    if top_p is not None and temperature > 0:
        slack = NEAR_TIE / temperature + 1e-6  # 1e-6 for the sum of many probabilities in float32
        edges |= {min(1.0, top_p + slack), max(1e-9, top_p - slack)}
    winners = set()
    for favoured, other in (picks, picks[::-1]):
        shifted = logits.clone()
        shifted[:, favoured] += NEAR_TIE / 2
        shifted[:, other] -= NEAR_TIE / 2
        winners |= {sample_token(shifted, noise, replace(sampling, top_p=edge)).item() for edge in edges}
    return set(picks) <= winners


def logits_after(model, ids, T, kv_cache):
    """Return the logits `(V,)` of the plain loop after `ids`, the first T of which are the prompt."""
    start = text_context_start(model.config.block_size, T, len(ids))
    context = torch.tensor([ids[start:]], device=device_of(model))
    if not kv_cache:
        return model.next_logits(context)[0].float()
    cache, prefilled = model.new_cache(1), max(1, model.config.block_size // 2) if start else T
    logits = model.next_logits(context[:, :prefilled], cache)
    for i in range(prefilled, context.size(1)):
        logits = model.next_logits(context[:, i : i + 1], cache)
    return logits[0].float()


def verify(model, prompts, texts, max_new_tokens, kv_cache, sampling, tokenizer, stops=(), engine=None):
    """Compare texts with those of the plain loop, stream_tokens, on the same prompts.

    model       a GPT, or any model that works with stream_tokens
    prompts     B int64 tensors of one dimension
    texts       B lists of ids: the prompts and their continuations
    kv_cache    whether the plain loop uses the cache: the opposite of the run that we compare
    sampling    the Sampling of that run
    tokenizer   the model's tokenizer
    stops       the stop strings of the texts
    engine      what generated the texts, if it was not the model: an OnnxGPT
    Returns (same, lines). `same` is False for a difference that is not a near-tie. `lines` is a report.
    """
    runs = ["with the cache", "without the cache"]
    our_run, their_run = runs[::-1] if kv_cache else runs
    if engine:
        our_run, their_run = f"in ONNX Runtime {our_run}", f"in PyTorch {their_run}"
    lines, num_equal = [], 0
    samples = sampling.noise_ids(len(prompts), "cpu").tolist()
    for T in sorted({len(prompt) for prompt in prompts}):
        # generate the rows whose prompts have this length
        rows = [row for row, prompt in enumerate(prompts) if len(prompt) == T]
        settings = replace(sampling, sample_ids=[samples[row] for row in rows])
        idx = torch.stack([prompts[row] for row in rows])
        plain = torch.cat((idx, *stream_tokens(model, idx, max_new_tokens, settings, kv_cache)), dim=1).tolist()

        # compare
        for row, theirs in zip(rows, plain):
            ours, theirs = texts[row], Sequence(theirs[:T], tokenizer, stops).add(theirs[T:]).ids
            differences = (i for i, (a, b) in enumerate(zip_longest(ours, theirs)) if a != b)  # a missing one differs
            i = next(differences, None)
            if i is None:
                num_equal += 1
                continue
            picks = [*ours[i : i + 1], *theirs[i : i + 1]]
            pair = ", but ".join(repr(tokenizer.show(token)) for token in picks)
            our_logits = logits_after(engine or model, ours[:i], T, not kv_cache)
            their_logits = logits_after(model, ours[:i], T, kv_cache)
            a, b = (" and ".join(f"{x:.5f}" for x in logits[picks].tolist()) for logits in (our_logits, their_logits))
            line = (
                f"row {row}, new token {i - T}: {pair} {their_run}. Logits of the two: {a} {our_run}, {b} {their_run}"
            )
            context = ours[text_context_start(model.config.block_size, T, i) : i]
            if len(picks) < 2 or not near_tie(model, context, samples[row], i - T, picks, sampling):
                if (our_logits - their_logits).abs().max() <= NEAR_TIE:
                    line += ". The logits agree, so the two sampled differently"
                return False, [*lines, f"DIFFERENT at {line}"]
            lines.append(f"near-tie at {line}. Rounding decides between logits this close")
    if num_equal < len(texts):
        return True, [*lines, f"OK up to near-ties, {num_equal} of {len(texts)} samples match the run {their_run}"]
    num_new = sum(len(text) - len(prompt) for text, prompt in zip(texts, prompts))
    return True, [f"OK, {num_new} tokens match the run {their_run} ({num_equal} of {len(texts)} samples)"]


# -- main --------------------------------------------------------------------------------------------------------------


def main():
    # the model and the prompts
    args = parse_args()
    with suppress(ModuleNotFoundError):
        from extras.cores import share_cores

        share_cores()
    try:
        model, tokenizer, ngrams = open_model(args)
        reference = model  # what --verify compares with
        if args.verify and args.engine == "onnx":
            reference = model.exported_from(load(find_checkpoint(None, args.out_dir)))
        args.prompt = args.prompt or [tokenizer.default_prompt]
        prompts = [read_prompt(prompt, tokenizer) for prompt in args.prompt]
        for stop in args.stop:  # the model could never generate an unknown character
            tokenizer.encode(stop)
        num_new = choose_num_new(args, [len(ids) for ids in prompts], model.config.block_size, tokenizer.unit)
        samples = list(range(args.num_samples)) * len(args.prompt)
        sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed, samples, args.overflow)
    except (ValueError, OSError) as error:
        sys.exit(f"sample.py: {error}")

    # one row per sample: the samples of the first prompt, then those of the next
    prompts = [torch.tensor(ids, device=device_of(model)) for ids in prompts for _ in range(args.num_samples)]
    if args.explain:
        from extras.decoding.explain import explain

        explain(model, tokenizer, prompts[0][None], min(3, num_new), sampling)
        return

    # generate
    sequences = [Sequence(prompt.tolist(), tokenizer, args.stop) for prompt in prompts]
    ended, all_threads = [False] * len(prompts), torch.get_num_threads()
    stream = open_stream(args, model, ngrams, prompts, num_new, sampling, ended)
    most_new, times = write_stream(stream, sequences, ended)

    # report on stderr
    print(file=sys.stderr)
    texts = [sequence.ids for sequence in sequences]
    block_size, longest = model.config.block_size, max(map(len, prompts))
    slots = min(block_size, longest - context_start(0, longest, block_size) + num_new)
    report(args, model.config, getattr(stream, "slots", slots), times, most_new, texts, prompts)
    if args.draft and stream.offered:
        source = "n-grams of the training text" if ngrams else "the text so far: the checkpoint has no n-grams"
        note(f"draft: {stream.accepted} of {stream.offered} draft tokens accepted, from {source}")
    if args.verify:
        torch.set_num_threads(all_threads)
        began = time.perf_counter()
        engine = model if args.engine == "onnx" else None
        asked = most_new if all(ended) else num_new  # a stop string in every row, or a stream that may be too short
        same, lines = verify(
            reference, prompts, texts, asked, not args.kv_cache, sampling, tokenizer, args.stop, engine
        )
        for line in lines:
            note(f"verify: {line}")
        seconds = times[-1], time.perf_counter() - began
        cached, uncached = seconds if args.kv_cache else seconds[::-1]
        if same and most_new > 1:
            ours = "this way" if args.draft or args.compile or args.engine == "onnx" else "with the cache"
            speedup = f"{uncached / cached:.1f} times as fast"
            note(f"verify: {cached:.2f} s {ours}, {uncached:.2f} s without the cache: {speedup}")
        sys.exit(0 if same else 1)


if __name__ == "__main__":
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's has not
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace", newline="\n")  # on Windows too
        if hasattr(signal, "SIGPIPE"):
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly when `head` has read enough
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] != "extras":
            raise
        sys.exit("sample.py: this needs the folder extras of the repository, next to model.py")
