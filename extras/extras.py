"""`python extras/export.py` looks for `extras` in this folder, and finds this file: it says how to start a command."""

import sys
from pathlib import Path

sys.exit(f"start it in the folder of the repository, as a module: python -m extras.{Path(sys.argv[0]).stem}")
