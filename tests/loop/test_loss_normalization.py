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
from littrainer.loop.loss_normalization import (
    LABELS,
    SHIFTED_LABELS,
    UNKNOWN,
    LossReduction,
    _NoIgnoredIndex,
    _Trial,
)
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
# The last window of an epoch is shorter, and its last micro-batch too, but for the first layout.
LAYOUTS = ((10, 1), (5, 2), (4, 3), (3, 4), (1, 10))
WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
STEPWISE = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "max_steps": 3}
SEQUENTIAL = {"train_sampling_strategy": "sequential", "logging_strategy": "steps", "logging_steps": 1}


class KeywordTagger(nn.Module):
    """Takes any keyword, and returns the mean over the labels of the next tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, CLASSES)

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        logits = self.embedding(input_ids)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "scores": logits}


class HiddenTagger(KeywordTagger):
    """Nothing but the loss tells over which labels it is the mean."""

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        return (super().forward(input_ids, labels=labels)["loss"],)


class Regression(VectorClassifier):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        return {"loss": nn.functional.mse_loss(self.logits(x), labels), "logits": None}


class Contrastive(VectorClassifier):
    """Tells each row from the others of its micro-batch."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        vectors = self.logits(x)
        return nn.functional.cross_entropy(vectors @ vectors.T, torch.arange(len(x))), vectors


class PartlyDivided(CountingClassifier):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        found = super().forward(x, labels, **kwargs)
        return {**found, "loss": found["loss"] + 0.1 * self.head.weight.square().sum()}


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
    given: dict[str, Any] = {"train_dataset": Rows(rows)}
    if {"input_ids", "labels"} <= rows[0].keys():
        given["data_collator"] = pad_tokens
    size, accumulation = layout
    layout_arguments = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
    arguments = {**layout_arguments, **STEPWISE, **SEQUENTIAL, "loss_normalization": normalization, **changes}
    trainer = quiet_trainer(folder, model, kind=kind, given=given, **arguments)
    trainer.train()
    return trainer


def seen_of(trainer: Trainer) -> dict[str, Any]:
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": losses, "weights": torch.cat([one.detach().flatten() for one in trainer.model.parameters()])}


def seeded(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return make()


@pytest.mark.parametrize("kind", [Trainer, StepwiseTrainer])
@pytest.mark.parametrize("name", HEADS)
def test_losses_and_weights_are_the_same_for_each_layout(tmp_path: Path, name: str, kind: type[Trainer]) -> None:
    make, rows = HEADS[name]
    with warnings_logged("loss_normalization") as texts:
        whole, *others = (seen_of(trained(tmp_path, seeded(make), rows(), one, kind=kind)) for one in LAYOUTS)
    assert not texts
    assert len(whole["losses"]) == 3
    for other in others:
        torch.testing.assert_close(other, whole, rtol=2e-5, atol=1e-6)
    today = seen_of(trained(tmp_path, seeded(make), rows(), LAYOUTS[0], "transformers"))
    if name != "next tokens":
        # GPT-2 of today also counts the labels that its loss leaves out.
        torch.testing.assert_close(today, whole, rtol=2e-5, atol=1e-6)


def test_smoothed_labels_weigh_the_same_in_each_layout(tmp_path: Path) -> None:
    class Plain(KeywordTagger):
        def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
            return {"logits": self.embedding(input_ids)}

    changes = {"label_smoothing_factor": 0.2}
    whole, *others = (seen_of(trained(tmp_path, seeded(Plain), tag_rows(ROWS), one, **changes)) for one in LAYOUTS)
    for other in others:
        torch.testing.assert_close(other, whole, rtol=2e-5, atol=1e-6)


def warnings_of(
    folder: Path, model: Any, rows: list[Any], layout: tuple[int, int] = (2, 4), **changes: Any
) -> list[str]:
    with warnings_logged("loss_normalization") as texts:
        trained(folder, model, rows, layout, **{"normalization": "transformers", **changes})
    return texts


def test_a_head_whose_loss_depends_on_the_layout_is_warned_about_once_with_the_factor(tmp_path: Path) -> None:
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
    """Its labels have other names, so that their number is not counted."""

    def forward(self, x: Any, start_positions: Any = None, end_positions: Any = None, **kwargs: Any) -> Any:
        found = super().forward(x, start_positions)
        return {**found, "loss": (found["loss"] + super().forward(x, end_positions)["loss"]) / 2}


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
def test_a_head_that_is_right_is_not_warned_about(tmp_path: Path, make: Any, layout: tuple[int, int]) -> None:
    assert not warnings_of(tmp_path, make(), vector_rows(ROWS), layout)


def test_a_loss_of_neither_kind_is_warned_about_and_weighted_by_samples(tmp_path: Path) -> None:
    (warning,) = warnings_of(tmp_path, seeded(Contrastive), vector_rows(8), (2, 4), normalization="exact", max_steps=1)
    assert "the loss of Contrastive is neither a mean over samples nor one over labels" in warning
    assert "taken for a mean over samples" in warning


def test_a_head_that_cannot_be_tried_is_taken_for_what_its_labels_tell(tmp_path: Path) -> None:
    class OnlyTrains(KeywordClassifier):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
            if not self.training:
                raise RuntimeError("no evaluation")
            return super().forward(x, labels)

    (warning,) = warnings_of(tmp_path, OnlyTrains(), vector_rows(ROWS), normalization="exact")
    assert "could not be tried before the first step (RuntimeError: no evaluation)" in warning
    assert not warnings_of(tmp_path, OnlyTrains(), vector_rows(ROWS))


@pytest.mark.parametrize("ignored", [-100, -1])
def test_a_gpu_finds_out_what_is_a_mean_where_each_label_counts(tmp_path: Path, ignored: int) -> None:
    class Hidden(HiddenTagger):
        def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            logits, targets = self.embedding(input_ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            return (nn.functional.cross_entropy(logits, targets, ignore_index=ignored),)

    window = [{"input_ids": torch.arange(8).reshape(2, 4), "labels": torch.arange(8).reshape(2, 4) % CLASSES}]
    model = Hidden()
    trainer = quiet_trainer(tmp_path, model)
    trial = _Trial(trainer, model, window, LossReduction(unit=LABELS), torch.device("cpu"))
    trial.device = torch.device("cuda")
    if ignored == -100:
        assert trial._unit() == SHIFTED_LABELS
    else:
        # A GPU would stop at an index out of bounds.
        with pytest.raises(IndexError, match="nll_loss_forward gets the label -100 as an index"):
            trial._unit()


@pytest.mark.parametrize("normalization", ["exact", "transformers"])
def test_a_device_that_dies_in_a_trial_ends_the_training(tmp_path: Path, normalization: str) -> None:
    class Dies(KeywordClassifier):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
            if not self.training:
                raise torch.AcceleratorError("CUDA error: device-side assert triggered")
            return super().forward(x, labels)

    with pytest.raises(torch.AcceleratorError, match="device-side assert"):
        warnings_of(tmp_path, Dies(), vector_rows(ROWS), normalization=normalization)


def test_no_operator_of_a_trial_gets_an_ignored_label_as_an_index() -> None:
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
    """Draws from every generator, and counts its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: list[bool] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        self.passes.append(self.training)
        x = x * (1 + random.random() + float(np.random.rand()))
        return super().forward(x, labels)


def test_finding_out_changes_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> Any:
        random.seed(0)
        np.random.seed(0)
        trainer = trained(tmp_path, seeded(Draws), vector_rows(8), (2, 2), "transformers", max_steps=4)
        return trainer, [one.clone() for one in trainer.model.state_dict().values()]

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


class OwnLoss(Trainer):
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
def test_a_loss_of_the_scripts_decides_by_itself(tmp_path: Path, normalization: str) -> None:
    OwnLoss.counts.clear()
    rows, model = vector_rows(16), Draws()
    assert not warnings_of(tmp_path, model, rows, kind=OwnLoss, normalization=normalization, max_steps=2)
    # With "exact" it is tried whether it is a mean.
    assert model.passes == [False] * (2 if normalization == "exact" else 0) + [True] * 8
    assert set(map(float, OwnLoss.counts)) == {8.0}


def test_a_loss_that_takes_the_count_and_returns_a_mean_is_refused_too(tmp_path: Path) -> None:
    class Mean(OwnLoss):
        reduction = "mean"

    with pytest.raises(ValueError, match="Mean, whose compute_loss takes num_items_in_batch and returns a mean"):
        trained(tmp_path, KeywordClassifier(), vector_rows(ROWS), (2, 4), kind=Mean)


def test_questions_whose_answers_lie_behind_the_tokens_do_not_count(tmp_path: Path) -> None:
    def model() -> Any:
        return transformers.BertForQuestionAnswering(tiny_bert_config(**WITHOUT_DROPOUT, num_labels=2))

    places = (0, 9, 9, 9, 2, 0, 1, 2)
    rows = [{"input_ids": torch.arange(3), "start_positions": at, "end_positions": at} for at in places]
    found = [seen_of(trained(tmp_path, seeded(model), rows, one, max_steps=1)) for one in ((8, 1), (2, 4))]
    torch.testing.assert_close(*found, rtol=2e-5, atol=1e-6)


def test_a_loss_that_takes_no_count_is_refused_before_training(tmp_path: Path) -> None:
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
    found = [
        seen_of(trained(tmp_path, seeded(KeywordClassifier), rows, one, max_steps=2, logging_nan_inf_filter=False))
        for one in ((8, 1), (2, 4))
    ]
    assert all(np.isfinite(found[0]["losses"]))
    torch.testing.assert_close(*found, rtol=2e-5, atol=1e-6)


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


def test_each_training_finds_out_for_itself(tmp_path: Path) -> None:
    trainer = trained(tmp_path, tiny_bert_classifier(), token_rows(ROWS), (2, 2))
    assert trainer.session.loss_reduction == LossReduction(is_exact=True, divides=False)
    assert trainer.session.next().loss_reduction is UNKNOWN


def test_memory_that_runs_out_while_the_head_is_tried_is_an_error(tmp_path: Path) -> None:
    class RunsOut(KeywordClassifier):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if not self.training:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().forward(*args, **kwargs)

    with pytest.raises(torch.OutOfMemoryError):
        quiet_trainer(tmp_path, RunsOut(), loss_normalization="exact", max_steps=1).train()
