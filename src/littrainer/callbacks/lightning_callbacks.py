"""Which of Lightning's callbacks work in a Trainer, as a table, and the checks that follow from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from littrainer.arguments.choices import IntervalStrategy, SaveStrategy
from littrainer.errors.notes import add_note

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.trainer import Trainer


def _saves(trainer: Trainer) -> bool:
    return trainer.args.save_strategy != SaveStrategy.NO


def _loads_best_model(trainer: Trainer) -> bool:
    return bool(trainer.args.load_best_model_at_end)


def _has_batch_norm(trainer: Trainer) -> bool:
    from torch.nn.modules.batchnorm import _BatchNorm

    return any(isinstance(module, _BatchNorm) for module in trainer.model.modules())


OF_THE_TRAINER = ("littrainer", "transformers")


def backbone_of(model: Any) -> Any:
    """The part of a model below its head, which `BackboneFinetuning` freezes and unfreezes; None where it has none."""
    candidates = (getattr(model, name, None) for name in ("backbone", "base_model"))
    return next((found for found in candidates if hasattr(found, "parameters") and found is not model), None)


def _accumulates_by_argument(trainer: Trainer) -> bool:
    return trainer.args.gradient_accumulation_steps != 1


def _is_stepped_by_deepspeed(trainer: Trainer) -> bool:
    return bool(trainer.is_deepspeed_enabled)


def _has_no_backbone(trainer: Trainer) -> bool:
    return backbone_of(trainer.model) is None


def _never_evaluates(trainer: Trainer) -> bool:
    if trainer.args.eval_strategy != IntervalStrategy.NO or trainer.args.eval_on_start:
        return False
    # A callback or a Trainer of the user's own may evaluate when it likes.
    return _are_known([trainer, *trainer.callback_handler.callbacks])


def _logs_nothing_of_its_own(trainer: Trainer, callbacks: list[Any]) -> bool:
    has_functions = any(is_one_of(callback, "LambdaCallback") for callback in callbacks)
    return not has_functions and _are_known([trainer, *trainer.callback_handler.callbacks, *callbacks])


def _are_known(parts: list[Any]) -> bool:
    return all(type(part).__module__.partition(".")[0] in (*OF_THE_TRAINER, *PACKAGES) for part in parts)


def name_of_evaluations(monitored: Any) -> str | None:
    """The name that a Trainer has for what plain Lightning programs log as `val_...` or `val/...`; None for others."""
    prefixes = ("val_", "val/")
    return f"eval_{monitored[4:]}" if isinstance(monitored, str) and monitored.startswith(prefixes) else None


@dataclass(frozen=True)
class Unless:
    """A set-up in which a callback that works otherwise does not.

    Parameters:
        is_so: asked when a training begins.
        reason: why not.
        instead: what to do about it.
    """

    is_so: Callable[[Trainer], bool]
    reason: str
    instead: str


@dataclass(frozen=True)
class Support:
    """How a callback of Lightning's fares in a Trainer.

    Parameters:
        note: what it does here, or why it cannot work.
        instead: what to use instead of one that cannot work; None for one that works.
        unless: set-ups in which it does not work.
    """

    note: str
    instead: str | None = None
    unless: tuple[Unless, ...] = ()


BEST_MODEL_REPLACES_AVERAGE = Unless(
    _loads_best_model,
    "load_best_model_at_end=True loads the weights of a checkpoint in the place of the averaged ones",
    "set load_best_model_at_end=False",
)

# Classes of lightning.pytorch.callbacks; a class that derives from one is treated as that one.
SUPPORT: dict[str, Support] = {
    "BackboneFinetuning": Support(
        "freezes and unfreezes the model's `backbone`, or the base model of a transformers model; cannot be resumed",
        unless=(
            Unless(
                _has_no_backbone,
                "the model has neither a `backbone` nor a head on a base model",
                "derive from BaseFinetuning, where the model is pl_module.model",
            ),
        ),
    ),
    "BaseFinetuning": Support("the model is `pl_module.model`; cannot be resumed"),
    "BasePredictionWriter": Support("gets the predictions of each batch of `predict()`, and the places of its samples"),
    "BatchSizeFinder": Support(
        "it trains on trial batches of a loader of its own, while the Trainer builds and counts its batches itself",
        instead="call trainer.scale_batch_size() before training, or set auto_find_batch_size=True",
    ),
    "Callback": Support("subclasses of your own: all hooks but those of `test` and of the sanity check"),
    "Checkpoint": Support("the base of callbacks that save; called after all others"),
    "DeviceStatsMonitor": Support("logs at each micro-batch; statistics of the CPU need psutil"),
    "EMAWeightAveraging": Support(
        "evaluations see the averaged weights, and so does the model after training",
        unless=(BEST_MODEL_REPLACES_AVERAGE,),
    ),
    "EarlyStopping": Support("monitors what the Trainer logs: `eval_loss`, `eval_accuracy`, `loss`"),
    "GradientAccumulationScheduler": Support(
        "the optimizer steps of the training are counted by it; of a class that derives from it "
        "`get_accumulate_grad_batches` is called, and no hook",
        unless=(
            Unless(
                _accumulates_by_argument,
                "gradient_accumulation_steps asks for another number",
                "leave that argument at 1",
            ),
            Unless(
                _is_stepped_by_deepspeed,
                "DeepSpeed counts micro-batches by a number of its own",
                "train without DeepSpeed",
            ),
        ),
    ),
    "LambdaCallback": Support("functions for single hooks"),
    "LearningRateFinder": Support(
        "it runs trial steps on a loader of its own before training, with a schedule of its own",
        instead="call trainer.lr_find() before training, and set learning_rate to the suggestion()",
    ),
    "LearningRateMonitor": Support("logs the learning rate with which the next optimizer step is taken"),
    "ModelCheckpoint": Support(
        "saves folders that `from_pretrained` loads and `train(resume_from_checkpoint=...)` resumes; monitors what the "
        "Trainer logs"
    ),
    "ModelPruning": Support(
        "the model is pruned when training ends",
        unless=(
            Unless(
                _saves,
                "checkpoints written while it prunes hold masks beside weights, which from_pretrained does not load",
                'set save_strategy="no" and save the model after training',
            ),
        ),
    ),
    "ModelSummary": Support("prints the layers of the model when training begins"),
    "OnExceptionCheckpoint": Support("saves a folder as ModelCheckpoint does when training ends with an error"),
    "ProgressBar": Support("the base of progress bars; takes the place of the Trainer's own"),
    "RichModelSummary": Support("needs rich"),
    "RichProgressBar": Support("needs rich; takes the place of the Trainer's own"),
    "SpikeDetection": Support("compares the losses of micro-batches, as `training_step` returns them"),
    "StochasticWeightAveraging": Support(
        "the averaged weights are those of the model after training; its own schedule takes over when it begins",
        unless=(
            BEST_MODEL_REPLACES_AVERAGE,
            Unless(
                _has_batch_norm,
                "for batch norm it needs an epoch more than the training has",
                "use EMAWeightAveraging, which averages the statistics of batch norm too",
            ),
        ),
    ),
    "TQDMProgressBar": Support("takes the place of the Trainer's own"),
    "ThroughputMonitor": Support("`batch_size_fn` gets a micro-batch in training and a batch in evaluation"),
    "Timer": Support("training stops at the end of the optimizer step, or of the epoch, in which the time is over"),
    "WeightAveraging": Support(
        "evaluations see the averaged weights, and so does the model after training",
        unless=(BEST_MODEL_REPLACES_AVERAGE,),
    ),
}
# What they ask for the training does by itself, and Lightning does not call them.
CARRIED_OUT_BY_TRAINING = ("GradientAccumulationScheduler",)
# These change the model, and only a training is theirs: not the model that a later evaluation is asked about.
ONLY_IN_TRAINING = ("BaseFinetuning", "ModelPruning", "StochasticWeightAveraging", "WeightAveraging")
# One that has been through a training would take its weights into the next one.
BEGUN_ANEW = ("StochasticWeightAveraging",)
AS_IT_WAS_MADE = "_as_it_was_made"
PACKAGES = ("lightning", "pytorch_lightning")


def names_of(callback: Any) -> Iterator[str]:
    """The names of Lightning's own classes that a callback, or a class of callbacks, derives from; nearest first."""
    kind = callback if isinstance(callback, type) else type(callback)
    for ancestor in kind.__mro__:
        if ancestor.__module__.partition(".")[0] in PACKAGES:
            yield ancestor.__name__


def is_one_of(callback: Any, *names: str) -> bool:
    """Whether a callback is of one of Lightning's classes, by their names."""
    return any(name in names for name in names_of(callback))


def brings_a_bar(callbacks: list[Any], args: TrainingArguments) -> bool:
    """Whether one of the callbacks is a progress bar of Lightning's, and the Trainer's own bar stays away for it."""
    return not args.disable_tqdm and any(is_one_of(callback, "ProgressBar") for callback in callbacks)


def add_lightning_callback(trainer: Trainer, callback: Any) -> None:
    """Add a callback of Lightning's kind, or an instance of a class of them; it joins with the next training.

    Raises:
        ValueError: it cannot work.
        TypeError: its class takes arguments.
    """
    refuse_what_cannot_work(callback)
    if isinstance(callback, type):
        try:
            callback = callback()
        except TypeError as error:
            add_note(error, f"Of the class {callback.__name__} a callback is made without arguments; give an instance.")
            raise
    trainer.lightning_callbacks.append(callback)


def pop_lightning_callback(trainer: Trainer, callback: Any) -> Any:
    """Remove and return a callback of Lightning's kind, or the first one of a class; None where there is none."""
    present = trainer.lightning_callbacks
    is_meant = (lambda one: isinstance(one, callback)) if isinstance(callback, type) else (lambda one: one is callback)
    found = next(filter(is_meant, present), None)
    if found is not None:
        present.remove(found)
    return found


def remove_lightning_callback(trainer: Trainer, callback: Any) -> None:
    """Remove a callback of Lightning's kind, or the first one of a class.

    Raises:
        ValueError: an instance that the Trainer does not have.
    """
    if pop_lightning_callback(trainer, callback) is None and not isinstance(callback, type):
        raise ValueError(f"This Trainer does not have the callback {callback!r}.")


def refuse_what_cannot_work(callback: Any) -> None:
    """See that a callback of Lightning's kind, or a class of them, is one that works in a Trainer.

    Raises:
        ValueError: it cannot work.
    """
    for name in names_of(callback):
        support = SUPPORT.get(name)
        if support is not None and support.instead is not None:
            raise ValueError(
                f"Lightning's {name} cannot work in a Trainer: {support.note}. Instead, {support.instead}."
            )


def check_set_up(callbacks: list[Any], trainer: Trainer) -> None:
    """See, before a training, that each callback of Lightning's kind works as the Trainer is set up.

    Raises:
        ValueError: one does not.
    """
    for callback in callbacks:
        refuse_what_cannot_work(callback)
        for name in names_of(callback):
            for unless in SUPPORT.get(name, Support("")).unless:
                if unless.is_so(trainer):
                    raise ValueError(
                        f"Lightning's {name} does not work in this training: {unless.reason}. To train with it, "
                        f"{unless.instead}."
                    )
        monitored = getattr(callback, "monitor", None)
        meant = name_of_evaluations(monitored)
        if meant is not None and _logs_nothing_of_its_own(trainer, callbacks):
            raise ValueError(
                f"{type(callback).__name__}(monitor={monitored!r}) waits for a value that nothing logs: the names that "
                f"a Trainer's evaluations log begin with `eval_`. Set monitor={meant!r}."
            )
        if isinstance(monitored, str) and monitored.startswith("eval_") and _never_evaluates(trainer):
            raise ValueError(
                f"{type(callback).__name__}(monitor={monitored!r}) waits for an evaluation, and this training has "
                'none: set eval_strategy="steps" or "epoch".'
            )


def begin_anew(callbacks: list[Any]) -> None:
    """Put back as they were made those callbacks that do so not by themselves when a further training begins."""
    for callback in callbacks:
        if is_one_of(callback, *BEGUN_ANEW):
            values = vars(callback)
            as_made = values.get(AS_IT_WAS_MADE, dict(values))
            values.clear()
            values.update(as_made)
            values[AS_IT_WAS_MADE] = as_made


def check_can_resume(callbacks: list[Any]) -> None:
    """See, before a training is resumed, that no callback would let it go on otherwise than it was.

    Raises:
        ValueError: one would.
    """
    for callback in callbacks:
        if is_one_of(callback, "BaseFinetuning"):
            raise ValueError(
                f"A training with Lightning's {type(callback).__name__} cannot be resumed: which layers are trained is "
                "not in the checkpoint. Load the checkpoint's model and start a new training."
            )


def support_table() -> str:
    """The table for docs/callbacks.md."""
    rows = ["| class | works | |", "| --- | --- | --- |"]
    for name, support in SUPPORT.items():
        works = "no" if support.instead is not None else "yes"
        sentences = [support.note]
        if support.instead is not None:
            sentences.append(f"instead, {support.instead}")
        sentences += [f"not where {unless.reason}: {unless.instead}" for unless in support.unless]
        rows.append(f"| `{name}` | {works} | {'. '.join(one[0].upper() + one[1:] for one in sentences)}. |")
    return "\n".join(rows)
