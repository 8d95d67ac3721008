from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from littrainer import Trainer, TrainerCallback
from tests.fidelity.first_difference import first_difference
from tests.scenarios.data import Rows, Stream, vector_rows
from tests.scenarios.metrics import accuracy
from tests.scenarios.models import NoisyClassifier, VectorClassifier
from tests.scenarios.trainers import quiet_trainer


def test_a_prediction_made_by_a_callback_during_training_is_an_evaluation_to_lightning(tmp_path: Path) -> None:
    predicted: list[Any] = []
    modes: list[bool] = []

    class Predicting(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            modes.append(kwargs["model"].training)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            predicted.append(trainer.predict(Rows(vector_rows(5))))

    trainer = quiet_trainer(tmp_path, given={"callbacks": [Predicting()]}, max_steps=2)
    trainer.train()
    assert [output.predictions.shape for output in predicted] == [(5, 3), (5, 3)]
    assert trainer.lightning_trainer.global_step == 2
    assert modes == [True, True]


class LossesOf(VectorClassifier):
    """Its loss at each batch is the next of a list."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__()
        self.losses = iter(losses)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return {"loss": torch.tensor(next(self.losses)), "logits": self.logits(x)}


def test_a_prediction_keeps_its_outputs_also_with_batch_metrics(tmp_path: Path) -> None:
    trainer = quiet_trainer(
        tmp_path, given={"compute_metrics": lambda prediction, compute_result: {}}, batch_eval_metrics=True
    )
    assert trainer.predict(Rows(vector_rows(5))).predictions.shape == (5, 3)


def test_a_stream_that_gives_nothing_is_refused(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, given={"eval_dataset": Stream([])})
    with pytest.raises(ValueError, match="The evaluation set is a stream that gave no batch"):
        trainer.evaluate()
    with pytest.raises(ValueError, match="The test set is a stream"):
        trainer.predict(Stream([]))


class SwitchedOptimizer(torch.optim.SGD):
    """Has modes, as schedule-free optimizers do."""

    mode = None

    def train(self) -> None:
        self.mode = "train"

    def eval(self) -> None:
        self.mode = "eval"


@pytest.mark.parametrize("work", ["evaluate", "predict"])
def test_gradients_optimizer_and_schedule_stay_and_modes_are_left_in_evaluation(tmp_path: Path, work: str) -> None:
    model = NoisyClassifier()
    optimizer = SwitchedOptimizer(model.parameters(), lr=0.1, momentum=0.9)
    trainer = quiet_trainer(tmp_path, model, given={"optimizers": (optimizer, None)}, max_steps=2)
    trainer.train()
    assert model.training and optimizer.mode == "train"
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)

    def found() -> Any:
        gradients = [parameter.grad for parameter in model.parameters()]
        return copy.deepcopy([gradients, optimizer.state_dict(), trainer.lr_scheduler.state_dict()])

    before = found()
    getattr(trainer, work)(Rows(vector_rows(3)))
    assert first_difference(before, found()) is None
    assert not any(module.training for module in model.modules()) and optimizer.mode == "eval"


def test_all_that_is_collected_goes_through_the_trainers_gather_function_once(tmp_path: Path) -> None:
    handed: list[Any] = []

    class Vectors(VectorClassifier):
        main_input_name = "x"

    trainer = quiet_trainer(tmp_path, Vectors(), given={"compute_metrics": accuracy}, include_for_metrics=["inputs"])
    trainer.gather_function = lambda value: handed.append(value) or value
    trainer.evaluate()
    # Losses, logits, labels and inputs of three batches; the last one's losses count as those of a full batch.
    assert len(handed) == 12
    assert [tuple(value.shape) for value in handed[-4:]] == [(3,), (1, 3), (1,), (1, 6)]
    # It holds for one loop, as in transformers.
    trainer.evaluate()
    assert len(handed) == 12


def test_a_loader_in_place_of_a_dataset_is_refused_with_the_method_it_belongs_into(tmp_path: Path) -> None:
    loader = DataLoader(Rows(vector_rows(4)))
    trainer = quiet_trainer(tmp_path, given={"train_dataset": loader, "eval_dataset": loader})
    for evaluate, named in (
        (trainer.train, r"train_dataset is a DataLoader.*get_train_dataloader\(\)"),
        (trainer.evaluate, r"eval_dataset is a DataLoader.*get_eval_dataloader\(\)"),
        (lambda: trainer.evaluate(loader), r"eval_dataset is a DataLoader.*get_eval_dataloader\(\)"),
        (lambda: trainer.predict(loader), r"test_dataset is a DataLoader.*get_test_dataloader\(\)"),
    ):
        with pytest.raises(TypeError, match=named):
            evaluate()
    named = quiet_trainer(tmp_path, given={"eval_dataset": {"near": loader}})
    with pytest.raises(TypeError, match=r"eval_dataset 'near' is a DataLoader"):
        named.evaluate("near")


def test_the_name_of_a_dataset_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    datasets = {"near": Rows(vector_rows(4)), "far": Rows(vector_rows(5))}
    trainer = quiet_trainer(tmp_path, given={"eval_dataset": datasets})
    with pytest.raises(KeyError, match=r"'fat'.*near, far"):
        trainer.evaluate("fat")
    with pytest.raises(ValueError, match=r"dict of them \(near, far\)"):
        trainer.get_eval_dataloader()
    with pytest.raises(KeyError, match=r"'near'.*no dict of them but a Rows"):
        quiet_trainer(tmp_path).evaluate("near")
    with pytest.raises(ValueError, match="eval_dataset"):
        quiet_trainer(tmp_path, given={"eval_dataset": None}).evaluate()
    with pytest.raises(ValueError, match="test_dataset"):
        quiet_trainer(tmp_path).predict(None)


def test_a_dataset_given_for_once_is_evaluated_although_workers_of_another_are_kept(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, dataloader_num_workers=1, dataloader_persistent_workers=True)
    kept = trainer.get_eval_dataloader()
    assert trainer.get_eval_dataloader() is kept
    passing = quiet_trainer(tmp_path)
    assert passing.get_eval_dataloader() is not passing.get_eval_dataloader()
    other = Rows(vector_rows(4, seed=5))
    assert len(trainer.get_eval_dataloader(other).dataset) == 4
    assert trainer.get_eval_dataloader() is kept


def test_an_evaluation_that_fails_at_its_last_batch_leaves_the_accelerator_as_it_was(tmp_path: Path) -> None:
    class FailsAtTheLast(Trainer):
        def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if self.accelerator.samples_in_last_batch is not None:
                raise ValueError("a short batch")
            return super().prediction_step(model, inputs, *args, **kwargs)

    trainer = quiet_trainer(tmp_path, kind=FailsAtTheLast)
    with pytest.raises(ValueError, match="a short batch"):
        trainer.evaluate(vector_rows(4))
    assert len(trainer.accelerator.gather_for_metrics(torch.ones(8))) == 8
