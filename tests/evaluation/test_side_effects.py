from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from littrainer import Trainer, TrainerCallback
from littrainer.checkpoint.random_state import capture_random_states, random_states_are_equal
from littrainer.evaluation.side_effects import continue_random_draws, model_device
from littrainer.seeds import set_seed
from tests.scenarios.data import AugmentedRows, Rows, vector_rows
from tests.scenarios.models import NoisyClassifier
from tests.scenarios.trainers import quiet_trainer

WORK: dict[str, Callable[[Trainer], Any]] = {
    "evaluate": lambda trainer: trainer.evaluate(),
    "evaluate several": lambda trainer: trainer.evaluate(
        {"one": AugmentedRows(vector_rows(3)), "two": AugmentedRows(vector_rows(4))}
    ),
    "evaluation_loop": lambda trainer: trainer.evaluation_loop(trainer.get_eval_dataloader(), "Evaluation"),
    "predict": lambda trainer: trainer.predict(AugmentedRows(vector_rows(5))),
}


def drawing_trainer(folder: Path, model: nn.Module | None = None, **given: Any) -> Trainer:
    """A Trainer whose data draws from all three global generators, and whose model depends on its mode."""
    data = {"train_dataset": AugmentedRows(vector_rows(8)), "eval_dataset": AugmentedRows(vector_rows(7, seed=1))}
    return quiet_trainer(folder, model or NoisyClassifier(), given={**data, **given}, max_steps=2)


@pytest.mark.parametrize("work", WORK.values(), ids=WORK.keys())
def test_generators_stand_where_they_stood(tmp_path: Path, work: Callable[[Trainer], Any]) -> None:
    trainer = drawing_trainer(tmp_path)
    random.random(), np.random.normal(), torch.rand(3)
    before = capture_random_states()
    work(trainer)
    assert random_states_are_equal(before, capture_random_states())


def test_generators_are_given_back_where_an_evaluation_fails(tmp_path: Path) -> None:
    def failing(_: Any) -> dict[str, float]:
        raise ZeroDivisionError

    trainer = drawing_trainer(tmp_path, compute_metrics=failing)
    trainer.model.train()
    before = capture_random_states()
    with pytest.raises(ZeroDivisionError):
        trainer.evaluate()
    assert random_states_are_equal(before, capture_random_states())
    assert trainer.model.training


def test_the_next_work_draws_from_where_the_evaluation_had_come(tmp_path: Path) -> None:
    trainer = drawing_trainer(tmp_path)
    first, second = trainer.evaluate()["eval_loss"], trainer.evaluate()["eval_loss"]
    assert first != second
    set_seed(42)
    again = drawing_trainer(tmp_path, trainer.model)
    set_seed(42)
    assert [again.evaluate()["eval_loss"], again.evaluate()["eval_loss"]] == [first, second]


def test_another_trainer_takes_up_the_draws_too(tmp_path: Path) -> None:
    one, other = drawing_trainer(tmp_path), drawing_trainer(tmp_path)
    other.model.load_state_dict(one.model.state_dict())
    assert one.evaluate()["eval_loss"] != other.evaluate()["eval_loss"]


def drawn_losses(trainer: Trainer, between: Callable[[], Any]) -> tuple[float, float]:
    first = trainer.evaluate()["eval_loss"]
    between()
    return first, trainer.evaluate()["eval_loss"]


def test_numbers_drawn_since_are_not_taken_back(tmp_path: Path) -> None:
    trainer = drawing_trainer(tmp_path)
    drawn: list[float] = []
    drawn_losses(trainer, lambda: drawn.append(torch.rand(1).item()))
    # The evaluation gave back what it then drew from itself, from one number further on.
    assert torch.rand(1).item() != drawn[0]


def test_seeding_since_counts_although_it_leads_to_where_the_generators_stood(tmp_path: Path) -> None:
    trainer = drawing_trainer(tmp_path)
    set_seed(7)
    first, second = drawn_losses(trainer, lambda: set_seed(7))
    assert first == second


def test_an_evaluation_that_seeds_is_not_undone(tmp_path: Path) -> None:
    class Seeding(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            set_seed(5)

    trainer = drawing_trainer(tmp_path, callbacks=[Seeding()])
    trainer.evaluate()
    found = torch.rand(1).item()
    set_seed(5)
    assert found == torch.rand(1).item()


def test_a_prediction_within_an_evaluation_hands_its_draws_on(tmp_path: Path) -> None:
    class Predicting(TrainerCallback):
        trainer: Any = None

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.trainer is not None:
                self.trainer.predict(AugmentedRows(vector_rows(5)))

    def state_after(asks: bool) -> Any:
        callback = Predicting()
        trainer = drawing_trainer(tmp_path, callbacks=[callback])
        callback.trainer = trainer if asks else None
        set_seed(3)
        trainer.evaluate()
        if not asks:
            trainer.predict(AugmentedRows(vector_rows(5)))
        continue_random_draws()
        return capture_random_states()

    assert random_states_are_equal(state_after(asks=True), state_after(asks=False))


@pytest.mark.parametrize("work", WORK.values(), ids=WORK.keys())
def test_each_module_has_the_mode_that_its_user_gave_it(tmp_path: Path, work: Callable[[Trainer], Any]) -> None:
    trainer = drawing_trainer(tmp_path)
    trainer.model.train()
    trainer.model.dropout.eval()
    modes = [module.training for module in trainer.model.modules()]
    assert True in modes and False in modes
    work(trainer)
    assert [module.training for module in trainer.model.modules()] == modes


def test_callbacks_find_the_model_in_evaluation_mode(tmp_path: Path) -> None:
    modes: list[bool] = []

    class Looking(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            modes.append(model.training)

    trainer = drawing_trainer(tmp_path, callbacks=[Looking()])
    trainer.model.train()
    trainer.evaluate()
    assert modes == [False] and trainer.model.training


def test_after_a_training_the_model_keeps_the_mode_to_infer_in(tmp_path: Path) -> None:
    trainer = drawing_trainer(tmp_path)
    trainer.train()
    assert trainer.model.training
    trainer.evaluate()
    assert not trainer.model.training
    trainer.predict(Rows(vector_rows(3)))
    assert not trainer.model.training
    trainer.model.train()
    trainer.evaluate()
    assert trainer.model.training


def test_an_evaluation_within_a_training_takes_nothing_back(tmp_path: Path) -> None:
    modes: list[bool] = []
    moved: list[bool] = []

    class Evaluating(TrainerCallback):
        trainer: Any = None

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            before = capture_random_states()
            self.trainer.evaluate()
            moved.append(not random_states_are_equal(before, capture_random_states()))
            modes.append(self.trainer.model.training)

    callback = Evaluating()
    callback.trainer = trainer = drawing_trainer(tmp_path, callbacks=[callback])
    trainer.train()
    assert moved == [True, True] and modes == [False, False]


class SwitchedOptimizer(torch.optim.SGD):
    """Has modes, as schedule-free optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.switches: list[str] = []
        self.param_groups[0]["train_mode"] = False

    def train(self) -> None:
        self.switches.append("train")
        self.param_groups[0]["train_mode"] = True

    def eval(self) -> None:
        self.switches.append("eval")
        self.param_groups[0]["train_mode"] = False


def test_an_optimizer_with_modes_gets_its_mode_back_and_keeps_it_after_a_training(tmp_path: Path) -> None:
    model = NoisyClassifier()
    optimizer = SwitchedOptimizer(model.parameters())
    trainer = drawing_trainer(tmp_path, model, optimizers=(optimizer, None))
    trainer.evaluate()
    assert optimizer.switches == ["eval"]
    optimizer.train()
    trainer.evaluate()
    assert optimizer.switches[1:] == ["train", "eval", "train"]
    trainer.train()
    del optimizer.switches[:]
    trainer.evaluate()
    # As the model: what is saved or used next are the weights that were evaluated.
    assert optimizer.switches == ["eval"]


def test_optimizer_and_schedule_are_not_touched(tmp_path: Path) -> None:
    trainer = drawing_trainer(tmp_path)
    trainer.train()

    def states() -> Any:
        optimizer = trainer.optimizer.state_dict()
        moments = [value.clone() for state in optimizer["state"].values() for value in state.values()]
        return moments, optimizer["param_groups"], trainer.lr_scheduler.state_dict().copy()

    weights = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    moments, groups, schedule = states()
    trainer.evaluate()
    trainer.predict(Rows(vector_rows(3)))
    assert all(map(torch.equal, weights, trainer.model.parameters()))
    moments_after, groups_after, schedule_after = states()
    assert all(map(torch.equal, moments, moments_after))
    assert (groups, schedule) == (groups_after, schedule_after)


@pytest.mark.parametrize("work", WORK.values(), ids=WORK.keys())
def test_gradients_of_a_loop_of_the_script_stay(tmp_path: Path, work: Callable[[Trainer], Any]) -> None:
    trainer = drawing_trainer(tmp_path)
    for parameter in trainer.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    work(trainer)
    assert all(torch.equal(parameter.grad, torch.ones_like(parameter)) for parameter in trainer.model.parameters())


def test_neither_optimizer_nor_schedule_is_made_for_an_evaluation(tmp_path: Path) -> None:
    trainer = drawing_trainer(tmp_path)
    trainer.evaluate()
    assert trainer.optimizer is None and trainer.lr_scheduler is None


def test_the_device_of_a_model_is_that_of_its_parameters() -> None:
    assert model_device(nn.Linear(1, 1)) == torch.device("cpu")
    assert model_device(nn.ReLU()) is None
    assert model_device(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta"))) is None


def test_a_model_that_an_evaluation_has_moved_is_moved_back_and_can_be_evaluated_again(tmp_path: Path) -> None:
    trainer = drawing_trainer(tmp_path)
    moves: list[Any] = []

    class Elsewhere(NoisyClassifier):
        """Says that it is on another device than its parameters."""

        device_says = torch.device("cuda", 0)

        def parameters(self, recurse: bool = True) -> Any:
            yield type("Standing", (), {"device": self.device_says})()

        def to(self, device: Any) -> Any:
            moves.append(device)
            self.device_says = torch.device(device)
            return self

    trainer.model = Elsewhere()
    trainer.evaluate()
    assert moves == [torch.device("cpu"), torch.device("cuda", 0)]
    trainer.evaluate()
    assert moves[2:] == [torch.device("cpu"), torch.device("cuda", 0)]
