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
from littrainer.callbacks.progress import PrinterCallback, ProgressCallback, default_progress_callback
from littrainer.check import trial_training as trial
from littrainer.check.findings import FAILS, NOTE, PASSED, CheckReport, Finding, shown_bytes, shown_seconds, words_of
from littrainer.check.rows import RowLook, can_select, look_at_rows, selected
from littrainer.check.surroundings import WRITES_FILES_ONLY, rights_on_hub, room_on_disk, starts_of_trackers
from littrainer.check.trial_training import END, EVALUATION, SAVE, STEP, TrialSteps
from littrainer.checkpoint.verification import damage_in
from littrainer.data.columns import accepted_columns
from littrainer.distributed.agreement import from_first, wait_for_each_other
from littrainer.distributed.layout import data_parallel_size
from littrainer.errors.tracebacks import ShortTraceback
from littrainer.lightning.trial_steps import OF_THE_TRAINING, check_can_try, left_as_found
from littrainer.tracking.base import TrackerCallback
from littrainer.training.overrides import own_methods

# How long steps, and batches of an evaluation, are taken to forecast the whole; and how long an evaluation of all rows
# may take if its metrics fail on few.
SECONDS_TO_MEASURE, LONGEST_EVALUATION_SECONDS = 5.0, 120.0
MOST_BATCHES, MOST_ROWS = 12, 32
# Of losses with and without a resume, on the CPU and elsewhere, where kernels may add in another order each time.
TOLERANCE, TOLERANCE_OF_GPUS = 1e-6, 1e-3
TRAINING_DATA = "train_dataset"


class TrainingCheck:
    """One check of a Trainer.

    Parameters:
        trainer: the Trainer, which does not train.
        training: which of the script's trainings it is, for the page.
        ends_afterwards: whether the process ends after the check, so that a model which is split between processes need
            not be put back.
    """

    def __init__(self, trainer: Any, training: str = "train()", ends_afterwards: bool = False):
        self.trainer, self.args = trainer, trainer.args
        self.report = CheckReport(f"{training}, output_dir={str(self.args.output_dir)!r}")
        self.ends_afterwards, self.puts_model_back = ends_afterwards, True
        self.callbacks = list(trainer.callback_handler.callbacks)
        given = trainer.eval_dataset
        self.eval_datasets: dict[str, Any] = given if isinstance(given, dict) else {} if given is None else {"": given}
        self.looks: dict[str, RowLook] = {}
        self.eval_batch_size = self.args.eval_batch_size * data_parallel_size(self.args)
        # Of each evaluation set: batches that trials go over, and all batches.
        self.batches: dict[str, tuple[list[int], int]] = {}
        # Of a stream, and of a loader of the script's own, the first batches alone can be had.
        self.limits_evaluation = False
        # Whether the metrics need all rows, as where the script compares them with rows that it keeps itself.
        self.evaluates_all = False
        self.folder = ""
        self.peak_at_start = self._peak()

    def run(self) -> CheckReport:
        """Check everything, and return what was found; raises what `Trainer.check()` does."""
        try:
            check_can_try(self.trainer, "check")
        except NotImplementedError:
            if not self.ends_afterwards:
                raise
            self.puts_model_back = False
        # On the disk of the run, and where all processes see it.
        near = next(one for one in Path(self.args.output_dir).absolute().parents if one.is_dir())
        is_first = self.args.process_index == 0
        self.folder = from_first(tempfile.mkdtemp(prefix=".littrainer_check_", dir=near) if is_first else "")
        try:
            self._look_at_rows()
            steps = self._train_and_save()
            if steps is not None:
                evaluation_seconds, peak = self._measure_evaluations(), self._peak()
                self._try_rows()
                self._forecast(steps, evaluation_seconds, peak)
                self._resume(steps)
            self.report.findings += [rights_on_hub(self.args)] if self.args.push_to_hub else []
            self.report.findings += starts_of_trackers(self.callbacks)
            if not self.report.is_broken_off:
                wait_for_each_other()
        finally:
            # The first process may be ended while it waits for one that has failed.
            if is_first or self.report.is_broken_off:
                shutil.rmtree(self.folder, ignore_errors=True)
        return self.report

    def _add(self, status: str, about: str, text: str, when: str = "") -> None:
        self.report.findings.append(Finding(status, about, text, when))

    def _fail(self, about: str, error: Exception, when: str) -> None:
        self._add(FAILS, about, words_of(error), when)
        # The other processes wait for this one.
        self.report.is_broken_off = self.report.is_broken_off or self.args.world_size > 1

    def _look_at_rows(self) -> None:
        trainer = self.trainer
        columns = accepted_columns(trainer.model, trainer.label_names) if self.args.remove_unused_columns else None
        own_loss = trainer.compute_loss_func is not None or bool(own_methods(trainer, ("compute_loss",)))
        for name, dataset in {TRAINING_DATA: trainer.train_dataset, **self.eval_datasets}.items():
            about = name if name == TRAINING_DATA else f"eval_dataset {name!r}".removesuffix(" ''")
            if not can_select(dataset):
                self._add(NOTE, about, "its rows were not looked at, since single ones cannot be read")
                continue
            is_first = self.args.process_index == 0
            own: Any = look_at_rows(dataset, columns, trainer.model, own_loss) if is_first else None
            look = self.looks[name] = from_first(own)
            self._add(PASSED, about, str(look))
            when = "in epoch 1, when a batch has this row" if name == TRAINING_DATA else "in the evaluation"
            for column, rows in look.failing.items():
                others = f" ({len(rows):,} such rows)" if len(rows) > 1 else ""
                self._add(FAILS, about, f"row {min(rows):,}: {column}: {rows[min(rows)]}{others}", when)

    # ---- Trial trainings ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _trial(self, last: Any, changed: dict[str, Any] | None = None, train_dataset: Any = None) -> Iterator[None]:
        """A block in which the Trainer tries something out; afterwards it is as it was.

        The callback `last` comes after those of the script; without it none of these hears of the trial.
        """
        trainer, args, handler = self.trainer, self.args, self.trainer.callback_handler
        heard = [*self.callbacks, *trainer.lightning_callbacks]
        with left_as_found(trainer, heard, self.puts_model_back), ShortTraceback():
            replaced = {} if train_dataset is None else {"train_dataset": train_dataset}
            if self.eval_datasets and train_dataset is None:
                replaced["eval_dataset"] = self._few_rows()
            lightning = {name: value for name, value in (args.lightning or {}).items() if name not in OF_THE_TRAINING}
            places = {"output_dir": self.folder, "logging_dir": f"{self.folder}/runs", "lightning": lightning}
            vars(args).update(trial.OF_A_TRIAL | places | (changed or {}))
            for name in OF_THE_TRAINING:
                trainer.lightning_keywords.pop(name, None)
            if self.limits_evaluation:
                trainer.lightning_keywords["limit_val_batches"] = MOST_BATCHES
            kept = [one for one in trainer.lightning_callbacks if last is not None and not is_one_of(one, "Checkpoint")]
            trainer.lightning_callbacks[:] = kept
            handler.callbacks = [DefaultFlowCallback()] if last is None else [*self._users_callbacks(), last]
            vars(trainer).update(replaced)
            yield

    def _users_callbacks(self) -> Iterator[Any]:
        """Yield the callbacks of the script without bars and trackers; TensorBoard writes into the folder."""
        bars_and_trackers = (TrackerCallback, PrinterCallback, ProgressCallback, default_progress_callback())
        for one in self.callbacks:
            if isinstance(one, TrackerCallback) and one.service == WRITES_FILES_ONLY:
                copied: Any = type(one)()
                copied.logging_dir = f"{self.folder}/runs"
                yield copied
            elif not isinstance(one, bars_and_trackers):
                yield one

    def _few_rows(self) -> Any:
        """Return the evaluation data with few batches, each as in the whole: first, notable and last ones."""
        few, has_own_loader = {}, own_methods(self.trainer, ("get_eval_dataloader", "_get_eval_sampler"))
        for name, dataset in self.eval_datasets.items():
            look, size = self.looks.get(name), self.eval_batch_size
            if look is None or has_own_loader:
                self.limits_evaluation = True
                few[name] = dataset
                continue
            last = (len(dataset) - 1) // size
            numbers = [0, last, *(row // size for row in (*look.longest(1), *look.good(look.notable)))]
            chosen = sorted(list(dict.fromkeys([*numbers, min(1, last)]))[:MOST_BATCHES])
            self.batches[name] = list(range(last + 1)) if self.evaluates_all else chosen, last + 1
            few[name] = self._batches_of(name, self.batches[name][0])
        return few.get("", few)

    def _batches_of(self, name: str, numbers: list[int]) -> Any:
        dataset, size = self.eval_datasets[name], self.eval_batch_size
        rows = [row for one in numbers for row in range(one * size, min((one + 1) * size, len(dataset)))]
        return selected(dataset, rows)

    def _train_and_save(self) -> TrialSteps | None:
        """Train some steps, with evaluation and save; a part that fails is left out of the next attempt."""
        args = self.args
        wanted = {
            EVALUATION: args.eval_strategy not in (None, IntervalStrategy.NO),
            SAVE: args.save_strategy != SaveStrategy.NO,
            END: bool(args.load_best_model_at_end),
            STEP: True,
        }
        saves = wanted[SAVE]
        while True:
            # A step that fails is most often one of a batch with a rare row, which is looked for afterwards.
            steps = TrialSteps(wanted[EVALUATION], wanted[SAVE], SECONDS_TO_MEASURE if wanted[STEP] else 0.0)
            try:
                with self._trial(steps, {"load_best_model_at_end": wanted[END]}):
                    self.trainer.train()
                    if not saves:
                        self._try_to_save_model()
            except Exception as error:
                if self._needs_all_rows(error, time.perf_counter() - steps.last_event):
                    continue
                part = trial.part_of(error)
                self._fail(part, error, self._when(part, steps))
                is_early = part == STEP and len(steps.step_ends) <= trial.STEPS_WITH_EVENTS
                if self.report.is_broken_off or is_early or not (wanted[part] or part == END):
                    return None
                wanted[part] = False
                if part != END:
                    continue
            self._note_success(wanted, steps)
            return None if self.report.is_broken_off else steps

    def _try_to_save_model(self) -> None:
        try:
            self.trainer.save_model(f"{self.folder}/model")
        except Exception as error:
            self._add(NOTE, SAVE, f"save_strategy is 'no'; a call of save_model() would fail: {words_of(error)}")

    def _needs_all_rows(self, error: Exception, seconds: float) -> bool:
        """Whether metrics that fail are to be tried on all rows: the script may compare them with its own rows."""
        number = sum(len(some) for some, _ in self.batches.values())
        total = sum(every for _, every in self.batches.values())
        is_of_metrics = trial.OF_METRICS in trial.calls_of(error) and self.args.world_size == 1
        if not is_of_metrics or number >= total or seconds / number * total > LONGEST_EVALUATION_SECONDS:
            return False
        self.evaluates_all = True
        return True

    def _when(self, part: str, steps: TrialSteps) -> str:
        args, state = self.args, steps.state
        if state is None:
            return "before the first optimizer step"
        if part == EVALUATION or (part == SAVE and args.save_strategy == SaveStrategy.BEST):
            return trial.first_time(args.eval_strategy, state.eval_steps, state)
        if part == SAVE:
            return trial.first_time(args.save_strategy, state.save_steps, state)
        return "when all steps are done" if part == END else f"at optimizer step {len(steps.step_ends) + 1:,}"

    def _checkpoint(self) -> Path | None:
        return next(iter(sorted(Path(self.folder).rglob("checkpoint-1"))), None)

    def _note_success(self, wanted: dict[str, bool], steps: TrialSteps) -> None:
        state, checkpoint = steps.state, self._checkpoint()
        assert state is not None
        odd = {step: loss for step, loss in trial.losses_by_step(state).items() if not math.isfinite(loss)}
        if odd:
            self._add(FAILS, STEP, f"the loss is {next(iter(odd.values()))}", f"by optimizer step {min(odd):,}")
        elif wanted[STEP]:
            self._add(PASSED, STEP, f"{len(steps.step_ends):,} optimizer steps with forward, backward and update")
        if wanted[EVALUATION]:
            names = sorted({name for entry in state.log_history for name in entry if name.startswith("eval_")})
            self._add(PASSED, EVALUATION, f"it gives {', '.join(names)}")
            if not any(name.endswith("_loss") for name in names):
                self._add(NOTE, EVALUATION, "it gives no loss: are there labels in the rows?")
        if wanted[SAVE] and checkpoint is None:
            best = f"metric_for_best_model={self.args.metric_for_best_model!r} gives {state.best_metric!r}"
            self._add(FAILS, SAVE, f"no checkpoint was written after an evaluation: {best}", "at each evaluation")
        elif checkpoint is not None:
            damage = damage_in(checkpoint)
            self._add(FAILS if damage else PASSED, SAVE, " ".join(damage) or "a checkpoint was written and verified")
        if wanted[END] and checkpoint is not None:
            self._add(PASSED, END, "the best model was loaded")

    def _resume(self, before: TrialSteps) -> None:
        """Go on from the first checkpoint: the next loss has to be the same."""
        checkpoint, args = self._checkpoint(), self.args
        if checkpoint is None or args.save_only_model or args.ignore_data_skip or self.report.is_broken_off:
            return
        about, when = "resume", "when a training that was killed is resumed"
        steps = TrialSteps(False, False, last_step=2)
        try:
            with self._trial(steps):
                self.trainer.train(resume_from_checkpoint=str(checkpoint))
        except Exception as error:
            # The end, which comes after all steps, has been tried before.
            if trial.part_of(error) != END:
                self._fail(about, error, when)
                return
        expected, again = (trial.losses_by_step(one.state).get(2) for one in (before, steps) if one.state is not None)
        if expected is None or again is None:
            self._add(PASSED, about, "the checkpoint was loaded; no further loss was logged to compare")
        elif math.isclose(expected, again, rel_tol=TOLERANCE if args.device.type == "cpu" else TOLERANCE_OF_GPUS):
            self._add(PASSED, about, f"the next loss is the same ({again:.6g})")
        else:
            text = (
                f"the next loss is {again:.6g} after a resume, and {expected:.6g} without one: part of the model, of "
                "the data's order or of the loss is not in the checkpoint"
            )
            self._add(FAILS, about, text, when)

    # ---- Rows that stand out, and the longest batch ------------------------------------------------------------------

    def _try_rows(self) -> None:
        """Train on the longest batch, and on rows that stand out with a last batch as short as it will be."""
        look, trainer = self.looks.get(TRAINING_DATA), self.trainer
        chosen_by_script = own_methods(trainer, ("get_train_dataloader", "_get_train_sampler", "_get_dataloader"))
        if look is None or chosen_by_script or self.report.is_broken_off:
            return
        rows = look.longest(trainer.get_total_train_batch_size(self.args))
        about = f"longest batch, {look.lengths[rows[0]]:,} long" if rows else ""
        # Twice, since the optimizer has its state from the first step on.
        error = self._failure_on(rows, epochs=2)
        if error is not None:
            self._fail(about, error, f"in epoch 1, at a batch with long rows such as row {rows[0]:,}")
            return
        self._add(PASSED, about, f"{len(rows)} rows, with forward, backward and update")
        size, total = self.args.train_batch_size * data_parallel_size(self.args), look.total
        rows = look.good(look.notable)[:MOST_ROWS]
        others = [row for row in look.good(look.lengths) if row not in rows]
        rows += others[: max(min(size, total) - len(rows), 0)]
        rows += others[size:][: (total - len(rows)) % size]
        error = self._failure_on(rows)
        if error is None:
            self._add(PASSED, "rows that stand out", f"{len(rows)} rows, and a last batch as short as it will be")
            return
        if self.args.world_size == 1:
            rows, error = self._fewest_failing(rows, error)
        named = ", ".join(f"{row:,}" + (f" ({look.notable[row]})" if row in look.notable else "") for row in rows[:4])
        about = f"{TRAINING_DATA}, row{'s' * (len(rows) > 1)} {named}{' and others' * (len(rows) > 4)}"
        self._fail(about, error, "in epoch 1, at a batch of such rows")

    def _failure_on(self, rows: list[int], epochs: int = 1) -> Exception | None:
        """Train on some rows alone; return the error, also for a loss that is no number."""
        dataset = selected(self.trainer.train_dataset, rows)
        try:
            with self._trial(None, {**trial.OF_STEPS_ALONE, "num_train_epochs": epochs}, train_dataset=dataset):
                self.trainer.train()
                losses = list(trial.losses_by_step(self.trainer.state).values())
        except Exception as error:
            return error
        return None if all(map(math.isfinite, losses)) else FloatingPointError(f"the loss is {losses[-1]}")

    def _fewest_failing(self, rows: list[int], error: Exception) -> tuple[list[int], Exception]:
        half = len(rows) // 2
        for part in (rows[:half], rows[half:]) if half else ():
            found = self._failure_on(part)
            if found is not None:
                return self._fewest_failing(part, found)
        return rows, error

    # ---- Time and memory ---------------------------------------------------------------------------------------------

    def _measure_evaluations(self) -> float | None:
        """Return the seconds of an evaluation of all datasets; None if they are not known."""
        has_failed = any(one.about == EVALUATION and one.status == FAILS for one in self.report.findings)
        if has_failed or self.limits_evaluation or self.report.is_broken_off or not self.batches:
            return None
        total = 0.0
        for name, (chosen, every) in self.batches.items():
            number, seconds, started = len(chosen), 0.0, 0.0
            # The first one is slower, and tells how many batches there is time for.
            for _ in range(2):
                # Spread over all, the last one among them.
                spread = sorted({round((place + 1) * every / number) - 1 for place in range(number)})
                data = self._batches_of(name, spread)
                try:
                    with self._trial(TrialSteps(False, False)):
                        started = time.perf_counter()
                        self.trainer.evaluate({name: data} if name else data)
                except Exception as error:
                    if not self._needs_all_rows(error, time.perf_counter() - started):
                        self._fail(EVALUATION, error, "at a call of evaluate()")
                        return None
                    number = every
                    continue
                seconds = (time.perf_counter() - started) / number
                number = from_first(min(max(int(SECONDS_TO_MEASURE / seconds), number), every))
            total += seconds * every
        return total

    def _peak(self) -> int:
        """Return the most memory that the process has held, without the copy of weights that are put back."""
        if self.args.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.args.device)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        if not self.folder or not self.puts_model_back:
            return peak
        weights = (*self.trainer.model.parameters(), *self.trainer.model.buffers())
        return max(self.peak_at_start, peak - sum(one.numel() * one.element_size() for one in weights))

    def _forecast(self, steps: TrialSteps, evaluation: float | None, peak_before: int) -> None:
        report, state, args, checkpoint = self.report, steps.state, self.args, self._checkpoint()
        assert state is not None
        peak = report.forecast_bytes = self._peak()
        report.forecast["memory"] = f"{shown_bytes(peak_before)} so far, {shown_bytes(peak)} with the longest batch"
        evaluations = trial.times_of(args.eval_strategy, state.eval_steps, state)
        saves = trial.times_of(args.save_strategy, state.save_steps, state)
        saves = evaluations if args.save_strategy == SaveStrategy.BEST else saves
        evaluations += bool(args.eval_on_start)
        if checkpoint is not None:
            size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
            report.findings.append(room_on_disk(args, size, saves))
        step, save = steps.seconds_per_step, steps.save_seconds
        times = {"a step": step, "an evaluation": evaluation, "a save": save or None}
        shown = [f"{shown_seconds(value)} {name}" for name, value in times.items() if value is not None]
        report.forecast["time"] = ", ".join(shown) or "too few steps to measure"
        if step is None or (evaluations and evaluation is None):
            return
        start = (steps.first_step_began or steps.began) - steps.began
        seconds = start + state.max_steps * step + evaluations * (evaluation or 0) + saves * save
        report.forecast_seconds = seconds
        end = datetime.datetime.now() + datetime.timedelta(seconds=seconds)
        report.forecast["forecast"] = (
            f"{state.max_steps:,} steps, {evaluations} evaluations and {saves} saves take {shown_seconds(seconds)}; "
            f"begun now, training ends {end:%Y-%m-%d %H:%M}"
        )
