"""`Trainer.check()`: short trainings by the Trainer's own methods, in a temporary folder, that find what fails late."""

from __future__ import annotations

import datetime
import math
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from tqdm import tqdm

from littrainer.arguments.choices import IntervalStrategy, SaveStrategy
from littrainer.callbacks.base import TrainerCallback
from littrainer.callbacks.handler import DefaultFlowCallback
from littrainer.callbacks.lightning_callbacks import is_lightning_class
from littrainer.callbacks.progress import PrinterCallback, ProgressCallback, default_progress_callback
from littrainer.check import findings
from littrainer.check.findings import NOTE, CheckReport, Finding, format_error, format_seconds, make_finding
from littrainer.check.rows import LABELS, RowSummary, can_select, select_rows, summarize_rows
from littrainer.checkpoint.verification import damage_in
from littrainer.data.columns import find_accepted_columns
from littrainer.distributed.collectives import barrier, barrier_with_timeout, broadcast_object, raise_on_all_ranks
from littrainer.distributed.layout import data_parallel_size
from littrainer.evaluation import generation
from littrainer.lightning.trial_steps import check_can_try, restore_trainer_after, strip_to_bare_training
from littrainer.loop.overrides import find_overrides
from littrainer.runtime.notes import END, EVALUATION, PART, SAVE
from littrainer.runtime.remote_folder import get_remote_url
from littrainer.runtime.tracebacks import ShortTraceback
from littrainer.tracking.base import TrackerCallback

# How long steps are taken to forecast the whole training; how long an evaluation of all rows may take if its metrics
# fail on few; and how much later than the first of several processes the last one may fail.
SECONDS_TO_MEASURE, MAX_EVALUATION_SECONDS, SECONDS_UNTIL_ALL_FAIL = 5.0, 120.0, 10.0
MAX_BATCHES, MAX_ROWS = 12, 32
# Longest generation in tokens, if neither arguments nor model set a limit.
DEFAULT_MAX_TOKENS = 20
# Relative difference of losses with and without a resume: kernels of GPUs may add in another order each time.
TOLERANCE, TOLERANCE_OF_GPUS = 1e-6, 1e-3
TRAINING_DATA = "train_dataset"
# A trial evaluates and saves at its first optimizer steps: twice, since the first time takes longer.
STEPS_WITH_EVENTS = 2
# Arguments for the length of a trial; `TrialSteps` starts evaluations and saves.
TRIAL_ARGUMENTS: dict[str, Any] = {
    **dict.fromkeys(("save_total_limit", "max_minutes", "save_minutes", "eval_minutes", "hang_timeout")),
    **dict.fromkeys(("disable_tqdm", "skip_memory_metrics"), True),
    "push_to_hub": False,
}
# Part of a training during which an error notes no part.
STEP = "optimizer step"


class TrialSteps(TrainerCallback):
    """The last callback of a trial: evaluates and saves at the first steps, measures times, and ends the trial.

    Parameters:
        seconds: time for steps after the first ones; infinite for a training to its end that logs each step.
    """

    def __init__(self, evaluates: bool = False, saves: bool = False, seconds: float = 0.0):
        self.evaluates, self.saves, self.seconds = evaluates, saves, seconds
        self.state: Any = None
        self.start = self.last_event = time.perf_counter()
        self.step_ends: list[float] = []
        self.save_seconds, self.is_over = 0.0, False

    @property
    def losses(self) -> dict[int, float]:
        """The logged losses by optimizer step."""
        return {int(entry["step"]): entry["loss"] for entry in self.state.log_history if "loss" in entry}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.last_event = time.perf_counter()
        self.step_ends.append(self.last_event)
        has_events = state.global_step <= STEPS_WITH_EVENTS
        control.should_log = control.should_log or has_events or self.seconds == math.inf
        control.should_evaluate, control.should_save = has_events and self.evaluates, has_events and self.saves
        # A resume begins later.
        seconds = self.last_event - self.step_ends[: STEPS_WITH_EVENTS + 1][-1]
        self.is_over = state.global_step >= state.max_steps or (not has_events and seconds >= self.seconds)
        control.should_training_stop = self.is_over

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.state, self.last_event = state, time.perf_counter()
        # If a callback stops, too little is measured for a forecast.
        control.should_training_stop = self.is_over

    on_train_begin = on_evaluate = on_log

    def on_save(self, *_: Any, **__: Any) -> None:
        self.save_seconds = time.perf_counter() - self.last_event

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_evaluate = control.should_save = False
        control.should_training_stop = self.is_over


def get_schedule(part: str, args: Any, state: Any) -> tuple[int, float | None]:
    """Return after how many optimizer steps, and minutes, a training repeats a part; 0 for never."""
    strategy, interval, minutes = args.eval_strategy, state.eval_steps, args.eval_minutes
    if part == SAVE and args.save_strategy != SaveStrategy.BEST:
        strategy, interval, minutes = args.save_strategy, state.save_steps, args.save_minutes
    if strategy in (None, IntervalStrategy.NO):
        return 0, minutes
    # The length of a stream's epochs is not known.
    epochs = 1 if state.num_train_epochs == sys.maxsize else state.num_train_epochs
    return interval if strategy == IntervalStrategy.STEPS else math.ceil(state.max_steps / epochs), minutes


def describe_first_time(part: str, args: Any, steps: TrialSteps) -> str:
    """Return when a training first reaches a part; without a strategy the script calls for it."""
    state = steps.state
    if part == END:
        return "when all steps are done"
    if state is None or part == STEP:
        return f"at optimizer step {len(steps.step_ends) + 1:,}"
    every, minutes = get_schedule(part, args, state)
    if every:
        return f"at optimizer step {min(every, state.max_steps):,} of {state.max_steps:,}"
    return f"after {minutes:g} minutes" if minutes else f"at a call of {'save_model' if part == SAVE else 'evaluate'}()"


class TrainingCheck:
    """One check of a Trainer, which does not train.

    Parameters:
        training: the script's training that is checked, for the page.
    """

    def __init__(self, trainer: Any, training: str = "train()"):
        self.trainer, self.args = trainer, trainer.args
        self.report = CheckReport(f"{training}, output_dir={str(self.args.output_dir)!r}")
        self.findings = self.report.findings
        self.callbacks = list(trainer.callback_handler.callbacks)
        dataset = trainer.eval_dataset
        datasets = dataset if isinstance(dataset, dict) else {} if dataset is None else {"": dataset}
        self.eval_datasets: dict[str, Any] = datasets
        self.eval_batch_size = self.args.eval_batch_size * data_parallel_size(self.args)
        self.rows: dict[str, RowSummary] = {}
        # Evaluation set -> its batches in a trial, and all its batches.
        self.batches: dict[str, tuple[int, int]] = {}
        # A stream, and a loader of the script's own, give their first batches alone; metrics may need all batches.
        self.limits_evaluation = self.evaluates_all = False
        self.restores_model, self.folder = True, ""
        self.saves_itself = self.args.save_strategy != SaveStrategy.NO or self.args.save_minutes is not None
        # The first checkpoint of the trial that saves.
        self.checkpoint: Path | None = None
        self.peak_at_start = self._peak()

    def run(self, ends_afterwards: bool = False) -> CheckReport:
        """Check everything, and return what was found; raises what `Trainer.check()` does.

        Parameters:
            ends_afterwards: whether the process ends then, so that a sharded model need not be restored.
        """
        try:
            check_can_try(self.trainer, "check")
        except NotImplementedError:
            if not ends_afterwards:
                raise
            self.restores_model = False
        except (LookupError, TypeError, ValueError) as error:
            self._fail("arguments", error, "when train() begins")
            return self.report
        with raise_on_all_ranks("making a temporary folder"):
            # On the disk of output_dir, which all processes see; not in a folder that is uploaded.
            output = Path(self.args.output_dir).absolute()
            folders = (path for path in (*output.parents[:1], output, *output.parents) if os.access(path, os.W_OK))
            near = next(path for path in folders if get_remote_url(path / "trial") is None)
            is_first = self.args.process_index == 0
            self.folder = tempfile.mkdtemp(prefix=".littrainer_check_", dir=near) if is_first else ""
        self.folder = broadcast_object(self.folder)
        try:
            with restore_trainer_after(self.trainer, with_model=False):
                self.findings += self._check_rows()
            steps = self._train_and_save()
            if steps is not None:
                peak = self._peak()
                self._try_rows()
                self._generate_longest(steps)
                self._forecast(steps, peak)
                self._resume(steps)
            self.findings += [findings.check_hub_permissions(self.args)] if self.args.push_to_hub else []
            self.findings += findings.check_tracker_logins(self.callbacks)
            if not self.report.is_interrupted:
                barrier()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
        return self.report

    def _fail(self, about: str, error: BaseException, when: str) -> None:
        self.findings.append(make_finding(about, "", format_error(error), when))
        # Other processes may wait for this one.
        self.report.is_interrupted |= not barrier_with_timeout(SECONDS_UNTIL_ALL_FAIL)

    def _check_rows(self) -> Iterator[Finding]:
        trainer, model, is_first = self.trainer, self.trainer.model, self.args.process_index == 0
        columns = find_accepted_columns(model, trainer.label_names) if self.args.remove_unused_columns else None
        has_own_loss = trainer.compute_loss_func is not None or bool(find_overrides(trainer, ("compute_loss",)))
        labels = {*LABELS, *trainer.label_names}
        for name, dataset in {TRAINING_DATA: trainer.train_dataset, **self.eval_datasets}.items():
            about = name if name == TRAINING_DATA else f"eval_dataset {name!r}".removesuffix(" ''")
            if not can_select(dataset):
                yield Finding(NOTE, about, "its rows were not looked at, since single ones cannot be read")
                continue
            summary: Any = summarize_rows(dataset, columns, model, has_own_loss, labels) if is_first else None
            summary = self.rows[name] = broadcast_object(summary)
            yield make_finding(about, str(summary))
            when = "in epoch 1, when a batch has this row" if name == TRAINING_DATA else "in the evaluation"
            for column, rows in summary.failing.items():
                others = f" ({len(rows):,} such rows)" if len(rows) > 1 else ""
                yield make_finding(about, "", f"row {min(rows):,}: {column}: {rows[min(rows)]}{others}", when)

    # ---- Trial trainings ---------------------------------------------------------------------------------------------

    def _attempt(
        self, steps: TrialSteps, action: Callable[[], Any], rows: Any = None, **changed: Any
    ) -> BaseException | None:
        """Do something with the Trainer, which is restored afterwards; return the error that ended it.

        Parameters:
            steps: the callback after those of the script.
            action: trains, or evaluates.
            rows: a dataset to train on instead; the script's callbacks receive no events then.
            changed: arguments.
        """
        trainer, callbacks = self.trainer, self.callbacks
        try:
            with (
                restore_trainer_after(trainer, [*callbacks, *trainer.lightning_callbacks], self.restores_model),
                ShortTraceback(),
            ):
                vars(trainer).update({"eval_dataset": self._few_rows()} if rows is None else {TRAINING_DATA: rows})
                folders = {"output_dir": self.folder, "logging_dir": f"{self.folder}/runs"}
                arguments = TRIAL_ARGUMENTS | folders | changed
                strip_to_bare_training(self.args, trainer.lightning_keywords, **arguments)
                if self.limits_evaluation:
                    trainer.lightning_keywords["limit_val_batches"] = MAX_BATCHES
                kept = trainer.lightning_callbacks if rows is None else []
                trainer.lightning_callbacks[:] = [
                    entry for entry in kept if not is_lightning_class(entry, "Checkpoint")
                ]
                others = (TrackerCallback, PrinterCallback, ProgressCallback, default_progress_callback())
                kept = [entry for entry in callbacks if not isinstance(entry, others)]
                trainer.callback_handler.callbacks = [*(kept if rows is None else [DefaultFlowCallback()]), steps]
                action()
        except (Exception, SystemExit) as error:
            return error
        return None

    def _few_rows(self) -> Any:
        """Return the evaluation data with few batches, each as in the whole: first, notable and last ones."""
        few, has_own_loader = {}, find_overrides(self.trainer, ("get_eval_dataloader", "_get_eval_sampler"))
        for name, dataset in self.eval_datasets.items():
            summary, size = self.rows.get(name), self.eval_batch_size
            if summary is None or has_own_loader:
                self.limits_evaluation = True
                few[name] = dataset
                continue
            count = (len(dataset) - 1) // size + 1
            rows = [0, len(dataset) - 1, *summary.longest(1), *summary.sound(summary.notable)]
            notable = list(dict.fromkeys(row // size for row in rows))[:MAX_BATCHES]
            # Spread over all, so that their mean time is known.
            chosen = {*notable, *range(0, count, 1 if self.evaluates_all else -(-count // MAX_BATCHES))}
            self.batches[name] = len(chosen), count
            numbers = (range(batch * size, min(batch * size + size, len(dataset))) for batch in sorted(chosen))
            few[name] = select_rows(dataset, [row for batch in numbers for row in batch])
        return few.get("", few or None)

    def _train_and_save(self) -> TrialSteps | None:
        """Train some steps, with evaluation and save; a part that fails is left out of the next attempt."""
        args, trainer = self.args, self.trainer
        parts = [STEP, SAVE]
        parts += [EVALUATION] if self.eval_datasets else []
        parts += [END] if args.load_best_model_at_end else []
        # An evaluation that the script calls for looks for no best model.
        evaluates = args.eval_strategy not in (None, "no") or args.eval_minutes is not None
        changed: dict[str, Any] = {} if evaluates else {"metric_for_best_model": None}

        def train() -> None:
            trainer.train()
            if SAVE in parts and not self.saves_itself:
                trainer.save_model()

        while True:
            seconds = SECONDS_TO_MEASURE if STEP in parts else 0.0
            steps = TrialSteps(EVALUATION in parts, SAVE in parts and self.saves_itself, seconds)
            error = self._attempt(steps, train, **changed, load_best_model_at_end=END in parts)
            if error is None:
                break
            part = getattr(error, PART, STEP)
            if part == EVALUATION and self._can_evaluate_all(steps):
                self.evaluates_all = True
                continue
            self._fail(part, error, describe_first_time(part, args, steps))
            # A later step that fails is most often one of a batch with a rare row, which `_try_rows` looks for.
            is_early = part == STEP and len(steps.step_ends) <= STEPS_WITH_EVENTS
            if self.report.is_interrupted or is_early or (part not in parts and part != END):
                return None
            if part in parts:
                parts.remove(part)
            if part == END:
                break
        if not steps.step_ends:
            self.findings.append(Finding(NOTE, STEP, "the training ends before the first one"))
            return None
        self.findings += self._judge(parts, steps)
        return steps

    def _can_evaluate_all(self, steps: TrialSteps) -> bool:
        """Whether metrics that failed may compare with rows that the script keeps itself, and all take little time."""
        few, every = map(sum, zip((0, 0), *self.batches.values(), strict=True))
        is_quick = (time.perf_counter() - steps.last_event) * every <= MAX_EVALUATION_SECONDS * few
        return few < every and barrier_with_timeout(SECONDS_UNTIL_ALL_FAIL) and bool(broadcast_object(is_quick))

    def _judge(self, parts: list[str], steps: TrialSteps) -> Iterator[Finding]:
        """Yield the findings of the last attempt about the parts that were in it."""
        odd = {step: f"the loss is {loss}" for step, loss in steps.losses.items() if not math.isfinite(loss)}
        state, first = steps.state, min(odd, default=0)
        if STEP in parts:
            passed = f"{len(steps.step_ends):,} optimizer steps with forward, backward and update"
            yield make_finding(STEP, passed, odd.get(first, ""), f"by optimizer step {first:,}")
        if EVALUATION in parts:
            names = sorted({name for entry in state.log_history for name in entry if name.startswith("eval_")})
            yield make_finding(EVALUATION, f"it gives {', '.join(names)}")
            if self.limits_evaluation:
                yield Finding(NOTE, EVALUATION, f"the first {MAX_BATCHES} batches were tried, and no shorter last one")
        if SAVE in parts and self.saves_itself:
            self.checkpoint = next(Path(self.folder).rglob("checkpoint-1"), None)
            best = f"metric_for_best_model={self.args.metric_for_best_model!r} gives {state.best_metric!r}"
            problem = f"no checkpoint was written after an evaluation: {best}"
            if self.checkpoint is not None:
                problem = " ".join(damage_in(self.checkpoint))
            when = describe_first_time(SAVE, self.args, steps)
            yield make_finding(SAVE, "a checkpoint was written and verified", problem, when)
        elif SAVE in parts:
            yield make_finding(SAVE, "save_model() wrote the model")
        if END in parts and state.best_model_checkpoint is not None:
            yield make_finding(END, "the best model was loaded")

    def _resume(self, before: TrialSteps) -> None:
        """Resume from the first checkpoint: the next loss has to be the same."""
        checkpoint, args, steps = self.checkpoint, self.args, TrialSteps()
        if checkpoint is None or args.save_only_model or args.ignore_data_skip or self.report.is_interrupted:
            return
        when = "when a training that was killed is resumed"
        error = self._attempt(steps, lambda: self.trainer.train(resume_from_checkpoint=str(checkpoint)))
        if error is not None:
            # The end, which comes after all steps, has been tried before.
            if getattr(error, PART, STEP) != END:
                self._fail("resume", error, when)
            return
        expected, actual = before.losses.get(2), steps.losses.get(2)
        passed, problem = "the checkpoint was loaded; no further loss was logged to compare", ""
        if expected is not None and actual is not None:
            passed = f"the next loss is the same ({actual:.6g})"
            tolerance = TOLERANCE if args.device.type == "cpu" else TOLERANCE_OF_GPUS
            if not math.isclose(expected, actual, rel_tol=tolerance):
                problem = f"the next loss is {actual:.6g} after a resume, and {expected:.6g} without one: part of the "
                problem += "model, of the data's order or of the loss is not in the checkpoint"
        self.findings.append(make_finding("resume", passed, problem, when))

    # ---- Rows that stand out, and the longest batch ------------------------------------------------------------------

    def _try_rows(self) -> None:
        """Train on the longest batch, and on rows that stand out with a last batch as short as it will be."""
        summary, trainer = self.rows.get(TRAINING_DATA, RowSummary(0)), self.trainer
        longest = summary.longest(trainer.get_total_train_batch_size(self.args))
        if not longest or self.report.is_interrupted:
            return
        if find_overrides(trainer, ("get_train_dataloader", "_get_train_sampler", "_get_dataloader")):
            self.findings.append(Finding(NOTE, "longest batch", "it was not tried, since the script makes its batches"))
            return
        size = self.args.train_batch_size * data_parallel_size(self.args)
        notable = summary.sound(summary.notable)[:MAX_ROWS]
        others = [row for row in summary.sound(summary.lengths) if row not in notable]
        notable += others[: max(min(size, summary.total) - len(notable), 0)]
        notable += others[size:][: (summary.total - len(notable)) % size]
        for about, rows, epochs in (
            # Twice, since the optimizer has its state from the first step on.
            (f"longest batch, {summary.lengths[longest[0]]:,} long", longest, 2),
            ("rows that stand out, and a last batch as short as it will be", notable, 1),
        ):
            error = self._failure_on(rows, epochs)
            if error is not None:
                few, error = self._fewest_failing(rows, error)
                shown = [
                    f"{row:,}" + (f" ({summary.notable[row]})" if row in summary.notable else "") for row in few[:4]
                ]
                which = f"row{'s' * (len(few) > 1)} {', '.join(shown)}{' and others' * (len(few) > 4)}"
                self._fail(f"{about.partition(',')[0]}, {which}", error, "in epoch 1, at a batch of such rows")
                return
            self.findings.append(make_finding(about, f"{len(rows)} rows, with forward, backward and update"))

    def _failure_on(self, rows: list[int], epochs: int = 1) -> BaseException | None:
        """Train on some rows alone; return the error, also for a loss that is not finite."""
        steps, dataset = TrialSteps(seconds=math.inf), select_rows(self.trainer.train_dataset, rows)
        changed = {"max_steps": -1, "num_train_epochs": epochs, "load_best_model_at_end": False}
        error = self._attempt(steps, self.trainer.train, dataset, **changed)
        odd = [] if error is not None else [loss for loss in steps.losses.values() if not math.isfinite(loss)]
        return FloatingPointError(f"the loss is {odd[0]}") if odd else error

    def _fewest_failing(self, rows: list[int], error: BaseException) -> tuple[list[int], BaseException]:
        # Several processes end with the first error.
        half = len(rows) // 2 if self.args.world_size == 1 else 0
        for part in (rows[:half], rows[half:]) if half else ():
            failure = self._failure_on(part)
            if failure is not None:
                return self._fewest_failing(part, failure)
        return rows, error

    def _generate_longest(self, steps: TrialSteps) -> None:
        """Evaluate a batch with generation to the greatest length: an untrained model may end its sentences early."""
        trainer, config = self.trainer, cast("Any", getattr(self.trainer.model, "generation_config", None))
        summaries = {name: self.rows[name] for name in self.eval_datasets if name in self.rows}
        lengths = {name: max(summary.lengths.values()) for name, summary in summaries.items() if summary.lengths}
        generates = (
            generation.is_generation_requested(self.args) and trainer.compute_metrics is not None and config is not None
        )
        if not (generates and lengths and steps.evaluates) or self.limits_evaluation or self.report.is_interrupted:
            return
        name = max(lengths, key=lengths.__getitem__)
        rows = select_rows(self.eval_datasets[name], summaries[name].longest(self.eval_batch_size))
        wanted = {"min_new_tokens": config.max_new_tokens}
        if config.max_new_tokens is None:
            length = generation.merge_generation_keywords(self.args, {}).get("max_length")
            wanted = {"min_length": length or config.max_length or DEFAULT_MAX_TOKENS}
        about = ", ".join(f"{setting}={value}" for setting, value in wanted.items())

        def evaluate() -> None:
            vars(trainer)["compute_metrics"] = lambda *_, **__: {}
            vars(config).update(wanted)
            trainer.evaluate(rows)

        error = self._attempt(TrialSteps(), evaluate, trainer.train_dataset)
        if error is not None:
            self._fail(f"longest generation, {about}", error, "in an evaluation with an answer of that length")
        else:
            self.findings.append(make_finding("longest generation", f"an evaluation with {about}"))

    # ---- Time and memory ---------------------------------------------------------------------------------------------

    def _peak(self) -> int:
        """Return the peak memory of the process in bytes, without the copy of weights for the restore."""
        if self.args.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.args.device)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        if not self.folder or not self.restores_model:
            return peak
        tensors = (*self.trainer.model.parameters(), *self.trainer.model.buffers())
        return max(self.peak_at_start, peak - sum(tensor.numel() * tensor.element_size() for tensor in tensors))

    def _forecast(self, steps: TrialSteps, peak_before: int) -> None:
        report, state, args = self.report, steps.state, self.args
        report.forecast_bytes = self._peak()
        sizes = [tqdm.format_sizeof(size, "B") for size in (peak_before, report.forecast_bytes)]
        report.forecast["memory"] = f"{sizes[0]} so far, {sizes[1]} with the longest batch"
        plain, save = steps.step_ends[STEPS_WITH_EVENTS:], steps.save_seconds
        step = (plain[-1] - plain[0]) / (len(plain) - 1) if len(plain) > 1 else None
        evaluation = self._evaluation_seconds(steps)
        times = {"a step": step, "an evaluation": evaluation, "a save": save or None}
        shown = [f"{format_seconds(value)} {name}" for name, value in times.items() if value is not None]
        report.forecast["time"] = ", ".join(shown) or "too few steps to measure"
        seconds = steps.step_ends[0] - steps.start + (state.max_steps - 1) * (step or 0)
        counts = []
        for part in (EVALUATION, SAVE):
            every, minutes = get_schedule(part, args, state)
            by_steps = math.ceil(state.max_steps / every) if every else 0
            counts.append(by_steps + int(seconds / 60 / (minutes or math.inf)))
        evaluations, saves = counts[0] + bool(args.eval_on_start), counts[1]
        if self.checkpoint is not None and saves:
            self.findings.append(findings.check_disk(args, self.checkpoint, saves))
        if step is None or (evaluations and evaluation is None):
            return
        seconds += saves * save + evaluations * (evaluation or 0)
        limit = 60 * (args.max_minutes or math.inf)
        report.forecast_seconds = min(seconds, limit)
        end = datetime.datetime.now() + datetime.timedelta(seconds=report.forecast_seconds)
        report.forecast["forecast"] = (
            f"{state.max_steps:,} steps, {evaluations} evaluations and {saves} saves take "
            f"{format_seconds(report.forecast_seconds)}{', since max_minutes ends them early' * (seconds > limit)}; "
            f"begun now, training ends {end:%Y-%m-%d %H:%M}"
        )

    def _evaluation_seconds(self, steps: TrialSteps) -> float | None:
        """Return the time of an evaluation of all rows; an evaluate() of the script's own may log none."""
        logged = {name: value for entry in steps.state.log_history for name, value in entry.items()}
        names = {name: f"eval_{name}_runtime" if name else "eval_runtime" for name in self.batches}
        if not steps.evaluates or self.limits_evaluation or not logged.keys() >= {*names.values()}:
            return None
        return sum(logged[names[name]] / few * every for name, (few, every) in self.batches.items())
