"""Generate text with a trained model: prefill the prompt, then decode one token per step from the KV cache.

    python sample.py --prompt "O Romeo, " --kv_cache
    python sample.py --prompt "O Romeo, " --no-kv_cache            the same text without the cache
    python sample.py --prompt FILE:start.txt --verify              both, compared token by token
    python sample.py --prompt "O Romeo, " --draft ngram --compile  the same text, as fast as we can
    python sample.py --prompt "O Romeo, " --engine onnx            the same text, run by ONNX Runtime
    python sample.py --ckpt gpt2 --prompt "To be, or"              GPT-2, from its Hugging Face folder

A token is a character, unless the model has a tokenizer. The text goes to stdout, and a report on time and memory to
stderr.
"""

# Read it from top to bottom: the command line, the model and the prompts, text as it arrives, the report, --verify, and
# main, which puts them together. The loop over the tokens, prefill and decode, is stream_tokens in model.py.

import argparse
import math
import os
import signal
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import torch

from model import (
    GPT,
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


def parse_args(argv=None):
    parser = Parser(__doc__)
    add, count = parser.add_argument, number(int, f"[1, {2**31})")
    # text and cache
    add("--prompt", action="append", help="text to continue, or FILE:path; repeat for a batch (default: a newline)")
    add("--start", action="append", dest="prompt", metavar="PROMPT", help="nanoGPT's name for --prompt")
    cache_help = "decode from the cache; False recomputes everything for every token (default: True)"
    add("--kv_cache", type=boolean, nargs="?", const=True, default=True, metavar="True|False", help=cache_help)
    add("--no-kv_cache", "--no_kv_cache", action="store_false", dest="kv_cache", help="the same as --kv_cache False")
    add(
        "--max_new_tokens",
        type=count,
        metavar="N",
        help="new tokens per sample (default: until the context is full; 1000 with --overflow slide)",
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
    add("--draft", choices=("ngram",), help="draft the next tokens from n-grams, and check them in one forward")
    compile_help = "decode with the C backend, which takes a second to compile (default: False)"
    add("--compile", type=boolean, nargs="?", const=True, default=False, metavar="True|False", help=compile_help)
    add(
        "--engine",
        choices=("torch", "onnx"),
        default="torch",
        help="onnx: ONNX Runtime, with a file from export.py (default: torch)",
    )
    weights_help = "int8: round the weights, which makes --compile faster but changes the text (default: float32)"
    add("--weights", choices=("float32", "int8"), default="float32", help=weights_help)
    # files and device
    add("--out_dir", type=path, help="folder with ckpt.pt or onnx/model.onnx (default: out)")
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
        with suppress(ModuleNotFoundError):  # hints for people who come from nanoGPT
            from extras.nanogpt import refuse_unknown

            refuse_unknown(parser, unknown)
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
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
    if args.ckpt and Path(args.ckpt).suffix == ".onnx" and args.engine == "torch":
        error(f"--ckpt {args.ckpt} needs --engine onnx")
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


# -- the model ---------------------------------------------------------------------------------------------------------


def pick_checkpoint(ckpt, out_dir):
    """Return the path of the checkpoint for --ckpt and --out_dir, which are None if not given.

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
    checkpoint = None
    if not meta and not path.is_dir():
        checkpoint = load(path)
        if "tokenizer" not in checkpoint:
            return checkpoint, char_tokenizer(checkpoint)
    with needs_extras(f"--meta {meta}" if meta else f"{path}, whose tokens are not characters,"):
        from extras.checkpoint import build_tokenizer, load_checkpoint
    checkpoint = checkpoint or load_checkpoint(path, meta)
    return checkpoint, build_tokenizer(checkpoint)


def open_engine(args):
    """Return (engine, tokenizer, ngrams): a model for stream_tokens, and n-gram counts for --draft, or None.

    Raises FileNotFoundError or ValueError with one line.
    """
    if args.engine == "onnx":
        with needs_extras("--engine onnx"):
            from extras.interop.onnx import OnnxGPT
        engine = OnnxGPT(args.ckpt or args.out_dir or "out")
        return engine, engine.tokenizer, None

    checkpoint, tokenizer = read_checkpoint(pick_checkpoint(args.ckpt, args.out_dir), args.meta)
    model = build(checkpoint).eval()
    if args.weights == "int8":
        with needs_extras("--weights int8"):
            from extras.decoding.quantize import round_weights
        round_weights(model)
    return model.to(pick_device(args.device), getattr(torch, args.dtype)), tokenizer, checkpoint.get("ngrams")


def make_decoder(args, model, ngrams):
    """Return (decoder, model) to generate with.

    decoder  a Decoder for speculation, the C backend or several prompts; None: use the plain loop, stream_tokens
    model    for the plain loop: `model`, or a CompiledGPT where the C backend cannot run
    """
    num_prompts = len(args.prompt) if args.engine == "torch" else 1
    if not (args.draft or args.compile or num_prompts > 1):
        return None, model
    with needs_extras("--draft" if args.draft else "--compile" if args.compile else "a batch of prompts"):
        from extras.decoding.choose import choose_decoder
    ngrams = ngrams if args.draft else None
    threads = num_threads(step_work(args, model, None, args.num_samples))
    return choose_decoder(model, args.draft, ngrams, args.compile, args.weights, num_prompts, args.num_samples, threads)


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


def device_of(engine):
    return engine.lm_head.weight.device if isinstance(engine, GPT) else torch.device("cpu")


def num_threads(multiply_adds):
    """Return how many threads to use for a step with this many multiply-adds: one, or all that torch may use."""
    return 1 if multiply_adds < SMALL_STEP else torch.get_num_threads()


def step_work(args, engine, decoder, num_rows):
    """Return the number of multiply-adds that torch does per step, about one per weight and token."""
    if args.engine == "onnx" or (decoder and decoder.program):
        return 0
    tokens = 1 + (decoder.num_drafts if decoder else 0) if args.kv_cache else engine.config.block_size
    return num_rows * tokens * sum(p.numel() for p in engine.parameters())


# -- the prompts -------------------------------------------------------------------------------------------------------


def read_prompt(prompt, tokenizer):
    """Return the token ids of the prompt. Exits with one line if a file cannot be read or a character is unknown."""
    if prompt.startswith("FILE:"):
        name = prompt.removeprefix("FILE:") or fail("--prompt FILE: needs a file name after the colon")
        try:
            prompt = Path(name).read_text(encoding="utf-8-sig")
        except OSError as error:
            fail(f"cannot read the prompt from {name}: {error.strerror}")
        except UnicodeDecodeError:
            fail(f"the prompt in {name} is not UTF-8: convert it first")
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
    equal = ["--overflow slide"] * (args.overflow == "slide") + ["--engine onnx"] * (args.engine == "onnx")
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
    return asked or most


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


def write_stream(stream, sequences, ended, timing):
    """Write the first sequence to stdout as its tokens arrive, then the rest. Extends `sequences`.

    stream  blocks of new tokens, `(B, n)` each, from stream_tokens or a Generation
    ended   B booleans: we set one to True when that row has reached a stop string
    Returns the number of new tokens in the longest sequence, including those of a stop string.
    """
    first, num_new = sequences[0], [0] * len(sequences)
    written = sys.stdout.write(first.final(0))
    sys.stdout.flush()
    for block in stream:
        # append
        new = [[token for token in tokens if token >= 0] for tokens in block.tolist()]  # -1 pads shorter rows
        timing.record(sum(map(len, new)) / len(new))
        for i, sequence in enumerate(sequences):
            if not sequence.ended:
                sequence.add(new[i])
                num_new[i] += len(new[i])
                ended[i] = sequence.ended

        # write
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
    return max(num_new)


# -- the report --------------------------------------------------------------------------------------------------------


class Timing:
    """Arrival times of the blocks of one generation. The clock starts with the object.

    times  seconds from the start to the arrival of each block
    sizes  new tokens per row in each block, on average over the rows
    """

    def __init__(self, device=None):
        self.device = device
        self.times, self.sizes = [], []
        self.start = self.now()

    def now(self):
        """Return the time in seconds, after the device has finished its work."""
        if self.device is not None and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def record(self, size=1):
        """Record the end of a step that gave every row `size` new tokens."""
        self.times.append(self.now() - self.start)
        self.sizes.append(size)

    def summary(self, num_tokens):
        """Return the figures of a generation with num_tokens tokens in all rows together.

        ttft_ms                 time to first token: from the start to the end of the first step
        tpot_ms                 time per output token: mean over the tokens per row after the first step
        itl_p50_ms, itl_p99_ms  inter-token latency: median and 99th percentile of the time between blocks
        e2e_ms                  end to end: from the start to the end of the last step
        tokens_per_s            num_tokens per second, end to end
        """
        gaps = torch.tensor(self.times, dtype=torch.float64).diff() * 1e3
        p50, p99 = (0.0, 0.0) if not len(gaps) else torch.quantile(gaps, gaps.new_tensor([0.5, 0.99])).tolist()
        return dict(
            ttft_ms=self.times[0] * 1e3,
            tpot_ms=(self.times[-1] - self.times[0]) * 1e3 / max(1, sum(self.sizes[1:])),
            itl_p50_ms=p50,
            itl_p99_ms=p99,
            e2e_ms=self.times[-1] * 1e3,
            tokens_per_s=num_tokens / self.times[-1],
        )


def allocated_slots(engine, stream, texts, prompts):
    """Return the number of positions that the cache has memory for."""
    block_size = engine.config.block_size
    if getattr(stream, "in_c", False):
        return block_size
    if isinstance(engine, GPT):
        return engine.transformer["h"][0].attn.heads[0].cache.slots
    fed = max(map(len, texts)) - 1  # the cache of ONNX Runtime grows; the last token is never fed
    return fed - text_context_start(block_size, max(map(len, prompts)), fed)


def report(config, dtype, slots, timing, texts, prompts):
    """Return the lines of sample.py's report.

    slots  of the cache, per row; None without a cache
    texts  lists of ids, prompts included
    """
    produced = sum(map(len, texts)) - sum(map(len, prompts))
    figures, num_steps, per_row = timing.summary(produced), len(timing.times), sum(timing.sizes)
    line = f"{produced} tokens: TTFT {figures['ttft_ms']:.2f} ms"
    if num_steps > 1:
        line += f", TPOT {figures['tpot_ms']:.3f} ms"
        line += f", ITL p50 {figures['itl_p50_ms']:.3f} ms, p99 {figures['itl_p99_ms']:.3f} ms"
        line += f" per chunk of {per_row / num_steps:.2f}" if per_row > num_steps else ""
    lines = [f"{line}, E2E {figures['e2e_ms']:.1f} ms, {figures['tokens_per_s']:,.0f} tokens/s"]
    if slots is None:
        lines.append("KV cache: off")
    else:
        factors = (config.n_layer, config.num_kv_heads, config.head_size, slots, len(texts))
        formula = "2 * {} layers * {} kv heads * {} head size * {} slots * {} rows".format(*factors)
        itemsize = getattr(torch, dtype).itemsize
        lines.append(f"KV cache: {formula} * {itemsize} bytes = {2 * math.prod(factors) * itemsize:,} bytes")
    return lines


def text_context_start(block_size, prompt_length, end):
    """Return where the context of token `end` starts in a text that started with prompt_length tokens."""
    start = 0
    for i in range(prompt_length, end + 1):
        start = context_start(start, i, block_size)
    return start


# -- --verify ----------------------------------------------------------------------------------------------------------


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


def first_difference(ours, theirs):
    """Return the first index at which two lists differ, or None. A missing item differs."""
    return next((i for i, (a, b) in enumerate(zip_longest(ours, theirs)) if a != b), None)


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
    plainly, in_texts = ("with", "without") if kv_cache else ("without", "with")
    ours_place, theirs_place = ("in ONNX Runtime ", "in PyTorch ") if engine else ("", "")
    lines, num_equal = [], 0
    samples = sampling.sample_ids(len(prompts), "cpu").tolist()
    for T in sorted({len(prompt) for prompt in prompts}):
        # generate the rows whose prompts have this length
        rows = [row for row, prompt in enumerate(prompts) if len(prompt) == T]
        settings = replace(sampling, samples=[samples[row] for row in rows])
        idx = torch.stack([prompts[row] for row in rows])
        plain = torch.cat((idx, *stream_tokens(model, idx, max_new_tokens, settings, kv_cache)), dim=1).tolist()

        # compare
        for row, theirs in zip(rows, plain):
            ours, theirs = texts[row], Sequence(theirs[:T], tokenizer, stops).add(theirs[T:]).ids
            position = first_difference(ours, theirs)
            num_equal += position is None
            if position is None:
                continue
            picks = (*ours[position : position + 1], *theirs[position : position + 1])
            pair = ", but ".join(repr(tokenizer.show(i)) for i in picks)
            where = f"row {row}, new token {position - T}: {pair} {theirs_place}{plainly} the cache. "
            both = (
                logits_after(engine or model, ours[:position], T, not kv_cache),
                logits_after(model, ours[:position], T, kv_cache),
            )
            ours_logits, theirs_logits = (" and ".join(f"{logits[i]:.5f}" for i in picks) for logits in both)
            where += f"Logits of the two: {ours_logits} {ours_place}{in_texts} the cache, "
            where += f"{theirs_logits} {theirs_place}{plainly}"
            context = ours[text_context_start(model.config.block_size, T, position) : position]
            if len(picks) < 2 or not near_tie(model, context, samples[row], position - T, picks, sampling):
                if (both[0] - both[1]).abs().max() <= NEAR_TIE:
                    where += ". The logits agree, so the two sampled differently"
                return False, [*lines, f"DIFFERENT at {where}"]
            lines.append(
                f"near-tie at {where}. Rounding decides between logits this close. All earlier tokens are equal."
            )
    num_new = sum(len(text) - len(prompt) for text, prompt in zip(texts, prompts))
    their_run, samples = f"the run {theirs_place}{plainly} the cache", f"{num_equal} of {len(texts)} samples"
    if num_equal < len(texts):
        return True, [*lines, f"OK up to near-ties, {samples} match {their_run} to the end"]
    return True, [*lines, f"OK, {num_new} tokens match {their_run} ({samples})"]


def compare(args, engine, model, tokenizer, prompts, texts, num_new, sampling, seconds):
    """Generate again, with the cache if it was without and vice versa. Returns whether the texts are the same.

    engine   what generated the texts; model: what generates them again
    texts    the generated ids, a list per row
    seconds  how long they took
    """
    began = time.perf_counter()
    other = None if engine is model else engine
    same, lines = verify(model, prompts, texts, num_new, not args.kv_cache, sampling, tokenizer, args.stop, other)
    for line in lines:
        note(f"verify: {line}")
    both = seconds, time.perf_counter() - began
    cached, uncached = both if args.kv_cache else both[::-1]
    if same and num_new > 1:
        note(f"verify: {cached:.2f} s with the cache, {uncached:.2f} s without: {uncached / cached:.1f} times as fast")
    return same


# -- main --------------------------------------------------------------------------------------------------------------


def main():
    # load the model, read the prompts
    args, began = parse_args(), time.perf_counter()
    with suppress(ModuleNotFoundError):  # if the folder extras is here, threads yield on a busy machine
        from extras.cores import share_cores

        share_cores()
    with one_line_errors():
        engine, tokenizer, ngrams = open_engine(args)
        model = engine
        if args.verify and args.engine == "onnx":  # compare with the GPT that the file was exported from
            model = engine.exported_from(load(pick_checkpoint(None, args.out_dir)))
    args.prompt = args.prompt or [tokenizer.default_prompt]
    prompts = [read_prompt(prompt, tokenizer) for prompt in args.prompt]
    with one_line_errors():
        for stop in args.stop:  # the model could never generate an unknown character
            tokenizer.encode(stop)
    num_new = choose_num_new(args, [len(ids) for ids in prompts], engine.config.block_size, tokenizer.unit)

    # one row per sample: the samples of the first prompt, then those of the next
    device = device_of(engine)
    prompts = [torch.tensor(ids, device=device) for ids in prompts for _ in range(args.num_samples)]
    samples = list(range(args.num_samples)) * len(args.prompt)
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed, samples, args.overflow)
    if args.explain:
        with needs_extras("--explain"):
            from extras.decoding.explain import explain
        explain(engine, tokenizer, prompts[0][None], min(3, num_new), sampling)
        return

    # generate
    sequences = [Sequence(prompt.tolist(), tokenizer, args.stop) for prompt in prompts]
    decoder, looped = make_decoder(args, engine, ngrams)
    all_threads = torch.get_num_threads()
    torch.set_num_threads(num_threads(step_work(args, engine, decoder, len(prompts))))
    ended = [False] * len(prompts)
    if decoder:
        stream = decoder.generation(prompts, num_new, sampling, ended)
    else:
        stream = stream_tokens(looped, torch.stack(prompts), num_new, sampling, args.kv_cache)
    loaded, timing = time.perf_counter() - began, Timing(device)
    most_new = write_stream(stream, sequences, ended, timing)

    # report on stderr
    print(file=sys.stderr)
    texts = [sequence.ids for sequence in sequences]
    slots = allocated_slots(engine, stream, texts, prompts) if args.kv_cache else None
    for line in report(engine.config, args.dtype, slots, timing, texts, prompts):
        note(line)
    note(f"loading: {loaded:.1f} s for the model{' and the C backend' if decoder and decoder.program else ''}")
    if decoder and stream.offered:
        rate = stream.accepted / stream.offered
        source = "n-grams of the training text" if decoder.table else "the text so far: the checkpoint has no n-grams"
        note(f"draft: {stream.accepted} of {stream.offered} draft tokens accepted ({rate:.0%}), from {source}")
    if args.verify:
        torch.set_num_threads(all_threads)
        same = compare(args, engine, model, tokenizer, prompts, texts, most_new, sampling, timing.times[-1])
        sys.exit(0 if same else 1)


# -- helpers, as in train.py -------------------------------------------------------------------------------------------


def number(kind, interval):
    """Return an argparse type: an int or a float in an interval such as "[0, 1)"."""
    low, high = (float(bound) for bound in interval[1:-1].split(","))

    def parse(text):
        value = kind(text)
        inside = low <= value <= high and (value > low or interval[0] == "[") and (value < high or interval[-1] == "]")
        if not inside:
            raise argparse.ArgumentTypeError(f"{text} is not in {interval}")
        return value

    parse.__name__ = kind.__name__  # argparse says "invalid int value: 'x'"
    return parse


def boolean(text):
    """An argparse type: True, False, 1 or 0."""
    if text.lower() not in ("true", "false", "1", "0"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")
    return text.lower() in ("true", "1")


def path(text):
    """An argparse type: a path. An empty one is refused, because it is probably an unset shell variable."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return text


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that keeps the line breaks of its description and reports mistakes in one line."""

    def __init__(self, description, epilog=None):
        lines_as_they_are = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, epilog=epilog, formatter_class=lines_as_they_are, allow_abbrev=False)

    def error(self, message):
        self.exit(2, f"{self.prog}: {message} (--help lists the flags)\n")


def note(message):
    """Print a line on stderr that starts with the name of the script."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)


def fail(message):
    """Exit with code 1 and one line on stderr: a message or an error."""
    if isinstance(message, OSError) and message.filename:  # without "[Errno 2]"
        message = f"{message.filename}: {message.strerror}"
    note(message)
    sys.exit(1)


@contextmanager
def one_line_errors():
    """Turn a ValueError into one line where we read what the user gave us. Elsewhere it is a bug, with a traceback."""
    try:
        yield
    except ValueError as error:
        fail(error)


@contextmanager
def needs_extras(feature):
    """Exit with one line if the imports inside the block fail because the folder extras is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] != "extras":
            raise
        fail(f"{feature} needs the folder extras of the repository, next to model.py")


def run_main(main, memory_hint):
    """Run main(). Errors that are not bugs are reported in one line.

    memory_hint  what to suggest when memory runs out
    Exit codes: 1 after an error or a closed pipe, 130 after Ctrl-C, 143 after SIGTERM.
    """
    sys.stdout, sys.stderr = (f or open(os.devnull, "w") for f in (sys.stdout, sys.stderr))  # noqa: SIM115 - for >&-
    sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace", newline="\n")  # on Windows too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # like Ctrl-C, it lets `with` and `finally` clean up
    try:
        main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `head` has read enough
        sys.stdout = None  # the interpreter would flush it again, and complain
        sys.exit(1)
    except OSError as error:
        fail(error)
    except (MemoryError, RuntimeError) as error:
        words = ("allocate memory", "out of memory", "not enough memory")  # Linux, CUDA, Windows
        if not (isinstance(error, MemoryError) or any(each in str(error) for each in words)):
            raise
        fail(f"out of memory: {memory_hint}")


if __name__ == "__main__":
    run_main(main, memory_hint="fewer --num_samples or --max_new_tokens, or a smaller model, would fit")
