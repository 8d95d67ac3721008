"""The state of a training, the attributes of a Trainer, and the course of a `train()` call."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from littrainer.arguments.choices import HPSearchBackend
from littrainer.callbacks.handler import notify_of_failure
from littrainer.callbacks.trainer_context import TrainerContext
from littrainer.checkpoint.layout import RUN_RECORD_NAME
from littrainer.checkpoint.manager import AUTO, FILES_READ_BY_METHOD, CheckpointManager, find_restart_checkpoint
from littrainer.checkpoint.reader import read_state
from littrainer.checkpoint.run_record import describe_run, get_timestamp, record_end, write_run_record
from littrainer.checkpoint.store import get_store
from littrainer.data.limits import check_order_is_fixed, is_overfit_run
from littrainer.data.loaders import warn_about_ignored_batching
from littrainer.distributed.collectives import raise_on_all_ranks
from littrainer.evaluation.results import TrainOutput
from littrainer.hub.push_to_hub import report_pushes_on_error
from littrainer.hub.repository import HubState
from littrainer.lightning_adapter.run_lightning import LightningState, fit
from littrainer.loop.checks import check_before_training
from littrainer.loop.fast_dev_run import apply_fast_dev_run
from littrainer.loop.health import HealthGuard, RollbackRequested, SkippingHealthGuard
from littrainer.loop.log_eval_save import can_save_in_background
from littrainer.loop.loss import RunningLoss
from littrainer.loop.loss_normalization import UNKNOWN, LossReduction
from littrainer.loop.model_preparation import prepare_model_for_training
from littrainer.loop.out_of_memory import drop_training_objects, train_with_auto_batch_size
from littrainer.loop.plan import TrainingPlan
from littrainer.loop.preemption import Preemption, report_ctrl_c
from littrainer.loop.reports import InputTokenCounter, MemoryReport, find_end_reason
from littrainer.loop.run import TrainingRun
from littrainer.loop.speed import NoSpeedLog, SpeedLog
from littrainer.loop.tracked_means import TrackedMeans, collect_tracked_values
from littrainer.loop.watchdog import Watchdog
from littrainer.optim.optimizers import Optimization
from littrainer.runtime.atomic_files import write_atomically
from littrainer.runtime.interruptions import UpdateGuard
from littrainer.runtime.notes import END, part_of_training
from littrainer.runtime.seeds import enable_full_determinism, set_seed
from littrainer.search.trial import SearchState, begin_trial, is_search_trial
from littrainer.strategies.sequence_parallel import SequenceCutter, cut_sequences
from littrainer.tracking.selection import set_trial_folder

if TYPE_CHECKING:
    from torch import nn

    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.callbacks.state import TrainerState
    from littrainer.compat.accelerator import AcceleratorFacade
    from littrainer.data.columns import DroppedColumns

Value = TypeVar("Value")
# Error -> why the training ended.
END_REASONS = {
    "KeyboardInterrupt": "interrupted by Ctrl-C",
    "SystemExit": "ended by the script",
    "TrialPruned": "pruned",
}


@dataclass(slots=True)
class TrainingSession:
    """The state of a training; the first session exists before `train()`, so that scripts can read it.

    A deep copy or a pickle contains only the fields that outlive a training: `optimization`, `search`, `hub`, `memory`,
    `train_batch_size` and `model_is_prepared`.

    Attributes:
        train_batch_size: samples per micro-batch and process.
        model_is_prepared: whether the model is wrapped for evaluation.
        loss: the running sum of losses.
        loss_reduction: how the model reduces its loss, as detected in the first window.
        tracked: values of `Trainer.track`, and loss terms.
        eval_loss_terms: loss terms of an evaluation.
        needs_logits: an evaluation needs logits, so its loss is not chunked (`chunked_loss` computes no logits).
        has_chunked_loss: `compute_loss` has computed a loss over chunks.
        health: detects non-finite numbers and spikes.
        run: None before the training begins.
        began: `time.monotonic()` at the start of `train()`.
        preemption: the signals that request a checkpoint.
        update_guard: delays Ctrl-C during an update of the weights.
        first_step, first_input_tokens: optimizer steps and input tokens before this `train()`.
        flos: floating-point operations not yet added to the state.
        main_input_name, parameters_without_embeddings: facts of the model in training, for counting its operations.
        micro_batches_in_window: of the current optimizer step.
        has_mixed_mesh_grads: gradients are sharded over different device meshes; None before the first clipping.
        clipped_parameters: the model's parameter list, made to clip gradients and reused to clear them; None if
            clipping made no such list.
        eval_dataloaders: loaders with persistent workers, by name.
        sequences: the hooks of sequence parallelism; None while the Trainer does not use them.
    """

    optimization: Optimization = field(default_factory=Optimization)
    search: SearchState = field(default_factory=SearchState)
    hub: HubState = field(default_factory=HubState)
    memory: MemoryReport = field(default_factory=lambda: MemoryReport(False))
    train_batch_size: int = 0
    model_is_prepared: bool = False
    lightning: LightningState = field(default_factory=LightningState)
    checkpoints: CheckpointManager = field(default_factory=CheckpointManager)
    tokens: InputTokenCounter = field(default_factory=InputTokenCounter)
    loss: RunningLoss = field(default_factory=RunningLoss)
    loss_reduction: LossReduction = UNKNOWN
    tracked: TrackedMeans = field(default_factory=TrackedMeans)
    eval_loss_terms: TrackedMeans = field(default_factory=TrackedMeans)
    needs_logits: bool = False
    has_chunked_loss: bool = False
    health: HealthGuard = field(default_factory=HealthGuard)
    run: TrainingRun | None = None
    is_in_train: bool = False
    began: float = field(default_factory=lambda: time.monotonic())
    preemption: Preemption = field(default_factory=Preemption)
    update_guard: UpdateGuard = field(default_factory=UpdateGuard)
    first_step: int = 0
    first_input_tokens: int = 0
    flos: float = 0
    main_input_name: str | None = None
    parameters_without_embeddings: int | None = None
    micro_batches_in_window: int = 1
    has_mixed_mesh_grads: bool | None = None
    clipped_parameters: list[Any] | None = None
    eval_dataloaders: dict[str, Any] = field(default_factory=dict)
    deepspeed: Any = None
    speed: SpeedLog | NoSpeedLog = field(default_factory=NoSpeedLog)
    neftune_hook_handle: Any = None
    sequences: SequenceCutter | None = None

    def __reduce__(self) -> Any:
        # Running uploads belong to the process.
        hub = replace(self.hub, pushes=None)
        return _make_session, ({**self._persistent_fields(), "optimization": self.optimization, "hub": hub},)

    def __copy__(self) -> TrainingSession:
        names = ("optimization", "search", "hub", "lightning")
        parts: dict[str, Any] = {name: replace(getattr(self, name)) for name in names}
        return replace(self, **parts)

    def _persistent_fields(self) -> dict[str, Any]:
        names = ("search", "hub", "memory", "train_batch_size", "model_is_prepared")
        return {name: getattr(self, name) for name in names}

    def copy_without_training(self) -> TrainingSession:
        """Return a session without optimizer, loaders and Lightning objects, to free memory."""
        return TrainingSession(**self._persistent_fields())

    def next(self) -> TrainingSession:
        """Return the session of the next training, which keeps optimizer and loaders."""
        return TrainingSession(
            **self._persistent_fields(),
            optimization=replace(self.optimization),
            lightning=replace(self.lightning),
            tokens=self.tokens,
            flos=self.flos,
            micro_batches_in_window=self.micro_batches_in_window,
            eval_dataloaders=dict(self.eval_dataloaders),
            deepspeed=self.deepspeed,
        )


def _make_session(fields: dict[str, Any]) -> TrainingSession:
    return TrainingSession(**fields)


class _Path:
    """Stand-in for a session that records which attribute a function reads."""

    def __init__(self, *names: str):
        self.names = names

    def __getattr__(self, name: str) -> _Path:
        return _Path(*self.names, name)


def session_attribute(read: Callable[[TrainingSession], Value]) -> Value:
    """Return a Trainer property for the attribute, possibly nested, that `read` reads from the session."""
    path: Any = read(_Path("session"))  # type: ignore[arg-type]
    *parts, name = path.names
    get_holder = attrgetter(".".join(parts))
    accessors: Any = property(
        attrgetter(".".join(path.names)),
        lambda trainer, value: setattr(get_holder(trainer), name, value),
        lambda trainer: delattr(get_holder(trainer), name),
    )
    return accessors


class TrainerAttributesBase(TrainerContext):
    """The typed attributes of a Trainer; `Trainer.__init__` sets those that the session does not store."""

    session: TrainingSession

    # ---- Attributes of the session, under transformers' names; libraries set some of them
    optimizer: torch.optim.Optimizer | None = session_attribute(lambda session: session.optimization.optimizer)
    lr_scheduler = session_attribute(lambda session: session.optimization.schedule)
    _created_lr_scheduler = session_attribute(lambda session: session.optimization.is_default_schedule)
    is_schedule_overridden = session_attribute(lambda session: session.optimization.is_schedule_overridden)
    lightning_trainer = session_attribute(lambda session: session.lightning.trainer)
    lightning_module = session_attribute(lambda session: session.lightning.module)
    _tr_loss = session_attribute(lambda session: session.loss.since_last_log)
    _loss_reduction = session_attribute(lambda session: session.loss_reduction)
    _needs_logits = session_attribute(lambda session: session.needs_logits)
    _has_chunked_loss = session_attribute(lambda session: session.has_chunked_loss)
    _total_loss_scalar = session_attribute(lambda session: session.loss.before_last_log)
    _globalstep_last_logged = session_attribute(lambda session: session.loss.step_of_last_log)
    _initial_global_step = session_attribute(lambda session: session.first_step)
    _initial_num_input_tokens_seen = session_attribute(lambda session: session.first_input_tokens)
    current_flos = session_attribute(lambda session: session.flos)
    current_gradient_accumulation_steps = session_attribute(lambda session: session.micro_batches_in_window)
    training_run = session_attribute(lambda session: session.run)
    _train_batch_size = session_attribute(lambda session: session.train_batch_size)
    _model_is_prepared = session_attribute(lambda session: session.model_is_prepared)
    is_in_train = session_attribute(lambda session: session.is_in_train)
    preemption = session_attribute(lambda session: session.preemption)
    update_guard = session_attribute(lambda session: session.update_guard)
    _eval_dataloaders = session_attribute(lambda session: session.eval_dataloaders)
    deepspeed = session_attribute(lambda session: session.deepspeed)
    neftune_hook_handle = session_attribute(lambda session: session.neftune_hook_handle)
    hp_space = session_attribute(lambda session: session.search.space)
    hp_name = session_attribute(lambda session: session.search.name)
    compute_objective = session_attribute(lambda session: session.search.compute_objective)
    hp_search_backend = session_attribute(lambda session: session.search.backend)
    objective = session_attribute(lambda session: session.search.objective)
    _trial = session_attribute(lambda session: session.search.trial)
    hub_model_id = session_attribute(lambda session: session.hub.model_id)
    push_in_progress = session_attribute(lambda session: session.hub.pushes)

    accelerator: AcceleratorFacade

    # ---- Facts of the arguments and the model
    # Model class from which these facts were read.
    _described_model_class: type
    # Forward's parameters and labels; None until a dataset is first trimmed to them.
    _signature_columns: list[str] | None
    # Description of a dataset -> its removed columns.
    _dropped_columns: dict[str | None, DroppedColumns]

    if TYPE_CHECKING:
        # ---- Methods of `TrainerHooks`, as this module calls them
        def _update_model_facts(self) -> None: ...
        def _find_overrides(self, *names: str) -> list[str]: ...
        def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None: ...
        def _inner_training_loop(
            self,
            batch_size: int | None = None,
            args: TrainingArguments | None = None,
            resume_from_checkpoint: str | None = None,
            trial: Any = None,
            ignore_keys_for_eval: Sequence[str] | None = None,
        ) -> TrainOutput: ...
        def _update_auto_batch_size(self, batch_size: int) -> None: ...
        def _finalize_training(self, trial: Any, num_train_samples: float, start_time: float) -> TrainOutput: ...
        def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None: ...
        def _hp_search_setup(self, trial: Any) -> None: ...

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a session first, since a subclass may set attributes before it calls `Trainer.__init__`."""
        trainer = super().__new__(cls)
        trainer.session = TrainingSession()
        return trainer

    def __copy__(self) -> Any:
        trainer = type(self).__new__(type(self))
        vars(trainer).update(vars(self), session=copy.copy(self.session))
        return trainer


def train(
    trainer: TrainerAttributesBase,
    resume_from_checkpoint: str | bool | None,
    trial: Any,
    ignore_keys_for_eval: Sequence[str] | None,
) -> TrainOutput:
    if is_search_trial(trainer.session.search, trial):
        begin_trial(trainer.session.search, trainer.args, trial)
        # `model_init` may draw from the trial, as does `hp_space`, which `_hp_search_setup` calls below. The order is
        # transformers', so that a seeded sampler draws the same values.
        _make_new_model(trainer, trial)
    trainer.session = trainer.session.next()
    # Called before the code below reads arguments, since an override may set any of them.
    trainer._hp_search_setup(trial)
    check_before_training(trainer)
    # As in transformers, `train()` ignores args.resume_from_checkpoint, except for "auto", which transformers lacks.
    if trial is None and resume_from_checkpoint is None and trainer.args.resume_from_checkpoint == AUTO:
        resume_from_checkpoint = AUTO
    set_trial_folder(
        trainer.callback_handler.callbacks, None if trial is None else trainer._get_output_dir(trial=trial)
    )
    trainer.session.checkpoints.times = {"started": get_timestamp()}
    run_dir = functools.partial(trainer._get_output_dir, trial=trial)
    write_record = functools.partial(_write_record_for_run, trainer)
    # Ray: no lock, since the previous process of a paused trial may not have ended.
    is_on_ray = trainer.hp_search_backend == HPSearchBackend.RAY
    folder_lock = trainer.session.checkpoints.open_folder(trainer.args, run_dir, write_record)
    # The report names a command that resumes a training, not a search.
    reported = report_ctrl_c(trainer.args, lambda: trainer.state) if trial is None else contextlib.nullcontext()
    with (
        reported,
        apply_fast_dev_run(
            trainer, trainer.callback_handler.callbacks, trainer.eval_dataset is not None, resume_from_checkpoint
        ),
        contextlib.nullcontext() if is_on_ray else folder_lock,
        notify_of_failure(trainer.callback_handler, trainer.args, lambda: trainer.state),
        report_pushes_on_error(lambda: trainer.push_in_progress),
        collect_tracked_values(trainer.session.tracked),
        Watchdog(trainer.args, lambda: trainer.state, functools.partial(_watchdog_targets, trainer.session)),
    ):
        # Trials have their own folders, in which a restart does not look for checkpoints.
        if trial is None:
            resume_from_checkpoint = find_restart_checkpoint(resume_from_checkpoint, trainer.args.output_dir)
        output = _train_from(trainer, resume_from_checkpoint, trial, ignore_keys_for_eval)
        # An override of the training loop may return something else.
        signal, metrics = trainer.preemption.stop_signal, getattr(output, "metrics", None) or {}
        signal_name = None if signal is None else signal.name
        reason = find_end_reason(
            trainer.args,
            trainer.state,
            trainer.callback_handler.callbacks,
            signal_name,
            metrics.get("ended_by"),
        )
        trainer.session.checkpoints.times["end"] = _describe_end(trainer.state, reason)
        return output


def _watchdog_targets(session: TrainingSession) -> tuple[TrainingRun | None, Any]:
    lightning = session.lightning
    return (None, None) if lightning.module is None else (session.run, lightning.evaluation)


@contextlib.contextmanager
def _write_record_for_run(trainer: TrainerAttributesBase, folder: Path) -> Iterator[None]:
    """Write the run record; restore the previous record after a failure before the first optimizer step."""
    session = trainer.session
    record = folder / RUN_RECORD_NAME
    checkpoints, previous = session.checkpoints, None
    is_new = not record.exists()
    with contextlib.suppress(OSError):
        previous = record.read_bytes()
    checkpoints.facts = describe_run(trainer.model, trainer.train_dataset, trainer.eval_dataset)
    write_run_record(trainer.args, folder, checkpoints.facts)
    try:
        yield
        record_end(record, checkpoints.times["end"])
    except BaseException as error:
        if session.run is None or trainer.state.global_step <= session.first_step:
            with contextlib.suppress(OSError):
                if is_new:
                    record.unlink()
                elif previous is not None:
                    write_atomically(record, previous)
        else:
            name = type(error).__name__
            record_end(record, _describe_end(trainer.state, END_REASONS.get(name, f"failed: {name}")))
        raise


def _describe_end(state: TrainerState, reason: str) -> dict[str, Any]:
    return {"reason": reason, "step": state.global_step, "time": get_timestamp()}


def _train_from(
    trainer: TrainerAttributesBase,
    resume_from_checkpoint: str | bool | None,
    trial: Any,
    ignore_keys_for_eval: Sequence[str] | None,
) -> TrainOutput:
    args, session = trainer.args, trainer.session
    session.preemption = Preemption.create(args)
    guard = SkippingHealthGuard if args.on_nonfinite in ("skip", "rollback") else HealthGuard
    session.health = guard(args.on_nonfinite, args.spike_factor)
    session.checkpoints.is_async = can_save_in_background(args, trainer)
    session.is_in_train = True
    try:
        if trainer.model_init is not None and not is_search_trial(trainer.session.search, trial):
            _make_new_model(trainer, trial)
        casts_to_evaluate = args.fp16_full_eval or args.bf16_full_eval
        is_placed_elsewhere = trainer.is_fsdp_enabled or trainer.is_model_parallel
        if casts_to_evaluate and trainer.model_init is None and not is_placed_elsewhere:
            # The constructor does not move a model that evaluations cast.
            trainer._move_model_to_device(trainer.model, args.device)

        def load_model(folder: str) -> None:
            trainer._load_from_checkpoint(folder)
            _resume_batch_size(trainer, Path(folder))

        reads_logits = bool(trainer._find_overrides("compute_loss", "training_step"))
        with (
            trainer.update_guard,
            trainer.session.memory.measure("train"),
            prepare_model_for_training(trainer),
            cut_sequences(trainer.session, args, trainer.model, reads_logits),
        ):
            overridden = trainer._find_overrides(*FILES_READ_BY_METHOD)
            checkpoint = trainer.session.checkpoints.restore(resume_from_checkpoint, args, overridden, load_model)
            first_optimizers = trainer.optimizer, trainer.lr_scheduler
            while True:
                try:
                    return train_with_auto_batch_size(
                        trainer,
                        lambda: trainer._inner_training_loop(
                            batch_size=trainer._train_batch_size,
                            args=args,
                            resume_from_checkpoint=None if checkpoint is None else str(checkpoint),  # noqa: B023
                            trial=trial,
                            ignore_keys_for_eval=ignore_keys_for_eval,
                        ),
                    )
                except RollbackRequested as error:
                    (fault,) = error.args
                # Outside of the except block, in which the traceback holds the batch and its graph.
                checkpoint = _roll_back(trainer, fault, first_optimizers)
    finally:
        try:
            trainer.session.checkpoints.close()
        finally:
            trainer.preemption.stop()
            trainer.is_in_train = False


def _roll_back(trainer: TrainerAttributesBase, fault: Any, first_optimizers: tuple[Any, Any]) -> Path:
    """Restore the weights of the last finite checkpoint, and return its folder, from which the next loop resumes."""
    session = trainer.session
    session.checkpoints.wait()
    assert session.run is not None and isinstance(session.health, SkippingHealthGuard)
    session.run.step.drain_flag_sync()
    # `prepare_rollback` refuses if no other window is left to train on.
    source = session.health.prepare_rollback(fault, session.run.plan.skip_windows(1, trainer.args).max_steps)
    if trainer.accelerator.scaler is not None:
        # The skipped step left its overflow check in the scaler.
        trainer.accelerator.scaler.update()
    session.flos = 0
    session.tracked.take(trainer.args.device)
    trainer.optimizer, trainer.lr_scheduler = first_optimizers
    drop_training_objects(trainer)
    overridden = trainer._find_overrides(*FILES_READ_BY_METHOD)
    checkpoint = session.checkpoints.restore(source, trainer.args, overridden, trainer._load_from_checkpoint)
    assert checkpoint is not None
    return checkpoint


def train_with_batch_size(
    trainer: TrainerAttributesBase,
    batch_size: int | None,
    resume_from_checkpoint: str | None,
    trial: Any,
    ignore_keys_for_eval: Sequence[str] | None,
) -> TrainOutput:
    """Train with a fixed micro-batch size.

    Parameters:
        batch_size: samples per micro-batch, found by `auto_find_batch_size`.
        resume_from_checkpoint: a folder, whose weights are loaded already.
    """
    checkpoint = None if resume_from_checkpoint is None else Path(resume_from_checkpoint)
    if trainer.args.auto_find_batch_size and batch_size is not None:
        trainer._update_auto_batch_size(batch_size)
    loader = trainer.get_train_dataloader()
    warn_about_ignored_batching(trainer.args, loader)
    if is_overfit_run(trainer):
        check_order_is_fixed(loader)
    if trainer.args.log_speed:
        padding = getattr(trainer.processing_class, "pad_token_id", None)
        trainer.session.speed = SpeedLog(trainer.args, trainer.model, padding, trainer._get_batch_copies())
    # Overrides for transformers 4.57 require the third parameter.
    total = inspect.signature(trainer.set_initial_training_values).parameters.get("total_train_batch_size")
    needs_total = total is not None and total.default is not None
    totals = [trainer.get_total_train_batch_size(trainer.args)] if needs_total else []
    plan = TrainingPlan(*trainer.set_initial_training_values(trainer.args, loader, *totals))
    run = trainer.session.run = TrainingRun(trainer, loader, plan, checkpoint, trial, ignore_keys_for_eval)
    run.prepare_state()
    # Refuse another user's checkpoint folders now, rather than at the save that would replace them.
    folder = run.folder
    with raise_on_all_ranks(f"looking into {folder}"):
        steps = range(trainer.state.global_step + 1, run.plan.max_steps + 1)
        get_store(folder).refuse_foreign_folders(steps)
    run.announce()
    if run.remaining_epochs > 0:
        fit(trainer, run)
    else:
        run.begin_without_steps()
    with part_of_training(END), raise_on_all_ranks("ending the training"):
        return trainer._finalize_training(trial, plan.num_train_samples, run.start_time)


def _resume_batch_size(trainer: TrainerAttributesBase, checkpoint: Path) -> None:
    # Without `auto_find_batch_size` the arguments decide.
    if trainer.args.auto_find_batch_size and (size := read_state(checkpoint).train_batch_size) is not None:
        trainer.session.train_batch_size = size


def _make_new_model(trainer: TrainerAttributesBase, trial: Any) -> None:
    args, search = trainer.args, trainer.session.search
    seed_everything(args, args.seed if trial is not None else search.seed_for_model.get(args.seed))
    model = trainer.model = trainer.call_model_init(search.best_trial if trial is None else trial)
    trainer.optimizer = trainer.lr_scheduler = None
    if type(model) is not trainer._described_model_class:
        trainer._update_model_facts()
        trainer._signature_columns = None
    if trainer.place_model_on_device:
        trainer._move_model_to_device(model, args.device)
    trainer.model_wrapped = model


def seed_everything(args: TrainingArguments, seed: int | None = None) -> None:
    """Seed all random generators, by default with `args.seed`; with `full_determinism`, use deterministic kernels."""
    seed = args.seed if seed is None else seed
    if args.full_determinism:
        enable_full_determinism(seed)
    else:
        set_seed(seed)
