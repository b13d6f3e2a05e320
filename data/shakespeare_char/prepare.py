"""nanoGPT's command for the same text: python data/shakespeare_char/prepare.py runs data/prepare.py."""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().parents[1] / "prepare.py"), run_name="__main__")
