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


def test_a_callback_can_predict_during_training(tmp_path: Path) -> None:
    predicted: list[Any] = []
    modes: list[bool] = []

    class Predicting(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            modes.append(kwargs["model"].training)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            predicted.append(trainer.predict(Rows(vector_rows(5))))

    trainer = quiet_trainer(tmp_path, trainer_kwargs={"callbacks": [Predicting()]}, max_steps=2)
    trainer.train()
    assert [output.predictions.shape for output in predicted] == [(5, 3), (5, 3)]
    assert trainer.lightning_trainer.global_step == 2
    assert modes == [True, True]


class LossesOf(VectorClassifier):
    """Classifier with a given loss for each batch."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__()
        self.losses = iter(losses)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return {"loss": torch.tensor(next(self.losses)), "logits": self.logits(x)}


def test_a_prediction_returns_its_outputs_with_batch_metrics(tmp_path: Path) -> None:
    trainer = quiet_trainer(
        tmp_path, trainer_kwargs={"compute_metrics": lambda prediction, compute_result: {}}, batch_eval_metrics=True
    )
    assert trainer.predict(Rows(vector_rows(5))).predictions.shape == (5, 3)


def test_an_empty_stream_is_refused(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, trainer_kwargs={"eval_dataset": Stream([])})
    with pytest.raises(ValueError, match="The evaluation set is a stream that gave no batch"):
        trainer.evaluate()
    with pytest.raises(ValueError, match="The test set is a stream"):
        trainer.predict(Stream([]))


class SwitchedOptimizer(torch.optim.SGD):
    """Optimizer with modes, as schedule-free optimizers have."""

    mode = None

    def train(self) -> None:
        self.mode = "train"

    def eval(self) -> None:
        self.mode = "eval"


@pytest.mark.parametrize("work", ["evaluate", "predict"])
def test_an_evaluation_changes_only_the_modes_of_model_and_optimizer(tmp_path: Path, work: str) -> None:
    model = NoisyClassifier()
    optimizer = SwitchedOptimizer(model.parameters(), lr=0.1, momentum=0.9)
    trainer = quiet_trainer(tmp_path, model, trainer_kwargs={"optimizers": (optimizer, None)}, max_steps=2)
    trainer.train()
    assert model.training and optimizer.mode == "train"
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)

    def copy_states() -> Any:
        gradients = [parameter.grad for parameter in model.parameters()]
        return copy.deepcopy([gradients, optimizer.state_dict(), trainer.lr_scheduler.state_dict()])

    before = copy_states()
    getattr(trainer, work)(Rows(vector_rows(3)))
    assert first_difference(before, copy_states()) is None
    assert not any(module.training for module in model.modules()) and optimizer.mode == "eval"


def test_all_outputs_are_gathered_by_the_trainers_gather_function(tmp_path: Path) -> None:
    gathered: list[Any] = []

    class Vectors(VectorClassifier):
        main_input_name = "x"

    trainer = quiet_trainer(
        tmp_path, Vectors(), trainer_kwargs={"compute_metrics": accuracy}, include_for_metrics=["inputs"]
    )
    trainer.gather_function = lambda value: gathered.append(value) or value
    trainer.evaluate()
    # Losses, logits, labels and inputs of three batches; the last losses are repeated for a full batch.
    assert len(gathered) == 12
    assert [tuple(value.shape) for value in gathered[-4:]] == [(3,), (1, 3), (1,), (1, 6)]
    # Reset after a loop, as in transformers.
    trainer.evaluate()
    assert len(gathered) == 12


def test_a_loader_instead_of_a_dataset_is_refused_with_the_method_to_override(tmp_path: Path) -> None:
    loader = DataLoader(Rows(vector_rows(4)))
    trainer = quiet_trainer(tmp_path, trainer_kwargs={"train_dataset": loader, "eval_dataset": loader})
    for evaluate, named in (
        (trainer.train, r"train_dataset is a DataLoader.*get_train_dataloader\(\)"),
        (trainer.evaluate, r"eval_dataset is a DataLoader.*get_eval_dataloader\(\)"),
        (lambda: trainer.evaluate(loader), r"eval_dataset is a DataLoader.*get_eval_dataloader\(\)"),
        (lambda: trainer.predict(loader), r"test_dataset is a DataLoader.*get_test_dataloader\(\)"),
    ):
        with pytest.raises(TypeError, match=named):
            evaluate()
    named = quiet_trainer(tmp_path, trainer_kwargs={"eval_dataset": {"near": loader}})
    with pytest.raises(TypeError, match=r"eval_dataset 'near' is a DataLoader"):
        named.evaluate("near")


def test_an_unknown_dataset_name_is_refused_with_the_known_names(tmp_path: Path) -> None:
    datasets = {"near": Rows(vector_rows(4)), "far": Rows(vector_rows(5))}
    trainer = quiet_trainer(tmp_path, trainer_kwargs={"eval_dataset": datasets})
    with pytest.raises(KeyError, match=r"'fat'.*near, far"):
        trainer.evaluate("fat")
    with pytest.raises(ValueError, match=r"dict of them \(near, far\)"):
        trainer.get_eval_dataloader()
    with pytest.raises(KeyError, match=r"'near'.*no dict of them but a Rows"):
        quiet_trainer(tmp_path).evaluate("near")
    with pytest.raises(ValueError, match="eval_dataset"):
        quiet_trainer(tmp_path, trainer_kwargs={"eval_dataset": None}).evaluate()
    with pytest.raises(ValueError, match="test_dataset"):
        quiet_trainer(tmp_path).predict(None)


def test_another_dataset_is_evaluated_if_a_loader_with_persistent_workers_is_cached(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, dataloader_num_workers=1, dataloader_persistent_workers=True)
    cached = trainer.get_eval_dataloader()
    assert trainer.get_eval_dataloader() is cached
    uncached = quiet_trainer(tmp_path)
    assert uncached.get_eval_dataloader() is not uncached.get_eval_dataloader()
    other = Rows(vector_rows(4, seed=5))
    assert len(trainer.get_eval_dataloader(other).dataset) == 4
    assert trainer.get_eval_dataloader() is cached


def test_an_error_at_the_last_batch_resets_the_accelerator(tmp_path: Path) -> None:
    class FailsAtTheLast(Trainer):
        def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if self.accelerator.samples_in_last_batch is not None:
                raise ValueError("a short batch")
            return super().prediction_step(model, inputs, *args, **kwargs)

    trainer = quiet_trainer(tmp_path, kind=FailsAtTheLast)
    with pytest.raises(ValueError, match="a short batch"):
        trainer.evaluate(vector_rows(4))
    assert len(trainer.accelerator.gather_for_metrics(torch.ones(8))) == 8
