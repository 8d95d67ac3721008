"""`Trainer.check()`: short trials of a training, in a temporary folder, that find late failures early."""

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
from littrainer.callbacks.trainer_context import TrainerContext
from littrainer.check import findings
from littrainer.check.findings import NOTE, CheckReport, Finding, format_error, format_seconds, make_finding
from littrainer.check.rows import LABELS, RowSummary, can_select, select_rows, summarize_rows
from littrainer.checkpoint.verification import find_damage
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

# Measured steps, from which the whole training is forecast.
MEASUREMENT_S, MAX_MEASURED_STEPS = 5.0, 100
# Limit for all rows, if metrics fail on a few.
MAX_EVALUATION_S = 120.0
# Time for all processes to fail after the first.
FAILURE_TIMEOUT_S = 10.0
MAX_BATCHES, MAX_ROWS = 12, 32
# Used if arguments and model have no limit.
DEFAULT_MAX_TOKENS = 20
# Relative difference of losses after a resume; GPU kernels may add in another order.
TOLERANCE, GPU_TOLERANCE = 1e-6, 1e-3
TRAINING_DATA = "train_dataset"
# The first evaluation and save include warm-up.
STEPS_WITH_EVENTS = 2
TRIAL_ARGUMENTS: dict[str, Any] = {
    **dict.fromkeys(("save_total_limit", "max_minutes", "save_minutes", "eval_minutes", "hang_timeout")),
    **dict.fromkeys(("disable_tqdm", "skip_memory_metrics"), True),
    "push_to_hub": False,
}
# The part of errors without a part.
STEP = "optimizer step"


class TrialSteps(TrainerCallback):
    """Last callback of a trial: evaluates and saves at the first steps, measures times, and ends the trial.

    Parameters:
        seconds: duration of the steps without events; infinite to train to the end and log each step.
    """

    def __init__(self, evaluates: bool = False, saves: bool = False, seconds: float = 0.0):
        self.evaluates, self.saves, self.seconds = evaluates, saves, seconds
        self.state: Any = None
        self.start = self.last_event = time.perf_counter()
        self.step_ends: list[float] = []
        self.save_seconds, self.is_over = 0.0, False

    @property
    def losses(self) -> dict[int, float]:
        return {int(entry["step"]): entry["loss"] for entry in self.state.log_history if "loss" in entry}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.last_event = time.perf_counter()
        self.step_ends.append(self.last_event)
        has_events = state.global_step <= STEPS_WITH_EVENTS
        control.should_log = control.should_log or has_events or self.seconds == math.inf
        control.should_evaluate, control.should_save = has_events and self.evaluates, has_events and self.saves
        seconds = self.last_event - self.step_ends[: STEPS_WITH_EVENTS + 1][-1]
        is_measured = seconds >= self.seconds or len(self.step_ends) >= MAX_MEASURED_STEPS
        self.is_over = state.global_step >= state.max_steps or (not has_events and is_measured)
        control.should_training_stop = self.is_over

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.state, self.last_event = state, time.perf_counter()
        # The forecast needs all steps, in spite of a user's callback.
        control.should_training_stop = self.is_over

    on_train_begin = on_evaluate = on_log

    def on_save(self, *_: Any, **__: Any) -> None:
        self.save_seconds = time.perf_counter() - self.last_event

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_evaluate = control.should_save = False
        control.should_training_stop = self.is_over


def get_schedule(part: str, args: Any, state: Any) -> tuple[int, float | None]:
    """Return the interval of a part of the training in optimizer steps (0 for never), and in minutes."""
    strategy, interval, minutes = args.eval_strategy, state.eval_steps, args.eval_minutes
    if part == SAVE and args.save_strategy != SaveStrategy.BEST:
        strategy, interval, minutes = args.save_strategy, state.save_steps, args.save_minutes
    if strategy in (None, IntervalStrategy.NO):
        return 0, minutes
    # A stream's epochs have unknown length.
    epochs = 1 if state.num_train_epochs == sys.maxsize else state.num_train_epochs
    return interval if strategy == IntervalStrategy.STEPS else math.ceil(state.max_steps / epochs), minutes


def describe_first_time(part: str, args: Any, steps: TrialSteps) -> str:
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
    """Check of a Trainer before its training."""

    def __init__(self, trainer: TrainerContext, training: str = "train()"):
        self.trainer, self.args = trainer, trainer.args
        self.report = CheckReport(f"{training}, output_dir={str(self.args.output_dir)!r}")
        self.findings = self.report.findings
        self.callbacks = list(trainer.callback_handler.callbacks)
        dataset = trainer.eval_dataset
        datasets = dataset if isinstance(dataset, dict) else {} if dataset is None else {"": dataset}
        self.eval_datasets: dict[str, Any] = datasets
        self.eval_batch_size = self.args.eval_batch_size * data_parallel_size(self.args)
        self.rows: dict[str, RowSummary] = {}
        self.batches: dict[str, tuple[int, int]] = {}
        # Streams and custom loaders have only their first batches evaluated.
        self.is_evaluation_limited = False
        self.should_evaluate_all = False
        self.should_restore_model = True
        self.folder = ""
        self.has_automatic_saves = self.args.save_strategy != SaveStrategy.NO or self.args.save_minutes is not None
        self.checkpoint: Path | None = None
        self.peak_at_start = self._get_peak_memory()

    def run(self, ends_afterwards: bool = False) -> CheckReport:
        """Run all checks; raise as `Trainer.check()` does.

        Parameters:
            ends_afterwards: whether the process ends then, so that a sharded model need not be restored.
        """
        try:
            check_can_try(self.trainer, "check")
        except NotImplementedError:
            if not ends_afterwards:
                raise
            self.should_restore_model = False
        except (LookupError, TypeError, ValueError) as error:
            self._fail("arguments", error, "when train() begins")
            return self.report
        with raise_on_all_ranks("making a temporary folder"):
            # On output_dir's disk, which all processes share, but not in an uploaded folder.
            output = Path(self.args.output_dir).absolute()
            folders = (
                path
                for path in (*output.parents[:1], output, *output.parents)
                if path.is_dir() and os.access(path, os.W_OK)
            )
            # The system's temporary folder, if no parent of output_dir can be written.
            parent = next((path for path in folders if get_remote_url(path / "trial") is None), None)
            is_first = self.args.process_index == 0
            self.folder = tempfile.mkdtemp(prefix=".littrainer_check_", dir=parent) if is_first else ""
        self.folder = broadcast_object(self.folder)
        try:
            with restore_trainer_after(self.trainer, with_model=False):
                self.findings += self._check_rows()
            steps = self._train_and_save()
            if steps is not None:
                peak = self._get_peak_memory()
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
        # Other processes that have not failed wait in a collective call.
        self.report.is_interrupted |= not barrier_with_timeout(FAILURE_TIMEOUT_S)

    def _check_rows(self) -> Iterator[Finding]:
        trainer, model, is_first = self.trainer, self.trainer.model, self.args.process_index == 0
        keeps_all, names = not self.args.remove_unused_columns, trainer.label_names
        columns = None if keeps_all else find_accepted_columns(model, names, self.args.signature_columns)
        has_custom_loss = trainer.compute_loss_func is not None or bool(find_overrides(trainer, "compute_loss"))
        labels = {*LABELS, *trainer.label_names}
        for name, dataset in {TRAINING_DATA: trainer.train_dataset, **self.eval_datasets}.items():
            about = name if name == TRAINING_DATA else f"eval_dataset {name!r}".removesuffix(" ''")
            if not can_select(dataset):
                yield Finding(NOTE, about, "its rows were not looked at, since single ones cannot be read")
                continue
            summary: Any = summarize_rows(dataset, columns, model, has_custom_loss, labels) if is_first else None
            summary = self.rows[name] = broadcast_object(summary)
            yield make_finding(about, str(summary))
            when = "in epoch 1, when a batch has this row" if name == TRAINING_DATA else "in the evaluation"
            for column, rows in summary.failing.items():
                count = f" ({len(rows):,} such rows)" if len(rows) > 1 else ""
                yield make_finding(about, "", f"row {min(rows):,}: {column}: {rows[min(rows)]}{count}", when)

    # ---- Trial trainings ---------------------------------------------------------------------------------------------

    def _attempt(
        self, steps: TrialSteps, action: Callable[[], Any], rows: Any = None, **changed: Any
    ) -> BaseException | None:
        """Run a trial, restore the Trainer, and return the error that ended the trial.

        Parameters:
            steps: the trial's callback, called after the user's callbacks.
            action: trains or evaluates.
            rows: dataset to train on instead, without the user's callbacks.
            changed: arguments of the trial.
        """
        trainer, callbacks = self.trainer, self.callbacks
        try:
            with (
                restore_trainer_after(trainer, [*callbacks, *trainer.lightning_callbacks], self.should_restore_model),
                ShortTraceback(),
            ):
                vars(trainer).update(
                    {"eval_dataset": self._select_eval_rows()} if rows is None else {TRAINING_DATA: rows}
                )
                folders = {"output_dir": self.folder, "logging_dir": f"{self.folder}/runs"}
                arguments = TRIAL_ARGUMENTS | folders | changed
                strip_to_bare_training(self.args, trainer.lightning_keywords, **arguments)
                if self.is_evaluation_limited:
                    trainer.lightning_keywords["limit_val_batches"] = MAX_BATCHES
                lightning_callbacks = trainer.lightning_callbacks if rows is None else []
                trainer.lightning_callbacks[:] = [
                    callback for callback in lightning_callbacks if not is_lightning_class(callback, "Checkpoint")
                ]
                excluded = (TrackerCallback, PrinterCallback, ProgressCallback, default_progress_callback())
                users = [callback for callback in callbacks if not isinstance(callback, excluded)]
                trainer.callback_handler.callbacks = [*(users if rows is None else [DefaultFlowCallback()]), steps]
                action()
        except (Exception, SystemExit) as error:
            return error
        return None

    def _select_eval_rows(self) -> Any:
        """Return complete batches of evaluation rows: first, notable and last."""
        selected, has_custom_loader = {}, find_overrides(self.trainer, "get_eval_dataloader", "_get_eval_sampler")
        for name, dataset in self.eval_datasets.items():
            summary, size = self.rows.get(name), self.eval_batch_size
            if summary is None or has_custom_loader:
                self.is_evaluation_limited = True
                selected[name] = dataset
                continue
            count = (len(dataset) - 1) // size + 1
            rows = [0, len(dataset) - 1, *summary.get_longest(1), *summary.exclude_failing(summary.notable)]
            notable = list(dict.fromkeys(row // size for row in rows))[:MAX_BATCHES]
            chosen = {*notable, *range(0, count, 1 if self.should_evaluate_all else -(-count // MAX_BATCHES))}
            self.batches[name] = len(chosen), count
            ranges = (range(batch * size, min(batch * size + size, len(dataset))) for batch in sorted(chosen))
            selected[name] = select_rows(dataset, [row for batch in ranges for row in batch])
        return selected.get("", selected or None)

    def _train_and_save(self) -> TrialSteps | None:
        args, trainer = self.args, self.trainer
        parts = [STEP, SAVE]
        parts += [EVALUATION] if self.eval_datasets else []
        parts += [END] if args.load_best_model_at_end else []
        # Without automatic evaluations the best model is not tracked.
        has_evaluations = args.eval_strategy not in (None, "no") or args.eval_minutes is not None
        changed: dict[str, Any] = {} if has_evaluations else {"metric_for_best_model": None}

        def train() -> None:
            trainer.train()
            if SAVE in parts and not self.has_automatic_saves:
                trainer.save_model()

        while True:
            seconds = MEASUREMENT_S if STEP in parts else 0.0
            steps = TrialSteps(EVALUATION in parts, SAVE in parts and self.has_automatic_saves, seconds)
            error = self._attempt(steps, train, **changed, load_best_model_at_end=END in parts)
            if error is None:
                break
            part = getattr(error, PART, STEP)
            if part == EVALUATION and self._can_evaluate_all(steps):
                self.should_evaluate_all = True
                continue
            self._fail(part, error, describe_first_time(part, args, steps))
            # A later step fails most often on a rare row, which `_try_rows` will find.
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
        self.findings += self._collect_findings(parts, steps)
        return steps

    def _can_evaluate_all(self, steps: TrialSteps) -> bool:
        """Return whether it is quick to retry failed metrics with all rows."""
        selected, total = map(sum, zip((0, 0), *self.batches.values(), strict=True))
        is_quick = (time.perf_counter() - steps.last_event) * total <= MAX_EVALUATION_S * selected
        return selected < total and barrier_with_timeout(FAILURE_TIMEOUT_S) and bool(broadcast_object(is_quick))

    def _collect_findings(self, parts: list[str], steps: TrialSteps) -> Iterator[Finding]:
        odd = {step: f"the loss is {loss}" for step, loss in steps.losses.items() if not math.isfinite(loss)}
        state, first = steps.state, min(odd, default=0)
        if STEP in parts:
            passed = f"{len(steps.step_ends):,} optimizer steps with forward, backward and update"
            yield make_finding(STEP, passed, odd.get(first, ""), f"by optimizer step {first:,}")
        if EVALUATION in parts:
            names = sorted({name for entry in state.log_history for name in entry if name.startswith("eval_")})
            yield make_finding(EVALUATION, f"it gives {', '.join(names)}")
            if self.is_evaluation_limited:
                yield Finding(NOTE, EVALUATION, f"the first {MAX_BATCHES} batches were tried, and no shorter last one")
        if SAVE in parts and self.has_automatic_saves:
            self.checkpoint = next(Path(self.folder).rglob("checkpoint-1"), None)
            best = f"metric_for_best_model={self.args.metric_for_best_model!r} gives {state.best_metric!r}"
            problem = f"no checkpoint was written after an evaluation: {best}"
            if self.checkpoint is not None:
                problem = " ".join(find_damage(self.checkpoint))
            when = describe_first_time(SAVE, self.args, steps)
            yield make_finding(SAVE, "a checkpoint was written and verified", problem, when)
        elif SAVE in parts:
            yield make_finding(SAVE, "save_model() wrote the model")
        if END in parts and state.best_model_checkpoint is not None:
            yield make_finding(END, "the best model was loaded")

    def _resume(self, before: TrialSteps) -> None:
        """Check that the next loss is the same after a resume."""
        checkpoint, args, steps = self.checkpoint, self.args, TrialSteps()
        if checkpoint is None or args.save_only_model or args.ignore_data_skip or self.report.is_interrupted:
            return
        when = "when a training that was killed is resumed"
        error = self._attempt(steps, lambda: self.trainer.train(resume_from_checkpoint=str(checkpoint)))
        if error is not None:
            # `_train_and_save` has tried the end.
            if getattr(error, PART, STEP) != END:
                self._fail("resume", error, when)
            return
        expected, actual = before.losses.get(2), steps.losses.get(2)
        passed, problem = "the checkpoint was loaded; no further loss was logged to compare", ""
        if expected is not None and actual is not None:
            passed = f"the next loss is the same ({actual:.6g})"
            tolerance = TOLERANCE if args.device.type == "cpu" else GPU_TOLERANCE
            if not math.isclose(expected, actual, rel_tol=tolerance):
                problem = f"the next loss is {actual:.6g} after a resume, and {expected:.6g} without one: part of the "
                problem += "model, of the data's order or of the loss is not in the checkpoint"
        self.findings.append(make_finding("resume", passed, problem, when))

    # ---- Notable rows, and the longest batch -------------------------------------------------------------------------

    def _try_rows(self) -> None:
        """Train on the longest batch; and on notable rows, with a last batch as short as the training's."""
        summary, trainer = self.rows.get(TRAINING_DATA, RowSummary(0)), self.trainer
        longest = summary.get_longest(trainer.get_total_train_batch_size(self.args))
        if not longest or self.report.is_interrupted:
            return
        if find_overrides(trainer, "get_train_dataloader", "_get_train_sampler", "_get_dataloader"):
            self.findings.append(Finding(NOTE, "longest batch", "it was not tried, since the script makes its batches"))
            return
        size = self.args.train_batch_size * data_parallel_size(self.args)
        notable = summary.exclude_failing(summary.notable)[:MAX_ROWS]
        ordinary = [row for row in summary.exclude_failing(summary.lengths) if row not in notable]
        notable += ordinary[: max(min(size, summary.total) - len(notable), 0)]
        notable += ordinary[size:][: (summary.total - len(notable)) % size]
        for about, rows, epochs in (
            # Two epochs: the first step allocates the optimizer's state.
            (f"longest batch, {summary.lengths[longest[0]]:,} long", longest, 2),
            ("outlier rows, and the short last batch", notable, 1),
        ):
            error = self._train_on(rows, epochs)
            if error is not None:
                rows, error = self._bisect_failing(rows, error)
                shown = [
                    f"{row:,}" + (f" ({summary.notable[row]})" if row in summary.notable else "") for row in rows[:4]
                ]
                which = f"row{'s' * (len(rows) > 1)} {', '.join(shown)}{' and others' * (len(rows) > 4)}"
                self._fail(f"{about.partition(',')[0]}, {which}", error, "in epoch 1, at a batch of such rows")
                return
            self.findings.append(make_finding(about, f"{len(rows)} rows, with forward, backward and update"))

    def _train_on(self, rows: list[int], epochs: int = 1) -> BaseException | None:
        """Train on some rows; return the error; a non-finite loss is an error too."""
        steps, dataset = TrialSteps(seconds=math.inf), select_rows(self.trainer.train_dataset, rows)
        changed = {"max_steps": -1, "num_train_epochs": epochs, "load_best_model_at_end": False}
        error = self._attempt(steps, self.trainer.train, dataset, **changed)
        odd = [] if error is not None else [loss for loss in steps.losses.values() if not math.isfinite(loss)]
        return FloatingPointError(f"the loss is {odd[0]}") if odd else error

    def _bisect_failing(self, rows: list[int], error: BaseException) -> tuple[list[int], BaseException]:
        # With several processes no trial can follow an error.
        half = len(rows) // 2 if self.args.world_size == 1 else 0
        for part in (rows[:half], rows[half:]) if half else ():
            failure = self._train_on(part)
            if failure is not None:
                return self._bisect_failing(part, failure)
        return rows, error

    def _generate_longest(self, steps: TrialSteps) -> None:
        """Generate a batch of the maximum length, which an untrained model may not reach."""
        trainer, config = self.trainer, cast("Any", getattr(self.trainer.model, "generation_config", None))
        summaries = {name: self.rows[name] for name in self.eval_datasets if name in self.rows}
        lengths = {name: max(summary.lengths.values()) for name, summary in summaries.items() if summary.lengths}
        generates = (
            generation.is_generation_requested(self.args) and trainer.compute_metrics is not None and config is not None
        )
        is_limited = self.is_evaluation_limited
        if not (generates and lengths and steps.evaluates) or is_limited or self.report.is_interrupted:
            return
        name = max(lengths, key=lengths.__getitem__)
        rows = select_rows(self.eval_datasets[name], summaries[name].get_longest(self.eval_batch_size))
        settings = {"min_new_tokens": config.max_new_tokens}
        if config.max_new_tokens is None:
            length = generation.merge_generation_keywords(self.args, {}).get("max_length")
            settings = {"min_length": length or config.max_length or DEFAULT_MAX_TOKENS}
        about = ", ".join(f"{setting}={value}" for setting, value in settings.items())

        def evaluate() -> None:
            vars(trainer)["compute_metrics"] = lambda *_, **__: {}
            vars(config).update(settings)
            trainer.evaluate(rows)

        error = self._attempt(TrialSteps(), evaluate, trainer.train_dataset)
        if error is not None:
            self._fail(f"longest generation, {about}", error, "in an evaluation with an answer of that length")
        else:
            self.findings.append(make_finding("longest generation", f"an evaluation with {about}"))

    # ---- Time and memory ---------------------------------------------------------------------------------------------

    def _get_peak_memory(self) -> int:
        """Return the process's peak memory in bytes, without the trial's copy of the weights."""
        if self.args.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.args.device)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        if not self.folder or not self.should_restore_model:
            return peak
        tensors = (*self.trainer.model.parameters(), *self.trainer.model.buffers())
        return max(self.peak_at_start, peak - sum(tensor.numel() * tensor.element_size() for tensor in tensors))

    def _forecast(self, steps: TrialSteps, peak_before: int) -> None:
        report, state, args = self.report, steps.state, self.args
        report.forecast_bytes = self._get_peak_memory()
        sizes = [tqdm.format_sizeof(size, "B") for size in (peak_before, report.forecast_bytes)]
        report.forecast["memory"] = f"{sizes[0]} so far, {sizes[1]} with the longest batch"
        ends, save = steps.step_ends[STEPS_WITH_EVENTS:], steps.save_seconds
        step = (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else None
        evaluation = self._estimate_evaluation_seconds(steps)
        times = {"a step": step, "an evaluation": evaluation, "a save": save or None}
        shown = [f"{format_seconds(value)} {name}" for name, value in times.items() if value is not None]
        report.forecast["time"] = ", ".join(shown) or "too few steps to measure"
        seconds = steps.step_ends[0] - steps.start + (state.max_steps - 1) * (step or 0)
        counts = []
        for part in (EVALUATION, SAVE):
            every, minutes = get_schedule(part, args, state)
            by_steps = math.ceil(state.max_steps / every) if every else 0
            counts.append(by_steps + int(seconds / 60 / (minutes or math.inf)))
        evaluations, saves = max(counts[0], int(args.eval_at_end)) + bool(args.eval_on_start), counts[1]
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
            f"started now, it finishes at {end:%Y-%m-%d %H:%M}"
        )

    def _estimate_evaluation_seconds(self, steps: TrialSteps) -> float | None:
        logged = {name: value for entry in steps.state.log_history for name, value in entry.items()}
        names = {name: f"eval_{name}_runtime" if name else "eval_runtime" for name in self.batches}
        if not steps.evaluates or self.is_evaluation_limited or not logged.keys() >= {*names.values()}:
            return None
        return sum(logged[names[name]] / selected * total for name, (selected, total) in self.batches.items())
