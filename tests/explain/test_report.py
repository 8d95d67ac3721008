from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import LearningRateMonitor

from littrainer import EarlyStoppingCallback, Trainer, TrainingArguments
from littrainer.arguments.destinations import DESTINATIONS
from littrainer.engine import lightning_keywords
from littrainer.explain.report import changed_arguments, explanation
from littrainer.explain.stand_ins import trainer_for
from tests.scenarios.models import VectorClassifier


class StepwiseTrainer(Trainer):
    """Runs in Lightning's manual optimization."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        return super().training_step(model, inputs, num_items_in_batch)


def report_on(args: TrainingArguments) -> str:
    return explanation(trainer_for(args), args)


def line_of(report: str, start: str) -> str:
    (line,) = [line.strip() for line in report.splitlines() if line.strip().startswith(start)]
    return line


def test_each_lightning_keyword_is_listed_with_its_value_and_its_reason() -> None:
    args = TrainingArguments(use_cpu=True, gradient_accumulation_steps=3, lightning={"detect_anomaly": True})
    report = report_on(args)
    for name, value in lightning_keywords(args).items():
        assert len(line_of(report, f"{name}={value!r} ").split()) > 2
    assert line_of(report, "accumulate_grad_batches=3").endswith("from gradient_accumulation_steps")
    assert line_of(report, "detect_anomaly=True").endswith("given as `lightning`")


def test_each_argument_away_from_its_default_has_the_line_that_says_where_it_went() -> None:
    report = report_on(TrainingArguments(use_cpu=True, learning_rate=3e-5, seed=7, max_grad_norm=0.5))
    told = report.partition("arguments away from their defaults")[2]
    for name, value in {"learning_rate": "3e-05", "seed": "7", "max_grad_norm": "0.5", "use_cpu": "True"}.items():
        place, sentence, _ = DESTINATIONS[name]
        assert line_of(told, f"{name}={value} ").endswith(f"  {place.value}: {sentence}")
    assert "weight_decay" not in told


def test_arguments_at_their_defaults_are_not_listed() -> None:
    assert changed_arguments(TrainingArguments(disable_tqdm=TrainingArguments().disable_tqdm)) == {
        "output_dir": "trainer_output"
    }


def test_a_token_is_masked() -> None:
    assert "secret" not in report_on(TrainingArguments(use_cpu=True, hub_token="secret"))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "precision plugin Precision (32-true)"),
        ({"bf16": True}, "precision plugin ForwardMixedPrecision (bf16-mixed)"),
        ({}, "strategy ResidentSingleDeviceStrategy on cpu"),
        ({}, "optimization automatic; the optimizer steps after each micro-batch"),
        ({"gradient_accumulation_steps": 4}, "optimization automatic; the optimizer steps after 4 micro-batches"),
        ({"disable_tqdm": True}, "Trainer callbacks DefaultFlowCallback, PrinterCallback"),
        ({"disable_tqdm": False}, "Trainer callbacks DefaultFlowCallback, ProgressCallback"),
        ({}, "Lightning loggers none"),
        ({"lightning": {"logger": True}}, "Lightning loggers"),
    ],
    ids=str,
)
def test_the_parts_that_result_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    report = report_on(TrainingArguments(use_cpu=True, **changes))
    lines = [" ".join(found.split()) for found in report.splitlines()]
    assert any(found.startswith(line) and (line.count(" ") > 1 or found != f"{line} none") for found in lines)


def test_what_a_script_gave_its_trainer_is_told_too(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    trainer = StepwiseTrainer(
        model=VectorClassifier(),
        args=args,
        callbacks=[EarlyStoppingCallback(), LearningRateMonitor()],
        lightning={"profiler": "simple", "logger": True, "default_root_dir": str(tmp_path)},
    )
    report = explanation(trainer, args)
    assert "EarlyStoppingCallback" in line_of(report, "Trainer callbacks")
    assert line_of(report, "Lightning callbacks").endswith("TrainerEvents, LearningRateMonitor")
    assert "manual" in line_of(report, "optimization")
    assert line_of(report, "profiler='simple'").endswith("given as `lightning`")


def test_explaining_leaves_no_folder_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report = report_on(TrainingArguments("runs/one", use_cpu=True))
    assert line_of(report, "output_dir='runs/one'")
    assert list(tmp_path.iterdir()) == []
