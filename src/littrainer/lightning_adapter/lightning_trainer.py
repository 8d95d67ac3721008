"""The builder of `lightning.Trainer`, and the logger for values of its callbacks."""

from __future__ import annotations

import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint, ProgressBar, Timer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyExperiment
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from littrainer.arguments.choices import IntervalStrategy
from littrainer.arguments.destinations import DERIVED_KEYWORDS
from littrainer.arguments.did_you_mean import suggest_name
from littrainer.arguments.process import get_matmul_precision
from littrainer.callbacks.lightning_callbacks import (
    ONLY_IN_TRAINING,
    check_average_begins,
    check_callbacks,
    check_can_resume,
    is_lightning_class,
    reject_unsupported_callback,
)
from littrainer.callbacks.lightning_metrics import COUNTS, is_number
from littrainer.callbacks.state import TrainerState
from littrainer.checkpoint.lightning_io import add_checkpoint_io, make_strategy_save_on_all_ranks
from littrainer.data.limits import LIMIT_KEYWORDS
from littrainer.lightning_adapter.fast_training_loop import use_fast_loop
from littrainer.lightning_adapter.lightning_internals import (
    disable_auto_resume,
    disable_signal_handling,
    restore_progress,
)
from littrainer.lightning_adapter.module import AfterUserCallbacks, BeforeUserCallbacks
from littrainer.lightning_adapter.precision import build_precision_plugin
from littrainer.runtime.log_filter import quiet_lightning
from littrainer.strategies.user_strategy import adapt_strategy
from littrainer.tracking.lightning_loggers import add_logger_trackers, get_shared_loggers

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.callbacks.trainer_context import TrainerContext
    from littrainer.loop.run import TrainingRun

logger = logging.getLogger(__name__)

# Keyword -> fixed value and reason.
FIXED_KEYWORDS: dict[str, tuple[Any, str]] = {
    "max_steps": (-1, "the Trainer's own flow callback stops at max_steps"),
    "logger": (False, "it gets the loggers of the trackers that the Trainer reports to"),
    "enable_checkpointing": (False, "the Trainer saves checkpoints, in the transformers format"),
    "enable_progress_bar": (False, "the Trainer's callbacks show progress"),
    "enable_model_summary": (False, "a Trainer prints none"),
    "num_sanity_val_steps": (0, "a Trainer evaluates when its arguments say so"),
    "use_distributed_sampler": (False, "the Trainer's own samplers shard"),
    "inference_mode": (False, "predictions may be used in later computations with gradients"),
    "log_every_n_steps": (1, "what a Lightning callback logs is due at each step"),
}
# Keyword that follows from the launcher -> value and reason.
LAUNCHER_KEYWORDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "devices": (lambda args: args.visible_device_count, "each process of this node trains on one device"),
    "num_nodes": (
        lambda args: args.world_size // args.local_world_size,
        "as many nodes as the launcher has started processes on",
    ),
}
# Keyword -> advice.
DECIDED_BY_ARGUMENTS: dict[str, str] = {
    "max_epochs": "set num_train_epochs",
    "min_epochs": "set num_train_epochs",
    "max_steps": "set max_steps",
    "min_steps": "set max_steps",
    "accumulate_grad_batches": "set gradient_accumulation_steps",
    "gradient_clip_val": "set max_grad_norm",
    "gradient_clip_algorithm": "set max_grad_norm",
    "precision": "set bf16 or fp16",
    "accelerator": "set use_cpu",
    "devices": "start the script with littrainer run --devices, or torchrun --nproc_per_node",
    "num_nodes": "start the script with littrainer run --nodes, or torchrun --nnodes",
    "val_check_interval": "set eval_strategy and eval_steps",
    "check_val_every_n_epoch": "set eval_strategy",
    "num_sanity_val_steps": "set eval_on_start",
    "use_distributed_sampler": "the Trainer shards its data itself",
    "reload_dataloaders_every_n_epochs": "override get_train_dataloader",
    "inference_mode": "evaluation runs under no_grad",
}
ACCEPTED_KEYWORDS = frozenset(inspect.signature(pl.Trainer).parameters)
# Interval of epochs at which Lightning never validates, but lets callbacks read metrics of evaluations.
NEVER_VALIDATE = 2**62
# For streams, whose number of epochs is about sys.maxsize.
NO_EPOCH_LIMIT = -1


def lightning_keywords(args: TrainingArguments, further: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the keywords of `lightning.Trainer`.

    Raises:
        ValueError: training arguments decide a further keyword.
    """
    keywords = {name: value for name, (value, _) in FIXED_KEYWORDS.items()}
    keywords |= {name: derive(args) for name, (derive, _) in (DERIVED_KEYWORDS | LAUNCHER_KEYWORDS).items()}
    in_arguments: Any = args.lightning
    user_keywords = {**(in_arguments or {}), **(further or {})}
    for name in user_keywords:
        if name in DECIDED_BY_ARGUMENTS:
            raise ValueError(
                f"lightning={{{name!r}: ...}} is decided by training arguments: {DECIDED_BY_ARGUMENTS[name]}."
            )
    return keywords | user_keywords


def build_lightning_trainer(trainer: TrainerContext, run: TrainingRun | None) -> pl.Trainer:
    """Return a `lightning.Trainer` for a training, or for evaluation if `run` is None.

    Raises:
        TypeError, ValueError: Lightning refuses a keyword or its value.
    """
    # Lightning reads torch's older setting.
    if (precision := get_matmul_precision()) in ("tf32", "ieee"):
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    keywords = lightning_keywords(trainer.args, trainer.lightning_keywords)
    keywords["strategy"] = adapt_strategy(keywords.get("strategy", "auto"), trainer)
    keywords.setdefault("default_root_dir", trainer.args.output_dir if run is None else run.folder)
    if trainer.overrides_training_step():
        # Required in manual optimization.
        keywords["accumulate_grad_batches"] = 1
    callbacks = _collect_callbacks(trainer.lightning_callbacks, keywords)
    add_logger_trackers(trainer, trainer.callback_handler)
    keywords["logger"] = get_shared_loggers(trainer.callback_handler.callbacks)
    if callbacks and not keywords["logger"]:
        trainer_ref: Any = weakref.ref(trainer)
        keywords["logger"] = [HistoryLogger(lambda: trainer_ref().state)]
    if run is None:
        callbacks = [callback for callback in callbacks if not is_lightning_class(callback, *ONLY_IN_TRAINING)]
    else:
        check_callbacks(callbacks, trainer.args, trainer.model, [trainer, *trainer.callback_handler.callbacks])
        callbacks = _prepare_callbacks(callbacks, run, keywords)
        plugins, checkpoints = to_list(keywords.get("plugins")), trainer.session.checkpoints
        keywords["plugins"] = add_checkpoint_io(
            plugins, trainer.model, checkpoints, lambda: run.trainer._build_save_request()
        )
    # Lightning refuses such callbacks if the keyword is False.
    for name, kind in (("enable_progress_bar", ProgressBar), ("enable_checkpointing", Checkpoint)):
        if any(isinstance(callback, kind) for callback in callbacks):
            keywords[name] = True
    trained_model = trainer.model if trainer.is_in_train else None
    scaler = trainer.accelerator.scaler
    plugin = build_precision_plugin(keywords["precision"], keywords["strategy"], trainer.args, scaler, trained_model)
    if plugin is not None:
        del keywords["precision"]
        keywords["plugins"] = [*to_list(keywords.get("plugins")), plugin]
    lightning_trainer = _construct(callbacks, keywords)
    if run is not None:
        use_fast_loop(lightning_trainer)
        if run.checkpoint is not None:
            restore_progress(lightning_trainer, epochs=run.first_epoch, optimizer_steps=trainer.state.global_step)
    return lightning_trainer


def _collect_callbacks(trainer_callbacks: list[Callback], keywords: dict[str, Any]) -> list[Callback]:
    """Return the user's callbacks, and remove those of the keywords."""
    callbacks = [*trainer_callbacks, *to_list(keywords.pop("callbacks", None))]
    for callback in callbacks:
        reject_unsupported_callback(callback)
    max_time = keywords.pop("max_time", None)
    if max_time is not None:
        # Before the Trainer's last callback, which completes the optimizer step.
        callbacks.append(Timer(max_time))
    return callbacks


def _prepare_callbacks(callbacks: list[Callback], run: TrainingRun, keywords: dict[str, Any]) -> list[Callback]:
    if run.checkpoint is not None:
        check_can_resume(callbacks)
    check_average_begins(callbacks, run.plan.max_steps, run.plan.num_train_epochs)
    args = run.trainer.args
    if args.ema_decay is not None:
        from littrainer.lightning_adapter.weight_averaging import AveragedWeights

        if any(is_lightning_class(callback, "WeightAveraging", "StochasticWeightAveraging") for callback in callbacks):
            raise ValueError("ema_decay is set, and a callback averages weights too: leave one of them out.")
        callbacks = [*callbacks, AveragedWeights(args.ema_decay, args.ema_use)]
    epochs = run.plan.num_train_epochs
    keywords["max_epochs"] = epochs if epochs < sys.maxsize // 2 else NO_EPOCH_LIMIT
    if args.eval_strategy != IntervalStrategy.NO:
        keywords["check_val_every_n_epoch"] = NEVER_VALIDATE
    return [BeforeUserCallbacks(run), *callbacks, AfterUserCallbacks(run)]


def _construct(callbacks: list[Callback], keywords: dict[str, Any]) -> pl.Trainer:
    for name in LIMIT_KEYWORDS:
        keywords.pop(name, None)
    for name in keywords:
        if name not in ACCEPTED_KEYWORDS:
            raise TypeError(
                f"lightning={{{name!r}: ...}} is no keyword of lightning.Trainer "
                f"({suggest_name(name, ACCEPTED_KEYWORDS)})."
            )
    with quiet_lightning():
        try:
            lightning_trainer = pl.Trainer(callbacks=callbacks, **keywords)
        except MisconfigurationException as error:
            raise ValueError(
                f"lightning.Trainer refuses a keyword, one given as `lightning` or one that follows from the training "
                f"arguments: {error}"
            ) from None
    make_strategy_save_on_all_ranks(lightning_trainer.strategy)
    disable_signal_handling(lightning_trainer)
    disable_auto_resume(lightning_trainer)
    return lightning_trainer


def to_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


class _DiscardingExperiment(DummyExperiment):
    has_warned = False

    def nop(self, *args: Any, **kwargs: Any) -> None:
        if not self.has_warned:
            self.has_warned = True
            logger.warning(
                "A Lightning callback writes to `logger.experiment`, and no tracker is there to keep that. Set "
                "report_to to the one it is made for."
            )


class HistoryLogger(Logger):
    """A logger that adds the newest values of Lightning's callbacks to `state.log_history`, when the Trainer logs."""

    def __init__(self, state: Callable[[], TrainerState]):
        super().__init__()
        self._state = state
        # Name -> step and value.
        self._newest: dict[str, tuple[int, float]] = {}
        self._experiment = _DiscardingExperiment()

    @property
    def name(self) -> str:
        """Return no name, so that callbacks create no folder."""
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def experiment(self) -> Any:
        """Return a substitute that discards all values with a warning."""
        return self._experiment

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        # Lightning's step may count batches.
        current_step = self._state().global_step
        numbers = {name: value for name, value in metrics.items() if is_number(value) and name not in COUNTS}
        self._newest.update((name, (current_step, float(value))) for name, value in numbers.items())

    def add_to_history(self) -> None:
        for step in sorted({step for step, _ in self._newest.values()}):
            values = {name: value for name, (value_step, value) in self._newest.items() if value_step == step}
            self._state().log_history.append({**values, "step": step})
        self._newest = {}

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the arguments are saved with the model."""
