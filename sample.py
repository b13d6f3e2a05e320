"""Generate text with a trained model: prefill the prompt, then decode one character at a time from the KV cache.

    python sample.py --prompt "O Romeo, " --kv_cache
    python sample.py --prompt "O Romeo, " --no-kv_cache      the same text, without the cache
    python sample.py --prompt FILE:start.txt --verify        both, compared character by character

The text goes to stdout; what it cost goes to stderr.
"""

import argparse
import math
import pickle
import sys
import time
from pathlib import Path

import torch

from model import Head, build_model, eval_mode, gumbel_noise, load_checkpoint, sample_token, slide

NEAR_TIE = 1e-4  # logits this close may change places by rounding: a full and a cached forward differ by up to 3e-5


def load_model(path, meta=None):
    """(model, chars) from a checkpoint of train.py, or from one of nanoGPT with its `meta` pickle; token i is chars[i].

    The model is on the CPU and in eval mode. Raises FileNotFoundError or ValueError with one line that says why.
    """
    ckpt = load_checkpoint(path)
    chars = ckpt.get("chars") if meta is None else read_nanogpt_meta(meta)
    if chars is None:
        raise ValueError(f"{path} has no characters in it: for a nanoGPT checkpoint give its --meta meta.pkl")
    model = build_model(ckpt)
    if not isinstance(chars, str) or not len(set(chars)) == len(chars) == model.config.vocab_size:
        raise ValueError(f"the characters do not fit the vocab_size {model.config.vocab_size} of {path}")
    return model.eval(), chars


def read_nanogpt_meta(path):
    """The characters of nanoGPT's meta.pkl, read by an unpickler that knows plain values and no class or function."""

    class PlainUnpickler(pickle.Unpickler):
        def find_class(self, module, name):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which a meta.pkl has no need of")

    try:
        with open(path, "rb") as f:
            itos = PlainUnpickler(f).load()["itos"]
        return "".join(itos[i] for i in range(len(itos)))
    except FileNotFoundError:
        raise FileNotFoundError(f"no --meta file at {path}") from None
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise ValueError(f"--meta {path} is not a nanoGPT meta.pkl: {error}") from None


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
    add("--prompt", default="\n", help="the text to continue, or FILE:path to read it from a file (default: a newline)")
    add(
        "--kv_cache",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="decode from the cache, or recompute the whole text for every character (default: --kv_cache)",
    )
    add(
        "--max_new_tokens",
        type=number(int, "[0, inf)"),
        metavar="N",
        help="default: as many as fit the context, 1000 with slide",
    )
    add("--temperature", type=number(float, "[0, 1e30)"), default=1.0, help="0 takes the likeliest (default: 1.0)")
    add("--top_k", type=number(int, "[1, inf)"), metavar="K", help="sample among the K likeliest")
    add("--top_p", type=number(float, "(0, 1]"), metavar="P", help="sample among the likeliest that have probability P")
    add("--seed", type=number(int, f"[0, {2**64})"), default=1337, help="same seed, same text (default: 1337)")
    add(
        "--overflow",
        choices=("stop", "slide"),
        default="stop",
        help="at a full context: stop, or keep the newest half of it and go on (default: stop)",
    )
    add(
        "--num_samples", type=number(int, f"[1, {2**20})"), default=1, metavar="N", help="samples, as rows of one batch"
    )
    add("--out_dir", type=path, default="out", help="the folder of train.py's ckpt.pt (default: out)")
    add("--ckpt", type=path, metavar="FILE", help="another checkpoint: last.pt, or one of nanoGPT")
    add("--meta", type=path, metavar="FILE", help="the meta.pkl that goes with a nanoGPT checkpoint")
    add("--device", default="auto", help="cpu, cuda, mps; auto: cuda where there is one (default: auto)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of weights and cache")
    add("--verify", action="store_true", help="generate with and without the cache, and compare token by token")
    return parser.parse_args(argv)


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
    """(used, reserved) bytes of all Heads' caches: what has been written, and what has been allocated for it."""
    heads = [module for module in model.modules() if isinstance(module, Head) and module.key_cache is not None]
    views = [view for head in heads for view in (head.key_cache, head.value_cache)]
    buffers = {view.untyped_storage().data_ptr(): view.untyped_storage().nbytes() for view in views}
    return sum(view.nbytes for view in views), sum(buffers.values())


def context_begin(model, prompt_tokens, tokens):
    """Where the context begins in a text that has grown from `prompt_tokens` to `tokens` tokens."""
    begin = 0
    for end in range(prompt_tokens, tokens + 1):
        begin = slide(begin, end, model.config.block_size)
    return begin


def report(model, arrivals, prompt_tokens, batch, cache):
    """Print what a generation cost. arrivals: seconds from the start to each step's tokens; cache: see cache_bytes."""
    gaps = torch.tensor(arrivals).diff() * 1e3
    line = f"{len(arrivals) * batch} tokens: TTFT {arrivals[0] * 1e3:.2f} ms"
    if len(gaps):
        p50, p99 = torch.quantile(gaps, torch.tensor([0.5, 0.99])).tolist()
        line += f", TPOT {gaps.mean():.3f} ms, ITL p50 {p50:.3f} ms, p99 {p99:.3f} ms"
    note(f"{line}, E2E {arrivals[-1] * 1e3:.1f} ms, {len(arrivals) * batch / arrivals[-1]:,.0f} tokens/s")
    if cache is None:
        note("KV cache: off")
        return
    config, tokens = model.config, prompt_tokens + len(arrivals) - 1  # the last token is never fed back
    tokens -= context_begin(model, prompt_tokens, tokens)
    factors = (config.n_layer, config.n_kv_head or config.n_head, config.n_embd // config.n_head, tokens, batch)
    itemsize = model.lm_head.weight.element_size()
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


def verify(model, idx, max_new_tokens, sampling, overflow="stop"):
    """Generate with and without the cache; report the match, a near-tie or a difference. True unless they differ."""
    cached, uncached = (
        model.generate(idx, max_new_tokens, kv_cache=kv_cache, overflow=overflow, **sampling).tolist()
        for kv_cache in (True, False)
    )
    T, equal = idx.size(1), 0
    for sample, (a, b) in enumerate(zip(cached, uncached)):
        step = next((i for i in range(len(a) - T) if a[T + i] != b[T + i]), None)
        equal += step is None
        if step is not None:
            picks = (a[T + step], b[T + step])
            where = f"sample {sample}, new token {step}: id {picks[0]} with the cache, id {picks[1]} without"
            context = a[context_begin(model, T, T + step) : T + step]
            if not near_tie(model, context, sample, step, picks, **sampling):
                note(f"verify: DIFFERENT at {where}")
                return False
            note(f"verify: near-tie at {where}; rounding may choose between two so close, and all before is equal")
    note(f"verify: {len(cached[0]) - T} new tokens, with and without the cache: {equal} of {len(cached)} samples match")
    return True


def main():
    args = parse_args()
    try:
        device = pick_device(args.device)
        model, chars = load_model(args.ckpt or Path(args.out_dir) / "ckpt.pt", args.meta)
    except (FileNotFoundError, ValueError) as error:
        fail(error)
    dtype = getattr(torch, args.dtype)
    if args.verify and dtype != torch.float32:
        fail(f"--verify compares token by token, which {args.dtype} does not promise: use --dtype float32")
    model.to(device, dtype)

    ids = read_prompt(args.prompt, chars)
    block_size = model.config.block_size
    room = block_size - len(ids)
    steps = args.max_new_tokens
    if args.overflow == "slide":
        steps = 1000 if steps is None else steps
    elif room < 1 and steps != 0:
        fail(
            f"the prompt has {len(ids)} characters and the context {block_size}: at most {block_size - 1} leave room "
            f"for a new one (--overflow slide takes the newest {max(1, block_size // 2)} of a longer prompt)"
        )
    elif steps is None:
        steps = room
    elif steps > room > 0:
        note(f"--max_new_tokens {steps} reaches past the context of {block_size}: capped at {room}")
        steps = room
    idx = torch.tensor([ids], device=device).repeat(args.num_samples, 1)
    sampling = dict(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed)

    # the first sample is shown as it comes, the other rows of the batch when they are whole
    prompt = "".join(chars[i] for i in ids)
    sys.stdout.write(prompt)
    sys.stdout.flush()
    rows, arrivals, cache = [], [], None
    began = time.perf_counter()
    for tokens in model.stream(idx, steps, kv_cache=args.kv_cache, overflow=args.overflow, **sampling) if steps else ():
        rows.append(tokens.tolist())
        arrivals.append(time.perf_counter() - began)
        sys.stdout.write(chars[rows[-1][0]])
        sys.stdout.flush()
        if args.kv_cache and len(rows) == steps:
            cache = cache_bytes(model)
    for sample in range(1, args.num_samples):
        sys.stdout.write(f"\n---------------\n{prompt}{''.join(chars[row[sample]] for row in rows)}")
    if sys.stdout.isatty():
        sys.stdout.write("\n")
    sys.stdout.flush()
    if rows:
        print(file=sys.stderr)
        report(model, arrivals, len(ids), args.num_samples, cache)
    if args.verify and not verify(model, idx, steps, sampling, args.overflow):
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
        fail("out of memory: fewer --num_samples, or a smaller model, would fit")
    except KeyboardInterrupt:
        sys.exit(130)
