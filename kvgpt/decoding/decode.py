"""Decoder: generation with drafts, with a compiled step and for prompts of different lengths, in any combination.

The tokens are those of GPT.generate for the same seed. decode_step (speculate.py) is the step, Decoder the loop.
"""

import torch

from kvgpt.decoding.compile import compile_step
from kvgpt.decoding.cuda_graph import graph_step
from kvgpt.decoding.ngrams import ngram_table
from kvgpt.decoding.sampling import Sampling, context_start, gumbel_noise
from kvgpt.decoding.speculate import DecodeState, decode_step
from kvgpt.decoding.threads import StepThreads, one_thread
from model import eval_mode

WORK_PER_CALL = 2**25  # multiply-adds: step.c returns after some milliseconds, so that a stream flows
NUM_DRAFTS = 3  # guesses per step; with the newest token a product has 4 rows, which fill one tile of its kernel
MOST_DRAFTS = 7  # guesses per step in step.c, which makes fewer where they are unlikely


class Decoder:
    """Continues prompts with a model.

    draft    None: one token per step. "ngram": guess by `ngrams`, the counts in a checkpoint (see count_ngrams), or by
             looking up the text so far if there are no counts
    compile  decode with a compiled step. It gets the model's present weights, and new ones after they change. Make a
             new Decoder after replacing a module of the model
    After a generation, `forwards` counts its steps, `offered` the guesses verified in them, `accepted` the right ones.
    """

    def __init__(self, model, draft=None, ngrams=None, compile=False):
        if draft not in (None, "ngram"):
            raise ValueError(f"draft={draft!r}: must be None or 'ngram'")
        self.model = model
        most = MOST_DRAFTS if compile and not model.lm_head.weight.is_cuda else NUM_DRAFTS
        self.num_drafts = min(most, model.config.block_size - 1) if draft else 0
        self.table = None
        if self.num_drafts and ngrams is not None:
            self.table = ngram_table(ngrams, model.config.vocab_size, model.lm_head.weight.device)
        self.compile = compile
        self.num_params = sum(p.numel() for p in model.parameters())
        self.threads = StepThreads(self.num_params)
        self.modules = list(model.modules())
        self.leaving = set()  # rows of the present generation that nobody needs any more; see leave
        self.program, self.program_weights = None, ([], [])  # the compiled step, and its weights; see _compiled
        self.forwards = self.offered = self.accepted = 0

    def generate(self, prompts, max_new_tokens, **sampling):
        """Return a list of int64 tensors, each a prompt and its continuation. The arguments are those of `stream`."""
        with eval_mode(self.model):
            blocks = list(self.stream(prompts, max_new_tokens, **sampling))
        rows = torch.cat(blocks, dim=1) if blocks else [prompt.new_zeros(0) for prompt in prompts]
        return [torch.cat((prompt, row[row >= 0])) for prompt, row in zip(prompts, rows)]

    def stream(self, prompts, max_new_tokens, **sampling):
        """Yield the new tokens of each step as a block `(B, n)`, n >= 1. The arguments are checked at the call.

        prompts   B int64 tensors of one dimension, or the rows of one `(B, T)`. With overflow="slide" all of one length
        sampling  temperature, top_k, top_p, seed, samples, overflow: see Sampling
        A row that has ended gives -1. Rows end at different steps, because a longer prompt fills its context earlier.
        """
        sampling, block_size = Sampling(**sampling), self.model.config.block_size
        lengths = [len(prompt) for prompt in prompts]
        slides = sampling.overflow == "slide"
        if slides and len(set(lengths)) > 1:
            raise ValueError(
                f"prompts of {sorted(set(lengths))} tokens cannot slide together: overflow='slide' needs equal lengths"
            )
        num_new = [sampling.num_new_tokens(T, max_new_tokens, block_size) for T in lengths]
        context = [prompt[context_start(0, T, block_size) :] for prompt, T in zip(prompts, lengths)]
        state = self._new_state(context, sampling)
        self.forwards = self.offered = self.accepted = 0
        self.leaving = set()
        if self.compile and any(num_new):
            self._compiled()  # before anybody waits for the first token
        owner = object()  # stands for this generation in the caches
        blocks = self._decode(state, [len(row) for row in context], num_new, slides, owner)
        return self.model.release_cache_after(blocks, owner)

    def leave(self, row):
        """End a row of the generation that is going on. Its blocks hold -1 from the next one on."""
        self.leaving.add(row)

    def _new_state(self, context, sampling):
        """Return a DecodeState for rows whose contexts are given."""
        device, ends = self.model.lm_head.weight.device, [len(row) for row in context]
        tokens = torch.zeros(len(context), self.model.config.block_size + 1, dtype=torch.int64, device=device)
        for i, row in enumerate(context):
            tokens[i, : len(row)] = row
        V = self.model.config.vocab_size
        if ((tokens < 0) | (tokens >= V)).any():  # step.c would read beyond a table
            raise ValueError(f"a prompt has tokens outside 0..{V - 1} (vocab_size)")
        end, cached, limit, first_new = torch.tensor([ends, [0] * len(ends), ends, ends], device=device)
        top_k, top_p = (None if x is None else torch.tensor(x, device=device) for x in (sampling.top_k, sampling.top_p))
        seed = torch.tensor([sampling.seed & 0xFFFFFFFF, sampling.seed >> 32], device=device)
        temperature = torch.tensor(float(sampling.temperature), device=device)
        sample = sampling.sample_ids(len(context), device)
        return DecodeState(tokens, end, cached, limit, first_new, sample, seed, temperature, top_k, top_p)

    def _decode(self, state, ends, num_new, slides, owner):
        """The loop of `stream`. `ends` and `first_new` are state.end and state.first_new as Python integers."""
        model, block_size = self.model, self.model.config.block_size
        full = block_size + 1 if slides else block_size  # "slide" samples one token from a full context, then moves it
        first_new = ends
        done, total = 0, max(num_new)  # new tokens per row: yielded so far, and in all
        while done < total:
            limits = [max(end, min(first + n, full)) for end, first, n in zip(ends, first_new, num_new)]
            state.limit.copy_(torch.tensor(limits))
            while ends != limits:
                for row in self.leaving:
                    limits[row], num_new[row] = ends[row], min(num_new[row], done)
                if self.leaving:
                    state.limit.copy_(torch.tensor(limits))
                    total, self.leaving = max(num_new), set()
                    continue
                # a prefill, which is needed again after another call has used the caches; then steps
                if model.cached_lengths(owner) is None:
                    step = self._compiled_step(state) if self.compile else self._eager_step(state, ends)
                step(first_new)
                ends = state.end.tolist()
                model.set_cached_lengths([end - 1 for end in ends], owner)
                # yield the new tokens that all unfinished rows have
                live = [end - first for end, first, n in zip(ends, first_new, num_new) if end - first < n]
                ready = min(live, default=total)
                if ready > done:
                    yield self._block(state, first_new, num_new, done, ready)
                    done = ready
            if done < total:  # every context is full: keep its newest half, which the next prefill caches again
                shift = context_start(0, full, block_size)
                state.tokens[:, : full - shift] = state.tokens[:, shift:].clone()
                state.first_new -= shift
                first_new = [first - shift for first in first_new]
                ends = [full - shift] * len(ends)
                state.end.copy_(torch.tensor(ends))
                model.set_cached_lengths([], owner)

    def _eager_step(self, state, ends):
        """Cache all tokens of each row but the newest. Return decode_step for `state`, without a compiler.

        Computes the noise of up to 64 steps at once.
        """
        block_size, (B, _), V = self.model.config.block_size, state.tokens.shape, self.model.config.vocab_size
        chunk = self.num_drafts + 1
        stride = max(chunk, min(64, 2**22 // (B * V)))
        noise, noise_first = None, []  # the noise at hand, and the step where each row's begins

        # prefill
        lengths = [end - 1 for end in ends]
        for block in self.model.transformer["h"]:
            block.attn.allocate_cache(B)
        if any(lengths):
            pos = torch.arange(max(lengths), device=state.end.device).expand(B, -1)
            with torch.inference_mode(), eval_mode(self.model), self.threads.for_tokens(pos.numel()):
                self.model.cached_hidden_states(state.tokens[:, : max(lengths)], pos, lengths)
        state.cached.copy_(state.end - 1)

        @torch.inference_mode()
        def step(first_new):
            nonlocal noise, noise_first
            cached, ends = state.cached.tolist(), state.end.tolist()
            starts = [min(length, block_size - chunk) for length in cached]
            steps = [start + 1 - first for start, first in zip(starts, first_new)]
            if noise is None or not all(0 <= p - f <= stride - chunk for p, f in zip(steps, noise_first)):
                noise_first = steps
                block = torch.tensor(noise_first)[:, None] + torch.arange(stride)
                with one_thread():
                    noise = gumbel_noise(state.seed.unbind(), state.sample, block.to(state.end.device), V)
            offset = [p - f for p, f in zip(steps, noise_first)]
            if len(set(offset)) == 1:
                step_noise = noise[:, offset[0] : offset[0] + chunk]
            else:
                step_noise = noise[torch.arange(B)[:, None], torch.tensor(offset)[:, None] + torch.arange(chunk)]
            lengths = [start + chunk for start in starts]
            with eval_mode(self.model), self.threads.for_tokens(B * chunk):
                decode_step(self.model, state, self.num_drafts, self.table, step_noise, lengths)
            self._count(state, cached, ends)

        return step

    def _compiled_step(self, state):
        """Return the compiled step for `state`. The first call makes one step, because somebody waits for a token."""
        run, num_steps = self._compiled(weights_checked=True)(state), 1
        per_call = max(1, WORK_PER_CALL // (self.num_params * len(state.end) * (self.num_drafts + 1)))
        state.cached.zero_()  # the first step prefills

        def step(first_new):
            nonlocal num_steps
            forwards, offered, accepted = run(num_steps)
            self.forwards += forwards
            self.offered += offered
            self.accepted += accepted
            num_steps = per_call

        return step

    def _block(self, state, first_new, num_new, begin, end):
        """Return new tokens begin..end of every row, `(B, end - begin)`; -1 where a row has ended before."""
        if len(set(first_new)) == 1 and min(num_new) >= end:
            return state.tokens[:, first_new[0] + begin : first_new[0] + end].clone()
        step = torch.arange(begin, end, device=state.end.device)
        block = state.tokens.gather(1, (state.first_new[:, None] + step).clamp(max=state.tokens.size(1) - 1))
        return block.masked_fill(step >= torch.tensor(num_new, device=step.device)[:, None], -1)

    def _compiled(self, weights_checked=False):
        """Return the bind function of the compiled step, an earlier one if the weights are still the same.

        weights_checked  compare version counters only. A generation compares all weights once, when it begins. Weights
                         that change in place in the middle need clear_kv_cache, as the cached keys do
        """
        # a fused optimizer does not change a tensor's _version, but model.train() before it changes weights_version
        counters, versions = [cache.weights_version for cache in self.model.caches], self.program_weights[1]
        if not weights_checked or counters != self.program_weights[0]:
            weights = [p for module in self.modules for p in module._parameters.values() if p is not None]
            versions = [(id(p), p.data_ptr(), 0 if p.is_inference() else p._version) for p in weights]
        if self.program_weights != (counters, versions):
            compiled = graph_step if self.model.lm_head.weight.is_cuda else compile_step
            program = compiled(self.model, self.num_drafts, self.table)
            # the weights are still the same, but trying the program may have counted as a change
            self.program_weights = ([cache.weights_version for cache in self.model.caches], versions)
            self.program = program
        return self.program

    def _count(self, state, cached, before):
        """Add one eager step to the counts. `cached` and `before` were state.cached and state.end before it."""
        self.forwards += 1
        for length, begin, end, limit in zip(cached, before, state.end.tolist(), state.limit.tolist()):
            if begin < limit:
                fed = min(length, self.model.config.block_size - 1 - self.num_drafts) + self.num_drafts + 1
                self.offered += max(0, min(fed, limit - 1) - begin)
                self.accepted += end - begin - 1
