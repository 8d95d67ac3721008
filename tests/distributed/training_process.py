"""One of several processes that train together: `python -m tests.distributed.training_process FOLDER`.

Rank and world size come from the environment, as a launcher sets them. Tried is what a training step does in two
processes: which model it is handed, what is exchanged when, and who decides.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from safetensors.torch import load_file
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import littrainer
from benchmarks.measured.routes import Route
from littrainer import Trainer, TrainerCallback
from littrainer.checkpoint import writer
from littrainer.checkpoint.weights import write_weights
from littrainer.distributed.collectives import all_gather_object
from littrainer.loop import out_of_memory
from tests.distributed.checks import run_checks
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, tag_rows, token_rows, vector_rows
from tests.scenarios.models import PartlyTrainedClassifier, VectorClassifier, tiny_bert_classifier, tiny_bert_tagger
from tests.scenarios.other_processes import LONGEST_WAIT_SECONDS
from tests.scenarios.trainers import StepwiseTrainer, plain_descent, quiet_trainer, warnings_logged

RANK, PROCESSES = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
KINDS: tuple[type[Trainer], ...] = (Trainer, StepwiseTrainer)
# The optimizer step whose checkpoint is written while the next one is taken.
SAVED_STEP = 3
# What torch exchanges between processes by itself, outside of the backward pass.
COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "barrier")


def get_weights(trainer: Trainer) -> list[float]:
    return torch.cat([one.detach().flatten() for one in trainer.model.parameters()]).tolist()


def alike(found: Any) -> Any:
    """What this process has found, which is what each of them has."""
    each = all_gather_object(found)
    assert each == [found] * PROCESSES
    return found


class NotesCollectives(TrainerCallback):
    """Notes what is exchanged between the processes from the beginning of each optimizer step to its end."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.of_steps: list[list[str]] = []

    @contextmanager
    def noting(self) -> Iterator[None]:
        originals = {name: getattr(dist, name) for name in COLLECTIVES}
        try:
            for name, original in originals.items():
                setattr(dist, name, self._noted(name, original))
            yield
        finally:
            for name, original in originals.items():
                setattr(dist, name, original)

    def _noted(self, name: str, original: Any) -> Any:
        def note(*args: Any, **kwargs: Any) -> Any:
            self.names.append(f"{name} in the background" if kwargs.get("async_op") else name)
            return original(*args, **kwargs)

        return note

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step:
            self.of_steps.append(self.names)
        self.names = []


class WritesUntilStep(TrainerCallback):
    """Holds what writes in the background until the end of an optimizer step."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.is_reached = threading.Event()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.is_reached.set()

    def write(self, *args: Any, **kwargs: Any) -> None:
        assert self.is_reached.wait(LONGEST_WAIT_SECONDS)
        write_weights(*args, **kwargs)


def beside_gradients_nothing_is_waited_for_between_two_steps_that_do_not_log(folder: Path) -> None:
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "finding a size": {"auto_find_batch_size": True},
        "writing": {"async_save": True, "save_strategy": "steps", "save_steps": SAVED_STEP},
    }
    # One for each of the two micro-batches, for the flags of the control.
    of_a_step = ["all_reduce in the background"] * 2
    for kind in KINDS:
        found: dict[str, Any] = {}
        for way, changes in ways.items():
            notes, writes = NotesCollectives(), WritesUntilStep(SAVED_STEP + 1)
            given = {"callbacks": [notes, writes]}
            trainer = quiet_trainer(
                folder, kind=kind, rows=96, given=given, gradient_accumulation_steps=2, max_steps=5, **changes
            )
            with (
                notes.noting(),
                mock.patch.object(writer, "write_weights", writes.write),
                mock.patch.object(out_of_memory, "MAX_AGREED_STEPS", 1),
            ):
                trainer.train()
            found[way] = notes.of_steps
        assert found["plain"] == [of_a_step] * 4
        # In the first steps the processes agree on whether the size fits.
        first, *others = found["finding a size"]
        assert first.count("all_gather_object") == 2 and others == [of_a_step] * 3
        # The step after a save is taken while its checkpoint is written.
        saved = found["writing"].pop(SAVED_STEP - 1)
        assert "all_gather_object" in saved and found["writing"] == [of_a_step] * 3


class CountsCalls(TrainerCallback):
    """Notes the file of each function of the package that is called from the end of the third step to the next one."""

    def __init__(self) -> None:
        self.route, self.files = Route(), list[str]()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4:
            self.files = self.route.end()
        if state.global_step == 3:
            self.route.begin()


def calls_of_a_step(folder: Path) -> list[str]:
    """The files of the package's functions that an optimizer step calls, in their order."""
    counts = CountsCalls()
    quiet_trainer(folder, rows=96, given={"callbacks": [counts]}, max_steps=6).train()
    return [str(Path(file).relative_to(Path(littrainer.__file__).parent)) for file in counts.files]


def python_calls_of_a_step_are_those_of_one_process_and_of_the_exchange(folder: Path) -> None:
    (folder / f"calls{RANK}.json").write_text(json.dumps(calls_of_a_step(folder)))


def parameters_without_gradients_are_an_error_with_a_remedy_where_nobody_looks_for_them(folder: Path) -> None:
    with pytest.raises(RuntimeError) as failed:
        quiet_trainer(folder, PartlyTrainedClassifier(), max_steps=3, ddp_find_unused_parameters=False).train()
    assert "ddp_find_unused_parameters=True" in "\n".join([str(failed.value), *getattr(failed.value, "__notes__", [])])


def a_strategy_of_the_users_keeps_its_hook_and_gradients_are_exchanged_once_in_a_window(folder: Path) -> None:
    calls: list[int] = []

    def exchange(bucket: Any) -> Any:
        calls.append(bucket.index())
        return allreduce_hook(dist.group.WORLD, bucket)

    strategy = DDPStrategy(ddp_comm_hook=lambda _, bucket: exchange(bucket), broadcast_buffers=False)
    each_batch = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}
    for kind in KINDS:
        for buckets, changes in ((2, {}), (6, each_batch)):
            calls.clear()
            given = {"lightning": {"strategy": strategy}}
            accumulated: Any = {"rows": 64, "gradient_accumulation_steps": 3, "max_steps": 2, **changes}
            trainer = quiet_trainer(folder, kind=kind, given=given, **accumulated)
            trainer.train()
            used: Any = trainer.lightning_trainer.strategy  # type: ignore[union-attr]
            assert len(calls) == buckets and trainer.model_wrapped.broadcast_buffers is False
            assert (used.global_rank, used.world_size) == (RANK, PROCESSES)


class Raises(TrainerCallback):
    """Raises a flag of the control at one event, on some ranks."""

    def __init__(self, flag: str, event: str, step: int, ranks: tuple[int, ...]):
        self.seen: list[tuple[str, int]] = []

        def on_event(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == step and RANK in ranks:
                setattr(control, flag, True)

        setattr(self, event, on_event)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("save", state.global_step))

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("evaluate", state.global_step))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("end", state.global_step))


def what_one_process_asks_for_all_do_one_step_later(folder: Path) -> None:

    def seen(flag: str, event: str, ranks: tuple[int, ...], **changes: Any) -> list[tuple[str, int]]:
        callback = Raises(flag, event, 2, ranks)
        trainer = quiet_trainer(folder, rows=80, given={"callbacks": [callback]}, **{"max_steps": 6, **changes})
        trainer.train()
        return callback.seen

    everybody = tuple(range(PROCESSES))
    stop, later = "should_training_stop", {"num_train_epochs": 1, "max_steps": -1}
    found = (
        seen(stop, "on_step_end", everybody),
        seen("should_evaluate", "on_step_end", everybody),
        seen("should_evaluate", "on_step_end", (1,)),
        seen(stop, "on_step_end", (1,)),
        seen(stop, "on_log", (1,), logging_strategy="steps", logging_steps=1),
        seen(stop, "on_substep_end", (1,), gradient_accumulation_steps=2),
        seen("should_epoch_stop", "on_step_end", (1,), **later),
    )
    evaluated = ([("evaluate", step), ("end", 6)] for step in (2, 3))
    assert found == ([("end", 2)], *evaluated, *[[("end", 3)]] * 4)


def lightning_callbacks_decide_alike_in_all_processes(folder: Path) -> None:
    from lightning.pytorch.callbacks import EarlyStopping, StochasticWeightAveraging

    class StopsAlone(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if RANK == 1 and trainer.global_step == 2:
                trainer.should_stop = True

    def steps(*callbacks: Any, **changes: Any) -> Any:
        trainer = quiet_trainer(
            folder,
            rows=40,
            given={"callbacks": list(callbacks)},
            **{"max_steps": 6, "eval_strategy": "steps", "eval_steps": 1, **changes},
        )
        trainer.train()
        return trainer.state.global_step, get_weights(trainer)

    stopping = EarlyStopping("eval_loss", mode="max", patience=1)
    alone, early, _ = alike(
        [
            steps(StopsAlone()),
            steps(stopping),
            steps(StochasticWeightAveraging(0.01, swa_epoch_start=1), max_steps=-1, num_train_epochs=3),
        ]
    )
    # It stops where the evaluation of that step has come to its end, and each process knows what the other one wants.
    assert alone[0] == 2 and early[0] < 6


def a_model_that_ddp_cannot_train_is_refused_by_name(folder: Path) -> None:
    spread: Any = VectorClassifier()
    spread.hf_device_map = {"inner": "cpu", "head": "disk"}
    with pytest.raises(ValueError, match=r"VectorClassifier was loaded onto several devices \(cpu, disk\)"):
        quiet_trainer(folder, spread, max_steps=1).train()


class Unfreezes(TrainerCallback):
    """Lets the first layer be trained from the second epoch on."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].inner.requires_grad_(state.global_step > 0)


def gradients_of_parameters_that_a_callback_unfreezes_are_exchanged(folder: Path) -> None:
    for kind in KINDS:
        torch.manual_seed(0)
        model = VectorClassifier()
        model.inner.requires_grad_(False)
        before = model.inner.weight.flatten().tolist()
        trainer = quiet_trainer(
            folder, model, kind=kind, given={"callbacks": [Unfreezes()]}, num_train_epochs=2, optim="sgd"
        )
        trainer.create_optimizer()
        trainer.optimizer.add_param_group({"params": list(model.inner.parameters())})
        trainer.train()
        assert alike(model.inner.weight.flatten().tolist()) != before


class NeedsMemory(VectorClassifier):
    """Runs out of memory in one process with more than two samples at a time."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        if RANK == 1 and len(x) > 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().forward(x, labels)


def all_processes_start_over_where_memory_runs_out_in_one(folder: Path) -> None:
    for kind in KINDS:
        torch.manual_seed(0)
        trainer = quiet_trainer(
            folder, NeedsMemory(), kind=kind, rows=24, auto_find_batch_size=True, max_steps=3, ddp_timeout=60
        )
        trainer.train()
        assert alike((trainer._train_batch_size, trainer.state.global_step, get_weights(trainer)))[:2] == (2, 3)


class Crowded(PartlyTrainedClassifier):
    """Runs out of memory in one process with more rows at a time, and adds up in a buffer what it has seen."""

    def __init__(self, most_rows: int) -> None:
        super().__init__()
        self.most_rows = most_rows
        self.register_buffer("seen", torch.zeros(()))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.sum() * self.training
        if RANK == 1 and self.training and len(x) > self.most_rows:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().logits(x)


def a_window_that_one_process_does_again_keeps_nobody_waiting(folder: Path) -> None:
    for accumulation in (1, 3):
        found: list[dict[str, Any]] = []
        for on in (False, True):
            torch.manual_seed(0)
            trainer = quiet_trainer(
                folder,
                Crowded(2 if on else 4),
                rows=72,
                auto_micro_batch=on,
                gradient_accumulation_steps=accumulation,
                optim="sgd",
                max_steps=3,
                ddp_timeout=60,
            )
            trainer.train()
            alike(get_weights(trainer))
            found.append(trainer.model.state_dict())
            # Two rows of six numbers.
            kept = trainer.training_run.resume_record().get("fitting_elements")  # type: ignore[union-attr]
            assert alike(kept) == (12 if on else None)
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


def a_row_that_does_not_fit_in_one_process_ends_all(folder: Path) -> None:
    class NoMemory(VectorClassifier):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            if RANK == 1 and self.training:
                raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return super().forward(x, labels)

    words = r"even with 1 row\(s\) of 6 elements" if RANK == 1 else "process 1 with RuntimeError: auto_micro_batch"
    with pytest.raises(RuntimeError, match=words):
        quiet_trainer(
            folder, NoMemory(), rows=64, auto_micro_batch=True, gradient_accumulation_steps=3, ddp_timeout=60
        ).train()


def finders_and_limits_are_those_of_all_processes(folder: Path) -> None:
    for kind in KINDS:
        torch.manual_seed(0)
        trainer = quiet_trainer(
            folder,
            NeedsMemory(),
            kind=kind,
            rows=40,
            per_device_train_batch_size=2,
            per_device_eval_batch_size=2,
            lightning={"limit_train_batches": 3, "limit_val_batches": 1},
            num_train_epochs=1,
            ddp_timeout=60,
        )
        before = get_weights(trainer)
        curve = trainer.lr_find(num_training=6).results
        size = trainer.scale_batch_size(steps_per_trial=1)
        is_unchanged = get_weights(trainer) == before
        steps = trainer.train().global_step
        samples = trainer.evaluation_loop(trainer.get_eval_dataloader(), "Evaluation").num_samples
        alike((curve, size, steps, samples))
        assert len(curve["loss"]) == len(set(curve["loss"])) == 6
        # Memory runs out with four samples, in the second process only.
        assert (size, steps, samples, is_unchanged) == (2, 3, 4, True)


def an_exact_loss_is_that_of_the_whole_batch_in_one_process(folder: Path) -> None:
    without_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    heads = ((tiny_bert_tagger, tag_rows(24)), (tiny_bert_classifier, token_rows(24)))
    for (make, rows), kind in itertools.product(heads, KINDS):
        found = {}
        for normalization in ("exact", "transformers"):
            torch.manual_seed(0)
            model = make(**without_dropout)
            trainer = quiet_trainer(
                folder,
                model,
                kind=kind,
                given={"train_dataset": Rows(rows), "data_collator": pad_tokens},
                per_device_train_batch_size=2,
                gradient_accumulation_steps=2,
                max_steps=3,
                optim="sgd",
                learning_rate=0.1,
                max_grad_norm=0.0,
                train_sampling_strategy="sequential",
                logging_strategy="steps",
                logging_steps=1,
                loss_normalization=normalization,
            )
            with warnings_logged("loss_normalization") as texts:
                trainer.train()
            losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            found[normalization] = losses, get_weights(trainer), texts
        torch.manual_seed(0)
        whole = make(**without_dropout).train()
        expected = plain_descent(whole, (pad_tokens(rows[begin : begin + 8]) for begin in (0, 8, 16)), 0.1)
        losses, weights, texts = found["exact"]
        assert alike(losses) == pytest.approx(expected, rel=1e-5) and not texts
        expected_weights = torch.cat([one.detach().flatten() for one in whole.parameters()])
        torch.testing.assert_close(torch.tensor(alike(weights)), expected_weights, rtol=1e-4, atol=1e-6)
        losses, _, texts = found["transformers"]
        assert losses[0] == pytest.approx(4 * expected[0], rel=0.05)
        is_named = ["2 micro-batches in each of 2 processes in an optimizer step" in text for text in texts]
        assert is_named == [True] * (RANK == 0), texts
        assert all("4 times too large" in text for text in texts)


def speed_is_that_of_all_processes_and_the_first_ones_times(folder: Path) -> None:
    slow = time.sleep if RANK else lambda _: None

    class SlowRows(Rows):
        def __getitem__(self, index: int) -> Any:
            slow(0.02)
            return super().__getitem__(index)

    arguments = {"log_speed": True, "logging_strategy": "steps", "logging_steps": 1, "max_steps": 3}
    given = {"train_dataset": SlowRows(vector_rows(64))}
    trainer = quiet_trainer(folder, given=given, **arguments)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry][1]
    seconds = {name: value for name, value in logs.items() if name.endswith("_seconds")}
    shares = all_gather_object(seconds["speed/data_seconds"] / sum(seconds.values()))
    assert alike(logs["speed/slowest_data_share"]) == pytest.approx(max(shares), abs=0.01)
    # Of both processes' four samples, by the time of this one.
    assert logs["speed/samples_per_second"] == pytest.approx(8 / sum(seconds.values()), 0.02)


def averaged_weights_are_evaluated_saved_and_resumed_alike(folder: Path) -> None:
    settings = {"ema_decay": 0.7, "save_strategy": "steps", "save_steps": 2, "learning_rate": 0.1}
    whole = quiet_trainer(folder, rows=48, max_steps=4, **settings)
    whole.train()
    saved = load_file(folder / "checkpoint-4" / "model.safetensors")
    resumed = quiet_trainer(folder, rows=48, max_steps=4, **settings)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    plain = quiet_trainer(folder / "plain", rows=48, max_steps=4, learning_rate=0.1)
    plain.train()
    # The average is in the file too, and the same in both processes.
    assert alike(get_weights(whole)) == get_weights(resumed) != get_weights(plain)
    assert all(torch.equal(saved[name], value) for name, value in whole.model.state_dict().items())


def muon_trains_alike_and_resumes(folder: Path) -> None:
    settings = {"optim": "muon", "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole, resumed = (quiet_trainer(folder, rows=48, **settings) for _ in range(2))
    whole.train()
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert alike(get_weights(whole)) == get_weights(resumed)


class TracksItsRank(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.track("rank", RANK)
        if RANK:
            self.track("second only", torch.tensor(3.0))
        return super().compute_loss(*args, **kwargs)


class AsksByFiles(TrainerCallback):
    """The first process asks for a checkpoint, and for the end once there is one; each step takes a while."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        time.sleep(0.3)
        if RANK == 0:
            self.folder.joinpath("STOP" if any(self.folder.glob("checkpoint-*")) else "SAVE").touch()


def files_of_the_clock_tracked_means_and_the_patience_of_a_resume_are_those_of_all_processes(folder: Path) -> None:
    patience = 30
    steps = []
    for asks in ([AsksByFiles(folder)], []):
        stopping = littrainer.EarlyStoppingCallback(early_stopping_patience=patience)
        given = {"callbacks": [*asks, stopping], "compute_metrics": lambda _: {"score": 0.5}}
        trainer = quiet_trainer(
            folder,
            kind=TracksItsRank,
            given=given,
            ddp_backend="gloo",
            max_steps=100,
            logging_strategy="steps",
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="steps",
            save_steps=1000,
            metric_for_best_model="score",
        )
        trainer.train(resume_from_checkpoint=not asks)
        steps.append(trainer.state.global_step)
        tracked = [(one["rank"], one["second only"]) for one in trainer.state.log_history if "rank" in one]
        assert set(alike(tracked)) == {(0.5, 3.0)}
    first, last = alike(steps)
    # The first evaluation is the best one, and those of both parts count.
    assert first < last == patience + 1
    assert (folder / f"checkpoint-{first}").is_dir()


CHECKS = (
    an_exact_loss_is_that_of_the_whole_batch_in_one_process,
    beside_gradients_nothing_is_waited_for_between_two_steps_that_do_not_log,
    python_calls_of_a_step_are_those_of_one_process_and_of_the_exchange,
    parameters_without_gradients_are_an_error_with_a_remedy_where_nobody_looks_for_them,
    a_strategy_of_the_users_keeps_its_hook_and_gradients_are_exchanged_once_in_a_window,
    what_one_process_asks_for_all_do_one_step_later,
    lightning_callbacks_decide_alike_in_all_processes,
    a_model_that_ddp_cannot_train_is_refused_by_name,
    all_processes_start_over_where_memory_runs_out_in_one,
    a_window_that_one_process_does_again_keeps_nobody_waiting,
    a_row_that_does_not_fit_in_one_process_ends_all,
    finders_and_limits_are_those_of_all_processes,
    gradients_of_parameters_that_a_callback_unfreezes_are_exchanged,
    speed_is_that_of_all_processes_and_the_first_ones_times,
    averaged_weights_are_evaluated_saved_and_resumed_alike,
    muon_trains_alike_and_resumes,
    files_of_the_clock_tracked_means_and_the_patience_of_a_resume_are_those_of_all_processes,
)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_checks(CHECKS, Path(sys.argv[1]))
