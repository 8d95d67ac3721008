"""How long a run is: epochs, fractions of epochs, steps, streams, and several calls in a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.fidelity.record import Record
from tests.fidelity.registry import Script, add_scripts, scenario
from tests.fidelity.side import Side
from tests.scenarios.data import Rows, SizedStream, Stream, vector_rows
from tests.scenarios.models import CountingClassifier, NoisyClassifier, VectorClassifier


def make_script(dataset: Any, make_model: Callable[[], Any] = VectorClassifier, **changes: Any) -> Script:
    return lambda side: side.train(side.vector_trainer(make_model(), train_dataset=dataset, **changes))


add_scripts(
    {
        "steps_over_a_stream_that_ends_mid_window": make_script(
            Stream(vector_rows(10)), max_steps=4, gradient_accumulation_steps=2
        ),
        "steps_over_a_stream_as_long_as_two_windows_and_a_half": make_script(
            Stream(vector_rows(28)), CountingClassifier, max_steps=6, gradient_accumulation_steps=3
        ),
        "epochs_over_a_stream_with_a_length": make_script(SizedStream(vector_rows(10)), gradient_accumulation_steps=2),
        "one_and_a_quarter_epochs_accumulating": make_script(
            Rows(vector_rows(30)), num_train_epochs=1.25, gradient_accumulation_steps=3
        ),
        "half_an_epoch": make_script(Rows(vector_rows(22)), num_train_epochs=0.5),
        "more_steps_than_an_epoch_accumulating": make_script(
            Rows(vector_rows(19)), CountingClassifier, max_steps=5, gradient_accumulation_steps=3
        ),
        "logging_less_often_than_the_run_is_long": make_script(Rows(vector_rows(14)), logging_steps=100),
    }
)


@scenario()
def steps_over_a_datasets_stream(side: Side) -> Record:
    import datasets

    rows = [{"x": row["x"].tolist(), "labels": row["labels"], "note": "unused"} for row in vector_rows(10)]
    stream = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=2).shuffle(seed=5, buffer_size=4)
    return side.train(side.vector_trainer(train_dataset=stream, max_steps=7))


@scenario(saves=True)
def two_train_calls_in_a_row(side: Side) -> Record:
    trainer = side.vector_trainer(NoisyClassifier(), rows=14, save_strategy="epoch", num_train_epochs=1)
    return side.record(trainer, trainer.train(), trainer.train())


@scenario()
def second_train_call_with_other_arguments(side: Side) -> Record:
    trainer = side.vector_trainer(rows=14, num_train_epochs=1)
    first = trainer.train()
    trainer.args.max_steps = 3
    trainer.args.learning_rate = 0.5
    trainer.args.gradient_accumulation_steps = 2
    trainer.train_dataset = Rows(vector_rows(9, seed=4))
    return side.record(trainer, first, trainer.train())


@scenario(extra=True)
def training_after_steps_of_the_script(side: Side) -> Record:
    """Gradients that lie around before train() are dropped, and arguments set after construction hold."""
    model = VectorClassifier()
    rows = vector_rows(8)
    model(torch.stack([row["x"] for row in rows]), torch.tensor([row["labels"] for row in rows]))["loss"].backward()
    trainer = side.vector_trainer(model, rows=9)
    trainer.args.num_train_epochs = 1
    trainer.args.learning_rate = 0.3
    trainer.args.logging_steps = 2
    output = trainer.train()
    return side.record(trainer, output, extra={"unpacked": list(output[:2])})
