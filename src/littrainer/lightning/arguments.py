"""Training arguments in a program in which a lightning.Trainer says where and in how many processes training runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from littrainer.arguments.accelerator_config import AcceleratorConfig

if TYPE_CHECKING:
    import lightning.pytorch as pl
    import torch

    from littrainer.arguments.training_arguments import TrainingArguments


class ArgumentsUnderLightning:
    """Training arguments as they are read under a lightning.Trainer; whatever it decides is asked from it.

    Parameters:
        args: the arguments.
        lightning_trainer: says how many processes there are, which of them this one is, on which device it works, how
            they share the data and how many micro-batches an optimizer step has.
    """

    def __init__(self, args: TrainingArguments, lightning_trainer: pl.Trainer):
        self._args = args
        self._lightning_trainer = lightning_trainer

    def __getattr__(self, name: str) -> Any:
        # A copy is asked for attributes before it has any.
        if name in ("_args", "_lightning_trainer"):
            raise AttributeError(name)
        return getattr(self._args, name)

    @property
    def world_size(self) -> int:
        """Number of processes that train together."""
        return self._lightning_trainer.world_size

    @property
    def process_index(self) -> int:
        """Rank of this process among all processes."""
        return self._lightning_trainer.global_rank

    @property
    def device(self) -> torch.device:
        """Device of this process."""
        return self._lightning_trainer.strategy.root_device

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of an optimizer step."""
        return self._lightning_trainer.accumulate_grad_batches

    @property
    def parallelism_config(self) -> dict[str, int]:
        """Of how many processes each has data of its own, and how many compute each layer together."""
        parts = self.world_size
        shared: Any = getattr(self._lightning_trainer.strategy, "distributed_sampler_kwargs", None)
        if shared:
            parts = int(shared["num_replicas"])
        return {"dp_replicate_size": parts, "tp_size": self.world_size // parts}

    @property
    def accelerator_config(self) -> AcceleratorConfig:
        """How processes share the data."""
        return AcceleratorConfig.from_argument(self._args.accelerator_config)
