from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import quiet_arguments, quiet_trainer

SEQUENCES = [
    [0.5, 0.4, 0.45, 0.4, 0.3],
    [float("nan"), 0.5, float("nan"), 0.6],
    [0.2, 0.2],
    [-1.0, -2.0, 3.0],
]


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    settings = {"metric_for_best_model": "quality", "save_strategy": "steps"}
    folder = tmp_path_factory.mktemp("best")
    args = quiet_arguments(folder, transformers.TrainingArguments, **settings)
    return quiet_trainer(folder, **settings), transformers.Trainer(model=VectorClassifier(), args=args)


@pytest.mark.parametrize("values", SEQUENCES, ids=str)
@pytest.mark.parametrize("greater", [True, False])
@pytest.mark.parametrize("strategy", ["steps", "no"])
def test_the_best_evaluation_is_the_one_that_transformers_remembers(
    trainers: tuple[Any, Any], values: list[float], greater: bool, strategy: str
) -> None:
    histories = []
    for trainer in trainers:
        trainer.args.greater_is_better = greater
        trainer.args.save_strategy = type(trainer.args.save_strategy)(strategy)
        trainer.state = type(trainer.state)()
        history = []
        for step, value in enumerate(values, 1):
            trainer.state.global_step = step
            is_new = trainer._determine_best_metric(metrics={"eval_quality": value}, trial=None)
            history.append((bool(is_new), trainer.state.best_metric, trainer.state.best_global_step))
        histories.append(history)
    assert histories[0] == histories[1]


def test_a_metric_may_be_named_with_its_prefix(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, metric_for_best_model="eval_loss", greater_is_better=False)
    assert trainer._determine_best_metric({"eval_loss": 2.0}, trial=None)
    assert trainer.state.best_metric == 2.0


def test_a_metric_that_no_evaluation_gives_is_named_with_those_there_are(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, max_steps=1, eval_strategy="steps", metric_for_best_model="accuracy")
    with pytest.raises(
        KeyError, match=r"metric_for_best_model='accuracy'.*'eval_accuracy'.*eval_loss.*compute_metrics"
    ):
        trainer.train()


def test_without_a_metric_to_watch_nothing_is_the_best(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path)
    assert not trainer._determine_best_metric({"eval_loss": 2.0}, trial=None)
    assert trainer.state.best_metric is None


def test_a_log_is_the_mean_since_the_last_one(tmp_path: Path) -> None:
    every, second = (
        quiet_trainer(tmp_path, max_steps=6, logging_strategy="steps", logging_steps=steps, seed=1) for steps in (1, 2)
    )
    for trainer in (every, second):
        trainer.model.load_state_dict({name: value * 0 + 0.1 for name, value in trainer.model.state_dict().items()})
        trainer.train()
    single = [log["loss"] for log in every.state.log_history if "loss" in log]
    pairs = [log["loss"] for log in second.state.log_history if "loss" in log]
    assert len(single) == 6
    assert pairs == pytest.approx([(single[i] + single[i + 1]) / 2 for i in (0, 2, 4)], rel=1e-6)
