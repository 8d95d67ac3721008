"""`log_speed` on a fake clock, for a training whose parts take known times."""

from __future__ import annotations

import gc
import logging
import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from torch.utils.data import default_collate

from littrainer import Trainer, TrainerCallback
from littrainer.callbacks import log_history
from littrainer.callbacks.progress import ProgressCallback, format_log_line
from littrainer.callbacks.state import TrainerState
from littrainer.lightning_adapter import fast_training_loop
from littrainer.loop import clock, speed
from tests.loop.step_calls import CountedCalls, run_side
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, token_rows, vector_rows
from tests.scenarios.models import VectorClassifier, tiny_bert_classifier
from tests.scenarios.trainers import StepwiseTrainer, quiet_trainer

# Part -> seconds.
SECONDS = {
    "row": 0.25,
    "to_device": 0.5,
    "forward": 2.0,
    "evaluation": 2.5,
    "backward": 3.0,
    "step": 5.0,
    "callback": 7.0,
    "save": 11.0,
}
BY_STEPS = {"logging_strategy": "steps", "logging_steps": 1, "log_speed": True}


class Now:
    """A fake clock."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def passes(self, what: str) -> None:
        self.seconds += SECONDS[what]


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Now:
    fake_clock = Now()
    monkeypatch.setattr(speed, "perf_counter", lambda: fake_clock.seconds)
    return fake_clock


class SlowRows(Rows):
    now: Now

    def __getitem__(self, index: int) -> Any:
        self.now.passes("row")
        return super().__getitem__(index)


class SlowModel(VectorClassifier):
    def __init__(self, now: Now) -> None:
        super().__init__()
        self.now = now
        self.head.weight.register_hook(lambda _: now.passes("backward"))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        self.now.passes("forward" if self.training else "evaluation")
        return super().forward(x, labels)


class SlowCallback(TrainerCallback):
    """A callback that advances the clock and records the time of each log."""

    def __init__(self, now: Now) -> None:
        self.now = now
        self.logged: list[tuple[float, dict[str, float]]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        optimizer.register_step_pre_hook(lambda *_: self.now.passes("step"))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.now.passes("callback")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.now.passes("save")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logged.append((self.now.seconds, dict(logs)))


def encoded(rows: list[Any]) -> Any:
    """Return a batch as tokenizers do."""
    return transformers.BatchEncoding(pad_tokens(rows))


def slow(kind: type[Trainer], now: Now) -> type[Trainer]:
    class Slow(kind):  # type: ignore[misc, valid-type]
        def _prepare_inputs(self, inputs: Any) -> Any:
            if self.model.training:
                now.passes("to_device")
            return super()._prepare_inputs(inputs)

    return Slow


def train(folder: Path, now: Now, kind: type[Trainer] = Trainer, **changes: Any) -> tuple[Any, SlowCallback]:
    rows, callback = SlowRows(vector_rows(24)), SlowCallback(now)
    rows.now = now
    parameters = {"train_dataset": rows, "callbacks": [callback]}
    trainer = quiet_trainer(
        folder, SlowModel(now), kind=slow(kind, now), trainer_kwargs=parameters, **BY_STEPS, **changes
    )
    return trainer.train(), callback


@pytest.mark.parametrize("kind", [Trainer, StepwiseTrainer])
@pytest.mark.parametrize("is_fast", [True, False], ids=["fast", "Lightning's own"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_each_part_is_timed_in_both_loops(
    tmp_path: Path, now: Now, monkeypatch: pytest.MonkeyPatch, kind: Any, is_fast: bool, accumulation: int
) -> None:
    if not is_fast:
        monkeypatch.setattr(fast_training_loop, "SUPPORTED_RELEASES", frozenset())
    output, callback = train(
        *(tmp_path, now, kind),
        gradient_accumulation_steps=accumulation,
        num_train_epochs=1,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=3,
    )
    steps = 6 // accumulation
    evaluations, saves = -(-steps // 2), -(-steps // 3)
    expected = {
        "data": 24 * SECONDS["row"],
        "to_device": 6 * SECONDS["to_device"],
        "forward": 6 * SECONDS["forward"],
        "backward": 6 * SECONDS["backward"],
        "step": steps * SECONDS["step"],
        # Three batches each.
        "evaluation": evaluations * 3 * SECONDS["evaluation"],
        "save": saves * SECONDS["save"],
        "other": steps * SECONDS["callback"],
    }
    assert {part: output.metrics[f"speed/{part}_seconds"] for part in expected} == pytest.approx(expected)
    training = sum(expected[part] for part in expected if part not in ("evaluation", "save"))
    assert output.metrics["speed/samples_per_second"] == pytest.approx(24 / training, abs=1e-3)
    # Each log has the time since the last log.
    entries = [(at, logs) for at, logs in callback.logged if "loss" in logs]
    assert len(entries) == steps
    for (before, _), (at, logs) in zip([(0.0, {}), *entries], entries, strict=False):
        assert sum(logs[f"speed/{part}_seconds"] for part in expected) == pytest.approx(at - before)


@pytest.mark.parametrize(
    ("changes", "logs", "first_exact"),
    [
        ({"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 5}, 12, 5),
        ({"eval_strategy": "epoch", "save_strategy": "epoch", "num_train_epochs": 2}, 24, 12),
    ],
    ids=["by steps", "by epochs"],
)
def test_the_remaining_seconds_include_evaluations_and_saves(
    tmp_path: Path, now: Now, changes: dict[str, Any], logs: int, first_exact: int
) -> None:
    _, callback = train(tmp_path, now, **{"per_device_train_batch_size": 2, "num_train_epochs": 1, **changes})
    estimates = [(at, logged["speed/seconds_left"]) for at, logged in callback.logged if "loss" in logged]
    assert len(estimates) == logs
    # After the first evaluation and save estimates are exact, except for a prefetched batch.
    for at, remaining in estimates[first_exact:]:
        assert at + remaining == pytest.approx(now.seconds, abs=2 * SECONDS["row"])


def test_tokens_and_padding_are_counted(tmp_path: Path) -> None:
    rows = token_rows(8)
    parameters = {"train_dataset": Rows(rows), "data_collator": pad_tokens}
    settings = {**BY_STEPS, "num_train_epochs": 1, "train_sampling_strategy": "sequential"}
    trainer = quiet_trainer(tmp_path, tiny_bert_classifier(), trainer_kwargs=parameters, **settings)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    lengths = [[len(row["input_ids"]) for row in rows[begin : begin + 4]] for begin in (0, 4)]
    expected = [1 - sum(batch) / (4 * max(batch)) for batch in lengths]
    assert [entry["speed/padding_share"] for entry in logs] == pytest.approx(expected, abs=1e-4)
    assert all(entry["speed/tokens_per_second"] > 0 for entry in logs)


# On a GPU 20 for one micro-batch: the loader's copies have two more boundaries, and each of nine takes a second call.
@pytest.mark.parametrize(("accumulation", "most"), [(1, 20 - 2 - 9), (4, 20)])
@pytest.mark.parametrize(
    ("model", "rows", "collate"),
    [(VectorClassifier, vector_rows, default_collate), (tiny_bert_classifier, token_rows, encoded)],
)
def test_a_step_has_few_more_python_calls_and_without_log_speed_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Any, rows: Any, collate: Any, accumulation: int, most: int
) -> None:
    monkeypatch.setattr(clock, "FILE_CHECK_INTERVAL_S", math.inf)
    calls = {}
    for on in (False, True):
        counted = CountedCalls(3, 8)
        gc.collect()
        gc.disable()
        try:
            arguments = {"log_speed": on, "gradient_accumulation_steps": accumulation}
            samples = rows(40 * accumulation)
            run_side("littrainer", tmp_path, model(), samples, counted.step_ended, collate, **arguments)
        finally:
            gc.enable()
        calls[on] = counted
    assert not any("speed" in name.lower() for name in calls[False].of_function)
    assert 0 < calls[True].calls_per_step - calls[False].calls_per_step <= most


def test_advice_is_printed_once(
    tmp_path: Path, now: Now, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(SECONDS, "row", 100.0)
    with caplog.at_level(logging.WARNING):
        train(tmp_path, now, num_train_epochs=2)
    messages = [record.getMessage() for record in caplog.records if "waiting for data" in record.getMessage()]
    assert len(messages) == 1 and "% of the time" in messages[0] and "dataloader_num_workers" in messages[0]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        ({"forward": 9, "data": 1}, None),
        ({"forward": 4, "data": 6}, "60 % of the time is spent waiting for data: a larger dataloader_num_workers"),
        ({"forward": 5, "save": 5}, "async_save=True"),
        ({"forward": 7, "evaluation": 3, "padding": 5}, "50 % of the tokens are padding"),
    ],
)
def test_the_advice_names_what_to_set(seconds: dict[str, float], words: str | None) -> None:
    logs = {f"speed/{part}_seconds": value for part, value in seconds.items() if part != "padding"}
    advice = log_history.suggest_speedup({**logs, "speed/padding_share": seconds.get("padding", 0) / 10})
    assert advice is None if words is None else words in (advice or "")


def test_the_progress_bar_shows_throughput_and_remaining_time_and_lines_omit_the_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback = ProgressCallback()
    trainer = quiet_trainer(tmp_path)
    shown: dict[str, Any] = {}
    callback.on_train_begin(trainer.args, TrainerState(max_steps=3, is_world_process_zero=True), trainer.control)
    monkeypatch.setattr(callback.training_bar, "set_postfix", lambda values, **_: shown.update(values))
    logs = {"loss": 1.0, "speed/samples_per_second": 12.0, "speed/seconds_left": 3720.0, "speed/data_seconds": 2.0}
    callback.on_log(trainer.args, TrainerState(max_steps=3), trainer.control, logs=dict(logs))
    callback.on_train_end(trainer.args, TrainerState(), trainer.control)
    assert shown == {"loss": "1", "samples/s": "12", "left": "1:02:00"}
    assert "speed" not in format_log_line(logs, TrainerState(max_steps=3))


class Event:
    """A fake CUDA event; the two newest events are incomplete."""

    recorded: ClassVar[list[Event]] = []
    now: Now

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self, stream: Any) -> None:
        self.at = self.now.seconds
        self.recorded.append(self)

    def query(self) -> bool:
        return self not in self.recorded[-2:]

    def synchronize(self) -> None:
        self.recorded.clear()

    def elapsed_time(self, other: Event) -> float:
        assert self.query() and other.query()
        return 1000 * (other.at - self.at)


def test_gpu_times_are_measured_by_events_of_which_few_are_pending(
    tmp_path: Path, now: Now, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "now", now, raising=False)
    monkeypatch.setattr(speed, "MAX_EVENTS", 16)
    trainer = quiet_trainer(tmp_path)
    log = speed.SpeedLog(trainer.args, trainer.model, None, 1)
    log._on_gpu = True
    log.begin(trainer.state)
    for _ in range(50):
        for part in ("forward", "backward"):
            log.enter(part)
            now.passes(part)
            assert len(log._events) <= 16 + 2
    summary = log.summary(trainer.state)
    assert summary["speed/forward_seconds"] == 50 * SECONDS["forward"]
    assert summary["speed/backward_seconds"] == 50 * SECONDS["backward"]
    assert len(log._events) == 1


@pytest.mark.parametrize(
    ("name", "is_half", "peak"),
    [("NVIDIA H200", True, 989e12), ("NVIDIA A100-SXM4-80GB", True, 312e12), ("Unknown A4000", True, None)],
)
def test_peak_flops_follow_from_the_device_name(
    monkeypatch: pytest.MonkeyPatch, name: str, is_half: bool, peak: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert speed.get_peak_flops(torch.device("cuda"), is_half) == peak
    assert speed.get_peak_flops(torch.device("cpu"), is_half) is None
