"""DeepSpeed as a Lightning strategy: optimizer states, gradients and parameters sharded over the processes (ZeRO)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn

from littrainer.arguments.destinations import lightning_precision
from littrainer.distributed.group import start_deepspeed_communication
from littrainer.ecosystem import is_a
from littrainer.strategies import deepspeed_engine
from littrainer.strategies.launched import LaunchedProcesses
from littrainer.strategies.resident import release_plugins

if TYPE_CHECKING:
    from littrainer.trainer import Trainer


class EnginePrecision(DeepSpeedPrecision):
    """Backward pass and step by the engine, which computes in the precision of its configuration.

    Parameters:
        trainer: the Trainer whose engine it is.
    """

    def __init__(self, trainer: Trainer):
        precision: Any = lightning_precision(trainer.args)
        super().__init__(precision)
        self._trainer = trainer

    @property
    def step_was_skipped(self) -> bool:
        """Whether gradients of fp16 were not finite at the last step."""
        return deepspeed_engine.step_was_skipped(self._trainer)

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Leave the model to the engine."""
        return module

    def convert_input(self, data: Any) -> Any:
        """Leave the batch as it is: `_prepare_inputs` converts it."""
        return data

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Nothing to enter."""
        yield

    def unscale(self, optimizer: Any) -> None:
        """Do nothing: the engine has divided its scale out."""

    def backward(self, tensor: torch.Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Backward pass, and at the end of a window the step."""
        if model.automatic_optimization:
            # The Trainer has divided by the true size of the window.
            kwargs["scale_wrt_gas"] = False
        deepspeed_engine.backward(self._trainer, tensor, **kwargs)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """What surrounds the step that the engine has taken within the backward pass."""
        result = closure()
        self._after_closure(model, optimizer)
        # A schedule watches whether its optimizer steps.
        optimizer.step()
        return result


class TrainerDeepSpeedStrategy(DeepSpeedStrategy):
    """Lightning's strategy around an engine that holds the user's model, which stays on its device.

    Lightning's own would put its module into the engine, and give the weights of checkpoints other names than
    transformers does. It makes the windows of optimizer steps too; here they are the Trainer's.

    Parameters:
        trainer: the Trainer.
    """

    def __init__(self, trainer: Trainer):
        args: Any = trainer.args
        super().__init__(
            config=args.hf_deepspeed_config.config,
            cluster_environment=LaunchedProcesses(args),
            process_group_backend=args.ddp_backend,
            timeout=args.ddp_timeout_delta,
            logging_level=args.get_process_log_level(),
            exclude_frozen_parameters=is_a(trainer.model, "peft model"),
        )
        self._trainer = trainer
        # Lightning would fill in its own values; the Trainer's are in it when the engine is made.
        self._config_initialized = True

    @property
    def handles_gradient_accumulation(self) -> bool:
        """No: the windows are the Trainer's, and the last one of an epoch may be shorter."""
        return False

    @property
    def deepspeed_engine(self) -> Any:
        """The engine, around the user's model."""
        return self._trainer.deepspeed

    def setup_environment(self) -> None:
        """Take the device, and bring communication up."""
        Strategy.setup_environment(self)
        self.setup_distributed()

    def setup_distributed(self) -> None:
        """Bring communication up, on whatever device DeepSpeed works on."""
        self.set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()
        start_deepspeed_communication(self._trainer.args)

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Nothing to enter: the model is there, and where `from_pretrained` made it, it is sharded."""
        yield

    def setup(self, trainer: pl.Trainer) -> None:
        """Let the module's `configure_optimizers` make the engine; without training only a sharded model needs one."""
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        self.model = self.lightning_module
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            DDPStrategy.setup_optimizers(self, trainer)
        else:
            deepspeed_engine.start_for_evaluation(self._trainer)
        self.barrier()

    def teardown(self) -> None:
        """Release what the plugins hold, and leave the engine and its model where they are."""
        release_plugins(self)


def deepspeed_strategy(trainer: Trainer) -> TrainerDeepSpeedStrategy:
    """The strategy for a training that DeepSpeed carries out."""
    return TrainerDeepSpeedStrategy(trainer)
