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


def evaluate_metrics(folder: Path, compute_metrics: Any, *arguments: Any, **changes: Any) -> dict[str, float]:
    """Return the metrics of an evaluation without loss and speed."""
    keywords = {"compute_metrics": compute_metrics, **changes.pop("trainer_kwargs", {})}
    metrics = quiet_trainer(folder, *arguments, trainer_kwargs=keywords, **changes).evaluate()
    excluded = ("_loss", "_time", "_runtime", "_per_second", "epoch")
    return {name: value for name, value in metrics.items() if not name.endswith(excluded)}


# ---- The same numbers as a function over all arrays -----------------------------------------------------------------


@pytest.mark.parametrize(("batch_size", "batch_eval_metrics"), [(1, False), (3, True), (7, False)])
def test_accuracy_equals_that_of_a_function_over_all_predictions(
    tmp_path: Path, batch_size: int, batch_eval_metrics: bool
) -> None:
    expected = evaluate_metrics(tmp_path, accuracy)
    streamed = evaluate_metrics(
        tmp_path,
        {"accuracy": micro_accuracy()},
        per_device_eval_batch_size=batch_size,
        batch_eval_metrics=batch_eval_metrics,
    )
    assert streamed == pytest.approx(expected, abs=1e-6)


def test_metrics_of_a_language_model_equal_those_of_a_function_over_padded_arrays(tmp_path: Path) -> None:
    def compute_next_token_metrics(prediction: EvalPrediction) -> dict[str, float]:
        labels = torch.from_numpy(prediction.label_ids[:, 1:])
        counted = labels != -100
        scores = torch.from_numpy(prediction.predictions[:, :-1])[counted]
        loss = torch.nn.functional.cross_entropy(scores.double(), labels[counted])
        right = (scores.argmax(-1) == labels[counted]).double().mean()
        return {"accuracy": right.item(), "perplexity": loss.exp().item()}

    torch.manual_seed(0)
    model = tiny_llama()
    data = {"eval_dataset": Rows(language_rows(7)), "data_collator": pad_tokens}
    metrics = {
        "accuracy": micro_accuracy(VOCABULARY_SIZE),
        "perplexity": StreamingMetrics(Perplexity(), inputs="language_model_scores"),
    }
    expected = evaluate_metrics(tmp_path, compute_next_token_metrics, model, trainer_kwargs=data)
    assert expected["eval_perplexity"] > 1
    assert evaluate_metrics(tmp_path, metrics, model, trainer_kwargs=data) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("batch_size", "wrap"), [(1, lambda metric: metric), (3, lambda metric: MetricCollection([metric]))]
)
def test_scores_for_metrics_with_thresholds_do_not_depend_on_batch_sizes(
    tmp_path: Path, batch_size: int, wrap: Any
) -> None:
    def small_logits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        # Scores of single samples are often between 0 and 1, as probabilities are.
        return logits * 0.5

    def auroc(prediction: EvalPrediction) -> dict[str, float]:
        scores, labels = torch.from_numpy(prediction.predictions), torch.from_numpy(prediction.label_ids)
        metric = BinaryAUROC() if scores.shape[-1] == 2 else MulticlassAUROC(scores.shape[-1])
        probabilities = scores.softmax(-1)
        return {"auroc": metric(probabilities[:, 1] if scores.shape[-1] == 2 else probabilities, labels).item()}

    keywords = {"preprocess_logits_for_metrics": small_logits}
    for classes, metric in ((2, BinaryAUROC()), (CLASSES, MulticlassAUROC(CLASSES))):
        rows = [{**row, "labels": row["labels"] % classes} for row in vector_rows(40)]
        torch.manual_seed(0)
        model = VectorClassifier()
        model.head = torch.nn.Linear(model.head.in_features, classes)
        changes: dict[str, Any] = {"trainer_kwargs": {**keywords, "eval_dataset": Rows(rows)}}
        (expected,) = evaluate_metrics(tmp_path, auroc, model, **changes).values()
        changes["per_device_eval_batch_size"] = batch_size
        (streamed,) = evaluate_metrics(tmp_path, wrap(metric), model, **changes).values()
        assert streamed == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("batch_size", [1, 7])
def test_multi_label_scores_do_not_depend_on_batch_sizes(tmp_path: Path, batch_size: int) -> None:
    class Logits(torch.nn.Module):
        """Model that returns its inputs as logits, and sets its problem type as transformers' models do."""

        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace(problem_type=None)
            self.unused = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            self.config.problem_type = "multi_label_classification"
            loss = torch.nn.functional.binary_cross_entropy_with_logits(x, labels)
            return {"loss": loss, "logits": x + 0 * self.unused}

    # The first rows would be negative predictions if they were probabilities.
    logits = torch.tensor([[0.2, 0.3], [0.4, 0.1], [-2.0, 3.0], [0.6, -1.0]])
    rows = [{"x": row, "labels": torch.ones(2)} for row in logits]
    keywords = {"trainer_kwargs": {"eval_dataset": Rows(rows)}, "per_device_eval_batch_size": batch_size}
    metrics = evaluate_metrics(tmp_path, {"accuracy": MultilabelAccuracy(2)}, Logits(), **keywords)
    assert metrics["eval_accuracy"] == pytest.approx(0.75)


# ---- Names and values -----------------------------------------------------------------------------------------------


class RecordingMetric(Metric):
    """Metric with a custom update, which records its calls."""

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
    "numbers by class": ({"f1": MulticlassF1Score(CLASSES, average=None)}, {"f1_0", "f1_1", "f1_2"}),
    "a matrix": (
        MulticlassConfusionMatrix(CLASSES),
        {f"multiclass_confusion_matrix_{row}_{column}" for row in range(CLASSES) for column in range(CLASSES)},
    ),
    "names of a metric's own": (
        ClasswiseWrapper(MulticlassRecall(CLASSES, average=None), labels=["a", "b", "c"], prefix="recall_"),
        {"recall_a", "recall_b", "recall_c"},
    ),
    "an object": (RecordingMetric(share=np.float32(0.5), pair=(1, [2])), {"rows", "share", "pair_0", "pair_1_0"}),
    "an object in a dict": ({"metric": RecordingMetric()}, {"metric_rows"}),
}


@pytest.mark.parametrize(("metrics", "names"), NAMED.values(), ids=NAMED.keys())
def test_each_number_gets_a_name_and_is_json(tmp_path: Path, metrics: Any, names: set[str]) -> None:
    values = evaluate_metrics(tmp_path, metrics)
    assert set(values) == {f"eval_{name}" for name in names}
    assert {type(value) for value in values.values()} <= {int, float}
    json.dumps(values)


def test_a_result_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"RecordingMetric.compute\(\) gave 'good' for 'quality'"):
        evaluate_metrics(tmp_path, RecordingMetric(quality="good"))


# ---- Values that are no metric --------------------------------------------------------------------------------------


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
def test_a_value_that_is_neither_function_nor_metric_is_refused_by_the_trainer(
    tmp_path: Path, compute_metrics: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        quiet_trainer(tmp_path, trainer_kwargs={"compute_metrics": compute_metrics})


def test_the_conversion_of_a_metric_overrides_the_common_conversion() -> None:
    with pytest.raises(ValueError, match=r"'argmax'.*'classification'"):
        StreamingMetrics(micro_accuracy(), inputs="argmax")
    metric, other = RecordingMetric(), RecordingMetric()
    metrics = StreamingMetrics({"own": StreamingMetrics(metric, "unchanged"), "all": other}, inputs="classification")
    logits, labels = torch.rand(4, CLASSES), torch.zeros(4, dtype=torch.int64)
    metrics.update(EvalPrediction(logits, labels))
    assert metric.calls[0][0][0].shape == (4, CLASSES) and other.calls[0][0][0].shape == (4,)


# ---- Collected outputs ----------------------------------------------------------------------------------------------


def record_collected_rows(patch: pytest.MonkeyPatch) -> list[int]:
    """Record the rows of all collected outputs, without losses."""
    rows: list[int] = []
    original = BatchCollection.add

    def add(collection: BatchCollection, batch: Any) -> None:
        if batch.dim() > 1 or not batch.is_floating_point():
            rows.append(len(batch))
        original(collection, batch)

    patch.setattr(BatchCollection, "add", add)
    return rows


def test_an_evaluation_with_metrics_keeps_no_predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = record_collected_rows(monkeypatch)
    evaluate_metrics(tmp_path, {"accuracy": micro_accuracy()}, trainer_kwargs={"eval_dataset": Rows(vector_rows(70))})
    assert rows == []
    evaluate_metrics(tmp_path, accuracy, trainer_kwargs={"eval_dataset": Rows(vector_rows(7))})
    assert sum(rows) == 14


def test_without_labels_there_are_no_metrics(tmp_path: Path) -> None:
    unlabelled = Rows([{"x": row["x"]} for row in vector_rows(5)])
    metric = RecordingMetric()
    output = quiet_trainer(tmp_path, trainer_kwargs={"compute_metrics": {"metric": metric}}).predict(unlabelled)
    assert output.predictions.shape == (5, CLASSES)
    assert metric.calls == [] and "test_metric_rows" not in output.metrics


def test_metrics_are_reset_for_each_evaluation_and_dataset(tmp_path: Path) -> None:
    datasets = {"near": Rows(vector_rows(4)), "far": Rows(vector_rows(5, seed=3))}
    trainer = quiet_trainer(
        tmp_path, trainer_kwargs={"eval_dataset": datasets, "compute_metrics": {"metric": RecordingMetric()}}
    )
    for _ in range(2):
        metrics = trainer.evaluate()
        assert (metrics["eval_near_metric_rows"], metrics["eval_far_metric_rows"]) == (4, 5)
    assert trainer.predict(Rows(vector_rows(3))).metrics["test_metric_rows"] == 3


# ---- Arguments of update --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda metric: metric, lambda metric: MetricCollection([metric])])
def test_a_custom_update_gets_the_models_outputs_and_an_inherited_update_converted_inputs(
    tmp_path: Path, wrap: Any
) -> None:
    class Derived(MulticlassAccuracy):
        """Metric with torchmetrics' update."""

    torch.manual_seed(0)
    model, custom = tiny_llama(), RecordingMetric()
    batch = pad_tokens(language_rows(3))
    metrics = StreamingMetrics({"custom": wrap(custom), "accuracy": wrap(Derived(VOCABULARY_SIZE, average="micro"))})
    metrics.begin(torch.device("cpu"), lambda: TaskFacts(is_causal_lm=True))
    with torch.no_grad():
        logits = model.eval()(**batch).logits
    metrics.update(EvalPrediction(logits, batch["labels"]))
    (((predictions, labels), _),) = custom.calls
    assert predictions is logits and labels is batch["labels"] and (labels == -100).any()
    right = (logits[:, :-1].argmax(-1) == labels[:, 1:])[labels[:, 1:] != -100].float().mean().item()
    values = metrics.compute()
    assert right == pytest.approx(next(value for name, value in values.items() if name.startswith("accuracy")))


def test_a_batch_without_counted_labels_is_skipped() -> None:
    metric = RecordingMetric()
    metrics = StreamingMetrics(metric, "classification")
    metrics.update(EvalPrediction(torch.rand(2, 3, CLASSES), torch.full((2, 3), -100)))
    assert metric.calls == [] and metrics.batches == 1


# ---- Errors ---------------------------------------------------------------------------------------------------------


def test_a_metric_that_rejects_a_batch_is_named_with_shapes_and_conversions(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        evaluate_metrics(tmp_path, {"mse": MeanSquaredError(), "perplexity": Perplexity()})
    message = str(caught.value)
    assert "'perplexity' (Perplexity)" in message
    assert f"predictions float32 (3, {CLASSES}) and labels int64 (3,)" in message
    assert "inputs='classification' (chosen by their shapes and the model)" in message
    assert "the arguments of update: tuple of [int64 (3,), int64 (3,)]." in message
    assert "StreamingMetrics takes as inputs also 'class_scores'" in message and "'regression'" in message
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("failing", ["update", "compute"])
def test_a_metric_that_fails_in_a_training_is_noted_with_the_optimizer_step(tmp_path: Path, failing: str) -> None:
    class Failing(RecordingMetric):
        def update(self, *arguments: Any, **keywords: Any) -> None:
            super().update(*arguments, **keywords)
            if failing == "update":
                raise RuntimeError("broken")

        def compute(self) -> Any:
            raise RuntimeError("broken")

    keywords = {"compute_metrics": {"own": Failing()}}
    trainer = quiet_trainer(tmp_path, trainer_kwargs=keywords, max_steps=3, eval_strategy="steps", eval_steps=2)
    with pytest.raises((ValueError, RuntimeError), match="broken") as caught:
        trainer.train()
    assert "at optimizer step 2 of 3" in " ".join(caught.value.__notes__)
