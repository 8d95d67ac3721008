"""DDP around the user's model and not Lightning's module: subclasses of a Trainer expect it there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from littrainer.model.traversal import is_immovable
from littrainer.runtime.lazy_isinstance import is_a
from littrainer.strategies.single_device import InPlaceStrategy, LaunchedProcesses, block_backward_sync

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from littrainer.strategies.choice import TrainedModel


# Argument -> keyword of Lightning's DDPStrategy; unset arguments keep torch's default.
DDP_KEYWORDS: dict[str, str] = {
    "ddp_find_unused_parameters": "find_unused_parameters",
    "ddp_bucket_cap_mb": "bucket_cap_mb",
    "ddp_broadcast_buffers": "broadcast_buffers",
    "ddp_static_graph": "static_graph",
    "ddp_backend": "process_group_backend",
    "ddp_timeout": "timeout",
}


class ResidentDDPStrategy(InPlaceStrategy, DDPStrategy):
    """DDPStrategy that wraps the user's model when the Trainer creates its optimizer.

    Gradients are reduced at the last micro-batch of a window.
    """

    is_fitting = False
    block_backward_sync = block_backward_sync

    def _configure_launcher(self) -> None:
        """Create no launcher, which Lightning refuses in a notebook."""

    def setup(self, trainer: pl.Trainer) -> None:
        """Prepare a training as Lightning does; evaluations do not synchronize the model."""
        self.is_fitting = trainer.state.fn == TrainerFn.FITTING
        if self.is_fitting:
            super().setup(trainer)
        else:
            self.model_to_device()
            self.set_up_in_place(trainer)

    def model_to_device(self) -> None:
        assert self.model is not None
        if not is_immovable(self.model):
            super().model_to_device()

    def configure_ddp(self) -> None:
        """Do nothing: the Trainer calls `wrap_in_ddp`."""

    def wrap_in_ddp(self, model: nn.Module) -> DistributedDataParallel:
        """Wrap a model in DDP, which broadcasts the first process's weights.

        Raises:
            ValueError: DDP cannot train it.
        """
        _check_single_device(model)
        wrapped = self._setup_model(model)
        hook: Any = self._ddp_comm_hook
        if hook is not None:
            # Lightning ignores the hook on a CPU.
            wrapper = self._ddp_comm_wrapper
            wrapped.register_comm_hook(self._ddp_comm_state, hook if wrapper is None else wrapper(hook))
        vars(wrapped)["parameters_reduced"] = _get_trained_parameters(model)
        return wrapped

    def teardown(self) -> None:
        """Undo `sync_batchnorm`; the model stays on its device."""
        if self.is_fitting and self._layer_sync is not None:
            assert self.model is not None
            self.model = self._layer_sync.revert(self.model)
        super().teardown()


def get_ddp_keywords(args: Any, model: Any) -> dict[str, Any]:
    values = {keyword: getattr(args, argument) for argument, keyword in DDP_KEYWORDS.items()}
    values["timeout"] = args.ddp_timeout_delta
    if values["find_unused_parameters"] is None:
        values["find_unused_parameters"] = not _recomputes_layers(args, model)
    return {keyword: value for keyword, value in values.items() if value is not None}


def _recomputes_layers(args: Any, model: Any) -> bool:
    # Reentrant checkpointing breaks DDP's search for unused parameters. Releases of transformers define only the first
    # or second name, and warn of the other.
    if not is_a(model, "pretrained model"):
        return False
    names = ("is_activation_checkpointing", "is_gradient_checkpointing")
    recomputes = next((getattr(model, name) for name in names if hasattr(type(model), name)), False)
    return bool(recomputes or args.activation_checkpointing)


def create_ddp_strategy(trained: TrainedModel) -> ResidentDDPStrategy:
    args = trained.args
    return ResidentDDPStrategy(cluster_environment=LaunchedProcesses(args), **get_ddp_keywords(args, trained.model))


def is_reusable_ddp(wrapped: Any, model: nn.Module) -> bool:
    """Return whether model, process group and trained parameters are the same."""
    return (
        isinstance(wrapped, DistributedDataParallel)
        and wrapped.module is model
        and wrapped.process_group is dist.group.WORLD
        and getattr(wrapped, "parameters_reduced", None) == _get_trained_parameters(model)
    )


def _get_trained_parameters(model: nn.Module) -> set[int]:
    return {id(parameter) for parameter in model.parameters() if parameter.requires_grad}


def _check_single_device(model: nn.Module) -> None:
    devices = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(devices) > 1:
        raise ValueError(
            f"{type(model).__name__} was loaded onto several devices ({', '.join(sorted(devices))}), and several "
            "processes train together, each with a copy on its own device. Load it without device_map, or start "
            "one process (`littrainer run --devices 1`)."
        )
