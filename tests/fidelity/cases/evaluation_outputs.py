"""Outputs of models in an evaluation, and their results: nesting, unequal lengths, labels of several names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.fidelity.record import Record
from tests.fidelity.registry import Script, add_scripts, scenario
from tests.fidelity.side import Side
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Row, Rows, language_rows, tag_rows, vector_rows
from tests.scenarios.metrics import accuracy, shapes_and_sums
from tests.scenarios.models import FEATURES, VectorClassifier, tiny_bert_tagger, tiny_gpt2


class Talkative(VectorClassifier):
    """Puts out more than logits, nested."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        outputs = super().forward(x, labels)
        logits = outputs["logits"]
        outputs["states"] = (logits * 2, logits[:, :2] * 3)
        outputs["named"] = {"sum": logits.sum(dim=1), "cube": logits[:, None, :].repeat(1, 2, 1)}
        outputs["mean"] = logits.mean()
        return outputs


def trainer_with(
    side: Side, model: nn.Module, rows: Any = None, trainer_kwargs: dict[str, Any] | None = None, **changes: Any
) -> Any:
    keywords: dict[str, Any] = {
        "compute_metrics": shapes_and_sums,
        "callbacks": [side.watcher],
        **(trainer_kwargs or {}),
    }
    return side.Trainer(
        model=model,
        args=side.arguments(**{"eval_strategy": "epoch", "num_train_epochs": 1, **changes}),
        train_dataset=Rows(rows or vector_rows(10)),
        eval_dataset=Rows(rows[:7] if rows else vector_rows(7, seed=1)),
        **keywords,
    )


class LossOfEachRow(VectorClassifier):
    """Returns a plain tensor, whose first row is taken for the loss."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = super().forward(x)["logits"]
        return nn.functional.cross_entropy(logits, labels, reduction="none")


def make_script(
    make_model: Callable[[], nn.Module],
    make_rows: Callable[..., list[Row]] = vector_rows,
    predicted: int = 5,
    trainer_kwargs: dict[str, Any] | None = None,
    **changes: Any,
) -> Script:
    """Return a script that trains and then predicts so many rows."""

    def script(side: Side) -> Record:
        rows = None if make_rows is vector_rows else make_rows(10)
        trainer = trainer_with(side, make_model(), rows, trainer_kwargs, **changes)
        return side.record(trainer, trainer.train(), predictions=trainer.predict(Rows(make_rows(predicted, seed=2))))

    return script


WITHOUT_METRICS = {"compute_metrics": None}
FLATTENING = {
    "data_collator": pad_tokens,
    "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(dim=-1)[labels != -100],
}
add_scripts(
    {
        "nested_outputs_joined": make_script(Talkative),
        "nested_outputs_kept_by_batch_and_moved_to_the_host": make_script(
            Talkative,
            predicted=8,
            trainer_kwargs=WITHOUT_METRICS,
            eval_do_concat_batches=False,
            eval_accumulation_steps=2,
        ),
        "outputs_of_unequal_length_in_three_dimensions": make_script(
            tiny_bert_tagger, tag_rows, 8, trainer_kwargs={"data_collator": pad_tokens}, eval_accumulation_steps=1
        ),
        "objects_gathered": make_script(VectorClassifier, eval_use_gather_object=True),
        "logits_flattened_to_tokens_before_they_are_gathered": make_script(
            tiny_gpt2, language_rows, trainer_kwargs=FLATTENING
        ),
        "a_model_that_returns_a_plain_tensor": make_script(
            LossOfEachRow, trainer_kwargs=WITHOUT_METRICS, gradient_accumulation_steps=2
        ),
    },
    predicts=True,
)


@scenario(predicts=True)
def outputs_excluded_by_name(side: Side) -> Record:
    trainer = trainer_with(side, Talkative())
    trained = trainer.train(ignore_keys_for_eval=["states", "named", "mean"])
    metrics = trainer.evaluate(ignore_keys=["logits", "mean", "named"])
    predictions = trainer.predict(Rows(vector_rows(5, seed=2)), ignore_keys=["states", "named", "mean"])
    return side.record(trainer, trained, metrics, predictions=predictions)


class SpanFinder(nn.Module):
    """Two labels, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.end = nn.Linear(FEATURES, 4), nn.Linear(FEATURES, 4)

    def forward(self, x: Any, start_positions: Any = None, end_positions: Any = None) -> Any:
        starts, ends = self.start(x), self.end(x)
        if start_positions is None or end_positions is None:
            return {"start_logits": starts, "end_logits": ends}
        loss = nn.functional.cross_entropy(starts, start_positions) + nn.functional.cross_entropy(ends, end_positions)
        return {"loss": loss, "start_logits": starts, "end_logits": ends}


@scenario(predicts=True)
def labels_of_several_names(side: Side) -> Record:
    def hits(prediction: Any) -> dict[str, Any]:
        predictions, labels = prediction
        assert prediction[0] is predictions and prediction.label_ids is labels
        return {f"hits_{n}": (p.argmax(-1) == l).mean() for n, (p, l) in enumerate(zip(predictions, labels))}  # noqa: B905, E741

    rows = [
        {"x": row["x"], "start_positions": row["labels"], "end_positions": 3 - row["labels"]} for row in vector_rows(10)
    ]
    trainer = trainer_with(
        side,
        SpanFinder(),
        rows,
        trainer_kwargs={"compute_metrics": hits},
        label_names=["start_positions", "end_positions"],
    )
    return side.record(trainer, trainer.train(), predictions=trainer.predict(Rows(rows[:4])))


@scenario()
def metrics_summed_up_batch_by_batch_from_inputs_and_losses(side: Side) -> Record:
    records: list[Any] = []

    def summing(prediction: Any, compute_result: bool) -> dict[str, float] | None:
        records.append((prediction.predictions, prediction.losses, prediction.inputs["x"].sum(), compute_result))
        return {"batches": float(len(records)), "mean": torch.tensor(2.5)} if compute_result else None

    class Vectors(VectorClassifier):
        main_input_name = "x"

    trainer = trainer_with(
        side,
        Vectors(),
        trainer_kwargs={"compute_metrics": summing},
        batch_eval_metrics=True,
        include_for_metrics=["inputs", "loss"],
    )
    return side.record(trainer, trainer.train(), extra={"seen": records})


@scenario(saves=True)
def metrics_of_other_kinds_than_numbers(side: Side) -> Record:
    def described(prediction: Any) -> dict[str, Any]:
        return {**accuracy(prediction), "report": {"per class": [0.5, 1]}, "model": "tiny", "nothing": None}

    trainer = trainer_with(
        side,
        VectorClassifier(),
        trainer_kwargs={"compute_metrics": described},
        save_strategy="epoch",
        metric_for_best_model="accuracy",
        load_best_model_at_end=True,
    )
    return side.train(trainer)


@scenario()
def arrays_as_metrics_where_nothing_is_saved(side: Side) -> Record:
    trainer = trainer_with(
        side,
        VectorClassifier(),
        trainer_kwargs={"compute_metrics": lambda prediction: {"column": prediction.label_ids}},
    )
    return side.train(trainer)


@scenario()
def an_evaluation_at_the_start_and_after_an_epoch_of_delay(side: Side) -> Record:
    return side.train(trainer_with(side, VectorClassifier(), num_train_epochs=3, eval_delay=2, eval_on_start=True))
