"""Public calls in orders drawn at random: after each call generators, modes, weights and results are transformers'.

A few orders keep the tests quick; `FIDELITY_ORDERS=420 FIDELITY_ORDERS_IN_TWO_PROCESSES=60` in the environment
runs more.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch

from tests.fidelity.record import Record, output_value, plain, random_state
from tests.fidelity.registry import Scenario, add
from tests.fidelity.side import Side
from tests.scenarios.data import AugmentedRows, Row, Rows, vector_rows
from tests.scenarios.metrics import accuracy
from tests.scenarios.models import NoisyClassifier

ORDERS = int(os.environ.get("FIDELITY_ORDERS", "16"))
ORDERS_IN_TWO_PROCESSES = int(os.environ.get("FIDELITY_ORDERS_IN_TWO_PROCESSES", "4"))


class UnreadableRowError(Exception):
    """A row of the script's data that cannot be read."""


class FailingRows(Rows):
    """Raises for rows from a given index on."""

    def __init__(self, rows: list[Row], first: int) -> None:
        super().__init__(rows)
        self.first = first

    def __getitem__(self, index: int) -> Row:
        if index >= self.first:
            raise UnreadableRowError(index)
        return super().__getitem__(index)


class Script:
    """A script that calls what its source of random numbers chooses, and notes where each call leaves everything.

    Parameters:
        side: where its names come from.
        number: the seed of the source, and with it the order.
        processes: how many run the script.
    """

    def __init__(self, side: Side, number: int, processes: int) -> None:
        self.side, self.processes = side, processes
        self.source = random.Random(number)
        self.notes: dict[str, Any] = {}
        # Checkpoints of data that draws numbers hold more than transformers'.
        self.draws = number % 2 == 0
        self.trainer = self.make_trainer(NoisyClassifier())

    def make_trainer(self, model: Any) -> Any:
        choose = self.source.choice
        trainer_kwargs = choose([{"model": model}, {"model": model}, {"model_init": lambda: NoisyClassifier()}])
        saving = "no" if self.draws else choose(["epoch", "steps"])
        # On resuming transformers skips events due at the end of an epoch whose checkpoint was written earlier.
        strategy = choose(["no", "steps"] if saving == "steps" else ["no", "epoch", "steps"])
        trainer = self.side.Trainer(
            **trainer_kwargs,
            args=self.side.arguments(
                num_train_epochs=choose([1, 2]),
                # A finished training that is resumed takes a further step in transformers if it ended within an epoch.
                max_steps=choose([-1, -1, 3]) if saving == "no" else -1,
                gradient_accumulation_steps=choose([1, 1, 2]),
                eval_strategy=strategy,
                eval_steps=2,
                eval_on_start=choose([False, False, True]),
                save_strategy=saving,
                save_steps=2,
                load_best_model_at_end=strategy == saving != "no",
                seed=choose([42, 7]),
            ),
            train_dataset=self.rows(self.source.randint(8, 16)),
            eval_dataset=self.rows(7),
            compute_metrics=choose([None, accuracy]),
            callbacks=[self.side.watcher],
        )
        self.has_trained = False
        return trainer

    def rows(self, number: int) -> Rows:
        return (AugmentedRows if self.draws else Rows)(vector_rows(number, seed=self.source.randint(0, 9)))

    def failing_rows(self) -> Rows:
        # All processes fail at the same batch, since they wait for each other.
        return FailingRows(vector_rows(9), 0 if self.processes > 1 else self.source.randint(0, 8))

    def batch(self) -> Any:
        batch = self.trainer.data_collator([self.trainer.train_dataset[place] for place in range(4)])
        return {name: value.to(self.trainer.args.device) for name, value in batch.items()}

    def train(self, **how: Any) -> Any:
        result = self.trainer.train(**how)
        self.has_trained = True
        return result

    def train_longer(self, **how: Any) -> Any:
        self.trainer.args.num_train_epochs += 1
        return self.train(**how)

    def train_on_data_that_breaks(self) -> Any:
        trainer_kwargs, self.trainer.train_dataset = self.trainer.train_dataset, self.failing_rows()
        try:
            return self.trainer.train()
        finally:
            self.trainer.train_dataset = trainer_kwargs

    def read(self, loader: Any) -> Any:
        number = self.source.choice([None, 1, 2])
        return [dict(batch) for batch in islice(loader, number)]

    def step_by_hand(self) -> Any:
        model = self.source.choice([self.trainer.model, self.trainer.model_wrapped])
        return self.trainer.training_step(model, self.batch())

    def predict_by_hand(self) -> Any:
        return self.trainer.prediction_step(self.trainer.model, self.batch(), self.source.choice([True, False]))

    def evaluate_several(self) -> Any:
        return self.trainer.evaluate({"one": self.rows(5), "two": self.rows(4)})

    def begin_another_trainer(self) -> None:
        # A model that was evaluated after a second training is not put into DDP again by transformers.
        self.trainer = self.make_trainer(self.trainer.model if self.processes == 1 else NoisyClassifier())

    def swap_data(self) -> None:
        self.trainer.train_dataset, self.trainer.eval_dataset = self.rows(11), self.rows(5)

    def draw(self) -> Any:
        return [torch.rand(2), random.random(), float(np.random.normal())]

    def run(self, name: str) -> None:
        """Make a call and record the state after it, also if it raises."""
        if not self.has_trained and name in NEEDING_A_TRAINING[self.processes]:
            name = "train"
        try:
            outcome = output_value(CALLS[name](self))
        except (UnreadableRowError, ValueError) as error:
            outcome = type(error).__name__
        model, generators = self.trainer.model, random_state()
        self.notes[f"{len(self.notes)} {name}"] = {
            "outcome": outcome,
            **{kind: digest(plain(state)) for kind, state in generators.items()},
            "training": [module.training for module in model.modules()],
            "weights": digest(plain(model.state_dict())),
            "gradients": [name for name, each in model.named_parameters() if each.grad is not None],
        }


CALLS: dict[str, Callable[[Script], Any]] = {
    "train": Script.train,
    "train_longer": Script.train_longer,
    "train_on_data_that_breaks": Script.train_on_data_that_breaks,
    "resume": partial(Script.train, resume_from_checkpoint=True),
    "resume_for_longer": partial(Script.train_longer, resume_from_checkpoint=True),
    "evaluate": lambda script: script.trainer.evaluate(),
    "evaluate_other_data": lambda script: script.trainer.evaluate(script.rows(6), metric_key_prefix="other"),
    "evaluate_several": Script.evaluate_several,
    "evaluate_data_that_breaks": lambda script: script.trainer.evaluate(script.failing_rows()),
    "predict": lambda script: tuple(script.trainer.predict(script.rows(5))),
    "predict_data_that_breaks": lambda script: script.trainer.predict(script.failing_rows()),
    "read_training_data": lambda script: script.read(script.trainer.get_train_dataloader()),
    "read_evaluation_data": lambda script: script.read(script.trainer.get_eval_dataloader()),
    "read_test_data": lambda script: script.read(script.trainer.get_test_dataloader(script.rows(5))),
    "compute_loss": lambda script: script.trainer.compute_loss(script.trainer.model, script.batch()).detach(),
    "training_step": Script.step_by_hand,
    "prediction_step": Script.predict_by_hand,
    "infer": lambda script: script.trainer.model(**script.batch())["logits"].detach(),
    "save_model": lambda script: script.trainer.save_model("saved"),
    "begin_another_trainer": Script.begin_another_trainer,
    "swap_data": Script.swap_data,
    "draw": Script.draw,
    "seed": lambda script: script.side.set_seed(3),
    "put_the_model_into_training_mode": lambda script: script.trainer.model.train().training,
    "put_dropout_into_training_mode": lambda script: script.trainer.model.dropout.train().training,
}
RESUMING = ("resume", "resume_for_longer")
# Processes -> calls that transformers cannot make before a training. In two processes they include an evaluation, after
# which each would train a separate model, and a search for a checkpoint, whose folder only one process may see.
NEEDING_A_TRAINING: dict[int, tuple[str, ...]] = {
    1: ("training_step",),
    2: ("training_step", *(name for name in CALLS if name.startswith(("evaluate", "predict"))), *RESUMING),
}


def digest(value: Any) -> str:
    """A text that two values share where they are equal to the bit."""
    results = hashlib.sha256()
    update_digest(results, value)
    return results.hexdigest()[:16]


def update_digest(results: Any, value: Any) -> None:
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, (torch.Tensor, np.ndarray)):
        results.update(np.asarray(value).tobytes())
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for part in value:
            update_digest(results, part)
    else:
        results.update(repr(value).encode())


def order_of_calls(number: int, processes: int, side: Side) -> Record:
    script = Script(side, number, processes)
    names = [name for name in CALLS if not (script.draws and name in RESUMING)]
    for name in script.source.choices(names, k=script.source.randint(5, 9)):
        script.run(name)
    return side.record(script.trainer, extra=script.notes)


for processes, orders in ((1, ORDERS), (2, ORDERS_IN_TWO_PROCESSES)):
    for number in range(orders):
        name = f"order_{number}_of_calls" + ("_in_two_processes" if processes == 2 else "")
        add(Scenario(name, partial(order_of_calls, number, processes), extra=True, processes=processes))
