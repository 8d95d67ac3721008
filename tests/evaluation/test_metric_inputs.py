from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from littrainer import EvalPrediction, Trainer
from littrainer.evaluation.loop import EvaluationPass
from littrainer.evaluation.streaming import CONVERSIONS, TaskFacts, converted, guessed_conversion
from tests.scenarios.models import VectorClassifier, tiny_bert_classifier, tiny_bert_tagger, tiny_gpt2, tiny_llama
from tests.scenarios.trainers import quiet_trainer

SCORES = torch.tensor([[[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]], [[0.6, 0.4], [0.2, 0.8], [0.9, 0.1]]])
LABELS = torch.tensor([[1, 0, -100], [-100, 1, 1]])


def lists(arguments: Any) -> Any:
    return [argument.tolist() for argument in arguments]


def batch(logits: Any, labels: Any) -> EvalPrediction:
    return EvalPrediction(logits, labels)


def test_classification_takes_the_likeliest_class_where_there_is_a_label() -> None:
    assert lists(converted(batch(SCORES, LABELS), "classification")) == [[1, 0, 1, 0], [1, 0, 1, 1]]


def test_class_scores_keep_all_classes_where_there_is_a_label() -> None:
    scores, labels = converted(batch(SCORES.half(), LABELS), "class_scores") or ()
    assert scores.dtype == torch.float32 and scores.shape == (4, 2)
    assert torch.equal(scores, SCORES.half().float()[LABELS != -100]) and labels.tolist() == [1, 0, 1, 1]


def test_scores_of_classes_become_probabilities_unless_they_are_some() -> None:
    logits, labels = torch.tensor([[2.0, 0.0], [0.5, 0.9], [0.0, 0.0]]), torch.tensor([0, 1, -100])
    scores, counted = converted(batch(logits, labels), "class_scores") or ()
    assert torch.equal(scores, logits[:2].softmax(-1)) and counted.tolist() == [0, 1]
    positive, _ = converted(batch(logits, labels), "positive_class_scores") or ()
    assert torch.equal(positive, logits[:2].softmax(-1)[:, 1])
    positive, _ = converted(batch(logits.softmax(-1), labels), "positive_class_scores") or ()
    assert torch.equal(positive, logits[:2].softmax(-1)[:, 1])


def test_a_language_models_prediction_belongs_to_the_label_after_it() -> None:
    assert lists(converted(batch(SCORES, LABELS), "language_model")) == [[1, 0, 1], [0, 1, 1]]
    scores, labels = converted(batch(SCORES, LABELS), "language_model_scores") or ()
    assert torch.equal(scores, torch.stack([SCORES[0, 0], SCORES[1, 0], SCORES[1, 1]]).unsqueeze(0))
    assert labels.tolist() == [[0, 1, 1]]


def test_predictions_that_are_classes_already_are_taken_as_they_are() -> None:
    chosen = SCORES.argmax(dim=-1)
    for name in ("classification", "language_model"):
        assert lists(converted(batch(chosen, LABELS), name)) == lists(converted(batch(SCORES, LABELS), name))


def test_regression_drops_a_last_dimension_that_the_labels_lack() -> None:
    numbers = torch.tensor([[0.5], [1.5]], dtype=torch.bfloat16)
    assert lists(converted(batch(numbers, torch.tensor([1, 2])), "regression")) == [[0.5, 1.5], [1, 2]]
    both = converted(batch(numbers, numbers), "regression") or ()
    assert [(value.shape, value.dtype) for value in both] == [((2, 1), torch.float32)] * 2


def test_labels_that_may_hold_together_become_whole_numbers() -> None:
    scores, labels = converted(batch(torch.rand(2, 3), torch.tensor([[1.0, 0, 1], [0, 0, 1]])), "multi_label") or ()
    assert scores.shape == (2, 3) and labels.tolist() == [[1, 0, 1], [0, 0, 1]] and labels.dtype == torch.int64


def test_logits_of_several_labels_become_probabilities_wherever_they_lie() -> None:
    logits, holds = torch.tensor([[0.2, 0.9], [-3.0, 4.0]]), torch.tensor([[1.0, 0], [0, 1]])
    scores, labels = converted(batch(logits, holds), "multi_label_logits") or ()
    assert torch.equal(scores, logits.sigmoid()) and labels.tolist() == [[1, 0], [0, 1]]
    assert (converted(batch(logits.half(), holds), "multi_label_logits") or ())[0].dtype == torch.float32


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_one_logit_per_sample_becomes_a_probability_where_there_is_a_label(shape: tuple[int, ...]) -> None:
    logits = torch.tensor([0.2, -3.0, 0.9])
    scores, labels = converted(batch(logits.reshape(shape), torch.tensor([1.0, 0, -100])), "binary_logits") or ()
    assert torch.equal(scores, logits[:2].sigmoid()) and labels.tolist() == [1, 0]


def test_the_first_of_several_outputs_holds_the_logits() -> None:
    assert lists(converted(batch((SCORES, torch.zeros(1)), LABELS), "unchanged")) == lists((SCORES, LABELS))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda predictions, labels: (predictions, labels), (1, 2)),
        (lambda prediction: (prediction.label_ids, prediction.inputs), (2, 3)),
        (lambda predictions, labels, scale=2: {"preds": predictions * scale}, {"preds": 2}),
        (lambda prediction: prediction.predictions, (1,)),
        (lambda prediction: None, None),
    ],
)
def test_a_function_is_given_both_or_the_whole_prediction(function: Any, expected: Any) -> None:
    assert converted(EvalPrediction(1, 2, inputs=3), function) == expected


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


NEXT, OWN, UNKNOWN = TaskFacts(True), TaskFacts(False), TaskFacts(None)
GUESSES = {
    "one class each": (torch.rand(4, 3), ints(4), UNKNOWN, "classification"),
    "classes already": (ints(4), ints(4), UNKNOWN, "classification"),
    "one class a token": (torch.rand(4, 5, 3), ints(4, 5), OWN, "classification"),
    "the next token": (torch.rand(4, 5, 3), ints(4, 5), NEXT, "language_model"),
    "the next token already": (ints(4, 5), ints(4, 5), NEXT, "language_model"),
    "further outputs": ((torch.rand(4, 3), torch.rand(2)), ints(4), UNKNOWN, "classification"),
    "one number": (torch.rand(4, 1), torch.rand(4), UNKNOWN, "regression"),
    "one number, whole labels": (torch.rand(4, 1), ints(4), UNKNOWN, "regression"),
    "numbers": (torch.rand(4, 2), torch.rand(4, 2), UNKNOWN, "regression"),
    "several labels": (
        torch.rand(4, 2),
        torch.rand(4, 2),
        TaskFacts(False, "multi_label_classification"),
        "multi_label_logits",
    ),
    "several labels, preprocessed": (
        torch.rand(4, 2),
        torch.rand(4, 2),
        TaskFacts(False, "multi_label_classification", keeps_scores=False),
        "multi_label",
    ),
    "several whole labels": (torch.rand(4, 2), ints(4, 2), UNKNOWN, "multi_label"),
    "one score": (torch.rand(4), ints(4), UNKNOWN, "unchanged"),
}


@pytest.mark.parametrize(("logits", "labels", "facts", "name"), GUESSES.values(), ids=GUESSES.keys())
def test_the_conversion_is_told_from_shapes_kinds_of_numbers_and_the_model(
    logits: Any, labels: Any, facts: TaskFacts, name: str
) -> None:
    prediction = batch(logits, labels)
    assert guessed_conversion(prediction, facts) == name
    assert len(converted(prediction, name) or ()) == 2


UNTOLD = {
    "a model of one's own": (torch.rand(4, 5, 3), ints(4, 5), UNKNOWN, "'language_model'.*is not known"),
    "two kinds of labels": (torch.rand(4, 5), (ints(4), ints(4)), OWN, "not one tensor each"),
    "longer predictions": (torch.rand(4, 7, 3), ints(4, 5), NEXT, r"float32 \(4, 7, 3\), labels int64 \(4, 5\)"),
    "generated tokens": (ints(4, 5), ints(4, 5), TaskFacts(False, generates=True), "predict_with_generate"),
}


@pytest.mark.parametrize(("logits", "labels", "facts", "reason"), UNTOLD.values(), ids=UNTOLD.keys())
def test_a_conversion_that_cannot_be_told_is_asked_for(logits: Any, labels: Any, facts: TaskFacts, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        guessed_conversion(batch(logits, labels), facts)
    assert all(name in str(caught.value) for name in CONVERSIONS)


def task_facts(trainer: Trainer) -> TaskFacts:
    has_own_step = bool(trainer._own_methods("prediction_step"))
    loader = trainer.get_eval_dataloader()
    return EvaluationPass(trainer, loader, "Evaluation", False, None, "eval", has_own_step).task_facts()


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (VectorClassifier, None),
        (tiny_bert_tagger, False),
        (tiny_llama, True),
        (tiny_gpt2, True),
    ],
)
def test_what_a_models_labels_belong_to_is_known_of_the_models_of_transformers(
    tmp_path: Path, model: Any, expected: bool | None
) -> None:
    assert task_facts(quiet_trainer(tmp_path, model())).predicts_next_token is expected


def test_the_problem_is_read_from_the_models_config(tmp_path: Path) -> None:
    model = tiny_bert_classifier(problem_type="multi_label_classification")
    facts = task_facts(quiet_trainer(tmp_path, model))
    assert facts.problem_type == "multi_label_classification" and facts.has_multi_label_logits
    given = {"preprocess_logits_for_metrics": lambda logits, labels: logits.sigmoid()}
    assert not task_facts(quiet_trainer(tmp_path, model, given=given)).has_multi_label_logits

    class OwnStep(Trainer):
        def prediction_step(self, *given: Any, **keywords: Any) -> Any:
            return super().prediction_step(*given, **keywords)

    assert not task_facts(quiet_trainer(tmp_path, model, kind=OwnStep)).has_multi_label_logits
