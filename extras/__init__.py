"""What model.py, train.py, sample.py and data/prepare.py do not need. README.md says what each file is for."""

import sys


def without_traceback(kind, error, traceback):
    """The excepthook of our commands: silence after Ctrl-C, and one line if the environment is missing."""
    if kind is KeyboardInterrupt:
        sys.exit(130)
    if kind is ModuleNotFoundError and error.name in ("torch", "numpy", "tqdm"):
        sys.exit(f"{error}: activate the environment, or install it as README.md says")
    sys.__excepthook__(kind, error, traceback)


if sys.argv[0] == "-m":  # python -m extras.export: this runs first, before the imports that take long or fail
    sys.excepthook = without_traceback
