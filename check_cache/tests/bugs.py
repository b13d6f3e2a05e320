"""For the tests: a small decoder with a correct cache, and many scenarios to break a cache.

Each bug is a function that breaks one thing with pytest's monkeypatch and returns the argument of check_cache.
"""

import copy
import math

import torch
from torch import nn
from torch.nn import functional as F

V, C, HEADS, KV_HEADS, SIZE, LAYERS = 61, 32, 4, 2, 8, 2

# what the report says about each kind of bug; a | separates words that must all appear
WRONG_VALUE, WRONG_KEY = "are wrong on arrival: its position is", "the new key of|its position is"
HOLDS, TOO_FEW, SEEN = "should hold the", " needs ", "the token of row"
IN_GENERATE, RAISES = "call of generate() chooses different tokens", "raises"


def copies_of(model, setup=lambda model, rows, length: None):
    """Return the function `new` for a decoder that keeps its cache inside: each cache is a copy of the module."""

    def new(rows, length):
        cache = copy.deepcopy(model)
        setup(cache, rows, length)
        return cache

    return new


# -- a decoder ---------------------------------------------------------------------------------------------------------


class Cache:
    """Keys and values `(B, KV_HEADS, t, SIZE)` of each layer, which grow, or lie in a buffer of `room` slots."""

    def __init__(self, room=None):
        self.room = room
        self.reset()

    def reset(self):
        self.keys, self.values, self.lengths = [None] * LAYERS, [None] * LAYERS, [0] * LAYERS

    def update(self, key, value, layer):
        start = self.lengths[layer]
        self.lengths[layer] += key.size(2)
        if self.room is None:
            old = self.keys[layer], self.values[layer]
            self.keys[layer] = key if old[0] is None else torch.cat((old[0], key), 2)
            self.values[layer] = value if old[1] is None else torch.cat((old[1], value), 2)
            return self.keys[layer], self.values[layer]
        if start == 0:
            self.keys[layer] = key.new_zeros(*key.shape[:2], self.room, SIZE)
            self.values[layer] = key.new_zeros(*key.shape[:2], self.room, SIZE)
        self.keys[layer][:, :, start : self.lengths[layer]] = key
        self.values[layer][:, :, start : self.lengths[layer]] = value
        return self.keys[layer], self.values[layer]

    def each(self, change):
        self.keys, self.values = [[change(x) for x in side] for side in (self.keys, self.values)]

    def crop(self, count):
        """Forget the newest -count tokens."""
        self.lengths = [length + count for length in self.lengths]
        if self.room is None:
            self.each(lambda x: x[:, :, :count])
            if self.lengths[0] == 0:
                self.reset()

    def reorder_cache(self, rows):
        self.each(lambda x: x[rows])

    def batch_repeat_interleave(self, count):
        self.each(lambda x: x.repeat_interleave(count, 0))

    def batch_select_indices(self, rows):
        self.each(lambda x: x[rows])


class Attention(nn.Module):
    def __init__(self, layer, positions, window):
        super().__init__()
        self.layer, self.positions, self.window = layer, positions, window
        self.norm, self.q_norm, self.k_norm = (nn.RMSNorm(size) for size in (C, SIZE, SIZE))
        self.q, self.o = nn.Linear(C, HEADS * SIZE), nn.Linear(HEADS * SIZE, C)
        self.k, self.v = nn.Linear(C, KV_HEADS * SIZE), nn.Linear(C, KV_HEADS * SIZE)
        self.dropout = 0.0

    def split(self, x):
        return x.unflatten(-1, (-1, SIZE)).transpose(1, 2)

    def rotate(self, x, pos):
        if self.positions != "rope":
            return x
        angle = pos[:, None, :, None] * 100.0 ** (-torch.arange(0, SIZE, 2, device=x.device) / SIZE)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def expand(self, x):
        """One key/value head serves several query heads."""
        return x.repeat_interleave(HEADS // KV_HEADS, 1)

    def scale(self, T):
        return 1 / math.sqrt(SIZE)

    def forward(self, x, cache, mask, pos):
        self.cached = cache is not None  # for the bugs of the cached path
        x = self.norm(x)
        q = self.rotate(self.q_norm(self.split(self.q(x))), pos)
        k = self.rotate(self.k_norm(self.split(self.k(x))), pos)
        v = self.split(self.v(x))
        T, start = x.size(1), 0
        if cache is not None:
            start = cache.lengths[self.layer]
            k, v = cache.update(k, v, self.layer)
        k, v = self.expand(k), self.expand(v)
        scores = q @ k.transpose(2, 3) * self.scale(T)
        query, slot = start + torch.arange(T)[:, None], torch.arange(k.size(2))
        if hasattr(cache, "at"):  # the position in each slot
            slot = cache.at[self.layer]
        weights = self.hide(scores, self.visible(query, slot, mask)).softmax(-1).to(v.dtype)
        weights = F.dropout(weights, self.dropout)
        return self.o((weights @ v).transpose(1, 2).flatten(2))

    def hide(self, scores, seen):
        return scores.masked_fill(~seen, torch.finfo(scores.dtype).min)

    def visible(self, query, slot, mask):
        seen = (slot <= query)[None, None]
        if self.window:
            seen = seen & (slot > query - self.window)
        if mask is not None:
            seen = seen & F.pad(mask, (0, len(slot) - mask.size(1))).bool()[:, None, None]
        return seen


class Decoder(nn.Module):
    """A decoder that is its own adapter. positions: "rope" or "learned"."""

    def __init__(self, positions="rope", window=None):
        super().__init__()
        torch.manual_seed(0)
        self.vocab_size, self.context, self.window = V, 128, window
        self.wte, self.wpe, self.head = nn.Embedding(V, C), nn.Embedding(128, C), nn.Linear(C, V)
        self.norm, self.positions = nn.RMSNorm(C), positions
        self.blocks = nn.ModuleList(Attention(i, positions, window) for i in range(LAYERS))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.RMSNorm(C), nn.Linear(C, 48), nn.GELU(), nn.Linear(48, C)) for _ in self.blocks
        )

    def full(self, ids):
        return self(ids, None, None, torch.arange(ids.size(1)).expand_as(ids))

    def new(self, rows, length, kind):
        return Cache(length if kind == "static" else None)

    def step(self, ids, cache, mask, pos):
        return self(ids, cache, mask, pos)

    def forward(self, ids, cache, mask, pos):
        x = self.wte(ids)
        if self.positions == "learned":
            x = x + self.wpe(pos)
        for block, mlp in zip(self.blocks, self.mlps):
            x = x + block(x, cache, mask, pos)
            x = x + mlp(x)
        return self.head(self.norm(x))


# -- the bugs ----------------------------------------------------------------------------------------------------------

BUGS = {}  # name: (function, cause, caches, source: a number is a public thread of that project)


def bug(cause, source, caches=("own",)):
    """Register a bug: a function of pytest's monkeypatch.setattr that returns the argument of check_cache."""

    def register(function):
        BUGS[function.__name__] = function, cause, caches, source
        return function

    return register


def tiny(kind, **settings):
    """Return a random transformers model."""
    import transformers

    transformers.logging.set_verbosity_error()
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=V, max_position_embeddings=128)
    if kind == "gpt2":
        sizes = dict(n_embd=32, n_layer=2, n_head=4, n_positions=128, vocab_size=V)
    elif kind == "bloom":
        sizes = dict(hidden_size=32, n_layer=2, n_head=4, vocab_size=V)
    else:
        sizes |= dict(intermediate_size=48, num_key_value_heads=2)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **(sizes | settings))
    return transformers.AutoModelForCausalLM.from_config(config)


# what a layer gives to its cache


def patched_rotation(patch, change):
    """Return a decoder whose queries and keys x are rotated by change(x, pos)."""
    rotate = Attention.rotate
    patch(Attention, "rotate", lambda self, x, pos: rotate(self, x, change(x, pos)))
    return Decoder()


@bug(WRONG_KEY, "the positions of each step start at 0")
def rope_begins_at_0_in_each_step(patch):
    return patched_rotation(patch, lambda x, pos: pos - pos[:, :1] if x.size(1) == KV_HEADS else pos)


@bug(WRONG_KEY, "unsloth 3699: slots of the cache used as positions, in rows with padding")
def slots_for_positions(patch):
    forward = Decoder.forward

    def broken(self, ids, cache, mask, pos):
        if mask is not None and cache.lengths[0]:
            pos = (cache.lengths[0] + torch.arange(ids.size(1))).expand_as(ids)
        return forward(self, ids, cache, mask, pos)

    patch(Decoder, "forward", broken)
    return Decoder()


@bug(WRONG_VALUE, "the same with a table of positions")
def slots_for_positions_in_a_table(patch):
    slots_for_positions(patch)
    return Decoder("learned")


@bug(WRONG_VALUE, "mlx-lm 93: wpe(arange(T)) in each step")
def table_begins_at_0_in_each_step(patch):
    forward = Decoder.forward
    patch(Decoder, "forward", lambda self, ids, cache, mask, pos: forward(self, ids, cache, mask, pos - pos[:, :1]))
    return Decoder("learned")


@bug(
    "a step calls attention 4 times, but 2 without a cache",
    "the last token of the prompt is fed again with the first new one",
)
def a_token_is_fed_twice(patch):
    step = Decoder.step

    def broken(self, ids, cache, mask, pos):
        if ids.size(1) == 1 and cache.lengths[0] > 1 and not hasattr(cache, "begun"):
            cache.begun = True
            self(ids, cache, mask, pos)
        return step(self, ids, cache, None, pos)

    patch(Decoder, "step", broken)
    return Decoder("learned")


@bug("a step feeds 2 tokens to attention, not 1", "each step feeds the previous token again, with the new one")
def a_step_feeds_two_tokens(patch):
    step = Decoder.step

    def broken(self, ids, cache, mask, pos):
        last, cache.last = getattr(cache, "last", None), ids[:, -1:]
        if last is None or mask is not None or ids.size(1) > 1 or len(last) != len(ids):
            return step(self, ids, cache, mask, pos)
        return step(self, torch.cat((last, ids), 1), cache, mask, torch.cat((pos - 1, pos), 1))[:, 1:]

    patch(Decoder, "step", broken)
    return Decoder()


@bug(WRONG_KEY, "a table of angles with too few rows, clamped")
def angles_end_at_64(patch):
    return patched_rotation(patch, lambda x, pos: pos.clamp(max=64) if pos.size(1) < 20 else pos)


@bug(WRONG_KEY, "positions of a block of at most 30 tokens")
def chunk_of_more_than_thirty(patch):
    cut = lambda pos: pos.where(torch.arange(pos.size(1)) < 30, 0)  # noqa: E731
    return patched_rotation(patch, lambda x, pos: cut(pos) if 30 < pos.size(1) < 48 else pos)


@bug(IN_GENERATE, "unsloth 3795: generate() counts the padding as positions")
def generate_counts_the_padding(patch):
    from transformers import LlamaForCausalLM

    prepare = LlamaForCausalLM.prepare_inputs_for_generation

    def broken(self, ids, **kwargs):  # generate() looks for this name
        inputs = prepare(self, ids, **kwargs)
        if inputs["input_ids"].size(1) == 1:
            inputs["position_ids"] = torch.full_like(inputs["input_ids"], ids.size(1) - 1)
        return inputs

    patch(LlamaForCausalLM, "prepare_inputs_for_generation", broken)
    return tiny("llama")


# what the cache gives back


def patched_update(patch, change):
    """Return a decoder whose cache returns change(cache, keys, values, key, layer)."""
    update = Cache.update

    def broken(self, key, value, layer):
        return change(self, *update(self, key, value, layer), key, layer)

    patch(Cache, "update", broken)
    return Decoder()


def rounded(x):
    scale = x.abs().amax((-1, -2), keepdim=True) / 127
    return (x / scale).round() * scale


@bug(f"{HOLDS}|rounded or scaled", "silently int8")
def int8(patch):
    return patched_update(patch, lambda self, k, v, *_: (rounded(k), rounded(v)))


@bug(f"{HOLDS}|row", "a row of the batch leaks into another")
def rows_in_another_order(patch):
    return patched_update(
        patch, lambda self, k, v, key, layer: (k.flip(0), v.flip(0)) if len(k) > 2 and key.size(2) == 1 else (k, v)
    )


@bug(f"{HOLDS}", "more rows than the cache was made for")
def no_more_than_four_rows(patch):
    return patched_update(patch, lambda self, k, v, *_: (k[torch.arange(len(k)) % 4], v[torch.arange(len(v)) % 4]))


@bug(HOLDS, "a default argument: all layers share one list")
def layers_share_a_slot(patch):
    return patched_update(
        patch,
        lambda self, k, v, key, layer: (
            (self.keys[max(0, layer - 1)], self.values[max(0, layer - 1)]) if key.size(2) == 1 else (k, v)
        ),
    )


@bug(HOLDS, "nanochat 187: resize_ of (layers, 2, B, heads, t, size) moves what is in it")
def growth_moves_layers(patch):
    def change(self, k, v, key, layer):
        if layer and self.lengths[layer] > 64 and self.room is None:
            self.keys[layer][:, :, :32] = self.keys[layer][:, :, 32:64].clone()
        return self.keys[layer], self.values[layer]

    return patched_update(patch, change)


@bug(f"{HOLDS}|zeros", "a write index that is one too far", caches=("static",))
def one_slot_too_far(patch):
    def change(self, k, v, key, layer):
        if self.room and key.size(2) < 10:
            end = self.lengths[layer]
            for x in (k, v):
                x[:, :, end] = x[:, :, end - 1]
                x[:, :, end - 1] = 0
        return k, v

    return patched_update(patch, change)


@bug(TOO_FEW, "attention reads the cache before the new token is in it")
def newest_token_is_dropped(patch):
    return patched_update(
        patch,
        lambda self, k, v, key, layer: (
            (k[:, :, :-1], v[:, :, :-1]) if key.size(2) == 1 and self.room is None else (k, v)
        ),
    )


@bug(TOO_FEW, "a prefill replaces what is there, and so does a chunk")
def chunks_replace_the_cache(patch):
    update = Cache.update

    def broken(self, key, value, layer):
        if key.size(2) > 1 and self.room is None:
            self.keys[layer] = self.values[layer] = None
        return update(self, key, value, layer)

    patch(Cache, "update", broken)
    return Decoder()


@bug(TOO_FEW, "attention sinks: the middle is dropped at 64 tokens")
def middle_is_dropped(patch):
    def change(self, k, v, key, layer):
        if self.room is None and k.size(2) > 64:
            k, v = (torch.cat((x[:, :, :4], x[:, :, 5:]), 2) for x in (k, v))
            self.keys[layer], self.values[layer] = k, v
        return k, v

    return patched_update(patch, change)


@bug(HOLDS, "rotated keys are rotated again when they are read")
def keys_rotated_twice(patch):
    def change(self, k, v, key, layer):
        return torch.cat((k[:, :, :1], k[:, :, 1:].flip(-1)), 2) if key.size(2) == 1 else k, v

    return patched_update(patch, change)


@bug(HOLDS, "keys and values change places")
def keys_and_values_swapped(patch):
    return patched_update(patch, lambda self, k, v, key, layer: (v, k) if key.size(2) == 1 else (k, v))


@bug(HOLDS, "transformers 37574: rolled before the window is full", caches=("static",))
def static_window_rolled_too_early(patch):
    from transformers.cache_utils import StaticSlidingWindowLayer as Layer

    update = Layer.update

    def broken(self, key, value, *args, **kwargs):
        if key.size(2) == 1 and self.cumulative_length_int == self.max_cache_len - 1:
            self.keys.copy_(self.keys.roll(-1, 2))
            self.values.copy_(self.values.roll(-1, 2))
        return update(self, key, value, *args, **kwargs)

    patch(Layer, "update", broken)
    return tiny("mistral", sliding_window=16)


@bug(HOLDS, "a chunk is cut to the window before its first tokens have looked back")
def chunk_cut_to_the_window(patch):
    update = Cache.update

    def broken(self, key, value, layer):
        k, v = update(self, key, value, layer)
        if key.size(2) > 1 and self.room is None:
            k, v = (torch.cat((x[:, :, :-12] * 0, x[:, :, -12:]), 2) for x in (k, v))
        return k, v

    patch(Cache, "update", broken)
    return Decoder(window=12)


# rollback, beams, copies, resets


@bug(f"{HOLDS}|rejected draft token, position", "crop leaves one rejected draft token")
def crop_leaves_one(patch):
    crop = Cache.crop
    patch(Cache, "crop", lambda self, count: crop(self, count + 1) if count < -1 else None)
    return Decoder()


@bug("layer 1: ", "crop forgets the length of the later layers")
def crop_forgets_a_layer(patch):
    def broken(self, count):
        self.lengths = [length + count for length in self.lengths]
        if self.room is None:
            self.keys = [x if i == 1 else x[:, :, :count] for i, x in enumerate(self.keys)]
            self.values = [x if i == 1 else x[:, :, :count] for i, x in enumerate(self.values)]

    patch(Cache, "crop", broken)
    return Decoder()


@bug(f"{HOLDS}|row", "beams: the cache stays where it was")
def beams_not_reordered(patch):
    patch(Cache, "reorder_cache", lambda self, rows: None)
    return Decoder()


@bug(f"{HOLDS}|row", "repeat for repeat_interleave")
def rows_repeated_in_blocks(patch):
    patch(Cache, "batch_repeat_interleave", lambda self, count: self.each(lambda x: x.repeat(count, 1, 1, 1)))
    return Decoder()


@bug(f"{HOLDS}|row", "the first rows are kept instead of the chosen ones")
def first_rows_selected(patch):
    patch(Cache, "batch_select_indices", lambda self, rows: self.each(lambda x: x[: len(rows)]))
    return Decoder()


@bug(HOLDS, "a prefix that both continuations write into")
def copies_share_their_lists(patch):
    def shallow(self, memo):
        other = Cache(self.room)
        other.keys, other.values, other.lengths = self.keys, self.values, self.lengths
        return other

    patch(Cache, "__deepcopy__", shallow, raising=False)
    return Decoder()


@bug(HOLDS, "a buffer that belongs to the class, so two generations share it", caches=("static",))
def two_caches_share_a_buffer(patch):
    buffers = {}

    def change(self, k, v, key, layer):
        if self.room is None:
            return k, v
        shared = buffers.setdefault((layer, k.shape, k.dtype), (k.clone(), v.clone()))
        end = self.lengths[layer]
        for old, new in zip(shared, (k, v)):
            old[:, :, end - key.size(2) : end] = new[:, :, end - key.size(2) : end]
        return shared

    return patched_update(patch, change)


# masks and heads


def patched_mask(patch, change):
    """Return a decoder whose tokens see what those at the positions change(query) should see."""
    visible = Attention.visible
    patch(Attention, "visible", lambda self, query, slot, mask: visible(self, change(query), slot, mask))
    return Decoder()


@bug(SEEN, "llama 899: a square mask, aligned at the top left")
def mask_at_the_top_left(patch):
    return patched_mask(patch, lambda query: query - query[0] if 1 < len(query) < 60 else query)


@bug(SEEN, "no causal mask as soon as there is a cache")
def chunks_see_the_future(patch):
    return patched_mask(patch, lambda query: query * 0 + query.max() if query[0] > 0 else query)


@bug(SEEN, "litgpt 1672: a mask that hides nothing")
def padding_is_seen(patch):
    visible = Attention.visible
    patch(Attention, "visible", lambda self, query, slot, mask: visible(self, query, slot, None))
    return Decoder()


@bug(f"{SEEN}|but should not", "a boolean mask is added to the scores, so a masked token loses 1 instead of infinity")
def mask_is_added(patch):
    hide = Attention.hide
    patch(Attention, "hide", lambda self, scores, seen: scores + seen if len(seen) > 1 else hide(self, scores, seen))
    return Decoder()


@bug(SEEN, "a window that looks one token too far in decode steps")
def window_one_too_wide(patch):
    visible = Attention.visible

    def broken(self, query, slot, mask):
        self.window = 13 if len(query) == 1 else 12
        return visible(self, query, slot, mask)

    patch(Attention, "visible", broken)
    return Decoder(window=12)


@bug(SEEN, "a token with the padding id is mistaken for padding")
def padding_id_is_hidden(patch):
    step = Decoder.step

    def broken(self, ids, cache, mask, pos):
        cache.ids = torch.cat((getattr(cache, "ids", ids[:, :0]), ids), 1)
        return step(self, ids, cache, (cache.ids != 0).long(), pos)

    patch(Decoder, "step", broken)
    return Decoder()


@bug(f"{HOLDS}|heads in another order", "grouped queries: repeat for repeat_interleave in the cached path")
def heads_in_blocks(patch):
    expand = Attention.expand
    blocks = lambda x: x.repeat(1, HEADS // KV_HEADS, 1, 1)  # noqa: E731
    patch(Attention, "expand", lambda self, x: blocks(x) if self.cached else expand(self, x))
    return Decoder()


@bug(SEEN, "a different scale in decode steps")
def another_scale(patch):
    patch(Attention, "scale", lambda self, T: 1 / math.sqrt(SIZE if T > 1 else C))
    return Decoder()


@bug(f"{SEEN}|dropout", "dropout stays on in the cached path")
def dropout_is_on(patch):
    dropout = F.dropout
    patch(
        F, "dropout", lambda x, p=0.0, *args, **kwargs: dropout(x, 0.1, True) if x.dim() == 4 and x.size(2) < 40 else x
    )
    return Decoder()


@bug(RAISES, "keys and values of different lengths", caches=("static",))
def a_step_raises(patch):
    return patched_update(
        patch,
        lambda self, k, v, key, layer: (
            (k, v[:, :, : self.lengths[layer]]) if key.size(2) == 1 and self.room else (k, v)
        ),
    )
