"""What a training ran on, for the model card: versions of the libraries, and how Lightning carried it out."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import littrainer
from littrainer.arguments.destinations import FULL_PRECISION, lightning_precision
from littrainer.strategies.choice import strategy_name

if TYPE_CHECKING:
    from littrainer.trainer import Trainer

# How a library is called -> its module; those that this process has loaded are named.
LIBRARIES: dict[str, str] = {
    "Lightning": "lightning",
    "Transformers": "transformers",
    "PyTorch": "torch",
    "Datasets": "datasets",
    "Tokenizers": "tokenizers",
    "PEFT": "peft",
    "DeepSpeed": "deepspeed",
}


def framework_versions() -> dict[str, str]:
    """The libraries that took part -> their versions."""
    loaded = {name: getattr(sys.modules.get(module), "__version__", None) for name, module in LIBRARIES.items()}
    return {"littrainer": littrainer.__version__, **{name: str(found) for name, found in loaded.items() if found}}


def strategy_of(trainer: Trainer) -> str:
    """One line about Lightning's strategy, the processes, their devices and the number format."""
    args = trainer.args
    name = _strategy_class(trainer) or strategy_name(args)
    kind = args.device.type
    devices = f"{args.world_size} processes, {kind}" if args.world_size > 1 else f"one {kind} device"
    precision = lightning_precision(args)
    return f"{name}, {devices}, precision {precision}{' (float32)' if precision == FULL_PRECISION else ''}"


def _strategy_class(trainer: Trainer) -> str | None:
    """Lightning's own name of the strategy that trained; None where no Lightning Trainer has been made."""
    strategy = getattr(trainer.lightning_trainer, "strategy", None)
    homes = ("lightning.pytorch.", "lightning.fabric.")
    return next((base.__name__ for base in type(strategy).__mro__ if base.__module__.startswith(homes)), None)
