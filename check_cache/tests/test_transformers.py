"""Models of transformers: whichever release is installed, the check sees as much, and names what it cannot find.

test_versions.py runs these tests with older releases, too.
"""

import inspect

import pytest
import torch
import transformers
from transformers import LlamaForCausalLM

from bugs import Cache, Decoder, tiny
from check_cache import check_cache
from test_families import family

NEWER, NEW = (tuple(map(int, transformers.__version__.split(".")[:2])) >= version for version in ((5, 5), (5, 24)))


def results(report):
    return {(result.scenario, result.cache): (result.status, result.why) for result in report.results}


def statuses(report):
    return {result.status for result in report.results}


def correct(report, cache="own"):
    return {result.scenario for result in report.results if (result.status, result.cache) == ("correct", cache)}


EVERYTHING = {
    *("decode", "decode from 1 token", "chunks of mixed sizes", "chunks that double"),
    *("mask of ones", "left padding", "left padding in chunks", "prefix used twice", "two caches at once"),
    *("equal pages after different beginnings", "reorder", "reorder from one row", "left padding, then reorder"),
    *("reuse after reset", "batches of 1 to 8 rows", "going on after an exception"),
}
EVERYTHING -= set() if NEWER else {"reuse after reset"}
ROLLBACKS = {"speculative rollback", "rollback of several steps", "rollback, then reorder"}
COPIES = {"repeat", "repeat from one row", "select", "select from one row"}


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_nearly_everything_runs(name):
    report = check_cache(family(name), length=24, skip=[] if NEWER else ["reset"])  # 5.4 leaves keys of zeros
    report.assert_correct(require=["decode", "chunks of mixed sizes", "left padding"])
    assert correct(report) == EVERYTHING | ROLLBACKS | COPIES | {"generate", "generate with left padding"}, report
    assert correct(report, "static") == EVERYTHING | (ROLLBACKS if NEW else set()), report
    ran = len(correct(report)) + len(correct(report, "static"))
    assert f": {ran} of {len(report.results)} scenarios ran, 24 tokens" in report.title, report


def test_a_rejected_draft_that_crop_leaves(monkeypatch):
    from transformers.cache_utils import DynamicLayer

    crop = DynamicLayer.crop
    monkeypatch.setattr(DynamicLayer, "crop", lambda self, count: crop(self, count + 1) if count < -1 else None)
    report = check_cache(tiny("llama"), length=30, caches="own", scenarios="rollback")
    assert statuses(report) == {"wrong"}, report


# -- what can be cropped -----------------------------------------------------------------------------------------------


recent = pytest.mark.xfail(not NEWER, reason="5.4 crops differently", strict=False)


@recent
def test_a_static_window_cannot_be_cropped_and_says_so_only_in_is_croppable():
    report = check_cache(family("mistral"), length=40, scenarios="speculative")
    said = results(report)
    assert said["speculative rollback", "own"] == ("correct", None), report  # after activate_past_recording()
    status, why = said["speculative rollback", "static"]
    assert status == "not run" and (why == "is_croppable is False" or not NEW), report


@recent
def test_convolutions_can_be_cropped_and_recurrent_states_cannot():
    report = check_cache(family("lfm2"), length=30, caches="own", scenarios="rollback")
    assert correct(report) == ROLLBACKS, report
    report = check_cache(family("jamba"), length=30, caches="own", scenarios="rollback")
    assert statuses(report) == {"not run"}, report
    assert {result.why for result in report.results} == {"is_croppable is False"}, report


# -- what a model need not have ----------------------------------------------------------------------------------------


def own_model(*takes, breaks=False):
    """Return a decoder that subclasses PreTrainedModel without GenerationMixin. Its forward takes these arguments."""
    decoder = Decoder("learned")

    class Own(transformers.PreTrainedModel):
        config_class = transformers.PreTrainedConfig

        def __init__(self):
            super().__init__(transformers.PreTrainedConfig())
            self.decoder = decoder
            self.post_init()

        def get_output_embeddings(self):
            return self.decoder.head

        def forward(self, **inputs):
            ids, cache = inputs.pop("input_ids"), inputs.pop("past_key_values", None)
            assert inputs.keys() <= {*takes}, inputs.keys()
            cache = Cache() if cache is None else cache
            start, end = cache.lengths[0], cache.lengths[0] + ids.size(1)
            mask = inputs.get("attention_mask")
            seen = torch.ones(len(ids), end, dtype=torch.long) if mask is None else mask
            pos = (seen.cumsum(1) - 1).clamp(min=0)[:, start:] * (not (breaks and start))
            logits = self.decoder(ids, cache, mask, pos)
            return transformers.modeling_outputs.CausalLMOutputWithPast(logits=logits, past_key_values=cache)

    names = ("self", "input_ids", "past_key_values", *takes)
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    Own.forward.__signature__ = inspect.Signature(parameters)
    return Own()


@pytest.mark.parametrize(
    "takes", [(), ("use_cache",), ("attention_mask", "use_cache"), ("attention_mask", "position_ids", "use_cache")]
)
def test_a_model_without_generate(takes):
    """Only generate() knows what becomes of a mask without position_ids, so there we cannot pad."""
    pads = {"mask of ones", "left padding", "left padding in chunks", "left padding, then reorder"}
    report = check_cache(own_model(*takes), length=24)
    report.assert_correct(require=["decode", "chunks", "speculative rollback", "reorder"])
    assert correct(report) & pads == (pads if "position_ids" in takes else set()), report
    assert correct(report) >= EVERYTHING - pads | ROLLBACKS | COPIES, report
    why = results(report)["left padding", "own"][1]
    if takes == ("attention_mask", "use_cache"):
        assert why == "the model has no prepare_inputs_for_generation(), see GenerationMixin", why
    report = check_cache(own_model(*takes, breaks=True), length=24, scenarios="decode", skip="from")
    assert results(report)["decode", "own"][0] == "wrong", report


# -- recurrent models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mamba", "falcon_mamba"])
def test_a_model_that_drops_its_mask_after_the_first_step(name):
    """generate() is correct with left padding, and so is a step with the inputs that generate() makes."""
    model = tiny(name, hidden_size=32, num_hidden_layers=2, state_size=8)
    report = check_cache(model, length=30, caches="own", scenarios=["padding", "ones", "decode"])
    assert {"left padding", "mask of ones", "generate with left padding", "decode"} <= correct(report), report
    assert "flex_attention" not in str(report)
    assert results(report)["left padding in chunks", "own"][0] == "wrong"  # each chunk starts from an empty state


def test_a_state_is_a_cache():
    """RWKV mixes the rows of a batch in steps of one token. Its argument is called state."""
    report = check_cache(family("rwkv"), length=30, scenarios=["decode", "generate", "double"])
    assert results(report)["decode", "own"][0] == results(report)["generate", "own"][0] == "wrong", report
    assert "forward returns logits (3, 3, 61) for 3 rows and 1 tokens" in str(report).replace("\n         ", " ")


# -- new names ---------------------------------------------------------------------------------------------------------


def renamed(old, new):
    """Return a llama whose forward has a new name for one of its arguments."""

    class Renamed(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            if new in kwargs:
                kwargs[old] = kwargs.pop(new)
            return super().forward(*args, **kwargs)

    signature = inspect.signature(LlamaForCausalLM.forward)
    parameters = [part.replace(name=new) if part.name == old else part for part in signature.parameters.values()]
    Renamed.forward.__signature__ = signature.replace(parameters=parameters)
    return Renamed(tiny("llama").config)


CACHE = "cache" if NEW else "past_key_values"


@pytest.mark.parametrize(
    "old, why", [(CACHE, "forward takes no cache"), ("attention_mask", "forward takes no attention")]
)
def test_a_new_name_of_an_argument_cannot_run(old, why):
    report = check_cache(renamed(old, "new"), length=24, caches="own", scenarios=["decode", "left padding"])
    assert report.exit_code == 2 and why in report.missing["left padding"] and not statuses(report) & {"wrong"}, report
    assert ("decode" in report.missing) == (old == CACHE), report


def test_a_new_name_in_the_output_cannot_run():
    class Output(dict):
        logits = property(lambda self: self["logits"])

    class Renamed(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            return Output(logits=output.logits, **({"kv_store": output[CACHE]} if CACHE in output else {}))

    Renamed.forward.__signature__ = inspect.signature(LlamaForCausalLM.forward)
    report = check_cache(Renamed(tiny("llama").config), length=24, caches="own", scenarios=["decode"])
    assert report.exit_code == 2, report
    assert report.missing["decode"] == f"forward returns no {CACHE}, but logits, kv_store", report


def test_a_new_name_of_a_window_is_known():
    model = tiny("llama")
    for name, known in (("use_window", False), ("window_pattern", False), ("local_window", True)):
        setattr(model.config, name, True if name == "use_window" else 12)
        report = check_cache(model, length=30, caches="own", scenarios=["around", "batches"])
        assert ("chunks around the window" in correct(report)) == known, report


def test_a_new_name_of_the_setting_for_a_static_cache_is_an_error(monkeypatch):
    for base in [base for base in LlamaForCausalLM.__mro__ if "_can_compile_fullgraph" in vars(base)]:
        monkeypatch.delattr(base, "_can_compile_fullgraph")
    report = check_cache(tiny("llama"), length=24, scenarios=["batches"])
    assert report.exit_code == 2 and "_can_compile_fullgraph" in str(report), report


# -- what must have run ------------------------------------------------------------------------------------------------


class Picky(LlamaForCausalLM):
    """Refuses whatever `refuses(number of tokens, whether there is a mask)` says."""

    def forward(self, input_ids=None, attention_mask=None, use_cache=None, **kwargs):
        if use_cache and type(self).refuses(input_ids.size(1), attention_mask is not None):
            raise NotImplementedError("refused")
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, use_cache=use_cache, **kwargs)


@pytest.mark.parametrize(
    "missing, refuses",
    [
        ("decode", lambda T, mask: T == 1),
        ("chunks of mixed sizes", lambda T, mask: T in (3, 5)),
        ("left padding", lambda T, mask: mask),
    ],
)
def test_a_check_that_hardly_ran_does_not_pass(missing, refuses, monkeypatch):
    monkeypatch.setattr(Picky, "refuses", refuses, raising=False)
    monkeypatch.setattr(Picky.forward, "__signature__", inspect.signature(LlamaForCausalLM.forward), raising=False)
    model = Picky(tiny("llama").config)
    options = dict(length=24, caches="own", scenarios=["decode", "double", "mixed", "left padding"], skip="generate")
    report = check_cache(model, **options)
    assert report.exit_code == 2 and "MISSING  required, but not run: " in str(report), report
    assert missing in report.missing
    with pytest.raises(AssertionError, match="too little could be checked"):
        report.assert_correct()
    check_cache(model, **options | dict(skip=["generate", *report.missing])).assert_correct()
