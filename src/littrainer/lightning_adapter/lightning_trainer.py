"""From training arguments to a `lightning.Trainer`, and from what its callbacks log to the Trainer's history."""

from __future__ import annotations

import functools
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
from littrainer.checkpoint.lightning_io import add_checkpoint_io, save_on_all_ranks
from littrainer.data.limits import LIMIT_KEYWORDS
from littrainer.lightning_adapter.fast_training_loop import use_fast_loop
from littrainer.lightning_adapter.lightning_internals import (
    cached_entry_points,
    disable_auto_resume,
    disable_signal_handling,
    restore_progress,
)
from littrainer.lightning_adapter.module import AfterUserCallbacks, BeforeUserCallbacks
from littrainer.lightning_adapter.precision import precision_plugin
from littrainer.runtime.log_filter import quiet_lightning
from littrainer.strategies.user_strategy import adapt_strategy
from littrainer.tracking.lightning_loggers import add_logger_trackers, get_shared_loggers

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.loop.run import TrainingRun

logger = logging.getLogger(__name__)

# Keywords of lightning.Trainer that are the same for each training, with the reason.
FIXED_KEYWORDS: dict[str, tuple[Any, str]] = {
    "max_steps": (-1, "the Trainer's own flow callback stops at max_steps"),
    "logger": (False, "it gets those of the trackers that the Trainer reports to"),
    "enable_checkpointing": (False, "the Trainer saves checkpoints, in the transformers format"),
    "enable_progress_bar": (False, "the Trainer's callbacks show progress"),
    "enable_model_summary": (False, "a Trainer prints none"),
    "num_sanity_val_steps": (0, "a Trainer evaluates when its arguments say so"),
    "use_distributed_sampler": (False, "the Trainer's own samplers shard"),
    "inference_mode": (False, "predictions may be used in later computations with gradients"),
    "log_every_n_steps": (1, "what a Lightning callback logs is due at each step"),
}
# Keywords that follow from how the processes were started, with the reason.
LAUNCHER_KEYWORDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "devices": (lambda args: args.visible_device_count, "each process of this node trains on one device"),
    "num_nodes": (
        lambda args: args.world_size // args.local_world_size,
        "as many nodes as the launcher has started processes on",
    ),
}
# Keywords of lightning.Trainer that a user cannot set besides the arguments, with what to set instead.
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
# As check_val_every_n_epoch: Lightning never validates by itself, and callbacks look for metrics after evaluations.
NEVER_VALIDATE = 2**62
# Lightning reads max_epochs into a loop counter; a stream's sys.maxsize of epochs means no limit.
NO_EPOCH_LIMIT = -1


def lightning_keywords(args: TrainingArguments, further: dict[str, Any] | None = None) -> dict[str, Any]:
    """The keywords for `lightning.Trainer` that training arguments stand for.

    Parameters:
        further: keywords given to the Trainer, added to those of `args.lightning`.

    Raises:
        ValueError: a further keyword is one that training arguments decide.
    """
    keywords = {name: value for name, (value, _) in FIXED_KEYWORDS.items()}
    for table in (DERIVED_KEYWORDS, LAUNCHER_KEYWORDS):
        keywords.update({name: derive(args) for name, (derive, _) in table.items()})
    in_arguments: Any = args.lightning
    given = {**(in_arguments or {}), **(further or {})}
    for name in given:
        if name in DECIDED_BY_ARGUMENTS:
            raise ValueError(
                f"lightning={{{name!r}: ...}} is decided by training arguments: {DECIDED_BY_ARGUMENTS[name]}."
            )
    keywords.update(given)
    return keywords


def build_lightning_trainer(trainer: Any, run: TrainingRun | None) -> pl.Trainer:
    """Return a new `lightning.Trainer` for a training, or for evaluation if `run` is None.

    Raises:
        TypeError: a further keyword is none of Lightning's.
        ValueError: Lightning refuses the value of one.
    """
    # Lightning reads torch's older switch, where a script has set the newer one alone.
    if (precision := get_matmul_precision()) in ("tf32", "ieee"):
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    keywords = lightning_keywords(trainer.args, trainer.lightning_keywords)
    keywords["strategy"] = adapt_strategy(keywords.get("strategy", "auto"), trainer)
    # Where callbacks write that are not told where to.
    keywords.setdefault("default_root_dir", trainer.args.output_dir if run is None else run.folder)
    if trainer.overrides_training_step():
        # Lightning accepts no other number in manual optimization, where it does not count micro-batches anyway.
        keywords["accumulate_grad_batches"] = 1
    callbacks = _user_callbacks(trainer.lightning_callbacks, keywords)
    add_logger_trackers(trainer, trainer.callback_handler)
    keywords["logger"] = get_shared_loggers(trainer.callback_handler.callbacks)
    if callbacks and not keywords["logger"]:
        owner: Any = weakref.ref(trainer)
        keywords["logger"] = [HistoryLogger(lambda: owner().state)]
    if run is None:
        callbacks = [callback for callback in callbacks if not is_lightning_class(callback, *ONLY_IN_TRAINING)]
    else:
        check_callbacks(callbacks, trainer.args, trainer.model, [trainer, *trainer.callback_handler.callbacks])
        callbacks = _prepare_callbacks(callbacks, run, keywords)
        plugins, checkpoints = to_list(keywords.get("plugins")), trainer.session.checkpoints
        keywords["plugins"] = add_checkpoint_io(
            plugins, trainer.model, checkpoints, lambda: run.trainer._build_saved_training()
        )
    # Lightning asks for these where a callback is a bar, or saves; it adds its own only if there is none.
    for name, kind in (("enable_progress_bar", ProgressBar), ("enable_checkpointing", Checkpoint)):
        if any(isinstance(callback, kind) for callback in callbacks):
            keywords[name] = True
    trained_model = trainer.model if trainer.is_in_train else None
    scaler = trainer.accelerator.scaler
    plugin = precision_plugin(keywords["precision"], keywords["strategy"], trainer.args, scaler, trained_model)
    if plugin is not None:
        # In the place of the plugin that Lightning would make for that precision.
        del keywords["precision"]
        keywords["plugins"] = [*to_list(keywords.get("plugins")), plugin]
    built = _construct(callbacks, keywords)
    if run is not None:
        use_fast_loop(built)
        if run.checkpoint is not None:
            restore_progress(built, epochs=run.first_epoch, optimizer_steps=trainer.state.global_step)
    return built


def _user_callbacks(of_trainer: list[Callback], keywords: dict[str, Any]) -> list[Callback]:
    """Lightning callbacks of the user's, from all places; takes those among the keywords out of them."""
    callbacks = [*of_trainer, *to_list(keywords.pop("callbacks", None))]
    for callback in callbacks:
        reject_unsupported_callback(callback)
    longest = keywords.pop("max_time", None)
    if longest is not None:
        # Lightning would add it behind the Trainer's own events, which then could not end an optimizer step first.
        callbacks.append(Timer(longest))
    return callbacks


def _prepare_callbacks(callbacks: list[Callback], run: TrainingRun, keywords: dict[str, Any]) -> list[Callback]:
    """Let the run have its length, and the callbacks its events around them."""
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
    known = _keywords_of(pl.Trainer)
    for name in keywords:
        if name not in known:
            raise TypeError(
                f"lightning={{{name!r}: ...}} is no keyword of lightning.Trainer ({suggest_name(name, known)})."
            )
    with quiet_lightning(), cached_entry_points():
        try:
            built = pl.Trainer(callbacks=callbacks, **keywords)
        except MisconfigurationException as error:
            raise ValueError(
                f"lightning.Trainer refuses a keyword, one given as `lightning` or one that follows from the training "
                f"arguments: {error}"
            ) from None
    save_on_all_ranks(built.strategy)
    disable_signal_handling(built)
    disable_auto_resume(built)
    return built


@functools.cache
def _keywords_of(cls: type) -> frozenset[str]:
    return frozenset(inspect.signature(cls).parameters)


def to_list(value: Any) -> list[Any]:
    """Return what may be one thing, several or None as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


class _DiscardingExperiment(DummyExperiment):
    has_told = False

    def nop(self, *args: Any, **kwargs: Any) -> None:
        if not self.has_told:
            self.has_told = True
            logger.warning(
                "A Lightning callback writes to `logger.experiment`, and no tracker is there to keep that. Set "
                "report_to to the one it is made for."
            )


class HistoryLogger(Logger):
    """Adds what Lightning's callbacks log to `state.log_history`, which checkpoints keep and reports show.

    They may log at every micro-batch, and checkpoints would hold an entry for each. So only the newest values are kept,
    and added when the Trainer logs. Nothing is printed, and no event of the Trainer's callbacks comes of it.

    Parameters:
        state: returns the state whose history it is.
    """

    def __init__(self, state: Callable[[], TrainerState]):
        super().__init__()
        self._state = state
        # Name -> the optimizer step at which it was logged last, and its value.
        self._newest: dict[str, tuple[int, float]] = {}
        self._experiment = _DiscardingExperiment()

    @property
    def name(self) -> str:
        """None, so that it makes no folder of callbacks that save."""
        return ""

    @property
    def version(self) -> str:
        """None, as there is no name."""
        return ""

    @property
    def experiment(self) -> Any:
        """Takes what callbacks write to the object of a service, as pictures, and keeps nothing of it; says so once."""
        return self._experiment

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Keep values until the Trainer logs; newer ones of a name take the place of older ones."""
        # Lightning's step is a number of batches in some cases. Its epoch counts complete ones only.
        now = self._state().global_step
        numbers = {name: value for name, value in metrics.items() if is_number(value) and name not in COUNTS}
        self._newest.update((name, (now, float(value))) for name, value in numbers.items())

    def add_to_history(self) -> None:
        """Add what is new to the history, as one entry for each optimizer step."""
        for step in sorted({step for step, _ in self._newest.values()}):
            values = {name: value for name, (of, value) in self._newest.items() if of == step}
            self._state().log_history.append({**values, "step": step})
        self._newest = {}

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the arguments are saved with the model."""
