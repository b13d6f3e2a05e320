"""A GPT without weights, for everybody who has weights from a file."""

from torch.overrides import TorchFunctionMode

from model import GPT


class SkipInit(TorchFunctionMode):
    """Inside `with SkipInit():` the random initializers of torch.nn.init do nothing.

    The usual way, torch.device("meta"), imports torch._dynamo to initialize a tensor that has no memory, which takes
    longer than to load the pretrained model.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__module__", None) != "torch.nn.init":
            return function(*args, **(kwargs or {}))


def blank_model(config):
    """Return a GPT whose matrices are memory that nobody has written to, which costs no time."""
    with SkipInit():
        return GPT(config)


def tie(model):
    """Let head and embedding be one matrix again, if the config says so, after each has got a tensor of its own."""
    if model.config.tie_weights:
        model.transformer["wte"].weight = model.lm_head.weight
