"""Wrong input ends in one line that says what was wrong and what to do, before training where that is knowable."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from littrainer import Trainer, TrainerCallback, TrainingArguments
from tests.scenarios.data import Rows, Stream, vector_rows
from tests.scenarios.models import LosslessClassifier, VectorClassifier


class StepCounter(TrainerCallback):
    """Counts the optimizer steps that began, and the trainings."""

    def __init__(self) -> None:
        self.trainings = 0
        self.steps = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainings += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1


@contextmanager
def one_line_error(kind: type[Exception], words: str) -> Iterator[None]:
    """The block raises `kind` with a message of one line that matches `words`."""
    with pytest.raises(kind, match=words) as caught:
        yield
    message = str(caught.value).strip()
    assert message and "\n" not in message


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    settings: dict[str, Any] = {"output_dir": str(folder), "max_steps": 2, "use_cpu": True, "disable_tqdm": True}
    return TrainingArguments(**{**settings, **changes})


def test_a_model_that_returns_no_loss_is_named_with_what_it_returned(tmp_path: Path) -> None:
    counter = StepCounter()
    trainer = Trainer(
        model=LosslessClassifier(),
        args=arguments(tmp_path),
        train_dataset=Rows(vector_rows(8)),
        callbacks=[counter],
    )
    with one_line_error(ValueError, "(?i)loss.*logits"):
        trainer.train()
    assert counter.steps == 0


def test_data_without_labels_is_named_as_the_reason_for_a_missing_loss(tmp_path: Path) -> None:
    counter = StepCounter()
    trainer = Trainer(
        model=VectorClassifier(),
        args=arguments(tmp_path),
        train_dataset=Rows([{"x": row["x"]} for row in vector_rows(8)]),
        callbacks=[counter],
    )
    with one_line_error(ValueError, "(?i)loss.*labels"):
        trainer.train()
    assert counter.steps == 0


@pytest.mark.parametrize("length", [{"max_steps": 2}, {"max_steps": -1, "num_train_epochs": 1}])
def test_an_empty_training_set_is_refused_before_training(tmp_path: Path, length: dict[str, int]) -> None:
    counter = StepCounter()
    with one_line_error(ValueError, "train_dataset.*empty"):
        Trainer(
            model=VectorClassifier(),
            args=arguments(tmp_path, **length),
            train_dataset=Rows([]),
            callbacks=[counter],
        ).train()
    assert counter.trainings == 0


@pytest.mark.parametrize("evaluated", [Rows([]), {"whole": Rows(vector_rows(4)), "short": Rows([])}])
def test_an_empty_evaluation_set_is_refused_before_training(tmp_path: Path, evaluated: Any) -> None:
    counter = StepCounter()
    with one_line_error(ValueError, "eval_dataset.*empty"):
        Trainer(
            model=VectorClassifier(),
            args=arguments(tmp_path, eval_strategy="epoch"),
            train_dataset=Rows(vector_rows(8)),
            eval_dataset=evaluated,
            callbacks=[counter],
        ).train()
    assert counter.trainings == 0


def test_training_without_a_training_set_says_which_argument_is_missing(tmp_path: Path) -> None:
    trainer = Trainer(model=VectorClassifier(), args=arguments(tmp_path))
    with one_line_error(ValueError, "train_dataset"):
        trainer.train()


def test_evaluating_without_an_evaluation_set_says_which_argument_is_missing(tmp_path: Path) -> None:
    trainer = Trainer(model=VectorClassifier(), args=arguments(tmp_path))
    with one_line_error(ValueError, "eval_dataset"):
        trainer.evaluate()


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_evaluation_during_training_needs_an_evaluation_set_from_the_start(tmp_path: Path, strategy: str) -> None:
    with one_line_error(ValueError, f"eval_strategy='{strategy}'.*eval_dataset"):
        Trainer(
            model=VectorClassifier(),
            args=arguments(tmp_path, eval_strategy=strategy),
            train_dataset=Rows(vector_rows(8)),
        )


def test_a_stream_without_max_steps_is_refused_when_the_trainer_is_made(tmp_path: Path) -> None:
    with one_line_error(ValueError, "max_steps"):
        Trainer(model=VectorClassifier(), args=arguments(tmp_path, max_steps=-1), train_dataset=Stream(vector_rows(8)))


def test_a_trainer_without_a_model_says_what_to_pass(tmp_path: Path) -> None:
    with one_line_error(RuntimeError, "model.*model_init"):
        Trainer(args=arguments(tmp_path), train_dataset=Rows(vector_rows(8)))


def test_a_trainer_with_a_model_and_a_model_init_says_to_pass_one(tmp_path: Path) -> None:
    with one_line_error(ValueError, "model.*model_init"):
        Trainer(model=VectorClassifier(), model_init=VectorClassifier, args=arguments(tmp_path))


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("learning_rat", "learning_rate"),
        ("num_epochs", "num_train_epochs"),
        ("per_device_train_batchsize", "per_device_train_batch_size"),
        ("gradient_acumulation_steps", "gradient_accumulation_steps"),
    ],
)
def test_an_unknown_argument_name_suggests_the_nearest_known_one(tmp_path: Path, written: str, meant: str) -> None:
    with one_line_error(TypeError, f"{written}.*{meant}"):
        arguments(tmp_path, **{written: 1})


def test_a_script_path_that_does_not_exist_ends_with_status_2_and_one_line(tmp_path: Path) -> None:
    script = tmp_path / "nope.py"
    command = [sys.executable, "-m", "littrainer", "run", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert str(script) in line
