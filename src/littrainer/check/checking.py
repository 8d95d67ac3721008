"""`Trainer.check()`: short trainings by the Trainer's own methods, in a temporary folder, that find what fails late."""

from __future__ import annotations

import contextlib
import datetime
import math
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from littrainer.arguments.choices import IntervalStrategy, SaveStrategy
from littrainer.callbacks.handler import DefaultFlowCallback
from littrainer.callbacks.lightning_callbacks import is_one_of
from littrainer.callbacks.progress import PrinterCallback, ProgressCallback
from littrainer.check.findings import FAILS, NOTE, PASSED, CheckReport, shown_bytes, shown_seconds, words_of
from littrainer.check.rows import RowLook, can_select, look_at_rows, selected
from littrainer.check.surroundings import (
    WRITES_FILES_ONLY,
    existing_folder,
    rights_on_hub,
    room_on_disk,
    starts_of_trackers,
)
from littrainer.check.trial_training import (
    ARGUMENTS_OF_A_TRIAL,
    ARGUMENTS_OF_STEPS_ALONE,
    END,
    EVALUATION,
    SAVE,
    STEP,
    STEPS_WITH_EVENTS,
    TrialSteps,
    first_time,
    losses_by_step,
    part_of,
    times_of,
)
from littrainer.checkpoint.verification import damage_in
from littrainer.data.columns import accepted_columns
from littrainer.data.limits import DEVELOPMENT_RUN
from littrainer.distributed.agreement import from_first, wait_for_each_other
from littrainer.distributed.layout import data_parallel_size
from littrainer.errors.tracebacks import ShortTraceback
from littrainer.lightning.trial_steps import check_can_try, left_as_found
from littrainer.tracking.base import TrackerCallback
from littrainer.training.batch_size_search import ran_out_of_memory
from littrainer.training.overrides import own_methods

# How long steps, and batches of an evaluation, are taken to forecast the whole.
SECONDS_TO_MEASURE = 5.0
# Batches of an evaluation besides those with rows that stand out: the first ones.
FIRST_BATCHES = 2
MOST_BATCHES = 12
MOST_ROWS_TO_TRY = 32
# Keywords for `lightning.Trainer` that would write somewhere, or make another training of it.
NOT_IN_A_TRIAL = ("logger", "max_time", "profiler", DEVELOPMENT_RUN)
# Kernels of a GPU may add in another order each time.
TOLERANCE_OF_LOSSES = {"cpu": 1e-6, "cuda": 1e-3}
# A window is repeated, since the optimizer has its state from the first step on.
TIMES_OF_LONGEST_WINDOW = 2


class TrainingCheck:
    """One check of a Trainer.

    Parameters:
        trainer: the Trainer that has not trained yet.
        training: which of the script's trainings it is, for the page.
        ends_afterwards: whether the process ends after the check, so that a model which is split between processes need
            not be put back.
    """

    def __init__(self, trainer: Any, training: str = "train()", ends_afterwards: bool = False):
        self.trainer, self.args = trainer, trainer.args
        self.report = CheckReport(f"{training}, output_dir={str(self.args.output_dir)!r}")
        self.ends_afterwards, self.puts_model_back = ends_afterwards, True
        self.is_alone = self.args.world_size == 1
        self.callbacks = list(trainer.callback_handler.callbacks)
        datasets = trainer.eval_dataset
        named = datasets if isinstance(datasets, dict) else {} if datasets is None else {"": datasets}
        self.eval_datasets: dict[str, Any] = named
        self.evaluates = self.args.eval_strategy not in (None, IntervalStrategy.NO)
        self.saves = self.args.save_strategy != SaveStrategy.NO
        self.looks: dict[str, RowLook] = {}
        # Batches that trial evaluations go over, and all batches, by the name of the dataset.
        self.batches: dict[str, tuple[int, int]] = {}
        # Of a stream, and of a loader of the script's own, the first batches alone can be had.
        self.limits_evaluation = False
        self.peak_before, self.peak_at_start = 0, _peak_bytes(self.args.device)

    def run(self, resume_from_checkpoint: str | bool | None = None) -> CheckReport:
        """Check everything, and return what was found.

        Parameters:
            resume_from_checkpoint: as `train()` was given it; a named checkpoint is verified.

        Raises:
            RuntimeError: a training goes on, or there is no model.
            NotImplementedError: the model is split between processes, so that it could not be put back.
        """
        try:
            check_can_try(self.trainer, "check")
        except NotImplementedError:
            # The processes that split it end after the check.
            if not self.ends_afterwards:
                raise
            self.puts_model_back = False
        report, folder = self.report, from_first(self._temporary_folder())
        if isinstance(resume_from_checkpoint, str) and Path(resume_from_checkpoint).is_dir():
            damage = damage_in(Path(resume_from_checkpoint))
            report.add(
                FAILS if damage else PASSED,
                resume_from_checkpoint,
                " ".join(damage) or "intact",
                "at the start" * bool(damage),
            )
        try:
            self._look_at_rows()
            steps = self._train_and_save(folder)
            if steps is not None and not self.report.is_broken_off:
                evaluation = self._measure_evaluations(folder)
                self._try_longest_batch(folder)
                self._try_rows(folder)
                self._forecast(steps, evaluation, folder)
                self._resume(steps, folder)
            report.findings += [*rights_on_hub(self.args), *starts_of_trackers(self.callbacks)]
            if not self.report.is_broken_off:
                wait_for_each_other()
        finally:
            if self.args.process_index == 0:
                shutil.rmtree(folder, ignore_errors=True)
        return report

    # ---- Rows --------------------------------------------------------------------------------------------------------

    def _look_at_rows(self) -> None:
        trainer = self.trainer
        named = {f"eval_dataset {name!r}" if name else "eval_dataset": one for name, one in self.eval_datasets.items()}
        columns = accepted_columns(trainer.model, trainer.label_names) if self.args.remove_unused_columns else None
        own_loss = trainer.compute_loss_func is not None or bool(own_methods(trainer, ("compute_loss",)))
        for name, dataset in {"train_dataset": trainer.train_dataset, **named}.items():
            if not can_select(dataset) or not len(dataset):
                self.report.add(NOTE, name, "a stream, or empty: its rows were not looked at")
                continue
            own = look_at_rows(dataset, columns, trainer.model, own_loss) if self.args.process_index == 0 else None
            look = self.looks[name] = from_first(own)
            self.report.add(PASSED, name, look.described())
            evaluates = name != "train_dataset"
            when = "in the evaluation" if evaluates else "in epoch 1, when a batch has this row"
            for about, rows in look.failing.items():
                first = min(rows)
                others = f" ({len(rows)} such rows)" if len(rows) > 1 else ""
                self.report.add(FAILS, name, f"row {first:,}: {about}: {rows[first]}{others}", when)

    # ---- Trial trainings ---------------------------------------------------------------------------------------------

    def _temporary_folder(self) -> str | None:
        """Make a folder on the disk of the run, which all processes see."""
        if self.args.process_index:
            return None
        folder = existing_folder(str(self.args.output_dir))
        try:
            return tempfile.mkdtemp(prefix=".littrainer_check_", dir=folder.parent)
        except OSError:
            return tempfile.mkdtemp(prefix=".littrainer_check_", dir=folder)

    @contextlib.contextmanager
    def _trial(
        self, folder: str, callbacks: list[Any], changed: dict[str, Any] | None = None, **replaced: Any
    ) -> Iterator[None]:
        """A block in which the Trainer trains for trial; afterwards it is as it was.

        Parameters:
            callbacks: those that hear of it.
            changed: arguments with other values.
            replaced: the Trainer's datasets.
        """
        trainer, args = self.trainer, self.args
        heard = [*self.callbacks, *trainer.lightning_callbacks]
        with left_as_found(trainer, heard, self.puts_model_back), ShortTraceback():
            given: Any = args.lightning or {}
            lightning = {name: value for name, value in given.items() if name not in NOT_IN_A_TRIAL}
            trial = {**ARGUMENTS_OF_A_TRIAL, "output_dir": folder, "logging_dir": f"{folder}/runs"}
            vars(args).update(trial | {"lightning": lightning} | (changed or {}))
            for name in NOT_IN_A_TRIAL:
                trainer.lightning_keywords.pop(name, None)
            if self.limits_evaluation:
                trainer.lightning_keywords["limit_val_batches"] = MOST_BATCHES
            trainer.callback_handler.callbacks = callbacks
            files = [one for one in trainer.lightning_callbacks if is_one_of(one, "Checkpoint")]
            trainer.lightning_callbacks[:] = [one for one in trainer.lightning_callbacks if one not in files]
            vars(trainer).update(replaced)
            yield

    def _users_callbacks(self, last: Any, folder: str) -> list[Any]:
        """Return the callbacks of a training without bars and trackers; TensorBoard writes into the folder."""
        shown = (TrackerCallback, PrinterCallback, ProgressCallback)
        heard = [one for one in self.callbacks if not isinstance(one, shown) and "Notebook" not in type(one).__name__]
        for one in self.callbacks:
            if isinstance(one, TrackerCallback) and one.service == WRITES_FILES_ONLY:
                heard.append(type(one)())
                heard[-1].logging_dir = f"{folder}/runs"
        return [*heard, last]

    def _train_and_save(self, folder: str) -> TrialSteps | None:
        """Train some steps, with evaluation and save; a part that fails is left out of the next attempt."""
        wanted = {EVALUATION: self.evaluates, SAVE: self.saves, END: bool(self.args.load_best_model_at_end), STEP: True}
        while True:
            # A step that fails is most often one of a batch with a rare row, which is looked for afterwards.
            steps = TrialSteps(wanted[EVALUATION], wanted[SAVE], SECONDS_TO_MEASURE if wanted[STEP] else 0.0)
            changed = {"load_best_model_at_end": wanted[END]}
            try:
                with self._trial(folder, self._users_callbacks(steps, folder), changed, **self._few_to_evaluate()):
                    self.trainer.train()
                    if not self.saves:
                        self._save_model(folder)
            except Exception as error:
                part = part_of(error)
                self._note_failure(part, error, steps)
                is_early = part == STEP and len(steps.step_ends) <= STEPS_WITH_EVENTS
                if self.report.is_broken_off or is_early or not wanted[part]:
                    return None
                wanted[part] = False
                continue
            self._note_success(wanted, steps, folder)
            return steps

    def _few_to_evaluate(self) -> dict[str, Any]:
        """Return evaluation datasets of few batches, as they are in the whole: the first, notable and last ones."""
        if not self.eval_datasets:
            return {}
        size, few = self.args.eval_batch_size * data_parallel_size(self.args), {}
        has_own_loader = bool(own_methods(self.trainer, ("get_eval_dataloader", "_get_eval_sampler")))
        for name, dataset in self.eval_datasets.items():
            look = self.looks.get(f"eval_dataset {name!r}" if name else "eval_dataset")
            if look is None or has_own_loader:
                self.limits_evaluation = True
                few[name] = dataset
                continue
            last = (len(dataset) - 1) // size
            standing_out = [*look.longest(1), *(row for row in look.notable if row not in look.bad_rows)]
            numbers = [*range(min(FIRST_BATCHES, last + 1)), last, *(row // size for row in standing_out)]
            chosen = sorted(dict.fromkeys(numbers[:MOST_BATCHES]))
            few[name] = selected(dataset, _rows_of_batches(chosen, size, len(dataset)))
            self.batches[name] = len(chosen), last + 1
        return {"eval_dataset": few.get("", few)}

    def _save_model(self, folder: str) -> None:
        try:
            self.trainer.save_model(f"{folder}/model")
        except Exception as error:
            self.report.add(NOTE, SAVE, f"save_strategy is 'no'; save_model() would fail: {words_of(error)}")

    def _fail(self, about: str, error: Exception, when: str, advice: str = "") -> None:
        self.report.add(FAILS, about, f"{words_of(error)}{advice}", when)
        # The other processes wait for this one.
        self.report.is_broken_off = self.report.is_broken_off or not self.is_alone

    def _note_failure(self, part: str, error: Exception, steps: TrialSteps) -> None:
        state, advice, strategy = steps.state, "", self.args.save_strategy
        if part == EVALUATION or (part == SAVE and strategy == SaveStrategy.BEST):
            when = first_time(self.args.eval_strategy, getattr(state, "eval_steps", 1), state)
            evaluated = [look.notable.items() for name, look in self.looks.items() if name != "train_dataset"]
            odd = [f"row {row:,} ({why})" for rows in evaluated for row, why in rows if "None" in why]
            advice = f"\nRows that stand out: {', '.join(odd[:5])}." if odd else ""
        elif part == SAVE:
            when = first_time(strategy, getattr(state, "save_steps", 1), state)
        elif part == END:
            when = "when all optimizer steps are done"
        else:
            when = (
                "before the first optimizer step" if state is None else f"at optimizer step {len(steps.step_ends) + 1}"
            )
        self._fail(part, error, when, advice)

    def _note_success(self, wanted: dict[str, bool], steps: TrialSteps, folder: str) -> None:
        state, report = steps.state, self.report
        assert state is not None
        odd = {step: loss for step, loss in losses_by_step(state).items() if not math.isfinite(loss)}
        if odd:
            report.add(FAILS, STEP, f"the loss is {next(iter(odd.values()))}", f"by optimizer step {min(odd)}")
        elif wanted[STEP]:
            report.add(PASSED, STEP, f"{len(steps.step_ends)} optimizer steps with forward, backward and update")
        if wanted[EVALUATION]:
            names = sorted({name for entry in state.log_history for name in entry if name.startswith("eval_")})
            report.add(PASSED, EVALUATION, f"the evaluation gives {', '.join(names)}")
            if not any(name.endswith("_loss") for name in names):
                report.add(NOTE, EVALUATION, "it has no loss: are there labels in the rows?")
        if wanted[SAVE]:
            checkpoints = sorted(Path(folder).rglob("checkpoint-1"))
            if not checkpoints:
                text = "no checkpoint was written after the first evaluation"
                best = f"metric_for_best_model={self.args.metric_for_best_model!r} gives {state.best_metric!r}"
                report.add(FAILS, SAVE, f"{text}: {best}", "at each evaluation")
                return
            damage = damage_in(checkpoints[0])
            report.add(FAILS if damage else PASSED, SAVE, " ".join(damage) or "a checkpoint was written and verified")
        if wanted[END]:
            report.add(PASSED, END, "the best model was loaded")

    def _resume(self, before: TrialSteps, folder: str) -> None:
        """Go on from the first checkpoint: the next loss has to be the same."""
        found = sorted(Path(folder).rglob("checkpoint-1"))
        if not found or before.state is None or self.args.save_only_model or self.args.ignore_data_skip:
            return
        about, when = "resume", "when a killed training is resumed"
        steps = TrialSteps(False, False, last_step=2)
        try:
            with self._trial(folder, self._users_callbacks(steps, folder), **self._few_to_evaluate()):
                self.trainer.train(resume_from_checkpoint=str(found[0]))
        except Exception as error:
            self._fail(about, error, when)
            return
        expected, again = (losses_by_step(one.state).get(2) for one in (before, steps) if one.state is not None)
        if expected is None or again is None:
            self.report.add(PASSED, about, "the checkpoint was loaded; the training has no further step to compare")
            return
        tolerance = TOLERANCE_OF_LOSSES.get(self.args.device.type, 1e-3)
        if math.isclose(expected, again, rel_tol=tolerance) or math.isnan(expected):
            self.report.add(PASSED, about, f"the next loss is the same ({again:.6g})")
        else:
            text = (
                f"the next loss is {again:.6g} after a resume, and {expected:.6g} without one: part of the model, of "
                "the data's order or of the loss is not in the checkpoint"
            )
            self.report.add(FAILS, about, text, when)

    # ---- Rows that stand out, and the longest batch ------------------------------------------------------------------

    def _may_choose_rows(self) -> bool:
        names = ("get_train_dataloader", "_get_train_sampler", "_get_dataloader")
        return "train_dataset" in self.looks and not own_methods(self.trainer, names)

    def _train_on(self, rows: list[int], folder: str, epochs: int = 1) -> None:
        """Train on some rows alone, and see that the losses are numbers."""
        dataset = selected(self.trainer.train_dataset, rows)
        changed = {**ARGUMENTS_OF_STEPS_ALONE, "num_train_epochs": epochs}
        with self._trial(folder, [DefaultFlowCallback()], changed, train_dataset=dataset):
            self.trainer.lightning_callbacks.clear()
            self.trainer.train()
            losses = losses_by_step(self.trainer.state)
        if not all(map(math.isfinite, losses.values())):
            raise FloatingPointError(f"the loss is {list(losses.values())[-1]}")

    def _try_longest_batch(self, folder: str) -> None:
        self.peak_before = self._peak()
        if not self._may_choose_rows():
            return
        look, number = self.looks["train_dataset"], self.trainer.get_total_train_batch_size(self.args)
        rows = look.longest(number)
        if not rows:
            return
        about = f"longest batch ({look.lengths[rows[0]]:,} long, {len(rows)} rows)"
        try:
            self._train_on(rows, folder, TIMES_OF_LONGEST_WINDOW)
            self.report.add(PASSED, about, "forward, backward and update")
        except Exception as error:
            advice = "\nLower per_device_train_batch_size, or cut rows shorter." if ran_out_of_memory(error) else ""
            self._fail(about, error, f"in epoch 1, at a batch with long rows, as row {rows[0]:,}", advice)

    def _try_rows(self, folder: str) -> None:
        """Train on the rows that stand out, in number so that the last batch is as short as it will be."""
        if self.report.is_broken_off or not self._may_choose_rows():
            return
        look, dataset = self.looks["train_dataset"], self.trainer.train_dataset
        size = self.args.train_batch_size * data_parallel_size(self.args)
        rows = [row for row in look.notable if row not in look.bad_rows][:MOST_ROWS_TO_TRY]
        further = (row for row in look.lengths if row not in look.bad_rows and row not in rows)
        while (len(rows) % size != len(dataset) % size or len(rows) < min(size, len(dataset))) and (
            row := next(further, None)
        ) is not None:
            rows.append(row)
        if not rows or any(
            finding.about.startswith("longest") and finding.status == FAILS for finding in self.report.findings
        ):
            return
        error = self._failure_on(rows, folder)
        if error is None:
            self.report.add(PASSED, "rows that stand out", f"{len(rows)} rows, and a last batch as short as it will be")
            return
        if self.is_alone:
            rows, error = self._fewest_failing(rows, error, folder)
        named = ", ".join(f"{row:,} ({look.notable[row]})" if row in look.notable else f"{row:,}" for row in rows[:4])
        more = f" and {len(rows) - 4} more" if len(rows) > 4 else ""
        when = "in epoch 1, when a batch has " + ("this row" if len(rows) == 1 else "such rows")
        self._fail(f"train_dataset, row{'s' * (len(rows) > 1)} {named}{more}", error, when)

    def _failure_on(self, rows: list[int], folder: str) -> Exception | None:
        try:
            self._train_on(rows, folder)
        except Exception as error:
            return error
        return None

    def _fewest_failing(self, rows: list[int], error: Exception, folder: str) -> tuple[list[int], Exception]:
        """Return the fewest rows that fail, by halves, and their error."""
        half = len(rows) // 2
        for part in (rows[:half], rows[half:]) if half else ():
            found = self._failure_on(part, folder)
            if found is not None:
                return self._fewest_failing(part, found, folder)
        return rows, error

    # ---- Time and memory ---------------------------------------------------------------------------------------------

    def _measure_evaluations(self, folder: str) -> float | None:
        """Return the seconds of an evaluation of all datasets; None if they are not known."""
        if any(one.about == EVALUATION and one.status == FAILS for one in self.report.findings):
            return None
        size, total = self.args.eval_batch_size * data_parallel_size(self.args), 0.0
        if not self.eval_datasets or self.eval_datasets.keys() - self.batches.keys() - {""}:
            return None
        steps = TrialSteps(False, False)
        for name, dataset in self.eval_datasets.items():
            few, all_batches = self.batches.get(name, (0, 0))
            if not few:
                return None
            seconds = 0.0
            try:
                number = few
                # The first one is slower, and tells how many batches there is time for.
                for _ in range(2):
                    spread = _spread_batches(number, all_batches)
                    chosen = selected(dataset, _rows_of_batches(spread, size, len(dataset)))
                    with self._trial(folder, self._users_callbacks(steps, folder)):
                        started = time.perf_counter()
                        self.trainer.evaluate({name: chosen} if name else chosen)
                        seconds = (time.perf_counter() - started) / number
                    fits = int(SECONDS_TO_MEASURE / max(seconds, 1e-6))
                    number = from_first(min(max(fits, few), all_batches))
            except Exception as error:
                # Evaluations of the training were tried before; this one is the script's own, if it makes one.
                self._fail(EVALUATION, error, "at a call of evaluate()")
                return None
            total += seconds * all_batches
        return total

    def _peak(self) -> int:
        """Return the peak of a training, which holds no copy of the weights in the host's memory to put back."""
        model, peak = self.trainer.model, _peak_bytes(self.args.device)
        copied = 0
        if self.puts_model_back and self.args.device.type == "cpu":
            copied = sum(one.numel() * one.element_size() for one in (*model.parameters(), *model.buffers()))
        return max(self.peak_at_start, peak - copied)

    def _forecast(self, steps: TrialSteps, evaluation: float | None, folder: str) -> None:
        report, state, args = self.report, steps.state, self.args
        peak = self._peak()
        report.forecast_bytes = peak
        report.forecast["memory"] = (
            f"{shown_bytes(self.peak_before)} so far, {shown_bytes(peak)} with the longest batch"
        )
        checkpoint = next(iter(sorted(Path(folder).rglob("checkpoint-1"))), None)
        assert state is not None
        by = args.eval_strategy if args.save_strategy == SaveStrategy.BEST else args.save_strategy
        saves = times_of(by, state.save_steps if by == args.save_strategy else state.eval_steps, state)
        if checkpoint is not None:
            size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
            report.findings.append(room_on_disk(args, from_first(size), saves))
        step, save = steps.seconds_per_step, list(steps.save_seconds.values())[-1:]
        evaluations = times_of(args.eval_strategy, state.eval_steps, state) + bool(args.eval_on_start)
        known = {"a step": step, "an evaluation": evaluation, "a save": save[0] if save else None}
        shown = [f"{shown_seconds(value)} {name}" for name, value in known.items() if value is not None]
        report.forecast["time"] = ", ".join(shown) or "too few steps to measure"
        if step is None or (evaluations and evaluation is None):
            return
        seconds = steps.seconds_to_start + state.max_steps * step + evaluations * (evaluation or 0) + saves * sum(save)
        report.forecast_seconds = seconds
        end = datetime.datetime.now() + datetime.timedelta(seconds=seconds)
        report.forecast["forecast"] = (
            f"{state.max_steps:,} steps, {evaluations} evaluations and {saves} saves take "
            f"{datetime.timedelta(seconds=round(seconds))}; begun now, training ends {end:%Y-%m-%d %H:%M}"
        )


def _rows_of_batches(batches: list[int], size: int, total: int) -> list[int]:
    return [row for batch in batches for row in range(batch * size, min((batch + 1) * size, total))]


def _spread_batches(number: int, total: int) -> list[int]:
    """Return numbers of so many batches, spread over all, the last one among them."""
    return sorted({round((place + 1) * total / number) - 1 for place in range(number)})


def _peak_bytes(device: torch.device) -> int:
    """Return the most memory that this process has held: on a GPU what torch allocated there."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
