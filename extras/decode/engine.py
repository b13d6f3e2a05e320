"""The engines of sample.py: draft tokens, the C backend, a CUDA graph, prompts of different lengths.

An engine is an iterator over blocks `(B, n)`: the new tokens of all rows in a step, on the CPU, padded with -1 where a
row has fewer. Its tokens are those of GPT.generate for the same seed, and model.kv_cache is its cache. The step in
PyTorch is in speculate.py, the one in C in step.c, and the CUDA graph in cuda_graph.py.
"""

import time

import torch

from extras.cli import note
from extras.decode.c_step import CompileError, compile_step
from extras.decode.cuda_graph import GraphedGPT
from extras.decode.guard import refuse_other_sampling
from extras.decode.ngrams import ngram_table
from extras.decode.speculate import BatchState, noise_window, prefill, speculative_step
from model import GPT, TRAIN_MODE, Sampling, num_threads, slide

# Seconds after which the C backend returns, so that output streams. More often would cost time: the weights of a large
# model have driven Python out of the CPU's cache.
CALL = 0.05
NUM_DRAFTS = 3  # draft tokens per step; with the newest token that makes 4 rows, one tile of the matrix kernel
MOST_DRAFTS = 7  # draft tokens per step of the C backend, which makes fewer when they are unlikely


class Decoder:
    """Generates continuations of prompts.

    draft    None: one token per step. "ngram": draft tokens from `ngrams`, the counts in a checkpoint (count_ngrams)
    compile  use the C backend, or raise CompileError if that is impossible. It copies the weights, so make a new
             Decoder after you change them
    weights  "int8": the C backend reads int8, for a model whose weights were rounded by round_weights
    Raises ValueError.
    """

    def __init__(self, model, draft=None, ngrams=None, compile=False, weights="float32"):
        if draft not in (None, "ngram"):
            raise ValueError(f"draft={draft!r}: must be None or 'ngram'")
        if weights not in ("float32", "int8") or (weights == "int8" and not compile):
            raise ValueError(f"weights={weights!r}: must be 'float32', or 'int8' with compile=True")
        if draft and ngrams is None:
            hint = "train.py saves them with --loss extras.targets, for vocabularies of up to 2,895 tokens"
            raise ValueError(f"draft='ngram' needs n-gram counts, and this model has none ({hint}): leave it out")
        self.model = model
        self.num_drafts = min(MOST_DRAFTS if compile else NUM_DRAFTS, model.config.block_size - 1) if draft else 0
        self.table = ngram_table(ngrams, model.config.vocab_size) if self.num_drafts else None
        self.program = compile_step(model, self.num_drafts, self.table, weights) if compile else None

    def generate(self, prompts, max_new_tokens, *settings, **more_settings):
        """Return the prompts and their continuations, in the form of the prompts: see stream."""
        blocks = list(self.stream(prompts, max_new_tokens, *settings, **more_settings))
        rows = [torch.cat([row, *(block[i].to(row.device) for block in blocks)]) for i, row in enumerate(prompts)]
        rows = [row[row >= 0] for row in rows]
        return torch.stack(rows) if isinstance(prompts, torch.Tensor) else rows

    def stream(self, prompts, max_new_tokens, *settings, **more_settings):
        """Return a Generation, which yields the new tokens of the prompts step by step.

        prompts   int64 ids `(B, T)`, or a list of tensors `(T,)`, which may differ in length
        settings  those of Sampling, in order or by name. With overflow="slide", the prompts need equal lengths
        """
        return Generation(self, list(prompts), max_new_tokens, Sampling(*settings, **more_settings))


def open_engine(model, rows, max_new_tokens, sampling, kv_cache=True, draft=None, compile=False):
    """Return the engine for some texts. It chooses the number of torch's threads.

    rows            the texts. Each has `prompt` and `new`, lists of ids, and `ended`. The caller appends to `new`, and
                    sets `ended` to end a row
    sampling        a Sampling
    kv_cache        False is refused, because every engine has a cache
    draft, compile  those of Decoder. A note on stderr says why there is no compiled step
    Raises ValueError.
    """
    prompts = [torch.tensor(row.prompt, device=model.device) for row in rows]
    lengths = sorted({len(prompt) for prompt in prompts})
    if not (isinstance(model, GPT) and kv_cache):
        what = "--no-kv_cache" if isinstance(model, GPT) else "--engine onnx"
        raise ValueError(f"{what} needs prompts of equal length in a batch, and has neither drafts nor --compile")
    if compile:
        try:
            if model.device.type == "cuda":
                if len(lengths) > 1:
                    raise CompileError("a CUDA graph needs prompts of one length")
                slots = lengths[0] + max_new_tokens if lengths[0] <= model.config.block_size else None
                stream = GraphedGPT(model, len(prompts), slots, sampling).stream(torch.stack(prompts), max_new_tokens)
                if draft:
                    note("leaving out --draft: a CUDA graph is faster without it")
                return stream
            weights = "int8" if getattr(model, "int8", False) else "float32"
            decoder = Decoder(model, draft, model.ngrams, compile=True, weights=weights)
            torch.set_num_threads(1)  # the C backend has threads of its own
            return Generation(decoder, prompts, max_new_tokens, sampling, rows)
        except CompileError as error:
            note(f"{error}: decoding without --compile")
    decoder = Decoder(model, draft, model.ngrams)
    torch.set_num_threads(num_threads(model, len(prompts) * (decoder.num_drafts + 1)))
    return Generation(decoder, prompts, max_new_tokens, sampling, rows)


class Generation:
    """One generation of a Decoder. Iterating over it gives the new tokens of each step, a block `(B, n)` on the CPU.

    prompts   B int64 tensors of one dimension
    sampling  a Sampling
    texts     those of open_engine, to learn which rows have ended
    stats     a dict with `forwards`, how many there were so far; `offered`, how many draft tokens they checked; and
              `accepted`, how many of those they accepted
    Rows advance at their own pace, because a step accepts more draft tokens in some of them, and a longer prompt fills
    its context earlier. A row with fewer than n new tokens is padded with -1.

    Raises ValueError for a prompt that does not fit the context, and for a batch that cannot slide together.
    """

    def __init__(self, decoder, prompts, max_new_tokens, sampling, texts=()):
        self.decoder = decoder
        self.model = decoder.model
        self.sampling = sampling
        self.texts = texts
        self.stats = dict(forwards=0, offered=0, accepted=0)
        lengths = [len(prompt) for prompt in prompts]
        block_size = self.model.config.block_size
        self.slides = sampling.overflow == "slide"
        if self.slides and len(set(lengths)) > 1:
            raise ValueError(
                f"prompts of {sorted(set(lengths))} tokens cannot slide together: overflow='slide' needs equal lengths"
            )
        num_new = [sampling.num_new_tokens(T, max_new_tokens, block_size) for T in lengths]
        self.state = new_state([slide(prompt, block_size) for prompt in prompts], sampling, self.model.config)
        self.goal = self.state.end + torch.tensor(num_new)  # where `end` stops, possibly beyond the context
        if decoder.program:
            refuse_other_sampling(sampling)
            self.run, self.cache = decoder.program(self.state)
            self.model.kv_cache = self.cache
            self.steps = 1  # of the next call
        else:
            self.noise_of = noise_window(self.model, self.state, sampling.seed, decoder.num_drafts + 1)
            self.cache = None  # until the first step

    def __iter__(self):
        try:
            yield from self._blocks()
        finally:  # also where the caller has had enough: a call may have gone on after the last stop string
            if self.texts and self.cache:
                longest = max(len(text.prompt + text.new) for text in self.texts)
                self.cache.length = min(self.cache.length, longest - 1)
                if self.stats["offered"]:  # for the report of sample.py
                    self.cache.drafts = "{accepted} of {offered} draft tokens accepted".format(**self.stats)

    def _blocks(self):
        state = self.state
        goal = self.goal
        block_size = self.model.config.block_size
        full = block_size + 1 if self.slides else block_size  # a sliding context gives one more token before it moves
        step = self._step_in_c if self.decoder.program else self._step_in_torch
        while True:
            # steps, until every row is done or its context is full
            state.limit.copy_(goal.clamp(max=full))
            before = state.end.tolist()
            while any(end < limit for end, limit in zip(before, state.limit.tolist())):
                step()
                after = state.end.tolist()
                if after != before:  # a step may have fed only known tokens
                    yield new_tokens(state, before, after)
                    for row in (row for row, text in enumerate(self.texts) if text.ended):
                        goal[row] = state.limit[row] = state.end[row]
                before = after
            if torch.equal(state.end, goal):
                return

            kept = slide(state.tokens[:, :full], block_size)  # the next step feeds it again
            shift = full - kept.size(1)
            state.tokens[:, : kept.size(1)] = kept.clone()
            state.first_new -= shift
            for end in (state.end, goal):
                end.sub_(shift).clamp_(min=1)  # a row that reached its stop text may be shorter than what we drop
            state.cached.zero_()

    def _step_in_c(self):
        """Run steps in C: a single one at first, to show a token soon, then as many as fit into CALL seconds."""
        if self.model.training:
            raise RuntimeError(TRAIN_MODE)
        state = self.state
        began = time.perf_counter()
        if self.stats["forwards"]:
            counters = self.run(self.steps)
        else:
            # the first row of each prompt reads it; the other rows wait, and then copy its keys and values
            copies = [(first, rows) for first, *rows in rows_by_prompt(state) if rows and state.end[first] > 1]
            limit = state.limit.clone()
            for _, rows in copies:
                state.limit[rows] = 0
            counters = self.run(1)
            state.limit.copy_(limit)
            for first, rows in copies:
                slots = state.end[rows[0]] - 1
                state.cached[rows] = slots
                for keys in self.cache.key + self.cache.value:
                    keys[rows, :, :slots] = keys[first, :, :slots]
        fit = int(self.steps * CALL / (time.perf_counter() - began))
        self.steps = min(max(1, fit), self.model.config.block_size)
        for name, count in zip(("forwards", "offered", "accepted"), counters):
            self.stats[name] += count

    @torch.inference_mode()
    def _step_in_torch(self):
        model = self.model
        state = self.state
        num_drafts = self.decoder.num_drafts
        if not state.cached.any():  # at the start, and after the context has moved
            self.cache = prefill(model, state, int(self.goal.max()) + num_drafts)
        before = state.end.tolist()
        fed = speculative_step(model, self.cache, state, num_drafts, self.decoder.table, self.noise_of, self.sampling)
        self.cache.length = int(state.cached.max())  # without the draft tokens that were rejected
        self.stats["forwards"] += 1
        for first, begin, end, limit in zip(fed, before, state.end.tolist(), state.limit.tolist()):
            if begin < limit:
                self.stats["offered"] += max(0, min(first + num_drafts + 1, limit - 1) - begin)
                self.stats["accepted"] += end - begin - 1


def new_state(contexts, sampling, config):
    """Return the BatchState for `contexts`, int64 tensors of one dimension, one per row."""
    end = torch.tensor([len(context) for context in contexts])
    tokens = torch.zeros(len(contexts), config.block_size + 1, dtype=torch.int64)
    for row, context in zip(tokens, contexts):
        row[: len(context)] = context
    if not ((tokens >= 0) & (tokens < config.vocab_size)).all():
        raise ValueError(f"a prompt contains tokens outside 0..{config.vocab_size - 1}")
    samples = torch.as_tensor(range(len(contexts)) if sampling.samples is None else sampling.samples)
    if not contexts or samples.shape != end.shape or samples.is_floating_point():
        raise ValueError(
            f"samples is {samples.tolist()}: {len(contexts)} rows need a whole number each, and at least one"
        )
    return BatchState(
        tokens=tokens,
        end=end,
        cached=torch.zeros_like(end),
        limit=end.clone(),
        first_new=end.clone(),
        sample=samples.long(),
        seed=torch.tensor([sampling.seed & 0xFFFFFFFF, sampling.seed >> 32]),
        temperature=torch.tensor(sampling.temperature, dtype=torch.float32),
        top_k=None if sampling.top_k is None else torch.tensor(sampling.top_k),
        top_p=None if sampling.top_p is None else torch.tensor(sampling.top_p, dtype=torch.float32),
    )


def rows_by_prompt(state):
    """Group the rows by their tokens: lists, in the order of their first rows."""
    same = {}
    for row, (tokens, end) in enumerate(zip(state.tokens.tolist(), state.end.tolist())):
        same.setdefault(tuple(tokens[:end]), []).append(row)
    return list(same.values())


def new_tokens(state, before, after):
    """Return the tokens in slots before[i] to after[i] - 1 of every row, `(B, n)`, padded with -1."""
    if len(set(before)) == len(set(after)) == 1:  # the common case, with few operations
        return state.tokens[:, before[0] : after[0]].clone()
    longest = max(end - begin for begin, end in zip(before, after))
    slots = torch.tensor(before)[:, None] + torch.arange(longest)
    block = state.tokens.gather(1, slots.clamp(max=state.tokens.size(1) - 1))
    return block.masked_fill(slots >= torch.tensor(after)[:, None], -1)
