"""Finds the earlier release of transformers that checkpoints are exchanged with."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "LITTRAINER_TRANSFORMERS_5_3"
"""Names the folder; by default it is where `make test` installs it."""
ABSENT = f"transformers 5.3.0 is not installed in its folder: `make test` does it, or set {VARIABLE}"


def earlier_release() -> Path | None:
    """Return the folder that provides transformers 5.3.0 on PYTHONPATH, or None."""
    folder = Path(os.environ.get(VARIABLE) or ROOT / ".venv" / "transformers-5.3.0")
    return folder if (folder / "transformers").is_dir() else None
