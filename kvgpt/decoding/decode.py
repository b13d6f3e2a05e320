"""Decoder: generation with guesses, with the step in C, and for prompts of different lengths, in any combination.

The tokens are those of GPT.generate for the same seed. speculate.py has the step in PyTorch, step.c the one in C, and
this is the loop around either.
"""

from functools import partial
from itertools import chain, repeat

import torch

from kvgpt.decoding.compile import compile_step
from kvgpt.decoding.ngrams import ngram_table
from kvgpt.decoding.speculate import DecodeState, decode_step
from model import Sampling, context_start, eval_mode, gumbel_noise

WORK_PER_CALL = 2**25  # multiply-adds: the step in C returns after some milliseconds, so that a stream flows
NUM_DRAFTS = 3  # guesses per step; with the newest token a product has 4 rows, which fill one tile of its kernel
MOST_DRAFTS = 7  # guesses per step in C, which makes fewer where they are unlikely


class Decoder:
    """Continues prompts with a model.

    draft    None: one token per step. "ngram": guess by `ngrams`, the counts in a checkpoint (see count_ngrams), or by
             looking up the text so far if there are no counts
    compile  decode by the step in C. It may copy the weights now, so make a new Decoder after you have changed them.
             Raises CompileError where it cannot
    weights  "int8": the step in C reads int8, for a model whose weights have been rounded by round_weights
    After a generation, `forwards` counts its steps, `offered` the guesses checked in them, `accepted` the right ones.
    """

    def __init__(self, model, draft=None, ngrams=None, compile=False, weights="float32"):
        if draft not in (None, "ngram"):
            raise ValueError(f"draft={draft!r}: must be None or 'ngram'")
        self.model = model
        self.num_drafts = min(MOST_DRAFTS if compile else NUM_DRAFTS, model.config.block_size - 1) if draft else 0
        has_table = self.num_drafts and ngrams is not None
        self.table = ngram_table(ngrams, model.config.vocab_size) if has_table else None
        self.num_params = sum(p.numel() for p in model.parameters())
        self.program = compile_step(model, self.num_drafts, self.table, weights) if compile else None
        self.forwards = self.offered = self.accepted = 0

    def generate(self, prompts, max_new_tokens, **sampling):
        """Return a list of int64 tensors, each a prompt and its continuation. The arguments are those of `stream`."""
        with eval_mode(self.model):
            blocks = list(self.stream(prompts, max_new_tokens, **sampling))
        rows = [torch.cat([prompt, *(block[i] for block in blocks)]) for i, prompt in enumerate(prompts)]
        return [row[row >= 0] for row in rows]

    def stream(self, prompts, max_new_tokens, **sampling):
        """Yield the new tokens of each step as a block `(B, n)`. The arguments are checked at the call.

        prompts   B int64 tensors of one dimension, or the rows of one `(B, T)`. With overflow="slide" all of one length
        sampling  temperature, top_k, top_p, seed, samples, overflow: see Sampling
        Rows move at their own pace, because a step accepts more guesses in some than in others, and a longer prompt
        fills its context earlier. A row that got fewer than n tokens is padded with -1.
        """
        sampling, block_size = Sampling(**sampling), self.model.config.block_size
        lengths, slides = [len(prompt) for prompt in prompts], sampling.overflow == "slide"
        if slides and len(set(lengths)) > 1:
            raise ValueError(
                f"prompts of {sorted(set(lengths))} tokens cannot slide together: overflow='slide' needs equal lengths"
            )
        num_new = [sampling.num_new_tokens(T, max_new_tokens, block_size) for T in lengths]
        contexts = [prompt[context_start(0, len(prompt), block_size) :] for prompt in prompts]
        state = new_state(contexts, sampling, self.model.config)
        self.goal = state.end + torch.tensor(num_new)  # where `end` stops, also beyond the context
        self.state = state
        self.forwards = self.offered = self.accepted = 0
        if self.program:
            return self._decode(state, self.goal, self._compiled_step(state), slides)
        owner = object()  # stands for this generation in the model's cache
        blocks = self._decode(state, self.goal, self._eager_step(state, owner), slides)
        return self.model.release_cache_after(blocks, owner)

    def leave(self, row):
        """End a row of the latest generation here, because nobody needs the rest of it."""
        self.goal[row] = self.state.limit[row] = self.state.end[row]

    def _decode(self, state, goal, step, slides):
        block_size, device = self.model.config.block_size, self.model.lm_head.weight.device
        full = block_size + 1 if slides else block_size  # "slide" samples one token from a full context, then moves it
        while True:
            # steps, until every row is done or its context is full
            state.limit.copy_(goal.clamp(max=full))
            before = state.end.tolist()
            while any(end < limit for end, limit in zip(before, state.limit.tolist())):
                step()
                after = state.end.tolist()
                if after != before:  # a step may only have fed known tokens
                    yield new_tokens(state, before, after).to(device)
                before = after
            if torch.equal(state.end, goal):
                return

            # keep the newest half of every context, which the next step feeds again
            shift = context_start(0, full, block_size)
            state.tokens[:, : full - shift] = state.tokens[:, shift:].clone()
            state.first_new -= shift
            for end in (state.end, goal):
                end.sub_(shift).clamp_(min=1)  # a row that met its stop text may be shorter than what we drop
            state.cached.zero_()

    def _compiled_step(self, state):
        """Return a function that makes steps in C: one at first, because somebody waits for a token, then many."""
        run, copy_slots = self.program(state)
        per_call = max(1, WORK_PER_CALL // (self.num_params * len(state.end) * (self.num_drafts + 1)))

        def first_step():
            """The first row of each prompt reads it. The other rows wait, and then get its keys and values."""
            copies = [(first, rows) for first, *rows in rows_by_prompt(state) if rows and state.end[first] > 1]
            if not copies:
                return run(1)
            limit = state.limit.clone()
            for _, rows in copies:
                state.limit[rows] = 0
            counters = run(1, int((state.limit > 0).sum()))
            state.limit.copy_(limit)
            for first, rows in copies:
                state.cached[rows] = state.end[rows] - 1
                copy_slots(first, rows, state.cached[rows[0]])
            return counters

        calls = chain([first_step], repeat(partial(run, per_call)))

        def step():
            forwards, offered, accepted = next(calls)()
            self.forwards += forwards
            self.offered += offered
            self.accepted += accepted

        return step

    def _eager_step(self, state, owner):
        """Return a function that makes one step in PyTorch, through the model's cache."""
        model, cache, chunk = self.model, self.model.cache, self.num_drafts + 1
        noise_of = noise_window(state, chunk, model.config.vocab_size)

        @torch.inference_mode()
        def step():
            if model.training:  # somebody trains between our steps
                with eval_mode(model):
                    return step()
            with cache.step(owner):
                # prefill: first, after the context has moved, and after somebody else has used the cache
                if cache.lengths != state.cached.tolist():
                    prompts = rows_by_prompt(state)
                    firsts = [rows[0] for rows in prompts]
                    cache.lengths = (state.end[firsts] - 1).tolist()
                    longest = max(cache.lengths)
                    if longest:
                        fed = state.tokens[firsts, :longest].to(model.lm_head.weight.device)
                        model.hidden_states(fed, torch.arange(longest, device=fed.device).expand(len(fed), -1))
                        prompt_of = {row: i for i, rows in enumerate(prompts) for row in rows}
                        if len(prompts) < len(prompt_of):
                            cache.take([prompt_of[row] for row in range(len(prompt_of))])
                    state.cached.copy_(state.end - 1)
                # guess, check, accept
                before = state.end.tolist()
                fed = decode_step(model, state, self.num_drafts, self.table, noise_of)
                cache.lengths = state.cached.tolist()
            self.forwards += 1
            for first, begin, end, limit in zip(fed, before, state.end.tolist(), state.limit.tolist()):
                if begin < limit:
                    self.offered += max(0, min(first + chunk, limit - 1) - begin)
                    self.accepted += end - begin - 1

        return step


def new_state(contexts, sampling, config):
    """Return the DecodeState that continues `contexts`, int64 tensors of one dimension, a row for each."""
    end = torch.tensor([len(context) for context in contexts])
    tokens = torch.zeros(len(contexts), config.block_size + 1, dtype=torch.int64)
    for row, context in zip(tokens, contexts):
        row[: len(context)] = context
    if not ((tokens >= 0) & (tokens < config.vocab_size)).all():  # step.c would read beyond its tables
        raise ValueError(f"a prompt holds tokens outside 0..{config.vocab_size - 1}")
    return DecodeState(
        tokens=tokens,
        end=end,
        cached=torch.zeros_like(end),
        limit=end.clone(),
        first_new=end.clone(),
        sample=sampling.sample_ids(len(contexts), "cpu"),
        seed=torch.tensor([sampling.seed & 0xFFFFFFFF, sampling.seed >> 32]),
        temperature=torch.tensor(float(sampling.temperature)),
        top_k=None if sampling.top_k is None else torch.tensor(sampling.top_k),
        top_p=None if sampling.top_p is None else torch.tensor(float(sampling.top_p)),
    )


def rows_by_prompt(state):
    """Return the rows that have the same tokens as lists, in the order of their first rows."""
    same = {}
    for row, (tokens, end) in enumerate(zip(state.tokens.tolist(), state.end.tolist())):
        same.setdefault(tuple(tokens[:end]), []).append(row)
    return list(same.values())


def new_tokens(state, before, after):
    """Return the tokens in slots before[i] to after[i] - 1 of every row, `(B, n)`; -1 pads the shorter ones."""
    if len(set(before)) == len(set(after)) == 1:  # no operation more than needed, because each costs time
        return state.tokens[:, before[0] : after[0]].clone()
    longest = max(end - begin for begin, end in zip(before, after))
    slots = torch.tensor(before)[:, None] + torch.arange(longest)
    block = state.tokens.gather(1, slots.clamp(max=state.tokens.size(1) - 1))
    return block.masked_fill(slots >= torch.tensor(after)[:, None], -1)


def noise_window(state, chunk, vocab_size):
    """Return noise_of(steps): the noise `(B, chunk, V)` of each row from its own step on.

    steps is (B,) int64. We make the noise of up to 64 steps at once, because that is cheaper than a little each time.
    """
    B = len(state.end)
    width = max(chunk, min(64, 2**22 // (B * vocab_size)))
    first, noise = None, None  # the step where each row's window begins, and the noise in it

    def noise_of(steps):
        nonlocal first, noise
        offsets = None if noise is None else (steps - first).tolist()
        if noise is None or not all(0 <= offset <= width - chunk for offset in offsets):
            first, offsets = steps, [0] * B
            noise = gumbel_noise(state.seed.unbind(), state.sample, first[:, None] + torch.arange(width), vocab_size)
        if len(set(offsets)) == 1:
            return noise[:, offsets[0] : offsets[0] + chunk]
        at = torch.tensor(offsets)[:, None] + torch.arange(chunk)
        return noise.gather(1, at[..., None].expand(-1, -1, vocab_size))

    return noise_of
