from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torchmetrics import MeanSquaredError, Metric, MetricCollection
from torchmetrics.classification import (
    BinaryAUROC,
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassRecall,
    MultilabelAccuracy,
)
from torchmetrics.text import Perplexity
from torchmetrics.wrappers import ClasswiseWrapper

from littrainer import EvalPrediction, StreamingMetrics
from littrainer.evaluation.gathering import BatchCollection
from littrainer.evaluation.streaming import TaskFacts
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, language_rows, vector_rows
from tests.scenarios.metrics import accuracy
from tests.scenarios.models import (
    CLASSES,
    VOCABULARY_SIZE,
    VectorClassifier,
    tiny_llama,
)
from tests.scenarios.trainers import quiet_trainer


def micro_accuracy(classes: int = CLASSES) -> Metric:
    return MulticlassAccuracy(classes, average="micro")


def evaluated(folder: Path, compute_metrics: Any, *arguments: Any, **changes: Any) -> dict[str, float]:
    """The metrics of an evaluation without its loss and speed."""
    given = {"compute_metrics": compute_metrics, **changes.pop("given", {})}
    found = quiet_trainer(folder, *arguments, given=given, **changes).evaluate()
    own = ("_loss", "_time", "_runtime", "_per_second", "epoch")
    return {name: value for name, value in found.items() if not name.endswith(own)}


# ---- The same numbers as a function over all arrays -----------------------------------------------------------------


@pytest.mark.parametrize("batch_eval_metrics", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3, 7])
def test_accuracy_is_that_of_a_function_over_all_predictions(
    tmp_path: Path, batch_size: int, batch_eval_metrics: bool
) -> None:
    whole = evaluated(tmp_path, accuracy)
    streamed = evaluated(
        tmp_path,
        {"accuracy": micro_accuracy()},
        per_device_eval_batch_size=batch_size,
        batch_eval_metrics=batch_eval_metrics,
    )
    assert streamed == pytest.approx(whole, abs=1e-6)


def test_a_language_models_accuracy_and_perplexity_are_those_of_a_function_over_padded_arrays(tmp_path: Path) -> None:
    def of_next_tokens(prediction: EvalPrediction) -> dict[str, float]:
        labels = torch.from_numpy(prediction.label_ids[:, 1:])
        counted = labels != -100
        scores = torch.from_numpy(prediction.predictions[:, :-1])[counted]
        loss = torch.nn.functional.cross_entropy(scores.double(), labels[counted])
        right = (scores.argmax(-1) == labels[counted]).double().mean()
        return {"accuracy": right.item(), "perplexity": loss.exp().item()}

    torch.manual_seed(0)
    model = tiny_llama()
    given = {"eval_dataset": Rows(language_rows(7)), "data_collator": pad_tokens}
    metrics = {
        "accuracy": micro_accuracy(VOCABULARY_SIZE),
        "perplexity": StreamingMetrics(Perplexity(), inputs="language_model_scores"),
    }
    whole = evaluated(tmp_path, of_next_tokens, model, given=given)
    assert whole["eval_perplexity"] > 1
    assert evaluated(tmp_path, metrics, model, given=given) == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("batch_size", [1, 3, 7])
@pytest.mark.parametrize("wrap", [lambda metric: metric, lambda metric: MetricCollection([metric])])
def test_metrics_over_thresholds_are_given_scores_that_do_not_depend_on_the_batches(
    tmp_path: Path, batch_size: int, wrap: Any
) -> None:
    def small_logits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        # Single samples' scores often lie between 0 and 1, those of several samples hardly ever all do.
        return logits * 0.5

    def auroc(prediction: EvalPrediction) -> dict[str, float]:
        scores, labels = torch.from_numpy(prediction.predictions), torch.from_numpy(prediction.label_ids)
        metric = BinaryAUROC() if scores.shape[-1] == 2 else MulticlassAUROC(scores.shape[-1])
        probabilities = scores.softmax(-1)
        return {"auroc": metric(probabilities[:, 1] if scores.shape[-1] == 2 else probabilities, labels).item()}

    given = {"preprocess_logits_for_metrics": small_logits}
    for classes, metric in ((2, BinaryAUROC()), (CLASSES, MulticlassAUROC(CLASSES))):
        rows = [{**row, "labels": row["labels"] % classes} for row in vector_rows(40)]
        torch.manual_seed(0)
        model = VectorClassifier()
        model.head = torch.nn.Linear(model.head.in_features, classes)
        changes: dict[str, Any] = {"given": {**given, "eval_dataset": Rows(rows)}}
        (expected,) = evaluated(tmp_path, auroc, model, **changes).values()
        changes["per_device_eval_batch_size"] = batch_size
        (streamed,) = evaluated(tmp_path, wrap(metric), model, **changes).values()
        assert streamed == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("batch_size", [1, 7])
def test_scores_of_several_labels_do_not_depend_on_the_batches(tmp_path: Path, batch_size: int) -> None:
    class Logits(torch.nn.Module):
        """Hands its inputs on as logits, and finds out about its problem as models of transformers do."""

        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace(problem_type=None)
            self.unused = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            self.config.problem_type = "multi_label_classification"
            loss = torch.nn.functional.binary_cross_entropy_with_logits(x, labels)
            return {"loss": loss, "logits": x + 0 * self.unused}

    # Taken for probabilities, those of the first rows lie below one half.
    logits = torch.tensor([[0.2, 0.3], [0.4, 0.1], [-2.0, 3.0], [0.6, -1.0]])
    rows = [{"x": row, "labels": torch.ones(2)} for row in logits]
    given, metric = {"eval_dataset": Rows(rows)}, {"accuracy": MultilabelAccuracy(2)}
    found = evaluated(tmp_path, metric, Logits(), given=given, per_device_eval_batch_size=batch_size)
    assert found["eval_accuracy"] == pytest.approx(0.75)


# ---- Names and values -----------------------------------------------------------------------------------------------


class Seen(Metric):
    """A metric with an update of its own, which notes what it is called with."""

    def __init__(self, **results: Any) -> None:
        super().__init__()
        self.results = results
        self.calls: list[Any] = []

    def update(self, *arguments: Any, **keywords: Any) -> None:
        self.calls.append((arguments, keywords))

    def compute(self) -> Any:
        return {"rows": sum(len(arguments[0]) for arguments, _ in self.calls), **self.results}

    def reset(self) -> None:
        super().reset()
        self.calls = []


NAMED = {
    "a metric by its class": (MulticlassAccuracy(CLASSES), {"multiclass_accuracy"}),
    "an abbreviation in its name": (StreamingMetrics(MulticlassAUROC(CLASSES), "class_scores"), {"multiclass_auroc"}),
    "a collection by its keys": (
        MetricCollection([micro_accuracy(), MulticlassF1Score(CLASSES)], prefix="tag_"),
        {"tag_MulticlassAccuracy", "tag_MulticlassF1Score"},
    ),
    "a collection of names": (MetricCollection({"acc": micro_accuracy()}), {"acc"}),
    "a dict by its keys": ({"acc": micro_accuracy(), "f1": MulticlassF1Score(CLASSES)}, {"acc", "f1"}),
    "a dict of collections": ({"of": MetricCollection({"acc": micro_accuracy()})}, {"of_acc"}),
    "one for each class": ({"f1": MulticlassF1Score(CLASSES, average=None)}, {"f1_0", "f1_1", "f1_2"}),
    "a matrix": (
        MulticlassConfusionMatrix(CLASSES),
        {f"multiclass_confusion_matrix_{row}_{column}" for row in range(CLASSES) for column in range(CLASSES)},
    ),
    "names of a metric's own": (
        ClasswiseWrapper(MulticlassRecall(CLASSES, average=None), labels=["a", "b", "c"], prefix="recall_"),
        {"recall_a", "recall_b", "recall_c"},
    ),
    "an object": (Seen(share=np.float32(0.5), pair=(1, [2])), {"rows", "share", "pair_0", "pair_1_0"}),
    "an object in a dict": ({"seen": Seen()}, {"seen_rows"}),
}


@pytest.mark.parametrize(("metrics", "names"), NAMED.values(), ids=NAMED.keys())
def test_each_number_gets_a_name_and_can_be_written_as_json(tmp_path: Path, metrics: Any, names: set[str]) -> None:
    found = evaluated(tmp_path, metrics)
    assert set(found) == {f"eval_{name}" for name in names}
    assert {type(value) for value in found.values()} <= {int, float}
    json.dumps(found)


def test_a_result_that_is_no_number_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"Seen.compute\(\) gave 'good' for 'quality'"):
        evaluated(tmp_path, Seen(quality="good"))


# ---- What counts as a metric ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compute_metrics", "error", "message"),
    [
        ("accuracy", TypeError, "compute_metrics is 'accuracy'.*function of an EvalPrediction"),
        ({}, ValueError, "dict without a metric"),
        ({"accuracy": accuracy}, TypeError, r"compute_metrics\['accuracy'\] is no metric of torchmetrics \(function\)"),
        ({"all": {"f1": accuracy}}, TypeError, r"compute_metrics\['all'\] is no metric of torchmetrics \(dict\)"),
        (StreamingMetrics, TypeError, "compute_metrics is the class StreamingMetrics"),
        (MulticlassAccuracy, TypeError, "is the class MulticlassAccuracy; pass a metric"),
    ],
)
def test_what_is_neither_function_nor_metric_is_refused_when_the_trainer_is_made(
    tmp_path: Path, compute_metrics: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        quiet_trainer(tmp_path, given={"compute_metrics": compute_metrics})


def test_an_unknown_way_of_input_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'argmax'.*'classification'"):
        StreamingMetrics(micro_accuracy(), inputs="argmax")


def test_the_way_of_input_of_one_metric_goes_before_that_of_all() -> None:
    seen, other = Seen(), Seen()
    metrics = StreamingMetrics({"own": StreamingMetrics(seen, "unchanged"), "all": other}, inputs="classification")
    logits, labels = torch.rand(4, CLASSES), torch.zeros(4, dtype=torch.int64)
    metrics.update(EvalPrediction(logits, labels))
    assert seen.calls[0][0][0].shape == (4, CLASSES) and other.calls[0][0][0].shape == (4,)


# ---- What is kept, and for how long ---------------------------------------------------------------------------------


def rows_kept(patch: pytest.MonkeyPatch) -> list[int]:
    """The samples of what evaluations keep from now on, losses left out."""
    kept: list[int] = []
    original = BatchCollection.add

    def add(collection: BatchCollection, batch: Any) -> None:
        if batch.dim() > 1 or not batch.is_floating_point():
            kept.append(len(batch))
        original(collection, batch)

    patch.setattr(BatchCollection, "add", add)
    return kept


def test_an_evaluation_with_metrics_keeps_no_predictions_however_many_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = rows_kept(monkeypatch)
    evaluated(tmp_path, {"accuracy": micro_accuracy()}, given={"eval_dataset": Rows(vector_rows(70))})
    assert kept == []
    evaluated(tmp_path, accuracy, given={"eval_dataset": Rows(vector_rows(7))})
    assert sum(kept) == 14


def test_without_labels_there_are_no_metrics(tmp_path: Path) -> None:
    unlabelled = Rows([{"x": row["x"]} for row in vector_rows(5)])
    seen = Seen()
    output = quiet_trainer(tmp_path, given={"compute_metrics": {"seen": seen}}).predict(unlabelled)
    assert output.predictions.shape == (5, CLASSES)
    assert seen.calls == [] and "test_seen_rows" not in output.metrics


def test_each_evaluation_begins_anew_and_datasets_do_not_leak_into_each_other(tmp_path: Path) -> None:
    datasets = {"near": Rows(vector_rows(4)), "far": Rows(vector_rows(5, seed=3))}
    trainer = quiet_trainer(tmp_path, given={"eval_dataset": datasets, "compute_metrics": {"seen": Seen()}})
    for _ in range(2):
        found = trainer.evaluate()
        assert (found["eval_near_seen_rows"], found["eval_far_seen_rows"]) == (4, 5)
    assert trainer.predict(Rows(vector_rows(3))).metrics["test_seen_rows"] == 3


# ---- What goes in ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda metric: metric, lambda metric: MetricCollection([metric])])
def test_a_metric_with_an_update_of_the_user_gets_what_the_model_returned_and_a_derived_one_what_update_takes(
    tmp_path: Path, wrap: Any
) -> None:
    class Derived(MulticlassAccuracy):
        """Takes what torchmetrics' own update takes."""

    torch.manual_seed(0)
    model, own = tiny_llama(), Seen()
    batch = pad_tokens(language_rows(3))
    metrics = StreamingMetrics({"own": wrap(own), "accuracy": wrap(Derived(VOCABULARY_SIZE, average="micro"))})
    metrics.begin(torch.device("cpu"), lambda: TaskFacts(is_causal_lm=True))
    with torch.no_grad():
        logits = model.eval()(**batch).logits
    metrics.update(EvalPrediction(logits, batch["labels"]))
    (((predictions, labels), _),) = own.calls
    assert predictions is logits and labels is batch["labels"] and (labels == -100).any()
    right = (logits[:, :-1].argmax(-1) == labels[:, 1:])[labels[:, 1:] != -100].float().mean().item()
    found = metrics.compute()
    assert right == pytest.approx(next(value for name, value in found.items() if name.startswith("accuracy")))


def test_a_batch_without_any_label_that_counts_is_left_out() -> None:
    seen = Seen()
    metrics = StreamingMetrics(seen, "classification")
    metrics.update(EvalPrediction(torch.rand(2, 3, CLASSES), torch.full((2, 3), -100)))
    assert seen.calls == [] and metrics.batches == 1


# ---- Errors ---------------------------------------------------------------------------------------------------------


def test_a_metric_that_does_not_fit_is_named_with_the_shapes_and_the_ways_of_input(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        evaluated(tmp_path, {"mse": MeanSquaredError(), "perplexity": Perplexity()})
    message = str(caught.value)
    assert "'perplexity' (Perplexity)" in message
    assert f"predictions float32 (3, {CLASSES}) and labels int64 (3,)" in message
    assert "inputs='classification' (chosen by their shapes and the model)" in message
    assert "what update was called with: tuple of [int64 (3,), int64 (3,)]." in message
    assert "StreamingMetrics takes as inputs also 'class_scores'" in message and "'regression'" in message
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("failing", ["update", "compute"])
def test_a_metric_that_fails_in_a_training_is_noted_with_the_optimizer_step(tmp_path: Path, failing: str) -> None:
    class Failing(Seen):
        def update(self, *arguments: Any, **keywords: Any) -> None:
            super().update(*arguments, **keywords)
            if failing == "update":
                raise RuntimeError("broken")

        def compute(self) -> Any:
            raise RuntimeError("broken")

    given = {"compute_metrics": {"own": Failing()}}
    trainer = quiet_trainer(tmp_path, given=given, max_steps=3, eval_strategy="steps", eval_steps=2)
    with pytest.raises((ValueError, RuntimeError), match="broken") as caught:
        trainer.train()
    assert "at optimizer step 2 of 3" in " ".join(caught.value.__notes__)
