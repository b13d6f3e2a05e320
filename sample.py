"""Generate text with a trained model: prefill the prompt, then decode one token per step from the KV cache.

    python sample.py --prompt "O Romeo, " --kv_cache
    python sample.py --prompt "O Romeo, " --no-kv_cache            the same text without the cache
    python sample.py --prompt FILE:start.txt --verify              both, compared token by token
    python sample.py --prompt "O Romeo, " --draft ngram --compile  the same text, as fast as we can
    python sample.py --ckpt gpt2 --prompt "To be, or"              GPT-2, from its Hugging Face folder

The text goes to stdout, and a report on time and memory to stderr. A token is a character, unless the model has a
tokenizer. Tokenizers, prompts of different lengths and the flags from --draft on need the folder extras.
"""

import re
import sys
import time
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from dataclasses import fields, replace
from pathlib import Path

try:
    import torch
except ModuleNotFoundError as error:
    sys.exit(f"sample.py: {error}: activate the environment, or install it as README.md says")

from model import Sampling, extras, generate, load_model, near_tie, num_threads, pick_device, sample_token, slide

cli = extras("cli")  # hints, a quiet Ctrl-C, UTF-8 on Windows; None without the folder
SEPARATOR = "\n---------------\n"  # between samples
FAR = 1e-2  # two logits, keys or values that differ by this much differ by more than rounding
GPU_STEP = 2**23  # multiply-adds; with more, an H100, which waits for Python, is faster than two CPU cores

# -- generation -------------------------------------------------------------------------------------------------------


class Text:
    """A prompt and its continuation. str() is the text.

    prompt, new  tokens: those of the prompt, and those after it, including those of a stop string
    sampling     the Sampling that picks them
    text         their text, up to the first stop string in the continuation
    ended        whether there was one
    Raises ValueError for a stop string that can never come.
    """

    def __init__(self, prompt, tokenizer, stops=(), sampling=None):
        if not all(map(tokenizer.encode, stops)):  # raises ValueError for a character outside the vocabulary
            raise ValueError("a stop string is empty")
        self.tokenizer = tokenizer
        self.prompt = prompt
        self.sampling = sampling
        self.new = []
        self.ended = False
        self.decode = tokenizer.stream()
        self.stable, pending = self.decode(prompt)  # stable: no later token changes it
        self.text = self.stable + pending
        self.prompt_length = len(self.text)
        self.shown = 0  # characters that new_piece has returned
        self.stop = re.compile("|".join(map(tokenizer.stop_pattern, stops))) if stops else None
        self.longest_stop = max(map(len, stops), default=0)

    def __str__(self):
        return self.text

    def add(self, token):
        """Append a token, unless a stop string has ended the text, or the token is -1, which is padding."""
        if self.ended or token < 0:
            return
        self.new.append(token)
        stable, pending = self.decode([token])
        self.stable += stable
        self.text = self.stable + pending
        if self.stop and (found := self.stop.search(self.text, max(self.prompt_length, self.shown))):
            self.ended = True
            self.text = self.text[: found.start()]

    def new_piece(self, final=False):
        """Return what no later token can change and no earlier call has returned; with final, all that is left."""
        text = self.text
        if not (final or self.ended):  # the last characters may be the first of a stop string
            text = self.stable[: max(self.prompt_length, len(self.stable) - self.longest_stop)]
        piece = text[self.shown :]
        self.shown += len(piece)
        return piece


def generate_texts(
    model,
    tokenizer,
    prompts,
    max_new_tokens=None,
    *,
    num_samples=1,
    stop=(),
    kv_cache=True,
    draft=None,
    compile=False,
    on_text=None,
    **settings,
):
    """Return what sample.py prints: for each prompt, a list of num_samples Texts.

    model, tokenizer  from load_model
    prompts           a list of strings, which may differ in length with the folder extras
    max_new_tokens    at most this many; None: until the context is full, or 1000 with overflow="slide"
    stop              strings; a text ends just before the first of them
    kv_cache          False: recompute everything for every token
    draft, compile    "ngram" and True: the same texts, faster, with the folder extras
    on_text           on_text(row, piece) gets each text as it arrives: its prompt, then what each step adds, which may
                      be "". Rows are the samples of the first prompt, then those of the next
    settings          fields of Sampling: temperature, top_k, top_p, seed, overflow
    Raises ValueError for impossible requests, and FloatingPointError for logits that are infinite or NaN.
    """
    if isinstance(prompts, str) or isinstance(stop, str):
        raise TypeError("prompts and stop are lists of strings")
    sampling = Sampling(samples=list(range(num_samples)) * len(prompts), **settings)
    encoded = [tokenizer.encode(prompt or tokenizer.default_prompt) for prompt in prompts]
    stop = list(stop)
    alone = [replace(sampling, samples=[i]) for i in range(num_samples)]
    rows = [Text(ids, tokenizer, stop, alone[i]) for ids in encoded for i in range(num_samples)]
    if not rows:
        return [[] for _ in prompts]
    block_size = model.config.block_size
    longest = max(len(row.prompt) for row in rows)
    if sampling.overflow == "stop" and longest >= block_size:
        hint = f"use at most {block_size - 1}, or overflow slide, which keeps the newest {max(1, block_size // 2)}"
        raise ValueError(f"the prompt has {longest} {tokenizer.unit}, which fill the context: {hint}")
    if max_new_tokens is None:
        max_new_tokens = 1000 if sampling.overflow == "slide" else block_size

    def show(final=False):
        for i, row in enumerate(rows):
            piece = row.new_piece(final)
            if on_text:
                on_text(i, piece)

    all_threads = torch.get_num_threads()
    try:
        if draft or compile or len(set(map(len, encoded))) > 1:
            engine = extras("decode.engine", "--draft, --compile or a batch of prompts of different lengths")
            blocks = engine.open_engine(model, rows, max_new_tokens, sampling, kv_cache, draft, compile)
        else:
            torch.set_num_threads(num_threads(model, len(rows) * (1 if kv_cache else block_size)))
            idx = torch.tensor([row.prompt for row in rows], device=model.device)
            blocks = generate(model, idx, max_new_tokens, sampling, kv_cache)
        show()  # the prompts, now that the engine is ready
        for block in blocks:
            for row, tokens in zip(rows, block.tolist()):  # waits for the device
                for token in tokens:
                    row.add(token)
            show()
            if all(row.ended for row in rows):
                break
    finally:
        torch.set_num_threads(all_threads)
    for row in rows:
        asked = sampling.num_new_tokens(len(row.prompt), max_new_tokens, block_size)
        if len(row.new) < asked and not row.ended:
            raise RuntimeError(f"a text ended after {len(row.new)} of {asked} new tokens")
    show(final=True)
    return [rows[i : i + num_samples] for i in range(0, len(rows), num_samples)]


def note(message):
    print(f"sample.py: {message}", file=sys.stderr)


def report(args, model, rows, times):
    """Write time and memory to stderr. rows: Texts. times: as in main."""
    ready, first, *_, end = times
    new = [len(row.new) for row in rows]
    line = f"{sum(new)} tokens: TTFT {(first - ready) * 1e3:.2f} ms, "  # time to first token, and per output token
    if max(new) > 1:
        line += f"TPOT {(end - first) / (max(new) - 1) * 1e3:.3f} ms, "
    print(file=sys.stderr)
    note(f"using {model.source}")
    note(f"{line}{sum(new) / (end - ready):,.0f} tokens/s")
    if ready > 0.1:
        note(f"preparing the engine took {ready:.2f} s, which is not in these figures")
    if args.kv_cache:
        key = model.kv_cache.key
        batch, heads, slots, size = key[0].shape
        formula = f"2 * {len(key)} layers * {heads} kv heads * {size} head size * {slots} slots * {batch} rows"
        num_bytes = 2 * sum(keys.nbytes for keys in key)
        note(f"KV cache: {formula} * {key[0].itemsize} bytes = {num_bytes:,} bytes")
        if drafts := getattr(model.kv_cache, "drafts", None):  # of the engine in extras
            note(f"draft: {drafts}")
    else:
        note("KV cache: off")
    asked = args.max_new_tokens or 0
    if capped := [n for n, row in zip(new, rows) if n < asked and not row.ended]:
        why = "the end of the context (--overflow slide continues)"
        note(f"--max_new_tokens {asked} is capped at {max(capped)}, {why}")


# -- --verify ----------------------------------------------------------------------------------------------------------


def replay(model, row, number, cache=None):
    """Feed a Text again, token by token, with a KVCache or without. Exits if the model picks another token.

    Returns the logits of each new token, `(1, V)`, the seconds, and whether some tokens are near-ties.
    """
    began = time.perf_counter()
    all_logits = []
    near_ties = False
    idx = torch.tensor([row.prompt], device=model.device)
    noises = row.sampling.noise(1, len(row.new), model.config.vocab_size, model.device)
    for step, (token, noise) in enumerate(zip(row.new, noises)):
        context = slide(idx, model.config.block_size)
        if cache and context is not idx:  # the context has slid
            cache.length = 0
        logits, _ = model(context[:, cache.length :] if cache else context, cache=cache, last=True)
        picked = sample_token(logits, noise, row.sampling).item()
        if picked != token:
            ours, other = (row.tokenizer.decode([each]) for each in (token, picked))
            what = f"the text has {ours!r}, but {'with' if cache else 'without'} the cache, the model picks {other!r}"
            where = f"at row {number}, new token {step}: {what}"
            if not near_tie(logits[0], noise[0], token, row.sampling):
                sys.exit(f"sample.py: verify: DIFFERENT {where}")
            note(f"verify: near-tie, which rounding decides, {where}")
            near_ties = True
        all_logits.append(logits)
        idx = torch.cat((context, idx.new_tensor([[token]])), dim=1)
    return all_logits, time.perf_counter() - began, near_ties


@torch.inference_mode()
def verify(model, rows, cache):
    """Feed the Texts of a run again, without a cache and with a new one. Exits if anything differs.

    cache  that of the run, which must hold the same as the new one, or None
    """
    longest = max(len(row.prompt + row.new) for row in rows)
    slow = fast = tied = 0
    for number, row in enumerate(rows):
        again = model.new_cache(1)
        without, seconds_without, tie_without = replay(model, row, number)
        cached, seconds_with, tie_with = replay(model, row, number, again)
        slow += seconds_without
        fast += seconds_with
        tied += tie_without or tie_with
        pairs = list(zip(without, cached))
        # after a slide, the cache of the run still holds the longest rows, but not those that ended earlier
        if cache and (longest <= model.config.block_size or len(row.prompt + row.new) == longest):
            for ours, new in zip(cache.key + cache.value, again.key + again.value):
                pairs.append((ours[number, :, : again.length], new[0, :, : again.length]))
        gap = torch.stack([(a - b).abs().max() for a, b in pairs]).max().item()
        if not gap < FAR:  # or if it is NaN
            sys.exit(f"sample.py: verify: DIFFERENT at row {number}: logits, keys or values differ by up to {gap:.5f}")
    same = f"{sum(len(row.new) for row in rows)} tokens are the same with and without the cache"
    note(f"verify: OK{' up to near-ties' if tied else ''}, {same} ({len(rows) - tied} of {len(rows)} samples)")
    note(f"verify: {fast:.2f} s with the cache, {slow:.2f} s without: {slow / fast:.1f} times as fast")


# -- the command line --------------------------------------------------------------------------------------------------


def boolean(text):
    return ("false", "0", "true", "1").index(text.lower()) > 1  # argparse turns the ValueError into one line


BOOLEAN = dict(type=boolean, nargs="?", const=True, metavar="True|False")  # a flag that may stand alone


def parse_args():
    plain = dict(description=__doc__, usage=SUPPRESS, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    parser = cli.Parser(__doc__) if cli else ArgumentParser(**plain)  # the former also gives hints
    add = parser.add_argument
    # text and cache
    add("--prompt", "--start", type=read_prompt, action="append", help="text, or FILE:path; repeat for a batch")
    add("--kv_cache", default=True, help="default: True", **BOOLEAN)
    add("--no-kv_cache", "--no_kv_cache", action="store_false", dest="kv_cache", help="feed the whole text every time")
    add("--max_new_tokens", type=int, metavar="N", help="default: until the context is full; 1000 with slide")
    add("--stop", action="append", default=[], help="end before this text; repeat for several")
    # sampling
    add("--temperature", type=float, default=0.8, help="0 is greedy, 1 the model's own distribution (default: 0.8)")
    add("--top_k", type=int, metavar="K", help="sample from the K most likely tokens")
    add("--top_p", type=float, metavar="P", help="sample from the most likely tokens whose probabilities add up to P")
    add("--seed", type=int, default=1337, help="the same seed gives the same text (default: 1337)")
    add("--overflow", choices=("stop", "slide"), default="stop", help="slide keeps the newest half of a full context")
    add("--num_samples", type=int, default=1, metavar="N", help="per prompt (default: 1)")
    # files and device
    add("--out_dir", help="folder of a run (default: out, or the pretrained model if there is no run)")
    add("--ckpt", metavar="FILE", help="a checkpoint from elsewhere")
    add("--device", default="auto", help="cpu, cuda or mps; auto: cuda if that is faster, else cpu (default: auto)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of weights and cache")
    add("--verify", help="feed the text again, with the cache and without, and compare", **BOOLEAN)
    # with the folder extras
    add("--draft", choices=("ngram",), help="draft the next tokens from n-grams, and check them in one forward")
    add("--compile", default=False, help="decode with the C backend, or on a GPU with a CUDA graph", **BOOLEAN)
    add("--weights", choices=("float32", "int8"), default="float32", help="int8: faster with --compile, different text")
    add("--engine", choices=("torch", "onnx"), default="torch", help="onnx: ONNX Runtime, for a file of extras.export")
    add("--meta", metavar="FILE", help="for a nanoGPT checkpoint: its meta.pkl, or the folder of its tokenizer")
    add("--explain", help="instead, print the tensor shapes of a prefill and two decode steps", **BOOLEAN)
    args = parser.parse_args()
    args.prompt = args.prompt or [""]
    for name, most in (("max_new_tokens", 2**31), ("num_samples", 2**12)):
        value = getattr(args, name)
        if value is not None and not 1 <= value <= most:
            parser.error(f"--{name} {value} is not from 1 to {most}")
    if args.ckpt and args.out_dir and not (args.engine == "onnx" and args.verify):
        parser.error("--ckpt and --out_dir both say which model: pass one of them")
    if args.verify and args.dtype != "float32":
        parser.error(f"--verify needs --dtype float32: rounding in {args.dtype} changes tokens")
    return args


def read_prompt(prompt):
    """Return a prompt, which may be FILE:path, as text."""
    if not prompt.startswith("FILE:"):
        return prompt
    try:
        return Path(prompt.removeprefix("FILE:")).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentTypeError(f"cannot read {prompt!r}: {error}") from None


def open_model(args):
    """Return (model, tokenizer) for the flags. Raises OSError or ValueError."""
    if args.engine == "onnx":
        return extras("formats.onnx", "--engine onnx").open_onnx(args)
    path = args.ckpt or args.out_dir
    if args.meta:
        return extras("formats.checkpoint", "--meta").load_model(path, args.meta)
    try:
        return load_model(path)
    except (OSError, ValueError):
        if formats := extras("formats.checkpoint"):  # it reads more formats, and explains errors better
            return formats.load_model(path)
        raise


def put_on_device(model, args):
    """Move a model to --device in --dtype. Raises ValueError."""
    name = args.device
    if name == "auto" and args.dtype == "float32" and torch.cuda.is_available():
        fed = len(args.prompt) * args.num_samples * (1 if args.kv_cache else model.config.block_size)
        if fed * sum(p.numel() for p in model.parameters()) < GPU_STEP:
            note("using the CPU, which is faster than a GPU for a step this small (--device cuda uses the GPU)")
            name = "cpu"
    device = pick_device(name)
    model.to(device, getattr(torch, args.dtype))
    if device.type == "cuda":  # the first prefill and the first step take half a second to load libraries
        model.generate(torch.zeros(1, 16, dtype=torch.int64, device=device), 2, seed=0, overflow="slide")


def main():
    args = parse_args()
    settings = {f.name: getattr(args, f.name) for f in fields(Sampling) if hasattr(args, f.name)}
    times = []  # seconds until the engine was ready, until each block, and at the end

    def on_text(row, piece):
        if row == 0:  # the first text appears as it arrives, and the others at the end
            sys.stdout.write(piece)
            sys.stdout.flush()
            times.append(time.perf_counter() - began)

    try:
        model, tokenizer = open_model(args)
        if args.weights == "int8":
            extras("decode.quantize", "--weights int8").round_weights(model)
        if args.engine == "torch":
            put_on_device(model, args)
        if args.explain:
            explain = extras("decode.explain", "--explain").explain_flags
            return explain(model, tokenizer, args, Sampling(**settings))
        how = dict(kv_cache=args.kv_cache, draft=args.draft, compile=args.compile, on_text=on_text, **settings)
        how |= dict(num_samples=args.num_samples, stop=args.stop)
        began = time.perf_counter()
        texts = generate_texts(model, tokenizer, args.prompt, args.max_new_tokens, **how)
        rows = [row for samples in texts for row in samples]
    except (ValueError, OSError, FloatingPointError) as error:
        sys.exit(f"sample.py: {error}")
    sys.stdout.write("".join(SEPARATOR + row.text for row in rows[1:]) + ("\n" if sys.stdout.isatty() else ""))
    sys.stdout.flush()
    report(args, model, rows, times)
    if args.verify:
        reference = getattr(model, "reference", model)  # with --engine onnx, the GPT that was exported
        verify(reference, rows, model.kv_cache if args.kv_cache else None)


if __name__ == "__main__":
    if code := cli.run_script(main) if cli else main():  # a notebook reports even exit code 0
        sys.exit(code)
