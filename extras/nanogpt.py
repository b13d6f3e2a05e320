"""What helps people who come from nanoGPT: its meta.pkl, and what to type instead of its flags."""

import pickle
from pathlib import PureWindowsPath

from extras.cli import first_line, note

# -- checkpoints -------------------------------------------------------------------------------------------------------


class PlainUnpickler(pickle.Unpickler):
    """Unpickles plain values only. A pickle can name classes and functions, and unpickling it calls them."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, but a meta.pkl needs plain values only")


def read_meta(path):
    """Return the characters of nanoGPT's meta.pkl in the order of their ids. Raises ValueError."""
    if not path.is_file():
        raise ValueError(f"there is no {path}")
    try:
        with open(path, "rb") as file:
            meta = PlainUnpickler(file).load()
        itos = meta["itos"] if "itos" in meta else {i: token for token, i in meta["stoi"].items()}
        tokens = [itos[i] for i in range(len(itos))]
        if any(len(token) != 1 for token in tokens):
            raise ValueError("its tokens are not characters, so pass their tokenizer.json instead")
        return "".join(tokens)
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise ValueError(f"{path} is not a nanoGPT meta.pkl: {first_line(error)}") from None


# -- flags -------------------------------------------------------------------------------------------------------------

INSTEAD = {  # flags of nanoGPT that we do not have: what to type instead
    "--init_from": "sample.py loads the run in --out_dir, or what --ckpt names",
    "--dataset": "type --data_dir data/NAME, or leave it out for Shakespeare, which data/prepare.py writes to data",
    "--always_save_checkpoint": "leave it out: every evaluation writes last.pt, and the best so far ckpt.pt too",
    "--decay_lr": "leave it out, or type --lr_decay none for a constant learning rate",
    "--backend": "leave it out: several processes use nccl on GPUs and gloo on CPUs",
}
INSTEAD |= dict.fromkeys(
    ("--wandb_log", "--wandb_project", "--wandb_run_name"),
    "leave it out: log.csv in --out_dir has the curves, and python -m extras.plot draws them",
)
CONFIGS = {  # config files of nanoGPT: what to type instead
    "train_shakespeare_char.py": "type python train.py --out_dir out-shakespeare-char --preset gpu --recipe nanogpt "
    "--max_iters 5000 --dropout 0.2, or on a CPU --out_dir out-shakespeare-char --preset nanogpt-cpu --recipe nanogpt",
    "finetune_shakespeare.py": "type python train.py --init_from gpt2 --data_dir DIR --out_dir out-shakespeare",
}
ANY_CONFIG = "there are no config files here: pass each line of it as a flag, --name value"


def refuse_unknown(parser, unknown):
    """Print what to type instead of nanoGPT's flags, and end the script. Returns what nanoGPT does not have either.

    unknown  from parser.parse_known_args
    sample.py --init_from=resume is fine: the run in --out_dir is what we load.
    """
    hints, unrecognized, previous = [], [], ""
    words = " ".join(unknown).replace("--init_from ", "--init_from=").split()
    for word in words:
        name, _, value = word.partition("=")
        if word.endswith(".py"):
            hints.append(f"{word}: {CONFIGS.get(PureWindowsPath(word).name, ANY_CONFIG)}")
        elif word.startswith("--init_from=gpt2"):
            download = f"hf download openai-community/{value} --local-dir {value} downloads it"
            hints.append(f"{word}: type --ckpt {value}; {download}")
        elif name in INSTEAD and word != "--init_from=resume":
            hints.append(f"{word}: {INSTEAD[name]}")
        elif name not in INSTEAD and (previous not in INSTEAD or word.startswith("--")):  # not the value of a flag
            unrecognized.append(word)
        previous = word
    for hint in hints:
        note(hint)
    if hints and not unrecognized:
        parser.exit(2)
    return unrecognized
