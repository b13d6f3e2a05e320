"""The settings of train.py: presets, recipes, all flags in one dataclass, and the rules for which one wins."""

import argparse
import math
import textwrap
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from kvgpt.cli import Parser, boolean, number, path
from model import GPTConfig

# A preset sets the model size, the context and the length of the run. A recipe sets the network and the optimizer. If
# both have a setting, the preset wins. An override wins over both, and the command line wins over everything.
#
# No recipe may win by size: within each preset, the parameter counts differ by less than 3%. RoPE has no table of
# positions, so at a context of 256 a small modern network needs a wider MLP to be as large as nanoGPT's.

PRESETS = {
    "lecture": dict(n_layer=4, n_head=4, n_embd=64, block_size=32, batch_size=16, max_iters=5000),
    "nanogpt-cpu": dict(n_layer=4, n_head=4, n_embd=128, block_size=64, batch_size=12, max_iters=2000),
    "cpu": dict(n_layer=4, n_head=4, n_embd=128, block_size=256, batch_size=2, max_iters=3200),
    "laptop": dict(n_layer=4, n_head=4, n_embd=128, block_size=256, batch_size=2, max_iters=7000),
    "gpu": dict(n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=64, max_iters=5000, dropout=0.2),
    # nanoGPT's settings for finetuning GPT-2 on Shakespeare, whatever the recipe
    "finetune": dict(
        batch_size=1,
        gradient_accumulation_steps=32,
        max_iters=20,
        eval_interval=5,
        log_interval=1,
        optimizer="adamw",
        learning_rate=3e-5,
        lr_decay="none",
        warmup_iters=0,
        weight_decay=0.1,
        beta2=0.95,
        grad_clip=1.0,
    ),
}
RECIPES = {
    "modern": dict(
        pos_emb="rope",
        bias=False,
        qk_norm=True,
        activation="swiglu",
        zero_init=True,
        ngram_targets=1.0,
        mtp_weight=0.3,
        optimizer="muon",
        learning_rate=1e-2,
        beta2=0.95,
        weight_decay=0.0,
        grad_clip=0.0,
        warmup_iters=0,
        lr_decay="linear",
        lr_stable_frac=0.3,
        min_lr=0.0,
    ),
    "nanogpt": dict(
        pos_emb="learned",
        bias=False,
        qk_norm=False,
        activation="gelu",
        zero_init=False,
        ngram_targets=None,
        mtp_weight=None,
        optimizer="adamw",
        learning_rate=1e-3,
        beta2=0.99,
        weight_decay=0.1,
        grad_clip=1.0,
        warmup_iters=100,
        lr_decay="cosine",
        lr_stable_frac=0.0,
        min_lr=None,
    ),
}
OVERRIDES = {(preset, "modern"): dict(mlp_ratio=4.2) for preset in ("nanogpt-cpu", "cpu", "laptop")}
OVERRIDES |= {("gpu", "modern"): dict(max_iters=2000, dropout=0.3)}


def defaults(preset, recipe):
    """Return {name: value} of the settings that a preset and a recipe set."""
    return RECIPES[recipe] | PRESETS[preset] | OVERRIDES.get((preset, recipe), {})


def network(recipe):
    """Return {name: value} of the fields of GPTConfig that a recipe sets: the network without its sizes."""
    return {name: value for name, value in RECIPES[recipe].items() if name in MODEL_FLAGS}


# -- flags -------------------------------------------------------------------------------------------------------------


def flag(default, kind, help, none=None):
    """Return a dataclass field for a flag. kind is an argparse type or a tuple of choices, none is what None means."""
    return field(default=default, metadata=dict(kind=kind, help=help, none=none))


positive = number(int, f"[1, {2**31})")
not_negative = number(int, f"[0, {2**31})")
rate = number(float, "[0, 1e30]")  # torch cannot multiply a float32 tensor by more
fraction = number(float, "[0, 1)")


def beginning(text):
    """An argparse type: where a run starts. gpt2, gpt2-xl and so on have to be folders here."""
    if text.startswith("gpt2") and not Path(text).exists():
        download = f"hf download openai-community/{text} --local-dir {text}"
        raise argparse.ArgumentTypeError(f"there is no folder {text}: {download} downloads it")
    return path(text)


@dataclass
class TrainConfig:
    """All settings of a run. A default here applies if no preset, recipe or flag sets it.

    If you add a setting, its default must be what train.py did before, because resumed older runs get it. A better
    value for new runs goes into the recipes.
    """

    preset: str = flag(
        "auto",
        ("auto", *PRESETS),
        "size and length; auto: finetune with --init_from FOLDER, gpu on a GPU, else cpu",
    )
    recipe: str = flag("modern", tuple(RECIPES), "network and optimizer: ours, or nanoGPT's")
    init_from: str = flag("scratch", beginning, "scratch; resume (last.pt in --out_dir); or a Hugging Face folder")
    data_dir: str | None = flag(None, path, "folder that data/prepare.py wrote", none="data, next to train.py")
    out_dir: str = flag("out", path, "folder for checkpoints and log.csv")
    eval_interval: int = flag(250, positive, "steps between evaluations on the whole val split")
    save_interval: int = flag(250, positive, "steps between writes of last.pt; an evaluation writes it too")
    log_interval: int = flag(20, positive, "steps between lines of progress and rows of log.csv")
    sample_interval: int | None = flag(None, positive, "steps between samples in samples.txt", none="off")
    # model
    n_layer: int = flag(4, positive, "number of blocks")
    n_head: int = flag(4, positive, "query heads per block")
    n_kv_head: int | None = flag(None, positive, "key/value heads; fewer is grouped-query attention", none="n_head")
    n_embd: int = flag(128, positive, "embedding width")
    block_size: int = flag(256, positive, "context length in tokens")
    dropout: float = flag(0.0, fraction, "dropout probability")
    bias: bool = flag(False, boolean, "biases in Linear and LayerNorm layers")
    mlp_ratio: float = flag(4, rate, "width of the MLP's hidden layer, in units of n_embd")
    activation: str = flag("gelu", ("gelu", "gelu_tanh", "swiglu"), "exact GELU, GPT-2's tanh GELU, or SwiGLU")
    pos_emb: str = flag("learned", ("learned", "rope"), "learned position embeddings, or rotary ones")
    norm_first: bool = flag(True, boolean, "True: pre-LN; False: post-LN")
    tie_weights: bool = flag(True, boolean, "lm_head shares the matrix of the token embedding")
    qk_norm: bool = flag(False, boolean, "LayerNorm on queries and keys")
    zero_init: bool = flag(False, boolean, "every pre-LN block starts as the identity")
    # optimization
    ngram_targets: float | None = flag(
        None,
        number(float, "[0, 1]"),
        "weight of n-grams in the targets at the first step; halves by the end",
        none="off",
    )
    mtp_weight: float | None = flag(
        None, rate, "weight of the loss for the three tokens after the next at the first step; falls to 0", none="off"
    )
    optimizer: str = flag("adamw", ("adamw", "muon"), "muon updates the matrices of the blocks, adamw the rest")
    batch_size: int = flag(12, positive, "sequences per micro-step, over all processes")
    gradient_accumulation_steps: int = flag(1, positive, "micro-steps per step")
    max_iters: int = flag(2000, positive, "total steps")
    learning_rate: float = flag(1e-3, rate, "peak learning rate of AdamW")
    muon_learning_rate: float = flag(0.01, rate, "peak learning rate of Muon")
    warmup_iters: int = flag(100, not_negative, "steps of linear warm-up")
    lr_stable_frac: float = flag(0.0, fraction, "fraction of the steps after warm-up at the peak learning rate")
    lr_decay: str = flag("cosine", ("cosine", "linear", "none"), "shape of the decay; none: constant")
    lr_decay_iters: int | None = flag(None, positive, "step at which the decay ends", none="max_iters")
    min_lr: float | None = flag(None, rate, "learning rate at the end of the decay", none="learning_rate/10")
    weight_decay: float = flag(0.1, rate, "AdamW's weight decay, on matrices and embeddings")
    beta1: float = flag(0.9, fraction, "AdamW's beta1")
    beta2: float = flag(0.99, fraction, "AdamW's beta2")
    grad_clip: float = flag(1.0, rate, "largest norm of the gradient; 0 turns clipping off")
    patience: int | None = flag(None, positive, "stop after N evaluations without a better val loss", none="off")
    # system
    seed: int = flag(1337, number(int, f"[0, {2**63})"), "seed of weights, batches and dropout")
    device: str = flag("auto", str, "cpu, cuda, cuda:1, mps; auto: cuda if there is one, else cpu")
    dtype: str = flag(
        "auto",
        ("auto", "float32", "bfloat16", "float16"),
        "dtype of the forward; auto: bfloat16 on a GPU that has it, float16 on other GPUs, float32 on a CPU",
    )
    threads: int | None = flag(
        None, number(int, "[1, 1024]"), "CPU threads; a resume uses as many as the run did", none="PyTorch's choice"
    )
    compile: bool = flag(False, boolean, "torch.compile the training step")
    plot: bool = flag(False, boolean, "draw loss.png in --out_dir at each evaluation; needs matplotlib")

    @property
    def tokens_per_step(self):
        return self.gradient_accumulation_steps * self.batch_size * self.block_size

    def model_args(self):
        """Return the fields that GPTConfig shares."""
        return {name: getattr(self, name) for name in MODEL_FLAGS}


FLAGS = {f.name: f for f in fields(TrainConfig)}
MODEL_FLAGS = [f.name for f in fields(GPTConfig) if f.name in FLAGS]
CHOSEN = {name for settings in (*PRESETS.values(), *RECIPES.values(), *OVERRIDES.values()) for name in settings}


def parse_flags(description, argv=None):
    """Return {name: value} of the given flags. resolve_config fills in the rest."""
    parser = make_parser(description)
    flags, unknown = parser.parse_known_args(argv)
    if unknown:
        from kvgpt.nanogpt import refuse_unknown

        refuse_unknown(parser, unknown)
    return vars(flags)


def make_parser(description):
    parser = Parser(description, epilog=choices())
    for name, f in FLAGS.items():
        kind, default = f.metadata["kind"], shown(name, f.default)
        if name in CHOSEN:
            default += ", or see below"
        if isinstance(kind, tuple):
            options = dict(choices=kind)
        elif kind is boolean:
            options = dict(type=kind, nargs="?", const=True, metavar="True|False")
        else:
            options = dict(type=kind, metavar=name.split("_")[-1].upper())
        help = f"{f.metadata['help']} (default: {default})".replace("%", "%%")
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS, help=help, **options)
    return parser


def shown(name, value):
    """Return a setting's value as --help shows it."""
    return FLAGS[name].metadata["none"] if value is None else str(value)


def choices():
    """Return the settings of each preset and recipe as text for the end of --help."""
    pairs = {f"{preset} with {recipe}": settings for (preset, recipe), settings in OVERRIDES.items()}
    lines = []
    for title, chosen in (("presets", PRESETS), ("recipes", RECIPES), ("a preset with a recipe", pairs)):
        lines.append(f"{title}:")
        for name, settings in chosen.items():
            text = " ".join(f"{key}={shown(key, value)}" for key, value in settings.items())
            lines.append(textwrap.fill(f"  {name}: {text}", 118, subsequent_indent="    "))
    return "\n".join(lines)


# -- which one wins ----------------------------------------------------------------------------------------------------


def resolve_config(flags, *, on_gpu, source=None):
    """Return the TrainConfig of a run.

    flags    {name: value} of the given flags
    on_gpu   whether preset "auto" means "gpu"
    source   the Checkpoint of the run to resume, or of the Hugging Face folder to start from; None: from scratch
    Raises ValueError for flags that contradict `source` or each other, and for a checkpoint that cannot be resumed.
    """
    flags = {name: value for name, value in flags.items() if (name, value) != ("preset", "auto")}
    if flags.get("preset") == "finetune" and source is None:
        raise ValueError("--preset finetune starts from a trained model: pass its Hugging Face folder as --init_from")
    if flags.get("init_from") == "resume":
        earlier = saved_config(source)
        fixed = ["preset", "recipe", "optimizer", *MODEL_FLAGS]
        if bool(flags.get("mtp_weight", earlier.mtp_weight)) != bool(earlier.mtp_weight):
            fixed.append("mtp_weight")  # last.pt either has its layers or not, so it cannot be turned on or off
        require_unchanged(f"the run in {source.path.parent}", vars(earlier), flags, fixed)
        config = replace(earlier, **flags)
    else:
        preset = flags.get("preset", "finetune" if source else "gpu" if on_gpu else "cpu")
        recipe = flags.get("recipe", TrainConfig.recipe)
        config = TrainConfig(**(defaults(preset, recipe) | flags | dict(preset=preset, recipe=recipe)))
        if source:
            network = {name: source.model_args[name] for name in MODEL_FLAGS if name != "dropout"}
            # only a shorter context can be chosen
            network["block_size"] = min(network["block_size"], flags.get("block_size", math.inf))
            require_unchanged(f"the model in {source.path}", network, flags, network)
            # a trained model knows more than n-grams do, so both auxiliary targets are off unless you ask for them
            targets = {name: flags.get(name) for name in ("ngram_targets", "mtp_weight")}
            config = replace(config, **network, **targets)
    if config.min_lr is not None and config.min_lr > config.learning_rate:
        raise ValueError(f"--min_lr {config.min_lr} is above --learning_rate {config.learning_rate}: lower it")
    return config


def require_unchanged(what, settings, flags, fixed):
    """Raise ValueError if a flag in `fixed` differs from the settings of an earlier run or model."""
    for name in fixed:
        if name != "dropout" and flags.get(name, settings[name]) != settings[name]:
            raise ValueError(
                f"--{name} {flags[name]} conflicts with {what} ({name} {settings[name]}): "
                "drop the flag or start a new run"
            )


def saved_config(source):
    """Return the TrainConfig in the Checkpoint of a run. Raises ValueError if train.py did not write it.

    Flags that are newer than the run get their defaults.
    """
    saved = source.training.get("config", {})
    if "recipe" not in saved:  # nanoGPT saves a config too
        raise ValueError(f"{source.path} cannot be resumed, because this train.py did not write it: start a new run")
    return TrainConfig(**{name: value for name, value in saved.items() if name in FLAGS})
