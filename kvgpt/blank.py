"""A GPT that gets its weights from a file."""

from torch.overrides import TorchFunctionMode

from model import GPT


class SkipInit(TorchFunctionMode):
    """Inside `with SkipInit():` the random initializers of torch.nn.init do nothing.

    torch.device("meta") would save that work too, but normal_ then imports torch._dynamo, which takes longer than
    loading the pretrained model.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__module__", None) != "torch.nn.init":
            return function(*args, **(kwargs or {}))


def blank_model(config):
    """Return a GPT whose matrices are uninitialized memory."""
    with SkipInit():
        return GPT(config)


def tie(model):
    """Make head and embedding one matrix again if the config says so. Loading gave each its own tensor."""
    if model.config.tie_weights:
        model.transformer["wte"].weight = model.lm_head.weight
