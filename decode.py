"""Speculative decoding, and a compiled step: guess a few tokens, verify them in one forward, leave Python out of it.

To read in order: the n-gram table (where guesses come from), advance (one step of every row: guess, verify, accept),
Decoder (the loop around it), compile_step (the same step without Python).

The tokens are those of `GPT.generate` for the same seed. The sampler's noise makes the token at a place a function of
the logits there, so a guess is right or wrong, never a matter of chance: verify, and keep what comes before the first
wrong one. And the noise is known before the logits are: a guess is what the n-gram table itself would have sampled
with it. Model and table, led by the same noise, agree far more often than the table's likeliest token would.
"""

import hashlib
import math
import os
import sys
import time
import warnings
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from model import Sampling, eval_mode, gumbel_noise, sample_token, slide

ORDER = 3  # tokens of context that the n-gram table looks at
KEPT = 30  # compiled steps, the last used, in the folder of torch's compiler
GUESSES = 3  # tokens guessed a step: four rows, the newest token and these, are what a matrix kernel takes at once


# -- guessing ----------------------------------------------------------------------------------------------------------


def count_ngrams(ids, vocab_size, most):
    """Counts of the `most` frequent runs of ORDER + 1 tokens in `ids`, as a checkpoint keeps them: {"codes", "counts"}.

    A run's code is its tokens as the digits of a number in base vocab_size, the last token being the last digit; one
    that occurs once says little and is left out. Looks at no more than 2**24 tokens. None if there are none, or
    if codes exceed 63 bits.
    """
    if vocab_size ** (ORDER + 1) >= 2**63:
        return None
    ids = np.asarray(ids[: 2**24], dtype=np.int64)
    runs = max(0, len(ids) - ORDER)
    code = np.zeros(runs, dtype=np.int64)
    for i in range(ORDER + 1):
        code = code * vocab_size + ids[i : i + runs]
    codes, counts = np.unique(code, return_counts=True)
    keep = np.sort(np.argsort(-counts, kind="stable")[:most])
    keep = keep[counts[keep] > 1]
    if not len(keep):
        return None
    dtype = np.int32 if vocab_size ** (ORDER + 1) < 2**31 else np.int64
    return {"codes": torch.from_numpy(codes[keep].astype(dtype)), "counts": torch.from_numpy(counts[keep]).int()}


def ngrams_fit(ngrams, vocab_size):
    """Whether `ngrams`, read from a file, can be what count_ngrams made for this vocabulary."""
    try:
        codes, counts = ngrams["codes"], ngrams["counts"]
        whole = codes.dim() == counts.dim() == 1 and len(codes) == len(counts) > 0
        whole = whole and not codes.is_floating_point() and not counts.is_floating_point()
        return whole and bool(((codes >= 0) & (codes < vocab_size ** (ORDER + 1)) & (counts > 0)).all())
    except (TypeError, KeyError, IndexError, AttributeError, RuntimeError, OverflowError):
        return False


def ngram_table(ngrams, vocab_size, device):
    """(rows, logits): what follows a context, as far as the counts know, by interpolated absolute discounting.

    logits  (R, vocab_size) float32 log-probabilities, a row for each context that occurs, short ones included
    rows    ((vocab_size + 1) ** n,) int32: the row of the longest known end of any context of n tokens. Its index has
            the tokens + 1 as digits in base vocab_size + 1, the newest the last digit; 0 stands for no token. n is
            ORDER, or what 2**22 entries allow
    """
    base = vocab_size + 1
    codes, counts = ngrams["codes"].long(), ngrams["counts"].double()
    tokens = [codes // vocab_size**i % vocab_size for i in range(ORDER, -1, -1)]
    order = max(n for n in range(1, ORDER + 1) if base**n <= 2**22)
    every = torch.arange(base**order)
    rows = torch.zeros_like(every)
    lower, tables = torch.full((1, vocab_size), 1 / vocab_size, dtype=torch.float64), []
    for length in range(order + 1):
        context = sum(((tokens[ORDER - 1 - i] + 1) * base**i for i in range(length)), torch.zeros_like(codes))
        contexts, row = context.unique(return_inverse=True)
        known = rows[contexts % base ** max(0, length - 1)]
        if (len(contexts) + len(lower)) * vocab_size > 2**23:  # 32 MB are enough
            break
        seen = torch.zeros(len(contexts), vocab_size, dtype=torch.float64)
        seen.index_put_((row, tokens[-1]), counts, accumulate=True)
        discount, total = 0.75 * (seen > 0), seen.sum(1, keepdim=True).clamp(min=1)
        probs = (seen - discount + discount.sum(1, keepdim=True) * lower[known]) / total
        end = every % base**length
        place = torch.searchsorted(contexts, end).clamp(max=max(0, len(contexts) - 1))
        first = sum(map(len, tables))
        rows = torch.where(contexts[place] == end, first + place, rows)
        tables.append(probs)
        lower = torch.cat(tables)
    return rows.int().to(device), lower.clamp(min=1e-12).log().float().to(device)


def guess_by_table(batch, slots, chunk, known, noise, rows, logits):
    """Fill chunk[:, 1:-1], but for known tokens, with what the n-gram table samples, one after the other."""
    base = logits.size(-1) + 1
    order = round(math.log(len(rows), base))
    before = slots[:, :1] - torch.arange(max(0, order - 1), 0, -1, device=slots.device)  # the slots before the chunk
    text = batch.window.gather(1, before.clamp(min=0)) + 1
    digits = list(torch.cat((torch.where(before >= 0, text, 0), chunk[:, :1] + 1), dim=1).unbind(1))
    for i in range(1, chunk.size(1) - 1):
        code = sum(digit * base**place for place, digit in enumerate(digits[-order:][::-1]))
        guess = sample_token(logits[rows[code]], noise[:, i - 1], batch.temperature, batch.top_k, batch.top_p)
        chunk[:, i] = torch.where(known[:, i - 1], chunk[:, i], guess)
        digits.append(chunk[:, i] + 1)


def guess_by_lookup(batch, slots, chunk, known):
    """Fill chunk[:, 1:-1], but for known tokens, with what followed the newest tokens where they last occurred: prompt
    lookup decoding."""
    text, end = batch.window, batch.end[:, None]
    place = torch.arange(text.size(1), device=text.device)
    same, length = place < end, 0
    for back in range(1, ORDER + 1):
        newest = text.gather(1, (end - back).clamp(min=0))
        same = same & (place >= back) & (end >= back) & (text.roll(back, dims=1) == newest)
        length = length + same
    best = torch.where(place < end, length * len(place) + place, -1).argmax(1, keepdim=True)
    guess = text.gather(1, (best + slots[:, 1:-1] - end).clamp(0, len(place) - 1))
    chunk[:, 1:-1] = torch.where(known[:, :-1], chunk[:, 1:-1], guess)


# -- one step ----------------------------------------------------------------------------------------------------------


@dataclass
class Batch:
    """Rows that are being continued, each at its own place: all that a step reads and writes, besides the caches.

    A row's window is its context: slot s holds the token at position s. A step writes window, end and cached.
    """

    window: torch.Tensor  # (B, block_size + 1) int64: tokens as far as `end`, which a full context can exceed
    end: torch.Tensor  # (B,) int64, >= 1: tokens in the window
    cached: torch.Tensor  # (B,) int64, < end: slots whose keys and values are in the caches
    limit: torch.Tensor  # (B,) int64: where the row's `end` stops
    origin: torch.Tensor  # (B,) int64: the slot of the row's first generated token; negative once it has slid away
    sample: torch.Tensor  # (B,) int64: whose noise the row draws
    seed: torch.Tensor  # (2,) int64: its low and its high 32 bits
    temperature: torch.Tensor  # () float32
    top_k: torch.Tensor | None  # () int64
    top_p: torch.Tensor | None  # () float32


def advance(model, batch, guesses, table, noise=None, lengths=None):
    """Feed each row's newest token and `guesses` guesses, and add the tokens that come of it: 1 to guesses + 1 a row.

    The tokens of a row that are not cached yet are fed first, in place of guesses; after as many as that it adds none.
    table    of ngram_table; None: guess by looking up the text so far
    noise    (B, guesses + 1, V), of the slots after those fed; None: made here
    lengths  the cache lengths that the forward leaves behind; None: see GPT.features
    At the edge of the context the fed slots are moved back, on to tokens that are known and stay: no guess is verified
    past the edge. A row that has reached its limit stays as it is.
    """
    block_size, V = model.config.block_size, model.config.vocab_size
    start = batch.cached.clamp(max=block_size - 1 - guesses)[:, None]
    slots = start + torch.arange(guesses + 2, device=start.device)  # (B, guesses + 2): all but the last are fed
    chunk = batch.window.gather(1, slots)
    known = slots[:, 1:] < batch.end[:, None]
    if noise is None:
        noise = gumbel_noise(batch.seed.unbind(), batch.sample, slots[:, 1:] - batch.origin[:, None], V)
    if guesses and table is not None:
        guess_by_table(batch, slots, chunk, known, noise, *table)
    elif guesses:
        guess_by_lookup(batch, slots, chunk, known)

    pos = slots[0, :-1] if len(slots) == 1 else slots[:, :-1]
    logits = model.lm_head(model.features(chunk[:, :-1], pos, lengths))  # (B, guesses + 1, V)
    picks = sample_token(logits, noise, batch.temperature, batch.top_k, batch.top_p)
    right = known | (picks == chunk[:, 1:])
    place = torch.arange(guesses + 1, device=start.device)
    # how far the fed tokens are those that would have been fed one by one
    reach = torch.where(right & (place < guesses), guesses, place).amin(1)
    batch.window.scatter_(1, slots[:, 1:], torch.where(known, chunk[:, 1:], picks))
    batch.end.copy_(torch.minimum(start[:, 0] + reach + 2, batch.limit).maximum(batch.end))
    batch.cached.copy_(torch.minimum(start[:, 0] + guesses + 1, batch.end - 1))


# -- the loop ----------------------------------------------------------------------------------------------------------


class Decoder:
    """Generates with a model by drafts, by a compiled step, for prompts of different lengths, or all of it at once.

    draft    None: one token a step. "ngram": guess by `ngrams`, the counts that a checkpoint keeps (`count_ngrams`), or
             by looking up the text so far where there are none
    compile  decode by a step compiled for the model's weights as they are (again after they changed): see compile_step.
             The modules are those that the model has now: one that is replaced later needs another Decoder
    After a generation `forwards`, `offered` and `accepted` say how many steps it took, how many guesses were verified
    in them, and how many of these were right.
    """

    def __init__(self, model, draft=None, ngrams=None, compile=False):
        if draft not in (None, "ngram"):
            raise ValueError(f"draft={draft!r}: must be None or 'ngram'")
        self.model = model
        self.guesses = min(GUESSES, model.config.block_size - 1) if draft else 0
        self.table = None
        if self.guesses and ngrams is not None:
            self.table = ngram_table(ngrams, model.config.vocab_size, model.lm_head.weight.device)
        self.compile = compile
        self.modules = list(model.modules())
        self.caches = [block.attn.cache for block in model.transformer["h"]]
        self.programs, self.made_of = {}, (None, None)  # compiled steps, and the weights that are in them
        self.forwards = self.offered = self.accepted = 0

    def generate(self, prompts, max_new_tokens, **sampling):
        """A list of B int64 tensors, each a prompt and its continuation. Arguments are those of `stream`."""
        with eval_mode(self.model):
            new = list(self.stream(prompts, max_new_tokens, **sampling)) or [prompts[0].new_zeros(0)]
        rows = torch.stack(new, dim=-1).view(len(prompts), -1)
        return [torch.cat((prompt, row[row >= 0])) for prompt, row in zip(prompts, rows)]

    def stream(self, prompts, max_new_tokens, **sampling):
        """Yield the tokens `(B,)` of one place in the continuation after the other, as `GPT.stream` does.

        prompts   B int64 tensors of one dimension, or the rows of one `(B, T)`. With overflow="slide" all of one length
        Several places may come at once, after a step that accepted guesses. A row that has reached the end of its
        context, as a longer prompt does earlier, gives -1 from then on. The other arguments are those of `GPT.stream`.
        """
        sampling = Sampling(**sampling)
        S, lengths = self.model.config.block_size, [len(prompt) for prompt in prompts]
        if sampling.overflow == "slide" and len(set(lengths)) > 1:
            raise ValueError(
                f"prompts of {sorted(set(lengths))} tokens cannot slide together: their contexts fill apart"
            )
        steps = [sampling.steps(T, max_new_tokens, S) for T in lengths]
        text = [prompt[slide(0, T, S) :] for prompt, T in zip(prompts, lengths)]
        batch = self._batch(text, sampling)
        self.forwards = self.offered = self.accepted = 0
        if self.compile and any(steps):
            self._program(batch)  # before the first token is waited for
        return self._decode(batch, [len(row) for row in text], steps, sampling.overflow == "slide")

    def _batch(self, text, sampling):
        device, ends = self.model.lm_head.weight.device, [len(row) for row in text]
        window = torch.zeros(len(text), self.model.config.block_size + 1, dtype=torch.int64, device=device)
        for i, row in enumerate(text):
            window[i, : len(row)] = row
        end, cached, limit, origin = torch.tensor([ends, [0] * len(ends), ends, ends], device=device)
        filters = sampling.top_k, sampling.top_p
        if self.compile and filters != (None, None):  # one program for both: these keep everything
            filters = sampling.top_k or 2**31, sampling.top_p or 2.0
        top_k, top_p = (None if x is None else torch.tensor(x, device=device) for x in filters)
        seed = torch.tensor([sampling.seed & 0xFFFFFFFF, sampling.seed >> 32], device=device)
        temperature = torch.tensor(float(sampling.temperature), device=device)
        sample = sampling.rows(len(text), device)
        return Batch(window, end, cached, limit, origin, sample, seed, temperature, top_k, top_p)

    def _decode(self, batch, ends, steps, slides):
        """The loop of `stream`. `ends`, and `origins` below, are batch.end and batch.origin, as Python's integers."""
        S = self.model.config.block_size
        full = S + 1 if slides else S  # with slide, one token is sampled from a full context before it moves on
        origins = ends
        done = 0  # places in the continuation that have been yielded
        cached = None  # the cache lengths that this generator left behind
        try:
            while done < max(steps):
                limits = [min(origin + n, full) for origin, n in zip(origins, steps)]
                batch.limit.copy_(torch.tensor(limits))
                while ends != limits:
                    if cached is None or any(cache.lengths is not cached for cache in self.caches):
                        step, cached = self._prefill(batch, ends)
                    step(cached, origins)
                    before, ends = ends, batch.end.tolist()
                    self._count(cached, before, ends, limits)
                    cached = [end - 1 for end in ends]
                    for cache in self.caches:
                        cache.lengths = cached
                    # every row that goes on has these places
                    ready = min((e - o for e, o, n in zip(ends, origins, steps) if e - o < n), default=max(steps))
                    yield from self._continuation(batch, origins, steps, done, ready)
                    done = ready
                if done < max(steps):  # the windows are full, all at once: keep the newest half
                    away = slide(0, full, S)
                    batch.window[:, : full - away] = batch.window[:, away:].clone()
                    batch.origin -= away
                    origins = [origin - away for origin in origins]
                    ends, cached = [full - away] * len(ends), None
                    batch.end.copy_(torch.tensor(ends))
        finally:
            if cached is not None and all(cache.lengths is cached for cache in self.caches):
                for cache in self.caches:
                    cache.clear()

    @torch.inference_mode()
    def _prefill(self, batch, ends):
        """Cache all but the newest token of each row, which the next step will feed.

        Returns that step, a function of the cache lengths and of where the continuations begin, and the cache lengths.
        """
        step = self._program(batch, began=True)(batch, self.table) if self.compile else self._eager_step(batch)
        lengths, chunk = [end - 1 for end in ends], self.guesses + 1
        batch.cached.zero_()
        if self.compile and len(set(ends)) == 1 and lengths[0] <= 4 * chunk:
            for _ in range(lengths[0] // chunk):  # faster than the forward, for a prompt of a few chunks
                step()
            return step, [lengths[0] // chunk * chunk] * len(ends)
        if any(lengths):
            pos = torch.arange(max(lengths), device=batch.end.device)
            with eval_mode(self.model):
                self.model.features(batch.window[:, : len(pos)], pos, lengths)
        batch.cached.copy_(batch.end - 1)
        return step, lengths

    def _eager_step(self, batch):
        """A step without a compiler. It makes the noise of many places at a time, and nothing in it waits for a GPU."""
        S, (B, _), V = self.model.config.block_size, batch.window.shape, self.model.config.vocab_size
        chunk = self.guesses + 1
        ahead = max(chunk, min(64, 2**22 // (B * V)))
        noise, base = None, []
        for block in self.model.transformer["h"]:
            block.attn.reserve_cache(B)

        @torch.inference_mode()
        def step(cached, origins):
            nonlocal noise, base
            starts = [min(length, S - chunk) for length in cached]
            first = [start + 1 - origin for start, origin in zip(starts, origins)]
            if noise is None or not all(0 <= f - b <= ahead - chunk for f, b in zip(first, base)):
                base = first
                places = torch.tensor(base)[:, None] + torch.arange(ahead)
                noise = gumbel_noise(batch.seed.unbind(), batch.sample, places.to(batch.end.device), V)
            offset = [f - b for f, b in zip(first, base)]
            if len(set(offset)) == 1:
                some = noise[:, offset[0] : offset[0] + chunk]
            else:
                some = noise[torch.arange(B)[:, None], torch.tensor(offset)[:, None] + torch.arange(chunk)]
            with eval_mode(self.model):
                advance(self.model, batch, self.guesses, self.table, some, [start + chunk for start in starts])

        return step

    def _continuation(self, batch, origins, steps, begin, end):
        """Places begin .. end of the continuations, as tensors (B,); -1 where a row has ended before."""
        if len(set(origins)) == 1:
            return batch.window[:, origins[0] + begin : origins[0] + end].clone().unbind(1)
        place = torch.arange(begin, end, device=batch.end.device)
        block = batch.window.gather(1, (batch.origin[:, None] + place).clamp(max=batch.window.size(1) - 1))
        return block.masked_fill(place >= torch.tensor(steps, device=place.device)[:, None], -1).unbind(1)

    def _program(self, batch, began=False):
        """The compiled step for batches like this one, from an earlier generation if the weights are the same.

        began: by a generation that compared the weights when it began, so that their epoch is enough. A change in place
        in between is what the caches cannot notice either.
        """
        # a fused optimizer leaves no trace in _version; model.train(), which comes before it, does in the epoch
        epochs, versions = [cache.epoch for cache in self.caches], self.made_of[1]
        if not began or epochs != self.made_of[0]:
            weights = [p for module in self.modules for p in module._parameters.values() if p is not None]
            versions = [(id(p), p.data_ptr(), p._version) for p in weights]
        if self.made_of != (epochs, versions):
            self.made_of, self.programs = (epochs, versions), {}
        kind = (len(batch.end), batch.top_k is not None)
        if kind not in self.programs:
            self.programs[kind] = compile_step(self.model, batch, self.guesses, self.table)
        return self.programs[kind]

    def _count(self, cached, before, ends, limits):
        self.forwards += 1
        for length, begin, end, limit in zip(cached, before, ends, limits):
            if begin < limit:
                fed = min(length, self.model.config.block_size - 1 - self.guesses) + self.guesses + 1
                self.offered += max(0, min(fed, limit - 1) - begin)
                self.accepted += end - begin - 1


# -- the compiled step -------------------------------------------------------------------------------------------------


class Step(torch.nn.Module):
    """`advance`, as a module whose inputs are all that it writes."""

    def __init__(self, model, guesses):
        super().__init__()
        self.model = model
        self.guesses = guesses

    def forward(self, batch, table, caches):
        for block, key, value in zip(self.model.transformer["h"], caches[::2], caches[1::2]):
            block.attn.cache.key, block.attn.cache.value = key, value
        advance(self.model, Batch(*batch), self.guesses, table)


def attend(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """What scaled_dot_product_attention stands for, in operations that a compiler fuses into loops.

    For a few queries that beats a call of its kernel: at 4 layers, 4 heads and 256 slots, 60 us a step instead of 90.
    """
    if enable_gqa:
        k, v = (x.repeat_interleave(q.size(1) // k.size(1), dim=1) for x in (k, v))
    score = (q[:, :, :, None] * k[:, :, None]).sum(-1) * q.size(-1) ** -0.5  # (B, nh, T, slots)
    score = score.masked_fill(~attn_mask, -1e30)
    weight = (score - score.amax(-1, keepdim=True)).exp()
    return (weight[..., None] * v[:, :, None]).sum(-2) / weight.sum(-1, keepdim=True)  # (B, nh, T, hs)


def compile_step(model, batch, guesses, table):
    """`advance` as machine code: a function (batch, table), for batches of this size, that returns the batch's step.

    The model's own layers are traced. On a CPU, matrix products, attention, sampler, noise and guesses become C++ for
    exactly these shapes, the weights packed into the program: nothing inside a step is dispatched by Python. It
    is kept in the folder of torch's compiler ($TORCHINDUCTOR_CACHE_DIR), for the next run with these weights. On CUDA
    the step is compiled by torch.compile and replayed as a CUDA graph.
    A program has its own caches, empty ones, which become the model's when it is given a batch.
    Raises CompileError, whose text is one line, where that cannot be done.
    """
    attentions = [block.attn for block in model.transformer["h"]]
    for attn in attentions:
        attn.reserve_cache(len(batch.end))
    buffers = [(attn.cache.key, attn.cache.value) for attn in attentions]
    args = [list(vars(batch).values()), table, [tensor for pair in buffers for tensor in pair]]
    try:
        with torch.no_grad(), eval_mode(model), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the compiler, about itself
            program = (capture if batch.end.is_cuda else build)(model, guesses, args)
    except Exception as error:  # compilers fail in many ways, a missing one in the most
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CompileError(f"the decode step cannot be compiled here ({why[:200]})") from error
    finally:
        for attn in attentions:
            attn.cache.clear()  # tracing has left its own tensors there

    def bind(batch, table):
        for attn, (key, value) in zip(attentions, buffers):
            attn.cache.key, attn.cache.value, attn.cache.lengths = key, value, []
        return program(batch, table)

    return bind


class CompileError(RuntimeError):
    """A compiler is missing, or has failed."""


@contextmanager
def announced():
    began = time.perf_counter()
    print("--compile: compiling the decode step, kept for the next run ...", file=sys.stderr, flush=True)
    yield
    print(f"--compile: done in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)


def build(model, guesses, args):
    """The step compiled ahead of time for the CPU, or loaded if an earlier run has compiled the same."""
    from torch._inductor.codecache import cache_dir  # makes the folder, and takes a second

    work = sum(p.nbytes for p in model.parameters()) * args[0][0].size(0) * (guesses + 1)
    options = {
        "freezing": True,  # weights are constants, laid out for the loops that read them
        "max_autotune": True,
        "max_autotune_gemm_backends": "CPP",  # matrix products as C++ loops, without a call of a library for each
        "aot_inductor.allow_stack_allocation": True,  # a third less time at 64 wide
        "cpp.threads": torch.get_num_threads() if work >= 2**25 else 1,  # less is done before others have woken up
    }
    shapes = [x if x is None else (x.shape, x.dtype) for x in torch.utils._pytree.tree_leaves(args)]
    parts = (torch.__version__, torch.backends.cpu.get_cpu_capability(), options, guesses, shapes, model.config)
    key = hashlib.sha256(repr(parts).encode())
    for weight in model.parameters():
        key.update(weight.detach().contiguous().view(torch.uint8).numpy())
    for file in ("model.py", "decode.py"):
        key.update(Path(__file__).with_name(file).read_bytes())
    path = Path(cache_dir()) / f"decode-{key.hexdigest()[:32]}.pt2"
    trial = [x.clone() for x in torch.utils._pytree.tree_leaves(args) if x is not None]
    try:
        program = load_program(path, trial)
    except RuntimeError:  # there is none, or it is damaged
        with announced():
            exported = torch.export.export(Step(model, guesses), tuple(args))
            exported = exported.run_decompositions({torch.ops.aten.scaled_dot_product_attention.default: attend})
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}.pt2")
            with suppress(AttributeError):  # how programs are wrapped is settled by a process's first compilation
                torch._inductor.codegen.common.device_codegens.pop("cpu", None)
                torch._inductor.codegen.common.init_backend_registration.cache_clear()
            try:
                torch._inductor.aoti_compile_and_package(exported, package_path=str(partial), inductor_configs=options)
                os.replace(partial, path)
            finally:
                partial.unlink(missing_ok=True)
            for old in sorted(path.parent.glob("decode-*.pt2"), key=lambda file: file.stat().st_mtime)[:-KEPT]:
                old.unlink(missing_ok=True)
        program = load_program(path, trial)

    def start(batch, table):
        inputs = [x for x in (*vars(batch).values(), *(table or ()), *args[2]) if x is not None]
        return lambda *_: program.run(inputs)

    return start


def load_program(path, inputs):
    """The program in the file, after one run, so that what is loaded late is loaded now. RuntimeError if it is none."""
    if not path.exists():
        raise RuntimeError(f"no program at {path}")
    program = torch._inductor.aoti_load_package(str(path)).loader
    program.run(inputs)
    path.touch()
    return program


def capture(model, guesses, args):
    """The step compiled for CUDA and captured as a graph, which reads and writes a batch of its own."""
    own = torch.utils._pytree.tree_map(lambda x: x if x is None else x.clone(), args[0])
    step = torch.compile(Step(model, guesses), fullgraph=True, dynamic=False)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with announced(), torch.cuda.stream(side):
        for _ in range(3):  # compiles, and warms up what a capture must not meet for the first time
            step(own, *args[1:])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(own, *args[1:])

    def start(batch, table):
        pairs = [pair for pair in zip(own, vars(batch).values()) if pair[0] is not None]

        def run(*_):
            for mine, theirs in pairs:
                mine.copy_(theirs)
            graph.replay()
            for mine, theirs in pairs[:3]:  # window, end, cached
                theirs.copy_(mine)

        return run

    return start
