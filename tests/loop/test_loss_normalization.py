from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from littrainer import Trainer
from littrainer.loop import step
from littrainer.loop.loss_normalization import UNKNOWN, LossReduction, _NoIgnoredIndex
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, language_rows, tag_rows, token_rows, vector_rows
from tests.scenarios.models import (
    CLASSES,
    CountingClassifier,
    KeywordClassifier,
    NoisyClassifier,
    VectorClassifier,
    tiny_bert_classifier,
    tiny_bert_config,
    tiny_bert_for_masked_tokens,
    tiny_bert_tagger,
    tiny_gpt2,
)
from tests.scenarios.trainers import StepwiseTrainer, quiet_trainer, warnings_logged

ROWS = 10
# Except for the first layout, the last window and its last micro-batch are shorter.
LAYOUTS = ((10, 1), (4, 3), (1, 10))
WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
STEPWISE = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "max_steps": 3}
SEQUENTIAL = {"train_sampling_strategy": "sequential", "logging_strategy": "steps", "logging_steps": 1}


class KeywordTagger(nn.Module):
    """A tagger that takes any keyword and returns the mean over the labels of the next tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, CLASSES)

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        logits = self.embedding(input_ids)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "scores": logits}


class HiddenTagger(KeywordTagger):
    """A tagger without logits among its outputs."""

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        return (super().forward(input_ids, labels=labels)["loss"],)


class Regression(VectorClassifier):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        return {"loss": nn.functional.mse_loss(self.logits(x), labels), "logits": None}


class Contrastive(VectorClassifier):
    """A model whose loss compares the rows of a micro-batch."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        vectors = self.logits(x)
        return nn.functional.cross_entropy(vectors @ vectors.T, torch.arange(len(x))), vectors


class PartlyDivided(CountingClassifier):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        outputs = super().forward(x, labels, **kwargs)
        return {**outputs, "loss": outputs["loss"] + 0.1 * self.head.weight.square().sum()}


def regression_rows() -> list[Any]:
    return [{**row, "labels": row["x"][:CLASSES] ** 2} for row in vector_rows(ROWS)]


def classes_without_some() -> list[Any]:
    rows = vector_rows(ROWS)
    for row in rows[1:7:2]:
        row["labels"] = -100
    return rows


HEADS: dict[str, tuple[Callable[[], Any], Callable[[], list[Any]]]] = {
    "one class": (KeywordClassifier, lambda: vector_rows(ROWS)),
    "one class, no keywords": (VectorClassifier, lambda: vector_rows(ROWS)),
    "classes of some rows": (KeywordClassifier, classes_without_some),
    "divided already": (CountingClassifier, classes_without_some),
    "divided in part": (PartlyDivided, lambda: vector_rows(ROWS)),
    "regression": (Regression, regression_rows),
    "tags": (lambda: tiny_bert_tagger(**WITHOUT_DROPOUT), lambda: tag_rows(ROWS)),
    "masked tokens": (lambda: tiny_bert_for_masked_tokens(**WITHOUT_DROPOUT), lambda: language_rows(ROWS)),
    "next tokens": (
        lambda: tiny_gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
        lambda: language_rows(ROWS, most_masked=1),
    ),
    "next tags": (KeywordTagger, lambda: tag_rows(ROWS)),
    "next tags without scores": (HiddenTagger, lambda: tag_rows(ROWS)),
}


def trained(
    folder: Path,
    model: Any,
    rows: list[Any],
    layout: tuple[int, int],
    normalization: str = "exact",
    kind: type[Trainer] = Trainer,
    **changes: Any,
) -> Trainer:
    parameters: dict[str, Any] = {"train_dataset": Rows(rows)}
    if {"input_ids", "labels"} <= rows[0].keys():
        parameters["data_collator"] = pad_tokens
    size, accumulation = layout
    layout_arguments = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
    arguments = {**layout_arguments, **STEPWISE, **SEQUENTIAL, "loss_normalization": normalization, **changes}
    trainer = quiet_trainer(folder, model, kind=kind, trainer_kwargs=parameters, **arguments)
    trainer.train()
    return trainer


def losses_and_weights(trainer: Trainer) -> dict[str, Any]:
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])
    return {"losses": losses, "weights": weights}


def seeded(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return make()


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, Trainer) for name in HEADS), ("tags", StepwiseTrainer), ("one class", StepwiseTrainer)]
)
def test_losses_and_weights_are_the_same_for_each_layout(tmp_path: Path, name: str, kind: type[Trainer]) -> None:
    make, rows = HEADS[name]
    with warnings_logged("loss_normalization") as texts:
        first, *rest = (
            losses_and_weights(trained(tmp_path, seeded(make), rows(), layout, kind=kind)) for layout in LAYOUTS
        )
    assert not texts
    assert len(first["losses"]) == 3
    for result in rest:
        torch.testing.assert_close(result, first, rtol=2e-5, atol=1e-6)
    default = losses_and_weights(trained(tmp_path, seeded(make), rows(), LAYOUTS[0], "transformers"))
    if name != "next tokens":
        # transformers' GPT-2 also counts labels that its loss ignores.
        torch.testing.assert_close(default, first, rtol=2e-5, atol=1e-6)


def test_smoothed_labels_weigh_the_same_in_each_layout(tmp_path: Path) -> None:
    class Plain(KeywordTagger):
        def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
            return {"logits": self.embedding(input_ids)}

    changes = {"label_smoothing_factor": 0.2}
    first, *rest = (
        losses_and_weights(trained(tmp_path, seeded(Plain), tag_rows(ROWS), layout, **changes)) for layout in LAYOUTS
    )
    for result in rest:
        torch.testing.assert_close(result, first, rtol=2e-5, atol=1e-6)


def warnings_of(
    folder: Path, model: Any, rows: list[Any], layout: tuple[int, int] = (2, 4), **changes: Any
) -> list[str]:
    with warnings_logged("loss_normalization") as texts:
        trained(folder, model, rows, layout, **{"normalization": "transformers", **changes})
    return texts


def test_a_loss_that_depends_on_the_layout_is_warned_about_once_with_the_factor(tmp_path: Path) -> None:
    (warning,) = warnings_of(tmp_path, KeywordClassifier(), vector_rows(ROWS))
    assert "KeywordClassifier takes num_items_in_batch" in warning
    assert "4 micro-batches in an optimizer step its loss and the gradients are 4 times too large" in warning
    assert "Set loss_normalization='exact'" in warning
    (warning,) = warnings_of(tmp_path, PartlyDivided(), vector_rows(ROWS))
    assert "4 micro-batches in an optimizer step a part of its loss and the gradients are 4 times too large" in warning


def test_labels_that_do_not_weigh_the_same_are_warned_about(tmp_path: Path) -> None:
    class Plain(KeywordTagger):
        def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
            return super().forward(input_ids, attention_mask, labels)

    rows = [{"input_ids": [3, 4, 5, 6], "labels": [-100, 1, -100, 2]} for _ in range(ROWS)]
    for row in rows[::2]:
        row["labels"] = [-100, 1, -100, -100]
    (warning,) = warnings_of(tmp_path, Plain(), rows, (1, 4))
    assert "Plain returns means over the labels of a micro-batch" in warning
    assert "weighs up to 2 times as much" in warning
    for row in rows:
        row["labels"] = [-100, 1, -100, -100]
    assert not warnings_of(tmp_path, Plain(), rows, (1, 4))


class Questions(VectorClassifier):
    """A model with other names of labels, so that labels are not counted."""

    def forward(self, x: Any, start_positions: Any = None, end_positions: Any = None, **kwargs: Any) -> Any:
        outputs = super().forward(x, start_positions)
        return {**outputs, "loss": (outputs["loss"] + super().forward(x, end_positions)["loss"]) / 2}


@pytest.mark.parametrize("make", [VectorClassifier, Questions])
def test_samples_that_do_not_weigh_the_same_are_warned_about(tmp_path: Path, make: Any) -> None:
    rows = vector_rows(ROWS)
    if make is Questions:
        rows = [{"x": row["x"], "start_positions": row["labels"], "end_positions": 0} for row in rows]
    changes = {"label_names": ["start_positions", "end_positions"]} if make is Questions else {}
    (warning,) = warnings_of(tmp_path, make(), rows, (4, 3), **changes)
    assert f"{make.__name__} returns means over the samples of a micro-batch" in warning
    assert "weighs up to 2 times as much" in warning
    assert not warnings_of(tmp_path, make(), rows, (5, 2), **changes)


@pytest.mark.parametrize(
    ("make", "layout"),
    [
        (CountingClassifier, (2, 4)),
        (CountingClassifier, (4, 3)),
        (VectorClassifier, (2, 4)),
        (KeywordClassifier, (4, 1)),
    ],
)
def test_a_correct_loss_is_not_warned_about(tmp_path: Path, make: Any, layout: tuple[int, int]) -> None:
    assert not warnings_of(tmp_path, make(), vector_rows(ROWS), layout)


def test_a_loss_of_neither_kind_is_warned_about_and_weighted_by_samples(tmp_path: Path) -> None:
    (warning,) = warnings_of(tmp_path, seeded(Contrastive), vector_rows(8), (2, 4), normalization="exact", max_steps=1)
    assert "the loss of Contrastive is neither a mean over samples nor one over labels" in warning
    assert "taken for a mean over samples" in warning


def test_the_reduction_of_a_loss_that_cannot_be_probed_follows_from_its_labels(tmp_path: Path) -> None:
    class OnlyTrains(KeywordClassifier):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
            if not self.training:
                raise RuntimeError("no evaluation")
            return super().forward(x, labels)

    (warning,) = warnings_of(tmp_path, OnlyTrains(), vector_rows(ROWS), normalization="exact")
    assert "could not be tried before the first step (RuntimeError: no evaluation)" in warning
    assert not warnings_of(tmp_path, OnlyTrains(), vector_rows(ROWS))


@pytest.mark.parametrize("normalization", ["exact", "transformers"])
@pytest.mark.parametrize(
    "error", [torch.AcceleratorError("CUDA error: device-side assert triggered"), torch.OutOfMemoryError("CUDA")]
)
def test_a_device_failure_in_a_probe_ends_the_training(tmp_path: Path, error: Exception, normalization: str) -> None:
    class Dies(KeywordClassifier):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
            if not self.training:
                raise error
            return super().forward(x, labels)

    with pytest.raises(type(error)):
        warnings_of(tmp_path, Dies(), vector_rows(ROWS), normalization=normalization)


def test_no_operator_of_a_probe_gets_an_ignored_label_as_an_index() -> None:
    labels, rows = torch.tensor([1, -100]), torch.rand(2, 200)
    for take in (
        lambda: rows.gather(1, labels[:, None]),
        lambda: rows[torch.arange(2), labels],
        lambda: nn.functional.embedding(labels, rows),
        lambda: torch.zeros(2, 200).scatter_(1, labels[:, None], 1.0),
        lambda: nn.functional.cross_entropy(rows, labels, ignore_index=-1),
    ):
        with _NoIgnoredIndex(), pytest.raises(IndexError, match="gets the label -100 as an index"):
            take()
    with _NoIgnoredIndex():
        assert nn.functional.cross_entropy(rows, labels) == nn.functional.cross_entropy(rows[:1], labels[:1])


class Draws(NoisyClassifier):
    """A model that draws from each generator and records its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: list[bool] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        self.passes.append(self.training)
        x = x * (1 + random.random() + float(np.random.rand()))
        return super().forward(x, labels)


def test_the_detection_changes_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> Any:
        random.seed(0)
        np.random.seed(0)
        trainer = trained(tmp_path, seeded(Draws), vector_rows(8), (2, 2), "transformers", max_steps=4)
        return trainer, [tensor.clone() for tensor in trainer.model.state_dict().values()]

    with warnings_logged("Draws takes num_items_in_batch") as texts:
        tried, state = run()
    assert len(texts) == 1
    # At most two forward passes of a micro-batch, before the first step.
    assert tried.model.passes == [False] * 2 + [True] * 8
    monkeypatch.setattr(step, "detect_loss_reduction", lambda *_: LossReduction())
    untried, same_state = run()
    assert untried.model.passes == [True] * 8
    assert untried.state.log_history[:-1] == tried.state.log_history[:-1]
    assert all(map(torch.equal, state, same_state))


class OverriddenLoss(Trainer):
    counts: ClassVar[list[float]] = []
    reduction = "sum"

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if model.training:
            self.counts.append(num_items_in_batch)
        outputs = model(x=inputs["x"])
        loss = nn.functional.cross_entropy(outputs["logits"], inputs["labels"], reduction=self.reduction) / 8
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("normalization", ["transformers", "exact"])
def test_an_overridden_loss_is_not_changed(tmp_path: Path, normalization: str) -> None:
    OverriddenLoss.counts.clear()
    rows, model = vector_rows(16), Draws()
    assert not warnings_of(tmp_path, model, rows, kind=OverriddenLoss, normalization=normalization, max_steps=2)
    # Only "exact" probes for a mean.
    assert model.passes == [False] * (2 if normalization == "exact" else 0) + [True] * 8
    assert set(map(float, OverriddenLoss.counts)) == {8.0}


def test_an_overridden_loss_with_the_count_that_returns_a_mean_is_refused(tmp_path: Path) -> None:
    class Mean(OverriddenLoss):
        reduction = "mean"

    with pytest.raises(ValueError, match="Mean, whose compute_loss takes num_items_in_batch and returns a mean"):
        trained(tmp_path, KeywordClassifier(), vector_rows(ROWS), (2, 4), kind=Mean)


def test_spans_after_the_last_token_do_not_count(tmp_path: Path) -> None:
    def model() -> Any:
        return transformers.BertForQuestionAnswering(tiny_bert_config(**WITHOUT_DROPOUT, num_labels=2))

    positions = (0, 9, 9, 9, 2, 0, 1, 2)
    rows = [{"input_ids": torch.arange(3), "start_positions": at, "end_positions": at} for at in positions]
    results = [
        losses_and_weights(trained(tmp_path, seeded(model), rows, layout, max_steps=1)) for layout in ((8, 1), (2, 4))
    ]
    torch.testing.assert_close(*results, rtol=2e-5, atol=1e-6)


def test_an_overridden_loss_without_the_count_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match="num_items_in_batch"):

        class Mean(Trainer):
            def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
                raise AssertionError

    message = r"Mean, whose compute_loss or training_step does not take num_items_in_batch: add that"
    with pytest.raises(ValueError, match=message):
        trained(tmp_path, KeywordClassifier(), vector_rows(ROWS), (2, 4), kind=Mean)


def test_counts_of_single_processes_contradict_an_exact_loss(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="average_tokens_across_devices=False"):
        quiet_trainer(tmp_path, loss_normalization="exact", average_tokens_across_devices=False)


def test_a_micro_batch_without_labels_weighs_nothing(tmp_path: Path) -> None:
    rows = vector_rows(8)
    for row in rows[:4]:
        row["labels"] = -100
    settings = {"max_steps": 2, "logging_nan_inf_filter": False}
    results = [
        losses_and_weights(trained(tmp_path, seeded(KeywordClassifier), rows, layout, **settings))
        for layout in ((8, 1), (2, 4))
    ]
    assert all(np.isfinite(results[0]["losses"]))
    torch.testing.assert_close(*results, rtol=2e-5, atol=1e-6)


def test_evaluations_during_an_exact_training_are_means(tmp_path: Path) -> None:
    losses = []
    for normalization in ("transformers", "exact"):
        trainer = trained(
            tmp_path,
            seeded(VectorClassifier),
            vector_rows(8),
            (8, 1),
            normalization,
            eval_strategy="epoch",
            eval_on_start=True,
        )
        losses.append([entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert len(losses[0]) > 1


def test_each_training_detects_the_reduction(tmp_path: Path) -> None:
    trainer = trained(tmp_path, tiny_bert_classifier(), token_rows(ROWS), (2, 2))
    assert trainer.session.loss_reduction == LossReduction(is_exact=True, divides=False)
    assert trainer.session.next().loss_reduction is UNKNOWN
