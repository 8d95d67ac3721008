"""One trial: a training with parameters of its own, its objective, and the memory that it gives back."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from littrainer.checkpoint.atomic_write import set_aside_and_delete, sort_checkpoints
from littrainer.checkpoint.distributed_save import leads
from littrainer.checkpoint.layout import RUN_RECORD_NAME
from littrainer.errors.lazy_isinstance import is_a
from littrainer.search.failures import TRIAL_FAILURES
from littrainer.search.memory import release_frames, release_memory
from littrainer.search.objective import refuse_nan
from littrainer.search.reporting import id_of, objective_in
from littrainer.search.trial_parameters import differs, parameters_of, set_parameters, settle_pairs
from littrainer.training.checks import check_arguments
from littrainer.training.loss import smoother_for
from littrainer.training.reports import MemoryReport

if TYPE_CHECKING:
    from littrainer.trainer import Trainer

logger = logging.getLogger(__name__)

# Arguments by which the optimizer is made, unless the Trainer was given its class and keywords.
OF_THE_NAMED_OPTIMIZER = ("learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon", "optim", "optim_args")
SEEDS = "littrainer:seeds"
"""An attribute of this name in a study's trial holds the seeds before and, once it has ended, after the trial."""

MAKES_THE_OPTIMIZER = ("create_optimizer", "create_optimizer_and_scheduler")


def run_trial(
    trainer: Trainer,
    trial: Any,
    resume_from_checkpoint: str | None = None,
    evaluated_at_end: Callable[[dict[str, float]], None] | None = None,
) -> float | list[float]:
    """Train with the parameters of a trial, and give back all memory however it ends.

    Parameters:
        trial: an Optuna trial, or a dict of parameters.
        resume_from_checkpoint: the folder of a checkpoint to go on from.
        evaluated_at_end: where no evaluation was reported during training, one is made at the end; this is called with
            its metrics while the model is still there.

    Returns:
        the objective of the last evaluation.

    Raises:
        SearchMistake: the script is wrong, so that no further trial makes sense.
        optuna.TrialPruned: the trial was not worth going on with; its checkpoints are deleted.
        Exception: one of TRIAL_FAILURES, where the trial has failed; or any other error of the script.
    """
    trainer.objective = None
    try:
        trainer.train(resume_from_checkpoint=resume_from_checkpoint, trial=trial)
        if trainer._search is not None:
            trainer._search.tell_of_same_model(trainer)
        if trainer.objective is None:
            metrics = trainer.evaluate()
            trainer.objective = objective_in(trainer, metrics)
            if evaluated_at_end is not None:
                evaluated_at_end(metrics)
        refuse_nan(trainer.objective)
        return trainer.objective
    except BaseException as error:
        if is_a(error, "pruned trial"):
            remove_checkpoints(trainer, trial)
        if is_a(error, "pruned trial") or isinstance(error, TRIAL_FAILURES):
            release_frames(error)
        raise
    finally:
        release_memory(trainer)


def is_of_search(trainer: Trainer, trial: Any) -> bool:
    """Whether a training is a trial of a search."""
    return trial is not None and trainer.hp_search_backend is not None


def begin_trial(trainer: Trainer, trial: Any) -> None:
    """Let a trial find the Trainer as the search did, but for the seed, which stays that of the trial before.

    The model is made with it, as in transformers.
    """
    seed = getattr(trial, "user_attrs", {}).get(SEEDS, [trainer.args.seed])[0]
    if trainer._search is not None:
        trainer._search.begin_trial(trainer, trial)
    trainer.args.seed = trainer._seeds_of_models[str(id_of(trainer, trial))] = seed


def set_up_trial(trainer: Trainer, trial: Any) -> None:
    """Set the Trainer's arguments to the parameters of a trial; outside of a search only the trial is noted.

    Raises:
        SearchMistake: the space or a parameter is wrong.
        ValueError: the parameters do not go together.
        NotImplementedError: a parameter's value is not supported.
    """
    trainer._trial = trial
    if trial is None:
        _follow_changes_since_search(trainer)
    if not is_of_search(trainer, trial):
        return
    parameters = parameters_of(trainer, trial)
    if hasattr(trial, "space_is_asked"):
        # One of several processes.
        trial.space_is_asked(parameters)
    before = dict(vars(trainer.args))
    changed = set_parameters(trainer, parameters)
    if trainer._search is not None:
        trainer._search.tell_of_differences(trainer.args, before, parameters)
    _tell_of_given_optimizer(trainer, parameters)
    logger.info("Trial with %s.", ", ".join(f"{name}={value!r}" for name, value in parameters.items()))
    follow_arguments(trainer, changed)
    if trainer._search is not None:
        trainer._search.checkpoints_there = _checkpoints_in(trainer._get_output_dir(trial=trial))


def follow_arguments(trainer: Trainer, changed: set[str]) -> None:
    """Make anew what a Trainer makes of its arguments.

    Parameters:
        changed: names of the arguments that have other values than when it was made.

    Raises:
        ValueError, TypeError, NotImplementedError: as at the Trainer's construction.
    """
    args = trainer.args
    check_arguments(args)
    trainer._train_batch_size = args.train_batch_size
    trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
    if "label_smoothing_factor" in changed:
        trainer.label_smoother = smoother_for(trainer.model, trainer.args.label_smoothing_factor)
    if "neftune_noise_alpha" in changed:
        trainer.neftune_noise_alpha = args.neftune_noise_alpha
    if "label_names" in changed:
        trainer._read_model_facts()
        trainer._signature_columns = None
    if "skip_memory_metrics" in changed:
        trainer._memory = MemoryReport(not args.skip_memory_metrics)
    trainer.create_accelerator_and_postprocess()
    if changed & {"fp16_full_eval", "bf16_full_eval", "place_model_on_device", "fsdp", "deepspeed"}:
        trainer.place_model_on_device = trainer._moves_model_itself()


def _follow_changes_since_search(trainer: Trainer) -> None:
    """Let a training after a search go by arguments that the script has set to the best trial's."""
    left = trainer._arguments_after_search
    if left is None:
        return
    changed = {name for name, value in vars(trainer.args).items() if differs(value, left.get(name))}
    if changed:
        settle_pairs(trainer.args, changed)
        trainer._arguments_after_search = dict(vars(trainer.args))
        follow_arguments(trainer, changed)


def _tell_of_given_optimizer(trainer: Trainer, parameters: Mapping[str, Any]) -> None:
    if trainer.optimizer_cls_and_kwargs is None or trainer._own_methods(*MAKES_THE_OPTIMIZER):
        return
    idle = [name for name in OF_THE_NAMED_OPTIMIZER if name in parameters]
    if idle:
        kind, keywords = trainer.optimizer_cls_and_kwargs
        _tell_of_idle(", ".join(idle), f"{getattr(kind, '__name__', kind)} with {keywords}")


@cache
def _tell_of_idle(names: str, optimizer: str) -> None:
    logger.warning(
        "Trials set %s without effect: optimizer_cls_and_kwargs makes the optimizer (%s). Choose it by optim and "
        "optim_args instead, or override create_optimizer.",
        names,
        optimizer,
    )


def _checkpoints_in(folder: str) -> list[str]:
    return sort_checkpoints(folder) if os.path.isdir(folder) else []


def remove_checkpoints(trainer: Trainer, trial: Any) -> None:
    """Delete the checkpoints that a trial has written, and their folder if nothing else is in it."""
    there = None if trainer._search is None else trainer._search.checkpoints_there
    if there is None:
        return
    folder = trainer._get_output_dir(trial=trial)
    if not leads(trainer, folder):
        return
    delete_checkpoints(folder, there)


def delete_checkpoints(folder: str, but: Collection[str] = ()) -> None:
    """Delete the checkpoints in the folder of a pruned trial, and the folder if nothing else is in it.

    Parameters:
        but: paths of those that are kept.
    """
    for checkpoint in _checkpoints_in(folder):
        if checkpoint not in but:
            try:
                set_aside_and_delete(Path(checkpoint))
            except OSError as error:
                logger.warning("%s of a pruned trial could not be deleted (%s): delete it by hand.", checkpoint, error)
    # It may never have been made, or hold something else.
    with contextlib.suppress(OSError):
        Path(folder, RUN_RECORD_NAME).unlink(missing_ok=True)
        Path(folder).rmdir()
