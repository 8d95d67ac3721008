"""Training steps in two processes: `python -m tests.distributed.training_process FOLDER`.

A launcher's variables set rank and world size.
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
from tests.scenarios.other_processes import MAX_WAIT_SECONDS
from tests.scenarios.trainers import StepwiseTrainer, plain_descent, quiet_trainer, warnings_logged

RANK, PROCESSES = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
KINDS: tuple[type[Trainer], ...] = (Trainer, StepwiseTrainer)
# The optimizer step whose checkpoint is written during the next step.
SAVED_STEP = 3
# Collectives outside of the backward pass.
COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "barrier")


def get_weights(trainer: Trainer) -> list[float]:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()]).tolist()


def check_equal(value: Any) -> Any:
    """Return a value after asserting that it is equal in all processes."""
    assert all_gather_object(value) == [value] * PROCESSES
    return value


class CollectiveRecorder(TrainerCallback):
    """Recorder of the collectives of each optimizer step."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.of_steps: list[list[str]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        originals = {name: getattr(dist, name) for name in COLLECTIVES}
        try:
            for name, original in originals.items():
                setattr(dist, name, self._wrap(name, original))
            yield
        finally:
            for name, original in originals.items():
                setattr(dist, name, original)

    def _wrap(self, name: str, original: Any) -> Any:
        def note(*args: Any, **kwargs: Any) -> Any:
            self.names.append(f"{name} in the background" if kwargs.get("async_op") else name)
            return original(*args, **kwargs)

        return note

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step:
            self.of_steps.append(self.names)
        self.names = []


class WritesUntilStep(TrainerCallback):
    """Callback that delays background writes until the end of an optimizer step."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.is_reached = threading.Event()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.is_reached.set()

    def write(self, *args: Any, **kwargs: Any) -> None:
        assert self.is_reached.wait(MAX_WAIT_SECONDS)
        write_weights(*args, **kwargs)


def steps_without_logs_wait_only_for_gradients(folder: Path) -> None:
    variants: dict[str, dict[str, Any]] = {
        "plain": {},
        "finding a size": {"auto_find_batch_size": True},
        "writing": {"async_save": True, "save_strategy": "steps", "save_steps": SAVED_STEP},
    }
    # Each of the two micro-batches synchronizes flags.
    of_a_step = ["all_reduce in the background"] * 2
    for kind in KINDS:
        collectives: dict[str, Any] = {}
        for variant, changes in variants.items():
            recorder, writes = CollectiveRecorder(), WritesUntilStep(SAVED_STEP + 1)
            trainer = quiet_trainer(
                folder,
                kind=kind,
                rows=96,
                trainer_kwargs={"callbacks": [recorder, writes]},
                gradient_accumulation_steps=2,
                max_steps=5,
                **changes,
            )
            with (
                recorder.recording(),
                mock.patch.object(writer, "write_weights", writes.write),
                mock.patch.object(out_of_memory, "MAX_AGREED_STEPS", 1),
            ):
                trainer.train()
            collectives[variant] = recorder.of_steps
        assert collectives["plain"] == [of_a_step] * 4
        # In the first steps the processes synchronize whether the size fits.
        first, *later = collectives["finding a size"]
        assert first.count("all_gather_object") == 2 and later == [of_a_step] * 3
        # The checkpoint is written during the next step.
        saved = collectives["writing"].pop(SAVED_STEP - 1)
        assert "all_gather_object" in saved and collectives["writing"] == [of_a_step] * 3


class CountsCalls(TrainerCallback):
    """Recorder of the files of the package's functions that are called in the fourth step."""

    def __init__(self) -> None:
        self.route, self.files = Route(), list[str]()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4:
            self.files = self.route.end()
        if state.global_step == 3:
            self.route.begin()


def list_calls_of_a_step(folder: Path) -> list[str]:
    """Return the files of the package's functions that an optimizer step calls, in order."""
    counts = CountsCalls()
    quiet_trainer(folder, rows=96, trainer_kwargs={"callbacks": [counts]}, max_steps=6).train()
    return [str(Path(file).relative_to(Path(littrainer.__file__).parent)) for file in counts.files]


def a_step_makes_few_python_calls(folder: Path) -> None:
    (folder / f"calls{RANK}.json").write_text(json.dumps(list_calls_of_a_step(folder)))


def unused_parameters_are_an_error_with_advice(folder: Path) -> None:
    with pytest.raises(RuntimeError) as failed:
        quiet_trainer(folder, PartlyTrainedClassifier(), max_steps=3, ddp_find_unused_parameters=False).train()
    assert "ddp_find_unused_parameters=True" in "\n".join([str(failed.value), *getattr(failed.value, "__notes__", [])])


def a_strategy_of_the_user_keeps_its_hook_and_gradients_are_reduced_once_in_a_window(folder: Path) -> None:
    calls: list[int] = []

    def exchange(bucket: Any) -> Any:
        calls.append(bucket.index())
        return allreduce_hook(dist.group.WORLD, bucket)

    strategy = DDPStrategy(ddp_comm_hook=lambda _, bucket: exchange(bucket), broadcast_buffers=False)
    each_batch = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}
    for kind in KINDS:
        for buckets, changes in ((2, {}), (6, each_batch)):
            calls.clear()
            accumulated: Any = {"rows": 64, "gradient_accumulation_steps": 3, "max_steps": 2, **changes}
            trainer = quiet_trainer(
                folder, kind=kind, trainer_kwargs={"lightning": {"strategy": strategy}}, **accumulated
            )
            trainer.train()
            used: Any = trainer.lightning_trainer.strategy  # type: ignore[union-attr]
            assert len(calls) == buckets and trainer.model_wrapped.broadcast_buffers is False
            assert (used.global_rank, used.world_size) == (RANK, PROCESSES)


class Raises(TrainerCallback):
    """Callback that raises a flag of the control at an event, on some ranks, and records events."""

    def __init__(self, flag: str, event: str, step: int, ranks: tuple[int, ...]):
        self.events: list[tuple[str, int]] = []

        def on_event(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == step and RANK in ranks:
                setattr(control, flag, True)

        setattr(self, event, on_event)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(("save", state.global_step))

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(("evaluate", state.global_step))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(("end", state.global_step))


def flags_of_a_process_are_obeyed_by_all_a_step_later(folder: Path) -> None:

    def train(flag: str, event: str, ranks: tuple[int, ...], **changes: Any) -> list[tuple[str, int]]:
        callback = Raises(flag, event, 2, ranks)
        trainer = quiet_trainer(
            folder, rows=80, trainer_kwargs={"callbacks": [callback]}, **{"max_steps": 6, **changes}
        )
        trainer.train()
        return callback.events

    all_ranks = tuple(range(PROCESSES))
    stop, epoch = "should_training_stop", {"num_train_epochs": 1, "max_steps": -1}
    events = (
        train(stop, "on_step_end", all_ranks),
        train("should_evaluate", "on_step_end", all_ranks),
        train("should_evaluate", "on_step_end", (1,)),
        train(stop, "on_step_end", (1,)),
        train(stop, "on_log", (1,), logging_strategy="steps", logging_steps=1),
        train(stop, "on_substep_end", (1,), gradient_accumulation_steps=2),
        train("should_epoch_stop", "on_step_end", (1,), **epoch),
    )
    evaluated = ([("evaluate", step), ("end", 6)] for step in (2, 3))
    assert events == ([("end", 2)], *evaluated, *[[("end", 3)]] * 4)


def lightning_callbacks_have_the_same_effect_in_all_processes(folder: Path) -> None:
    from lightning.pytorch.callbacks import EarlyStopping, StochasticWeightAveraging

    class StopsAlone(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if RANK == 1 and trainer.global_step == 2:
                trainer.should_stop = True

    def steps(*callbacks: Any, **changes: Any) -> Any:
        trainer = quiet_trainer(
            folder,
            rows=40,
            trainer_kwargs={"callbacks": list(callbacks)},
            **{"max_steps": 6, "eval_strategy": "steps", "eval_steps": 1, **changes},
        )
        trainer.train()
        return trainer.state.global_step, get_weights(trainer)

    stopping = EarlyStopping("eval_loss", mode="max", patience=1)
    alone, early, _ = check_equal(
        [
            steps(StopsAlone()),
            steps(stopping),
            steps(StochasticWeightAveraging(0.01, swa_epoch_start=1), max_steps=-1, num_train_epochs=3),
        ]
    )
    # The training stops after the evaluation of that step, which synchronizes the processes.
    assert alone[0] == 2 and early[0] < 6


def a_model_that_ddp_cannot_train_is_refused_by_name(folder: Path) -> None:
    spread: Any = VectorClassifier()
    spread.hf_device_map = {"inner": "cpu", "head": "disk"}
    with pytest.raises(ValueError, match=r"VectorClassifier was loaded onto several devices \(cpu, disk\)"):
        quiet_trainer(folder, spread, max_steps=1).train()


class Unfreezes(TrainerCallback):
    """Callback that unfreezes the first layer in the second epoch."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].inner.requires_grad_(state.global_step > 0)


def gradients_of_unfrozen_parameters_are_reduced(folder: Path) -> None:
    for kind in KINDS:
        torch.manual_seed(0)
        model = VectorClassifier()
        model.inner.requires_grad_(False)
        before = model.inner.weight.flatten().tolist()
        trainer = quiet_trainer(
            folder, model, kind=kind, trainer_kwargs={"callbacks": [Unfreezes()]}, num_train_epochs=2, optim="sgd"
        )
        trainer.create_optimizer()
        trainer.optimizer.add_param_group({"params": list(model.inner.parameters())})
        trainer.train()
        assert check_equal(model.inner.weight.flatten().tolist()) != before


class NeedsMemory(VectorClassifier):
    """A model that runs out of memory in the second process with more than two samples."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        if RANK == 1 and len(x) > 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().forward(x, labels)


def all_processes_restart_after_a_process_runs_out_of_memory(folder: Path) -> None:
    for kind in KINDS:
        torch.manual_seed(0)
        trainer = quiet_trainer(
            folder, NeedsMemory(), kind=kind, rows=24, auto_find_batch_size=True, max_steps=3, ddp_timeout=60
        )
        trainer.train()
        outcome = trainer._train_batch_size, trainer.state.global_step, get_weights(trainer)
        assert check_equal(outcome)[:2] == (2, 3)


class Crowded(PartlyTrainedClassifier):
    """A model that runs out of memory in the second process with more rows, and sums its inputs in a buffer."""

    def __init__(self, max_rows: int) -> None:
        super().__init__()
        self.max_rows = max_rows
        self.register_buffer("input_sum", torch.zeros(()))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        self.input_sum += x.sum() * self.training
        if RANK == 1 and self.training and len(x) > self.max_rows:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().logits(x)


def a_window_that_is_repeated_in_a_process_does_not_block_the_others(folder: Path) -> None:
    for accumulation in (1, 3):
        states: list[dict[str, Any]] = []
        for splits in (False, True):
            torch.manual_seed(0)
            trainer = quiet_trainer(
                folder,
                Crowded(2 if splits else 4),
                rows=72,
                auto_micro_batch=splits,
                gradient_accumulation_steps=accumulation,
                optim="sgd",
                max_steps=3,
                ddp_timeout=60,
            )
            trainer.train()
            check_equal(get_weights(trainer))
            states.append(trainer.model.state_dict())
            # Two rows of six numbers.
            max_elements = trainer.training_run.resume_record().get("fitting_elements")  # type: ignore[union-attr]
            assert check_equal(max_elements) == (12 if splits else None)
        torch.testing.assert_close(states[1], states[0], rtol=1e-5, atol=1e-6)


def a_row_that_exceeds_the_memory_of_a_process_ends_all(folder: Path) -> None:
    class NoMemory(VectorClassifier):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            if RANK == 1 and self.training:
                raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return super().forward(x, labels)

    message = r"even with 1 row\(s\) of 6 elements" if RANK == 1 else "process 1 with RuntimeError: auto_micro_batch"
    with pytest.raises(RuntimeError, match=message):
        quiet_trainer(
            folder, NoMemory(), rows=64, auto_micro_batch=True, gradient_accumulation_steps=3, ddp_timeout=60
        ).train()


def finders_and_limits_are_equal_in_all_processes(folder: Path) -> None:
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
        check_equal((curve, size, steps, samples))
        assert len(curve["loss"]) == len(set(curve["loss"])) == 6
        # The second process runs out of memory with four samples.
        assert (size, steps, samples, is_unchanged) == (2, 3, 4, True)


def an_exact_loss_equals_that_of_the_global_batch_in_a_single_process(folder: Path) -> None:
    without_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    heads = ((tiny_bert_tagger, tag_rows(24)), (tiny_bert_classifier, token_rows(24)))
    for (make, rows), kind in itertools.product(heads, KINDS):
        results = {}
        for normalization in ("exact", "transformers"):
            torch.manual_seed(0)
            model = make(**without_dropout)
            trainer = quiet_trainer(
                folder,
                model,
                kind=kind,
                trainer_kwargs={"train_dataset": Rows(rows), "data_collator": pad_tokens},
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
            results[normalization] = losses, get_weights(trainer), texts
        torch.manual_seed(0)
        reference = make(**without_dropout).train()
        expected = plain_descent(reference, (pad_tokens(rows[begin : begin + 8]) for begin in (0, 8, 16)), 0.1)
        losses, weights, texts = results["exact"]
        assert check_equal(losses) == pytest.approx(expected, rel=1e-5) and not texts
        expected_weights = torch.cat([parameter.detach().flatten() for parameter in reference.parameters()])
        torch.testing.assert_close(torch.tensor(check_equal(weights)), expected_weights, rtol=1e-4, atol=1e-6)
        losses, _, texts = results["transformers"]
        assert losses[0] == pytest.approx(4 * expected[0], rel=0.05)
        is_named = ["2 micro-batches in each of 2 processes in an optimizer step" in text for text in texts]
        assert is_named == [True] * (RANK == 0), texts
        assert all("4 times too large" in text for text in texts)


def speed_counts_all_processes_in_the_time_of_the_first(folder: Path) -> None:
    slow = time.sleep if RANK else lambda _: None

    class SlowRows(Rows):
        def __getitem__(self, index: int) -> Any:
            slow(0.02)
            return super().__getitem__(index)

    arguments = {"log_speed": True, "logging_strategy": "steps", "logging_steps": 1, "max_steps": 3}
    trainer = quiet_trainer(folder, trainer_kwargs={"train_dataset": SlowRows(vector_rows(64))}, **arguments)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry][1]
    seconds = {name: value for name, value in logs.items() if name.endswith("_seconds")}
    shares = all_gather_object(seconds["speed/data_seconds"] / sum(seconds.values()))
    assert check_equal(logs["speed/slowest_data_share"]) == pytest.approx(max(shares), abs=0.01)
    # Four samples of each process, in the time of this process.
    assert logs["speed/samples_per_second"] == pytest.approx(8 / sum(seconds.values()), 0.02)


def averaged_weights_are_evaluated_saved_and_resumed(folder: Path) -> None:
    settings = {"ema_decay": 0.7, "save_strategy": "steps", "save_steps": 2, "learning_rate": 0.1}
    first = quiet_trainer(folder, rows=48, max_steps=4, **settings)
    first.train()
    saved = load_file(folder / "checkpoint-4" / "model.safetensors")
    resumed = quiet_trainer(folder, rows=48, max_steps=4, **settings)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    plain = quiet_trainer(folder / "plain", rows=48, max_steps=4, learning_rate=0.1)
    plain.train()
    # The file has the average too.
    assert check_equal(get_weights(first)) == get_weights(resumed) != get_weights(plain)
    assert all(torch.equal(saved[name], value) for name, value in first.model.state_dict().items())


def muon_trains_and_resumes(folder: Path) -> None:
    settings = {"optim": "muon", "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    first, resumed = (quiet_trainer(folder, rows=48, **settings) for _ in range(2))
    first.train()
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert check_equal(get_weights(first)) == get_weights(resumed)


class TracksItsRank(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.track("rank", RANK)
        if RANK:
            self.track("second only", torch.tensor(3.0))
        return super().compute_loss(*args, **kwargs)


class RequestsByFiles(TrainerCallback):
    """Callback of the first process that requests a checkpoint, and then the end; steps are slow."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        time.sleep(0.3)
        if RANK == 0:
            self.folder.joinpath("STOP" if any(self.folder.glob("checkpoint-*")) else "SAVE").touch()


def request_files_tracked_means_and_patience_are_equal_in_all_processes(folder: Path) -> None:
    patience = 30
    steps = []
    for requests in ([RequestsByFiles(folder)], []):
        stopping = littrainer.EarlyStoppingCallback(early_stopping_patience=patience)
        trainer = quiet_trainer(
            folder,
            kind=TracksItsRank,
            trainer_kwargs={"callbacks": [*requests, stopping], "compute_metrics": lambda _: {"score": 0.5}},
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
        trainer.train(resume_from_checkpoint=not requests)
        steps.append(trainer.state.global_step)
        tracked = [(entry["rank"], entry["second only"]) for entry in trainer.state.log_history if "rank" in entry]
        assert set(check_equal(tracked)) == {(0.5, 3.0)}
    first, last = check_equal(steps)
    # The first evaluation is the best, and patience counts evaluations before and after the resume.
    assert first < last == patience + 1
    assert (folder / f"checkpoint-{first}").is_dir()


class ReturnsRankAsTerm(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **{**kwargs, "return_outputs": False})
        return {"loss": loss, "rank_loss": torch.tensor(float(RANK))}


def loss_terms_are_means_over_processes(folder: Path) -> None:
    trainer = quiet_trainer(
        folder,
        kind=ReturnsRankAsTerm,
        rows=12,
        ddp_backend="gloo",
        log_loss_terms=True,
        max_steps=2,
        logging_strategy="steps",
        logging_steps=1,
    )
    trainer.train()
    logged = [entry["rank_loss"] for entry in trainer.state.log_history if "rank_loss" in entry]
    assert check_equal(logged) == [0.5, 0.5]
    assert check_equal(trainer.evaluate()["eval_rank_loss"]) == 0.5


CHECKS = (
    an_exact_loss_equals_that_of_the_global_batch_in_a_single_process,
    steps_without_logs_wait_only_for_gradients,
    a_step_makes_few_python_calls,
    unused_parameters_are_an_error_with_advice,
    a_strategy_of_the_user_keeps_its_hook_and_gradients_are_reduced_once_in_a_window,
    flags_of_a_process_are_obeyed_by_all_a_step_later,
    lightning_callbacks_have_the_same_effect_in_all_processes,
    a_model_that_ddp_cannot_train_is_refused_by_name,
    all_processes_restart_after_a_process_runs_out_of_memory,
    a_window_that_is_repeated_in_a_process_does_not_block_the_others,
    a_row_that_exceeds_the_memory_of_a_process_ends_all,
    finders_and_limits_are_equal_in_all_processes,
    gradients_of_unfrozen_parameters_are_reduced,
    speed_counts_all_processes_in_the_time_of_the_first,
    averaged_weights_are_evaluated_saved_and_resumed,
    muon_trains_and_resumes,
    request_files_tracked_means_and_patience_are_equal_in_all_processes,
    loss_terms_are_means_over_processes,
)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_checks(CHECKS, Path(sys.argv[1]))
