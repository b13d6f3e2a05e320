"""What train.py takes from this folder.

It yields cores on a busy machine, locks the folder of a run, counts n-grams for sample.py --draft, adds auxiliary
targets, and reads data and checkpoints whose tokens are not characters.
"""

from extras.cli import lock_folder
from extras.decode.ngrams import count_ngrams
from extras.formats.checkpoint import load_checkpoint
from extras.formats.nanogpt import read_data
from extras.formats.tokenizer import gives_ids_of, tokenizer_from_state
from extras.targets import TrainingLoss
from extras.threads import share_cores

__all__ = [
    "TrainingLoss",
    "count_ngrams",
    "gives_ids_of",
    "load_checkpoint",
    "lock_folder",
    "read_data",
    "share_cores",
    "tokenizer_from_state",
]
