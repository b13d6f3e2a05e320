"""The settings of train.py: one dataclass, which is also the list of flags, and the rules that resolve them."""

import argparse
from dataclasses import dataclass, field, fields, replace

from kvgpt.cli import Parser, aligned, boolean, number, path
from model import GPTConfig

PLAIN = (bool, int, float, str, type(None))


def flag(default, kind, help, none=None):
    """Return a dataclass field that is a flag. kind: an argparse type, or a tuple of choices. none: what None means."""
    return field(default=default, metadata=dict(kind=kind, help=help, none=none))


positive = number(int, f"[1, {2**31})")
not_negative = number(int, f"[0, {2**31})")
rate = number(float, "[0, 1e30]")  # torch refuses larger factors of a float32 tensor with a traceback
share = number(float, "[0, 1)")


@dataclass
class TrainConfig:
    """All settings of a run. Presets and recipes of train.py take precedence over the defaults here."""

    preset: str = flag("auto", str, "size and length of the run; auto: gpu on a GPU, else cpu")
    recipe: str = flag("modern", str, "network and optimizer: this kit's, or nanoGPT's")
    init_from: str = flag(
        "scratch", path, "scratch; resume continues last.pt in --out_dir; or a Hugging Face folder to start from"
    )
    data_dir: str | None = flag(None, path, "folder that data/prepare.py wrote", none="data, beside train.py")
    out_dir: str = flag("out", path, "folder for checkpoints and log.csv")
    eval_interval: int = flag(
        250, positive, "steps between evaluations on the whole val split; does not affect training"
    )
    save_interval: int = flag(250, positive, "steps between writes of last.pt; an evaluation writes it too")
    log_interval: int = flag(20, positive, "steps between lines of progress and rows of log.csv")
    sample_interval: int | None = flag(
        None, positive, "steps between samples in samples.txt; does not affect training", none="off"
    )
    # model
    n_layer: int = flag(4, positive, "number of blocks")
    n_head: int = flag(4, positive, "query heads per block")
    n_kv_head: int | None = flag(
        None, positive, "key/value heads per block; fewer than n_head is grouped-query attention", none="n_head"
    )
    n_embd: int = flag(128, positive, "embedding width")
    block_size: int = flag(256, positive, "context length in characters")
    dropout: float = flag(0.0, share, "dropout probability")
    bias: bool = flag(False, boolean, "biases in Linear and LayerNorm layers")
    mlp_ratio: float = flag(4, rate, "width of the MLP's hidden layer, in units of n_embd")
    activation: str = flag("gelu", ("gelu", "gelu_tanh", "swiglu"), "exact GELU, GPT-2's tanh GELU, or SwiGLU")
    pos_emb: str = flag("learned", ("learned", "rope"), "learned position embeddings, or rotary ones")
    norm_first: bool = flag(True, boolean, "True: pre-LN; False: post-LN")
    tie_weights: bool = flag(True, boolean, "lm_head shares the matrix of the token embedding")
    qk_norm: bool = flag(False, boolean, "LayerNorm on queries and keys")
    zero_init: bool = flag(
        False, boolean, "every pre-LN block starts as the identity, instead of GPT-2's initialization"
    )
    # optimization
    ngram_targets: float | None = flag(
        None,
        number(float, "[0, 1]"),
        "share of n-gram distributions in the targets of the first step; falls to half of it at lr_decay_iters",
        none="off",
    )
    mtp_weight: float | None = flag(
        None,
        rate,
        "weight of the loss for the tokens after the next at the first step; falls to 0 at lr_decay_iters",
        none="off",
    )
    optimizer: str = flag("adamw", ("adamw", "muon"), "muon updates the matrices of the blocks, adamw all others")
    batch_size: int = flag(12, positive, "sequences per micro-step, over all processes")
    gradient_accumulation_steps: int = flag(1, positive, "micro-steps per step")
    max_iters: int = flag(2000, positive, "total steps")
    learning_rate: float = flag(1e-3, rate, "peak learning rate of AdamW")
    muon_learning_rate: float = flag(0.01, rate, "peak learning rate of Muon")
    warmup_iters: int = flag(100, not_negative, "steps of linear warm-up")
    lr_stable_frac: float = flag(0.0, share, "fraction of the steps after warm-up at the peak learning rate")
    lr_decay: str = flag("cosine", ("cosine", "linear"), "shape of the decay")
    lr_decay_iters: int | None = flag(None, positive, "step at which the decay ends", none="max_iters")
    min_lr: float | None = flag(None, rate, "learning rate at the end of the decay", none="learning_rate / 10")
    weight_decay: float = flag(0.1, rate, "AdamW's weight decay, on matrices and embeddings")
    beta1: float = flag(0.9, share, "AdamW's beta1")
    beta2: float = flag(0.99, share, "AdamW's beta2")
    grad_clip: float = flag(1.0, rate, "largest norm of the gradient; 0 turns clipping off")
    patience: int | None = flag(
        None, positive, "stop after this many evaluations without a better val loss", none="off"
    )
    # system
    seed: int = flag(1337, number(int, f"[0, {2**63})"), "seed of weights, batches and dropout")
    device: str = flag("auto", str, "cpu, cuda, cuda:1, mps; auto: cuda if there is one, else cpu")
    dtype: str = flag(
        "auto",
        ("auto", "float32", "bfloat16", "float16"),
        "dtype of the forward; auto: bfloat16 on a GPU that has it, float16 on other GPUs, float32 on a CPU",
    )
    threads: int | None = flag(
        None, number(int, "[1, 1024]"), "CPU threads; a resume takes the number of the run", none="PyTorch's choice"
    )
    compile: bool = flag(False, boolean, "torch.compile the training step")
    plot: bool = flag(False, boolean, "draw loss.png in --out_dir at each evaluation; needs matplotlib")

    @property
    def chars_per_step(self):
        return self.gradient_accumulation_steps * self.batch_size * self.block_size

    def model_args(self):
        """Return the fields that GPTConfig has too."""
        return {name: getattr(self, name) for name in MODEL_FLAGS}


FLAGS = {f.name: f for f in fields(TrainConfig)}
MODEL_FLAGS = [f.name for f in fields(GPTConfig) if f.name in FLAGS]


# -- flags -------------------------------------------------------------------------------------------------------------


def parse_flags(description, presets, recipes, overrides, argv=None):
    """Return {name: value} of the flags that were given. Presets, recipes or a checkpoint fill in the others."""
    parser = make_parser(description, presets, recipes, overrides)
    return vars(parser.parse_args(argv))


def make_parser(description, presets, recipes, overrides):
    epilog = defaults_tables(presets, recipes, overrides)
    parser = Parser(description, epilog=epilog)
    per_preset, per_recipe = varying_flags(presets, recipes, overrides)
    choices = {"preset": ("auto", *presets), "recipe": tuple(recipes)}
    for name, f in FLAGS.items():
        kind = choices.get(name, f.metadata["kind"])
        if name in per_preset or name in per_recipe:
            default = f"per {'preset' if name in per_preset else 'recipe'}, see below"
        else:
            default = shown(name, f.default)
        options = (
            dict(choices=kind) if isinstance(kind, tuple) else dict(type=kind, metavar=name.split("_")[-1].upper())
        )
        if kind is boolean:
            options |= dict(nargs="?", const=True, metavar="True|False")
        help = f"{f.metadata['help']} (default: {default})".replace("%", "%%")
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS, help=help, **options)
    return parser


def varying_flags(presets, recipes, overrides):
    """Return two sets of flags: defaults that depend on the preset, and defaults that depend on the recipe alone."""
    per_preset = {name for settings in (*presets.values(), *overrides.values()) for name in settings}
    per_recipe = {name for settings in recipes.values() for name in settings} - per_preset
    return per_preset, per_recipe


def shown(name, value):
    return FLAGS[name].metadata["none"] if value is None else str(value)


def defaults_tables(presets, recipes, overrides):
    """Return the defaults that apply, as text: a table with a column per preset, and one with a column per recipe."""
    per_preset, per_recipe = varying_flags(presets, recipes, overrides)
    usual = TrainConfig.recipe

    def default(name, preset, recipe):
        settings = recipes[recipe] | presets[preset] | overrides.get((preset, recipe), {})
        return shown(name, settings.get(name, FLAGS[name].default))

    def per_preset_cell(name, preset):
        cell = default(name, preset, usual)
        differing = [(r, default(name, preset, r)) for r in recipes if default(name, preset, r) != cell]
        return cell + "".join(f" ({recipe}: {value})" for recipe, value in differing)

    rows = [[f"defaults per preset (recipe {usual})", *presets]]
    rows += [[f"  --{name}", *(per_preset_cell(name, p) for p in presets)] for name in FLAGS if name in per_preset]
    text = aligned(rows, num_left=len(rows[0]))
    any_preset = next(iter(presets))
    rows = [["defaults per recipe", *recipes]]
    rows += [[f"  --{name}", *(default(name, any_preset, r) for r in recipes)] for name in FLAGS if name in per_recipe]
    return f"{text}\n\n{aligned(rows, num_left=len(rows[0]))}"


# -- resolution --------------------------------------------------------------------------------------------------------


def resolve_config(flags, presets, recipes, overrides, *, on_gpu, source=None):
    """Return the TrainConfig of a run. A pure function of its arguments.

    flags    {name: value} of the flags that were given; they come before everything else
    on_gpu   whether preset "auto" means "gpu"
    source   the Checkpoint of the run to resume, or of the Hugging Face folder to start from; None: from scratch
    Raises ValueError for a damaged checkpoint, and for flags that contradict it or each other.
    """
    flags = {name: value for name, value in flags.items() if (name, value) != ("preset", "auto")}
    if flags.get("init_from") == "resume":
        earlier = checkpoint_config(source, {"preset": tuple(presets), "recipe": tuple(recipes)})
        fixed = ("preset", "recipe", "optimizer", *MODEL_FLAGS)
        if bool(flags.get("mtp_weight", earlier.mtp_weight)) != bool(earlier.mtp_weight):
            fixed = (*fixed, "mtp_weight")  # the optimizer has a state for its matrices, or has none
        require_unchanged(f"the run in {source.path.parent}", vars(earlier), flags, fixed)
        config = replace(earlier, **flags)
    else:
        preset = flags.get("preset", "gpu" if on_gpu else "cpu")
        recipe = flags.get("recipe", TrainConfig.recipe)
        defaults = recipes[recipe] | presets[preset] | overrides.get((preset, recipe), {})
        config = TrainConfig(**(defaults | flags | dict(preset=preset, recipe=recipe)))
        if source:
            network = {name: source.model_args[name] for name in MODEL_FLAGS if name != "dropout"}
            require_unchanged(f"the model in {source.path}", network, flags, network)
            # a trained model knows more than n-grams do, and needs no help to begin
            helps = {name: flags.get(name) for name in ("ngram_targets", "mtp_weight")}
            config = replace(config, **network, **helps)
    if config.min_lr is not None and config.min_lr > config.learning_rate:
        raise ValueError(
            f"--min_lr {config.min_lr} is above --learning_rate {config.learning_rate}: "
            "lower the first or raise the second"
        )
    return config


def require_unchanged(what, settings, flags, names):
    """Raise ValueError if a flag among `names` differs from the settings of an earlier run or model."""
    for name in names:
        if name != "dropout" and flags.get(name, settings[name]) != settings[name]:
            raise ValueError(
                f"--{name} {flags[name]} conflicts with {what} ({name} {settings[name]}): "
                "drop the flag or start a new run"
            )


RUN_KEYS = ("config", "data_sha256", "optimizer", "scaler", "iter_num", "evals_since_best")


def checkpoint_config(ckpt, choices):
    """Return the TrainConfig in the Checkpoint of a run. Raises ValueError if there is none, or an impossible one.

    choices  {name: allowed values} of the flags that train.py defines
    """
    if missing := [key for key in RUN_KEYS if key not in ckpt.training]:
        raise ValueError(
            f"{ckpt.path} cannot be resumed, because another version of this kit, or another program, "
            f"wrote it (no {missing[0]} in it): start a new run"
        )
    stored = ckpt.training["config"]
    if not isinstance(stored, dict):
        raise ValueError(f"{ckpt.path} is damaged: its config is no dict but a {type(stored).__name__}")
    for name, f in FLAGS.items():
        if name not in stored and f.default is not None:  # None is what a flag that came later was before
            raise ValueError(f"{ckpt.path} is of another version of this kit (no {name} in it): start a new run")
        value, kind = stored.get(name), choices.get(name, f.metadata["kind"])
        try:
            if value is None:
                valid = f.default is None
            else:
                valid = type(value) in PLAIN
                valid = valid and (value in kind if isinstance(kind, tuple) else kind(str(value)) == value)
        except (ValueError, argparse.ArgumentTypeError):
            valid = False
        if not valid or ckpt.model_args.get(name, value) != value:
            raise ValueError(f"{ckpt.path} is damaged: its {name} is {' '.join(repr(value).split())[:200]}")
    return TrainConfig(**{name: stored.get(name) for name in FLAGS})
