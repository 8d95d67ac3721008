"""`Trainer.check()`: short trainings by the Trainer's own methods, in a temporary folder, that find what fails late."""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from littrainer.arguments.choices import IntervalStrategy, SaveStrategy
from littrainer.callbacks.base import TrainerCallback
from littrainer.callbacks.handler import DefaultFlowCallback
from littrainer.callbacks.lightning_callbacks import is_one_of
from littrainer.callbacks.progress import PrinterCallback, ProgressCallback, default_progress_callback
from littrainer.check import findings
from littrainer.check.findings import NOTE, CheckReport, Finding, judged, shown_seconds, words_of
from littrainer.check.rows import LABELS, RowLook, can_select, look_at_rows, selected
from littrainer.checkpoint.verification import damage_in
from littrainer.data.columns import accepted_columns
from littrainer.distributed.agreement import all_arrive, failing_together, from_first, wait_for_each_other
from littrainer.distributed.layout import data_parallel_size
from littrainer.errors.tracebacks import ShortTraceback
from littrainer.lightning.trial_steps import check_can_try, keep_steps_only, left_as_found
from littrainer.tracking.base import TrackerCallback
from littrainer.training.overrides import own_methods

# How long steps, and batches of an evaluation, are taken to forecast the whole; and how long an evaluation of all rows
# may take if its metrics fail on few; and how much later than the first of several processes the last one may fail.
SECONDS_TO_MEASURE, LONGEST_EVALUATION_SECONDS, SECONDS_UNTIL_ALL_FAIL = 5.0, 120.0, 10.0
MOST_BATCHES, MOST_ROWS = 12, 32
# Of losses with and without a resume, on the CPU and elsewhere, where kernels may add in another order each time.
TOLERANCE, TOLERANCE_OF_GPUS = 1e-6, 1e-3
TRAINING_DATA = "train_dataset"
# First optimizer steps, at which a trial evaluates and saves: twice, since the first time takes longer.
STEPS_WITH_EVENTS = 2
# What else the arguments say for the length of a trial; `TrialSteps` asks for evaluations and saves.
OF_A_TRIAL: dict[str, Any] = {
    **dict.fromkeys(("save_total_limit", "max_minutes", "save_minutes", "eval_minutes", "hang_timeout")),
    **dict.fromkeys(("disable_tqdm", "skip_memory_metrics"), True),
    "push_to_hub": False,
}
# Parts of a training, and functions whose call means that it has come to that part; the outermost one counts.
EVALUATION, SAVE, END, STEP = "evaluation", "save", "end of training", "optimizer step"
PARTS = {
    **dict.fromkeys(("_evaluate", "_determine_best_metric", "evaluate"), EVALUATION),
    **dict.fromkeys(("_save_checkpoint", "on_save", "note_what_callbacks_did", "save_model"), SAVE),
    "_finalize_training": END,
}


class TrialSteps(TrainerCallback):
    """The last callback of a trial: asks for evaluations and saves at the first steps, takes times, and ends it.

    Parameters:
        seconds: how long it goes on after the first steps; a training to the end logs each step.
    """

    def __init__(self, evaluates: bool = False, saves: bool = False, seconds: float = 0.0):
        self.evaluates, self.saves, self.seconds = evaluates, saves, seconds
        self.state: Any = None
        self.began = self.last_event = time.perf_counter()
        self.step_ends: list[float] = []
        self.save_seconds, self.is_over = 0.0, False

    @property
    def losses(self) -> dict[int, float]:
        """The losses that were logged, by optimizer step."""
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


def schedule_of(part: str, args: Any, state: Any) -> tuple[int, float | None]:
    """Return after how many optimizer steps, and minutes, a training comes to a part again and again; 0 for never."""
    strategy, interval, minutes = args.eval_strategy, state.eval_steps, args.eval_minutes
    if part == SAVE and args.save_strategy != SaveStrategy.BEST:
        strategy, interval, minutes = args.save_strategy, state.save_steps, args.save_minutes
    if strategy in (None, IntervalStrategy.NO):
        return 0, minutes
    # The length of a stream's epochs is not known.
    epochs = 1 if state.num_train_epochs == sys.maxsize else state.num_train_epochs
    return interval if strategy == IntervalStrategy.STEPS else math.ceil(state.max_steps / epochs), minutes


def first_time(part: str, args: Any, steps: TrialSteps) -> str:
    """Return when a training first comes to a part; one that no strategy asks for is left to the script."""
    state = steps.state
    if state is None or part in (STEP, END):
        return "when all steps are done" if part == END else f"at optimizer step {len(steps.step_ends) + 1:,}"
    every, minutes = schedule_of(part, args, state)
    if every:
        return f"at optimizer step {min(every, state.max_steps):,} of {state.max_steps:,}"
    return f"after {minutes:g} minutes" if minutes else f"at a call of {'save_model' if part == SAVE else 'evaluate'}()"


class TrainingCheck:
    """One check of a Trainer, which does not train.

    Parameters:
        training: which of the script's trainings it is, for the page.
    """

    def __init__(self, trainer: Any, training: str = "train()"):
        self.trainer, self.args = trainer, trainer.args
        self.report = CheckReport(f"{training}, output_dir={str(self.args.output_dir)!r}")
        self.findings = self.report.findings
        self.callbacks = list(trainer.callback_handler.callbacks)
        given = trainer.eval_dataset
        self.eval_datasets: dict[str, Any] = given if isinstance(given, dict) else {} if given is None else {"": given}
        self.eval_batch_size = self.args.eval_batch_size * data_parallel_size(self.args)
        self.looks: dict[str, RowLook] = {}
        # Of each evaluation set: batches that trials go over, and all batches.
        self.batches: dict[str, tuple[int, int]] = {}
        # Of a stream, and of a loader of the script's own, the first batches alone can be had; metrics may need all.
        self.limits_evaluation = self.evaluates_all = False
        self.puts_model_back, self.folder = True, ""
        self.saves_itself = self.args.save_strategy != SaveStrategy.NO or self.args.save_minutes is not None
        # The first one of the trial that saves.
        self.checkpoint: Path | None = None
        self.peak_at_start = self._peak()

    def run(self, ends_afterwards: bool = False) -> CheckReport:
        """Check everything, and return what was found; raises what `Trainer.check()` does.

        Parameters:
            ends_afterwards: whether the process ends then, so that a model which is split need not be put back.
        """
        try:
            check_can_try(self.trainer, "check")
        except NotImplementedError:
            if not ends_afterwards:
                raise
            self.puts_model_back = False
        except (LookupError, TypeError, ValueError) as error:
            self._fail("arguments", error, "when train() begins")
            return self.report
        is_first, output = self.args.process_index == 0, Path(self.args.output_dir).absolute()
        with failing_together("making a temporary folder"):
            # Next to output_dir: on its disk, and where all processes see it.
            near = next(one for one in (*output.parents[:1], output, *output.parents) if os.access(one, os.W_OK))
            self.folder = tempfile.mkdtemp(prefix=".littrainer_check_", dir=near) if is_first else ""
        self.folder = from_first(self.folder)
        try:
            with left_as_found(self.trainer, with_model=False):
                self.findings += self._look_at_rows()
            steps = self._train_and_save()
            if steps is not None:
                peak = self._peak()
                self._try_rows()
                self._forecast(steps, peak)
                self._resume(steps)
            self.findings += [findings.rights_on_hub(self.args)] if self.args.push_to_hub else []
            self.findings += findings.starts_of_trackers(self.callbacks)
            if not self.report.is_broken_off:
                wait_for_each_other()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
        return self.report

    def _fail(self, about: str, error: Exception, when: str) -> None:
        self.findings.append(judged(about, "", words_of(error), when))
        # Others may wait for this process at what it has not come to.
        self.report.is_broken_off |= not all_arrive(SECONDS_UNTIL_ALL_FAIL)

    def _look_at_rows(self) -> Iterator[Finding]:
        trainer, model, is_first = self.trainer, self.trainer.model, self.args.process_index == 0
        columns = accepted_columns(model, trainer.label_names) if self.args.remove_unused_columns else None
        own_loss = trainer.compute_loss_func is not None or bool(own_methods(trainer, ("compute_loss",)))
        labels = {*LABELS, *trainer.label_names}
        for name, dataset in {TRAINING_DATA: trainer.train_dataset, **self.eval_datasets}.items():
            about = name if name == TRAINING_DATA else f"eval_dataset {name!r}".removesuffix(" ''")
            if not can_select(dataset):
                yield Finding(NOTE, about, "its rows were not looked at, since single ones cannot be read")
                continue
            own: Any = look_at_rows(dataset, columns, model, own_loss, labels) if is_first else None
            look = self.looks[name] = from_first(own)
            yield judged(about, str(look))
            when = "in epoch 1, when a batch has this row" if name == TRAINING_DATA else "in the evaluation"
            for column, rows in look.failing.items():
                others = f" ({len(rows):,} such rows)" if len(rows) > 1 else ""
                yield judged(about, "", f"row {min(rows):,}: {column}: {rows[min(rows)]}{others}", when)

    # ---- Trial trainings ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _trial(self, last: TrialSteps, rows: Any = None, **changed: Any) -> Iterator[None]:
        """A block in which the Trainer tries something out; afterwards it is as it was.

        Parameters:
            last: the callback that comes after those of the script.
            rows: a dataset to train on instead, of which the script's callbacks do not hear.
            changed: arguments.
        """
        trainer, callbacks = self.trainer, self.callbacks
        with left_as_found(trainer, [*callbacks, *trainer.lightning_callbacks], self.puts_model_back), ShortTraceback():
            vars(trainer).update({"eval_dataset": self._few_rows()} if rows is None else {TRAINING_DATA: rows})
            places = {"output_dir": self.folder, "logging_dir": f"{self.folder}/runs"}
            keep_steps_only(self.args, trainer.lightning_keywords, **(OF_A_TRIAL | places | changed))
            if self.limits_evaluation:
                trainer.lightning_keywords["limit_val_batches"] = MOST_BATCHES
            kept = trainer.lightning_callbacks if rows is None else []
            trainer.lightning_callbacks[:] = [one for one in kept if not is_one_of(one, "Checkpoint")]
            others = (TrackerCallback, PrinterCallback, ProgressCallback, default_progress_callback())
            users = [one for one in callbacks if not isinstance(one, others)]
            trainer.callback_handler.callbacks = [*(users if rows is None else [DefaultFlowCallback()]), last]
            yield

    def _few_rows(self) -> Any:
        """Return the evaluation data with few batches, each as in the whole: first, notable and last ones."""
        few, has_own_loader = {}, own_methods(self.trainer, ("get_eval_dataloader", "_get_eval_sampler"))
        for name, dataset in self.eval_datasets.items():
            look, size = self.looks.get(name), self.eval_batch_size
            if look is None or has_own_loader:
                self.limits_evaluation = True
                few[name] = dataset
                continue
            number = (len(dataset) - 1) // size + 1
            rows = [0, len(dataset) - 1, *look.longest(1), *look.good(look.notable)]
            notable = list(dict.fromkeys(row // size for row in rows))[:MOST_BATCHES]
            # Spread over all, so that their mean time is known.
            chosen = {*notable, *range(0, number, 1 if self.evaluates_all else -(-number // MOST_BATCHES))}
            self.batches[name] = len(chosen), number
            places = [row for one in sorted(chosen) for row in range(len(dataset))[one * size : (one + 1) * size]]
            few[name] = selected(dataset, places)
        return few.get("", few or None)

    def _train_and_save(self) -> TrialSteps | None:
        """Train some steps, with evaluation and save; a part that fails is left out of the next attempt."""
        args = self.args
        wanted = {STEP: True, EVALUATION: bool(self.eval_datasets), SAVE: True, END: bool(args.load_best_model_at_end)}
        # An evaluation that the script calls for looks for no best model.
        evaluates = args.eval_strategy not in (None, "no") or args.eval_minutes is not None
        changed: dict[str, Any] = {} if evaluates else {"metric_for_best_model": None}
        while True:
            seconds = SECONDS_TO_MEASURE if wanted[STEP] else 0.0
            steps = TrialSteps(wanted[EVALUATION], wanted[SAVE] and self.saves_itself, seconds)
            try:
                with self._trial(steps, **changed, load_best_model_at_end=wanted[END]):
                    self.trainer.train()
                    if wanted[SAVE] and not self.saves_itself:
                        self.trainer.save_model()
                break
            except Exception as error:
                part, (few, every) = self._part_of(error), map(sum, zip((0, 0), *self.batches.values(), strict=True))
                is_quick = (time.perf_counter() - steps.last_event) * every <= LONGEST_EVALUATION_SECONDS * few
                # Metrics may compare with rows that the script keeps itself, and need all.
                if part == EVALUATION and few < every and all_arrive(SECONDS_UNTIL_ALL_FAIL) and from_first(is_quick):
                    self.evaluates_all = True
                    continue
                self._fail(part, error, first_time(part, args, steps))
                # A step that fails is most often one of a batch with a rare row, which is looked for afterwards.
                is_early = part == STEP and len(steps.step_ends) <= STEPS_WITH_EVENTS
                if self.report.is_broken_off or is_early or not (wanted[part] or part == END):
                    return None
                wanted[part] = False
                if part == END:
                    break
        if not steps.step_ends:
            self.findings.append(Finding(NOTE, STEP, "the training ends before the first one"))
            return None
        self.findings += self._judge({part for part in wanted if wanted[part]}, steps)
        return steps

    def _part_of(self, error: BaseException) -> str:
        """Return the part of a training that an error came from, by its traceback."""
        objects, names = (self.trainer, *self.callbacks), []
        for frame, _ in traceback.walk_tb(error.__traceback__):
            first = next(iter(frame.f_locals.values()), None)
            # A function of the script may have the name of a part too.
            if frame.f_globals.get("__name__", "").startswith("littrainer.") or any(one is first for one in objects):
                names.append(frame.f_code.co_name)
        return next((PARTS[name] for name in names if name in PARTS), STEP)

    def _judge(self, parts: Collection[str], steps: TrialSteps) -> Iterator[Finding]:
        """Say what the last attempt shows of the parts that were in it."""
        odd = {step: f"the loss is {loss}" for step, loss in steps.losses.items() if not math.isfinite(loss)}
        state, first = steps.state, min(odd, default=0)
        if STEP in parts:
            passed = f"{len(steps.step_ends):,} optimizer steps with forward, backward and update"
            yield judged(STEP, passed, odd.get(first, ""), f"by optimizer step {first:,}")
        if EVALUATION in parts:
            names = sorted({name for entry in state.log_history for name in entry if name.startswith("eval_")})
            yield judged(EVALUATION, f"it gives {', '.join(names)}")
            if self.limits_evaluation:
                yield Finding(NOTE, EVALUATION, f"the first {MOST_BATCHES} batches were tried, and no shorter last one")
        if SAVE in parts and self.saves_itself:
            best = f"metric_for_best_model={self.args.metric_for_best_model!r} gives {state.best_metric!r}"
            problem = f"no checkpoint was written after an evaluation: {best}"
            self.checkpoint = next(iter(sorted(Path(self.folder).rglob("checkpoint-1"))), None)
            if self.checkpoint is not None:
                problem = " ".join(damage_in(self.checkpoint))
            yield judged(SAVE, "a checkpoint was written and verified", problem, first_time(SAVE, self.args, steps))
        elif SAVE in parts:
            yield judged(SAVE, "save_model() wrote the model")
        if END in parts and state.best_model_checkpoint is not None:
            yield judged(END, "the best model was loaded")

    def _resume(self, before: TrialSteps) -> None:
        """Go on from the first checkpoint: the next loss has to be the same."""
        checkpoint, args, steps = self.checkpoint, self.args, TrialSteps()
        if checkpoint is None or args.save_only_model or args.ignore_data_skip or self.report.is_broken_off:
            return
        when = "when a training that was killed is resumed"
        try:
            with self._trial(steps):
                self.trainer.train(resume_from_checkpoint=str(checkpoint))
        except Exception as error:
            # The end, which comes after all steps, has been tried before.
            if self._part_of(error) != END:
                self._fail("resume", error, when)
                return
        expected, again = before.losses.get(2), steps.losses.get(2)
        passed, problem = "the checkpoint was loaded; no further loss was logged to compare", ""
        if expected is not None and again is not None:
            passed = f"the next loss is the same ({again:.6g})"
            tolerance = TOLERANCE if args.device.type == "cpu" else TOLERANCE_OF_GPUS
            if not math.isclose(expected, again, rel_tol=tolerance):
                problem = f"the next loss is {again:.6g} after a resume, and {expected:.6g} without one: part of the "
                problem += "model, of the data's order or of the loss is not in the checkpoint"
        self.findings.append(judged("resume", passed, problem, when))

    # ---- Rows that stand out, and the longest batch ------------------------------------------------------------------

    def _try_rows(self) -> None:
        """Train on the longest batch, and on rows that stand out with a last batch as short as it will be."""
        look, trainer = self.looks.get(TRAINING_DATA, RowLook(0)), self.trainer
        chosen_by_script = own_methods(trainer, ("get_train_dataloader", "_get_train_sampler", "_get_dataloader"))
        longest = look.longest(trainer.get_total_train_batch_size(self.args))
        if longest and chosen_by_script:
            self.findings.append(Finding(NOTE, "longest batch", "it was not tried, since the script makes its batches"))
        if not longest or chosen_by_script or self.report.is_broken_off:
            return
        size = self.args.train_batch_size * data_parallel_size(self.args)
        notable = look.good(look.notable)[:MOST_ROWS]
        others = [row for row in look.good(look.lengths) if row not in notable]
        notable += others[: max(min(size, look.total) - len(notable), 0)]
        notable += others[size:][: (look.total - len(notable)) % size]
        for about, rows, epochs in (
            # Twice, since the optimizer has its state from the first step on.
            (f"longest batch, {look.lengths[longest[0]]:,} long", longest, 2),
            ("rows that stand out, and a last batch as short as it will be", notable, 1),
        ):
            error = self._failure_on(rows, epochs)
            if error is not None:
                few, error = self._fewest_failing(rows, error)
                named = [f"{row:,}" + (f" ({look.notable[row]})" if row in look.notable else "") for row in few[:4]]
                which = f"row{'s' * (len(few) > 1)} {', '.join(named)}{' and others' * (len(few) > 4)}"
                self._fail(f"{about.partition(',')[0]}, {which}", error, "in epoch 1, at a batch of such rows")
                return
            self.findings.append(judged(about, f"{len(rows)} rows, with forward, backward and update"))

    def _failure_on(self, rows: list[int], epochs: int = 1) -> Exception | None:
        """Train on some rows alone; return the error, also for a loss that is no number."""
        steps, dataset = TrialSteps(seconds=math.inf), selected(self.trainer.train_dataset, rows)
        try:
            with self._trial(steps, dataset, max_steps=-1, num_train_epochs=epochs, load_best_model_at_end=False):
                self.trainer.train()
        except Exception as error:
            return error
        odd = [loss for loss in steps.losses.values() if not math.isfinite(loss)]
        return FloatingPointError(f"the loss is {odd[0]}") if odd else None

    def _fewest_failing(self, rows: list[int], error: Exception) -> tuple[list[int], Exception]:
        # Several processes break off with the first error.
        half = len(rows) // 2 if self.args.world_size == 1 else 0
        for part in (rows[:half], rows[half:]) if half else ():
            found = self._failure_on(part)
            if found is not None:
                return self._fewest_failing(part, found)
        return rows, error

    # ---- Time and memory ---------------------------------------------------------------------------------------------

    def _peak(self) -> int:
        """Return the most memory that the process has held, without the copy of weights that are put back."""
        if self.args.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.args.device)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        if not self.folder or not self.puts_model_back:
            return peak
        weights = (*self.trainer.model.parameters(), *self.trainer.model.buffers())
        return max(self.peak_at_start, peak - sum(one.numel() * one.element_size() for one in weights))

    def _forecast(self, steps: TrialSteps, peak_before: int) -> None:
        report, state, args = self.report, steps.state, self.args
        peak = report.forecast_bytes = self._peak()
        sizes = [tqdm.format_sizeof(number, "B") for number in (peak_before, peak)]
        report.forecast["memory"] = f"{sizes[0]} so far, {sizes[1]} with the longest batch"
        intervals = (schedule_of(part, args, state)[0] for part in (EVALUATION, SAVE))
        evaluations, saves = (math.ceil(state.max_steps / every) if every else 0 for every in intervals)
        logged = {name: value for entry in state.log_history for name, value in entry.items()}
        names = {name: f"eval_{name}_runtime" if name else "eval_runtime" for name in self.batches}
        evaluation: float | None = None
        # An evaluate() of the script's own may log no times.
        if steps.evaluates and not self.limits_evaluation and logged.keys() >= {*names.values()}:
            evaluation = sum(logged[names[name]] / few * every for name, (few, every) in self.batches.items())
        plain, save = steps.step_ends[STEPS_WITH_EVENTS:], steps.save_seconds
        step = (plain[-1] - plain[0]) / (len(plain) - 1) if len(plain) > 1 else None
        times = {"a step": step, "an evaluation": evaluation, "a save": save or None}
        shown = [f"{shown_seconds(value)} {name}" for name, value in times.items() if value is not None]
        report.forecast["time"] = ", ".join(shown) or "too few steps to measure"
        seconds = steps.step_ends[0] - steps.began + (state.max_steps - 1) * (step or 0)
        evaluations += bool(args.eval_on_start) + int(seconds / 60 / (args.eval_minutes or math.inf))
        saves += int(seconds / 60 / (args.save_minutes or math.inf))
        if self.checkpoint is not None and saves:
            self.findings.append(findings.room_on_disk(args, self.checkpoint, saves))
        if step is None or (evaluations and evaluation is None):
            return
        seconds += saves * save + evaluations * (evaluation or 0)
        is_ended = seconds > 60 * (args.max_minutes or math.inf)
        seconds = report.forecast_seconds = 60 * args.max_minutes if is_ended else seconds
        end = datetime.datetime.now() + datetime.timedelta(seconds=seconds)
        report.forecast["forecast"] = (
            f"{state.max_steps:,} steps, {evaluations} evaluations and {saves} saves take {shown_seconds(seconds)}"
            f"{', since max_minutes ends them early' * is_ended}; begun now, training ends {end:%Y-%m-%d %H:%M}"
        )
