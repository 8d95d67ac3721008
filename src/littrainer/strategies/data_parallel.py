"""A copy of the model in each process, with gradients averaged between them (DDP)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import DDPStrategy

from littrainer.strategies.launched import LaunchedProcesses
from littrainer.strategies.resident import release_plugins

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments


class ResidentDDPStrategy(DDPStrategy):
    """Distributed data parallel, after which the model stays on its device.

    Evaluation goes past DDP's wrapper, which would replace each process's buffers by those of the first.
    """

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """One batch of an evaluation, by the module itself."""
        return self._module_itself().validation_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """One batch of a prediction, by the module itself."""
        return self._module_itself().predict_step(*args, **kwargs)

    def _module_itself(self) -> Any:
        module = self.lightning_module
        assert module is not None
        return module

    def teardown(self) -> None:
        """Release what the plugins hold, take DDP's wrapper off, and leave the model where it is."""
        self.model = self.lightning_module
        release_plugins(self)


def data_parallel_strategy(args: TrainingArguments) -> ResidentDDPStrategy:
    """The strategy for a copy of the model in each process."""
    return ResidentDDPStrategy(
        cluster_environment=LaunchedProcesses(args),
        process_group_backend=args.ddp_backend,
        timeout=args.ddp_timeout_delta,
    )
