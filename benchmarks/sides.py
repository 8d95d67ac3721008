"""Who is compared: a Trainer of littrainer or transformers, a LightningModule, a PyTorch loop."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EARLIER_VARIABLE = "LITTRAINER_TRANSFORMERS_5_3"
"""Names the folder that has transformers 5.3.0; by default it is where `make test` installs it."""


@dataclass(frozen=True)
class Side:
    """One way to train.

    Parameters:
        name: What tables and records call it.
        library: The package whose Trainer runs: littrainer, transformers, lightning or torch.
        folder: Comes first on the path of its processes, None where the environment has all it needs.
        variant: What a benchmark does otherwise on this side than on another one of the same library.
    """

    name: str
    library: str
    folder: Path | None = None
    variant: str = ""

    @property
    def is_present(self) -> bool:
        return self.folder is None or (self.folder / self.library).is_dir()


RAW = Side("raw PyTorch", "torch")
OURS = Side("littrainer", "littrainer")
THEIRS = Side("transformers", "transformers")
EARLIER = Side(
    "transformers 5.3.0",
    "transformers",
    Path(os.environ.get(EARLIER_VARIABLE) or ROOT / ".venv" / "transformers-5.3.0"),
)
LIGHTNING = Side("Lightning", "lightning")

TRAINERS = (OURS, THEIRS, EARLIER)
"""The sides with transformers' interface: they take the same words."""
EVERY_SIDE = (RAW, *TRAINERS, LIGHTNING)
SIDES = {side.name: side for side in EVERY_SIDE}
