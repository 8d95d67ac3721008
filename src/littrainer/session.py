"""All that belongs to one training, and one call of `train()`: from the checks beforehand to what is given back."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from littrainer.arguments.choices import HPSearchBackend
from littrainer.callbacks.handler import notify_of_failure
from littrainer.checkpoint.distributed_resume import (
    AUTO,
    READ_BY,
    checkpoint_for_all,
    needed_to_resume,
    resumed_after_restart,
)
from littrainer.checkpoint.layout import RUN_RECORD_NAME
from littrainer.checkpoint.manager import CheckpointManager
from littrainer.checkpoint.reader import read_state
from littrainer.checkpoint.run_record import facts_of_run, write_run_record
from littrainer.checkpoint.store import store_of
from littrainer.data.limits import check_order_stays, overfits
from littrainer.data.loaders import warn_of_another_loader
from littrainer.distributed.collectives import raise_on_all_ranks
from littrainer.evaluation.results import TrainOutput
from littrainer.hub.push_to_hub import report_pushes_on_error
from littrainer.hub.repository import HubState
from littrainer.lightning_adapter.run_lightning import LightningState, fit
from littrainer.loop.checks import check_before_training
from littrainer.loop.development_run import trial_where_asked_for
from littrainer.loop.health import HealthGuard, RollbackRequested, SkippingHealthGuard
from littrainer.loop.log_eval_save import saves_in_background
from littrainer.loop.loss import RunningLoss
from littrainer.loop.loss_normalization import UNKNOWN, LossHead
from littrainer.loop.model_preparation import model_prepared_for_training
from littrainer.loop.out_of_memory import drop_training_objects, train_with_fitting_batch_size
from littrainer.loop.plan import TrainingPlan
from littrainer.loop.preemption import Preemption, reported_interruption
from littrainer.loop.reports import InputTokenCounter, MemoryReport
from littrainer.loop.run import TrainingRun
from littrainer.loop.speed import NoSpeedLog, SpeedLog
from littrainer.loop.tracked_means import TrackedMeans, tracked_by
from littrainer.loop.watchdog import Watchdog
from littrainer.optim.optimizers import Optimization
from littrainer.runtime.atomic_files import write_whole
from littrainer.runtime.interruptions import UpdateGuard
from littrainer.runtime.notes import END, part_of_training
from littrainer.runtime.seeds import enable_full_determinism, set_seed
from littrainer.search.trial import SearchState, begin_trial, is_search_trial
from littrainer.tracking.selection import set_trial_folder

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments


@dataclass(slots=True)
class TrainingSession:
    """The state of one training; the first is made with the Trainer, so that scripts find it before `train()`.

    A deep copy, and what is unpickled, keeps what lasts for more than one training: a training belongs to the process.

    Attributes:
        optimization, search, hub, memory, train_batch_size, model_is_prepared: what lasts for more than one training:
            optimizer and schedule, hyperparameter search, repository, measurements of memory, samples in a micro-batch
            of this process, and whether evaluations find the model wrapped.
        lightning: a further part that belongs to a package.
        checkpoints: saves and prunes them.
        tokens: counts input tokens.
        loss: the sum of the losses.
        loss_head: what the first window has shown of the model's loss.
        tracked: what the script tracks.
        health: looks for numbers that are not finite.
        run: the training; None before it begins.
        is_in_train: whether `train()` is going on.
        began: `time.monotonic()` when this call of it began.
        preemption: the signals that ask for a checkpoint.
        update_guard: keeps Ctrl-C out of the update of the weights.
        first_step: the optimizer step at which this call of `train()` began.
        first_input_tokens: input tokens seen when it began.
        flos: floating-point operations that are not in the state yet.
        micro_batches_in_window: micro-batches of the current optimizer step.
        clipped: all parameters of the model, if it has clipped their gradients and has yet to clear them.
        eval_dataloaders: evaluation loaders with lasting workers, by name.
        deepspeed: DeepSpeed's engine, or None.
        speed: counts where the time goes, with `log_speed`.
        neftune_hook_handle: takes NEFTune's hook off again; None outside of a training with it.
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
    loss_head: LossHead = UNKNOWN
    tracked: TrackedMeans = field(default_factory=TrackedMeans)
    health: HealthGuard = field(default_factory=HealthGuard)
    run: TrainingRun | None = None
    is_in_train: bool = False
    began: float = field(default_factory=lambda: time.monotonic())
    preemption: Preemption = field(default_factory=Preemption)
    update_guard: UpdateGuard = field(default_factory=UpdateGuard)
    first_step: int = 0
    first_input_tokens: int = 0
    flos: float = 0
    micro_batches_in_window: int = 1
    clipped: list[Any] | None = None
    eval_dataloaders: dict[str, Any] = field(default_factory=dict)
    deepspeed: Any = None
    speed: SpeedLog | NoSpeedLog = field(default_factory=NoSpeedLog)
    neftune_hook_handle: Any = None

    def __reduce__(self) -> Any:
        # Uploads that are on their way belong to the process too.
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
        """Return a session without optimizer, loaders and Lightning objects, which take memory."""
        return TrainingSession(**self._persistent_fields())

    def next(self) -> TrainingSession:
        """Return the session of the next training, which goes on with this one's optimizer and loaders."""
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


def of_session(path: str) -> Any:
    """Return a property of the Trainer that stands for an attribute of its session.

    Parameters:
        path: names from the session to the attribute, with dots between.
    """
    *parts, name = path.split(".")
    holder = attrgetter(".".join(["session", *parts]))
    return property(
        attrgetter(f"session.{path}"),
        lambda trainer, value: setattr(holder(trainer), name, value),
        lambda trainer: delattr(holder(trainer), name),
    )


class TrainerAttributesBase:
    """Attributes of the Trainer that its session holds, under the names of transformers; libraries set some of them."""

    session: TrainingSession

    optimizer: Any = of_session("optimization.optimizer")
    lr_scheduler: Any = of_session("optimization.schedule")
    _created_lr_scheduler = of_session("optimization.schedule_is_own")
    schedule_is_replaced = of_session("optimization.schedule_is_replaced")
    lightning_trainer = of_session("lightning.trainer")
    lightning_module = of_session("lightning.module")
    validation_rounds = of_session("lightning.validation_rounds")
    _tr_loss = of_session("loss.since_last_log")
    _loss_head = of_session("loss_head")
    _total_loss_scalar = of_session("loss.before_last_log")
    _globalstep_last_logged = of_session("loss.step_of_last_log")
    _initial_global_step = of_session("first_step")
    _initial_num_input_tokens_seen = of_session("first_input_tokens")
    current_flos = of_session("flos")
    current_gradient_accumulation_steps = of_session("micro_batches_in_window")
    training_run = of_session("run")
    _train_batch_size = of_session("train_batch_size")
    _model_is_prepared = of_session("model_is_prepared")
    is_in_train = of_session("is_in_train")
    preemption = of_session("preemption")
    update_guard = of_session("update_guard")
    _eval_dataloaders = of_session("eval_dataloaders")
    deepspeed = of_session("deepspeed")
    neftune_hook_handle = of_session("neftune_hook_handle")
    hp_space: Any = of_session("search.space")
    hp_name: Any = of_session("search.name")
    compute_objective: Any = of_session("search.compute_objective")
    hp_search_backend: Any = of_session("search.backend")
    objective: Any = of_session("search.objective")
    _trial: Any = of_session("search.trial")
    hub_model_id = of_session("hub.model_id")
    push_in_progress = of_session("hub.pushes")

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a session before any `__init__`, where a subclass may set attributes of it first."""
        made = super().__new__(cls)
        made.session = TrainingSession()
        return made

    def __copy__(self) -> Any:
        made = type(self).__new__(type(self))
        vars(made).update(vars(self), session=copy.copy(self.session))
        return made


def train(
    trainer: Any,
    resume_from_checkpoint: str | bool | None,
    trial: Any,
    ignore_keys_for_eval: Sequence[str] | None,
) -> TrainOutput:
    """Run one training, from the checks that can be made beforehand to its result."""
    if is_search_trial(trainer, trial):
        begin_trial(trainer, trial)
        # Before the space is asked, as in transformers: a seeded sampler draws in the order in which it is asked.
        _make_new_model(trainer, trial)
    trainer.session = trainer.session.next()
    # It may set any argument, the folder to claim for one.
    trainer._hp_search_setup(trial)
    check_before_training(trainer)
    if trial is None and resume_from_checkpoint is None and trainer.args.resume_from_checkpoint == AUTO:
        resume_from_checkpoint = AUTO
    folder = None if trial is None else trainer._get_output_dir(trial=trial)
    set_trial_folder(trainer.callback_handler.callbacks, folder)
    # Ray sees to it that one process has a trial; the process before may take a while to end.
    is_on_ray = trainer.hp_search_backend == HPSearchBackend.RAY
    run_dir = functools.partial(trainer._get_output_dir, trial=trial)
    folder_lock = trainer.session.checkpoints.open_folder(
        trainer.args, run_dir, functools.partial(_write_record_for_run, trainer)
    )
    # A search goes on by the call that began it.
    reported = reported_interruption(trainer.args, lambda: trainer.state) if trial is None else contextlib.nullcontext()
    with (
        reported,
        trial_where_asked_for(trainer, resume_from_checkpoint),
        contextlib.nullcontext() if is_on_ray else folder_lock,
        notify_of_failure(trainer.callback_handler, trainer.args, lambda: trainer.state),
        report_pushes_on_error(lambda: trainer.push_in_progress),
        tracked_by(trainer.session.tracked),
        Watchdog(trainer.args, lambda: trainer.state, functools.partial(_watchdog_targets, trainer.session)),
    ):
        if trial is None:
            resume_from_checkpoint = resumed_after_restart(resume_from_checkpoint, trainer.args.output_dir)
        return _train_from(trainer, resume_from_checkpoint, trial, ignore_keys_for_eval)


def _watchdog_targets(session: TrainingSession) -> tuple[TrainingRun | None, Any]:
    """Return what the watchdog looks at: the training and the evaluation that Lightning carries out, if it does."""
    lightning = session.lightning
    return (None, None) if lightning.module is None else (session.run, lightning.evaluation)


@contextlib.contextmanager
def _write_record_for_run(trainer: Any, folder: Path) -> Iterator[None]:
    """Write the record of a run, and put it back to what it was if the run fails before its first optimizer step."""
    session, record, before = trainer.session, folder / RUN_RECORD_NAME, None
    is_new = not record.exists()
    # A record that cannot be read is not put back.
    with contextlib.suppress(OSError):
        before = record.read_bytes()
    session.checkpoints.facts = facts_of_run(trainer.model, trainer.train_dataset, trainer.eval_dataset)
    write_run_record(trainer.args, folder, session.checkpoints.facts)
    try:
        yield
    except BaseException:
        if session.run is None or trainer.state.global_step <= session.first_step:
            with contextlib.suppress(OSError):
                if is_new:
                    record.unlink()
                elif before is not None:
                    write_whole(record, before)
        raise


def _train_from(
    trainer: Any, resume_from_checkpoint: str | bool | None, trial: Any, ignore_keys_for_eval: Sequence[str] | None
) -> TrainOutput:
    args = trainer.args
    trainer.preemption = Preemption.for_arguments(args)
    guard = SkippingHealthGuard if args.on_nonfinite in ("skip", "rollback") else HealthGuard
    trainer.session.health = guard(args.on_nonfinite, args.spike_factor)
    trainer.session.checkpoints.is_async = saves_in_background(args, trainer)
    trainer.is_in_train = True
    try:
        if trainer.model_init is not None and not is_search_trial(trainer, trial):
            _make_new_model(trainer, trial)
        casts_to_evaluate = args.fp16_full_eval or args.bf16_full_eval
        is_placed_elsewhere = trainer.is_fsdp_enabled or trainer.is_model_parallel
        if casts_to_evaluate and trainer.model_init is None and not is_placed_elsewhere:
            # So far it was left where it is, to be cast by an evaluation.
            trainer._move_model_to_device(trainer.model, args.device)
        checkpoint = checkpoint_for_all(
            resume_from_checkpoint, args, needed_to_resume(trainer._find_overrides(*READ_BY))
        )
        memory = trainer.session.memory
        with trainer.update_guard, memory.measuring("train"), model_prepared_for_training(trainer):
            if checkpoint is not None:
                with raise_on_all_ranks(f"loading the model in {checkpoint}"):
                    trainer._load_from_checkpoint(str(checkpoint))
                    _resume_batch_size(trainer, checkpoint)
            # Those of the script, or of a training before this one.
            given = trainer.optimizer, trainer.lr_scheduler
            while True:
                try:
                    return train_with_fitting_batch_size(
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
                # Outside of the except block, since the error's traceback holds the batch and its graph.
                checkpoint = _roll_back(trainer, fault, given)
    finally:
        try:
            trainer.session.checkpoints.close()
        finally:
            trainer.preemption.stop()
            trainer.is_in_train = False


def _roll_back(trainer: Any, fault: Any, given: tuple[Any, Any]) -> Path:
    """Put all back to the last healthy checkpoint, except what is read from it when training begins."""
    session = trainer.session
    session.checkpoints.wait()
    session.run.step.drain_flag_sync()
    found = session.health.roll_back(fault, session.run.plan.without_windows(1, trainer.args).max_steps)
    checkpoint = checkpoint_for_all(found, trainer.args, needed_to_resume(trainer._find_overrides(*READ_BY)))
    assert checkpoint is not None
    if trainer.accelerator.scaler is not None:
        # Gradients that were unscaled for a step that is not taken.
        trainer.accelerator.scaler.update()
    session.flos = 0
    session.tracked.take(trainer.args.device)
    trainer.optimizer, trainer.lr_scheduler = given
    drop_training_objects(trainer)
    with raise_on_all_ranks(f"loading the model in {checkpoint}"):
        trainer._load_from_checkpoint(str(checkpoint))
    return checkpoint


def train_with_batch_size(
    trainer: Any,
    batch_size: int | None,
    resume_from_checkpoint: str | None,
    trial: Any,
    ignore_keys_for_eval: Sequence[str] | None,
) -> TrainOutput:
    """Train with micro-batches of one size.

    Parameters:
        batch_size: samples in a micro-batch, where `auto_find_batch_size` looks for the size.
        resume_from_checkpoint: the folder to resume from, whose weights are loaded already.
    """
    checkpoint = None if resume_from_checkpoint is None else Path(resume_from_checkpoint)
    if trainer.args.auto_find_batch_size and batch_size is not None:
        trainer._update_auto_batch_size(batch_size)
    loader = trainer.get_train_dataloader()
    warn_of_another_loader(trainer.args, loader)
    if overfits(trainer):
        check_order_stays(loader)
    if trainer.args.log_speed:
        padding = getattr(trainer.processing_class, "pad_token_id", None)
        trainer.session.speed = SpeedLog(trainer.args, trainer.model, padding, trainer.get_tp_size())
    # An override of transformers 4.57 requires the samples of an optimizer step.
    total = inspect.signature(trainer.set_initial_training_values).parameters.get("total_train_batch_size")
    given = [] if total is None or total.default is None else [trainer.get_total_train_batch_size(trainer.args)]
    plan = TrainingPlan(*trainer.set_initial_training_values(trainer.args, loader, *given))
    run = trainer.training_run = TrainingRun(trainer, loader, plan, checkpoint, trial, ignore_keys_for_eval)
    run.prepare_state()
    with raise_on_all_ranks(f"looking into {run.folder}"):
        steps = range(trainer.state.global_step + 1, run.plan.max_steps + 1)
        store_of(run.folder).refuse_folders_of_others(steps)
    run.announce()
    if run.epochs_left > 0:
        fit(trainer, run)
    else:
        run.begin_without_steps()
    with part_of_training(END), raise_on_all_ranks("ending the training"):
        return trainer._finalize_training(trial, plan.num_train_samples, run.start_time)


def _resume_batch_size(trainer: Any, checkpoint: Path) -> None:
    # What fitted before fits again; without a search the arguments decide.
    found = read_state(checkpoint).train_batch_size
    if trainer.args.auto_find_batch_size and found is not None:
        trainer._train_batch_size = found


def _make_new_model(trainer: Any, trial: Any) -> None:
    args = trainer.args
    seed_everything(args, args.seed if trial is not None else trainer.session.search.seed_for_model.get(args.seed))
    model = trainer.model = trainer.call_model_init(trainer.session.search.best_trial if trial is None else trial)
    trainer.optimizer = trainer.lr_scheduler = None
    trainer._parameters_without_embeddings = None
    if type(model) is not trainer._described_model_class:
        # A model_init may make models of several classes, by the trial for one.
        trainer._update_model_facts()
        trainer._signature_columns = None
    if trainer.place_model_on_device:
        trainer._move_model_to_device(model, args.device)
    trainer.model_wrapped = model


def seed_everything(args: TrainingArguments, seed: int | None = None) -> None:
    """Seed all generators, deterministically where `full_determinism` asks for it.

    Parameters:
        seed: by default `args.seed`.
    """
    seed = args.seed if seed is None else seed
    if args.full_determinism:
        enable_full_determinism(seed)
    else:
        set_seed(seed)
