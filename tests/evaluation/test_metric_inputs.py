from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torchmetrics import MeanSquaredError

from littrainer import EvalPrediction, Trainer
from littrainer.evaluation.loop import EvaluationLoop
from littrainer.evaluation.streaming import CONVERSIONS, TaskFacts, convert_batch, guess_conversion
from tests.scenarios.models import VectorClassifier, tiny_bert_classifier, tiny_bert_tagger, tiny_gpt2, tiny_llama
from tests.scenarios.trainers import quiet_trainer

SCORES = torch.tensor([[[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]], [[0.6, 0.4], [0.2, 0.8], [0.9, 0.1]]])
CHOSEN = SCORES.argmax(dim=-1)
LABELS = torch.tensor([[1, 0, -100], [-100, 1, 1]])
COUNTED = LABELS != -100
LOGITS, LOGIT_LABELS = torch.tensor([[2.0, 0.0], [0.5, 0.9], [0.0, 0.0]]), torch.tensor([0, 1, -100])
HALF = torch.tensor([[0.5], [1.5]], dtype=torch.bfloat16)
MULTIPLE, MULTIPLE_LABELS = torch.tensor([[0.2, 0.9], [-3.0, 4.0]]), torch.tensor([[1.0, 0], [0, 1]])
SINGLE = torch.tensor([0.2, -3.0, 0.9])
NEXT_SCORES = torch.stack([SCORES[0, 0], SCORES[1, 0], SCORES[1, 1]]).unsqueeze(0)

# Conversion, predictions, labels, and arguments of update.
CONVERTED: list[tuple[str, Any, Any, list[Any]]] = [
    ("classification", SCORES, LABELS, [[1, 0, 1, 0], [1, 0, 1, 1]]),
    ("classification", CHOSEN, LABELS, [[1, 0, 1, 0], [1, 0, 1, 1]]),
    ("class_scores", SCORES.half(), LABELS, [SCORES.half().float()[COUNTED], [1, 0, 1, 1]]),
    ("class_scores", LOGITS, LOGIT_LABELS, [LOGITS[:2].softmax(-1), [0, 1]]),
    ("positive_class_scores", LOGITS, LOGIT_LABELS, [LOGITS[:2].softmax(-1)[:, 1], [0, 1]]),
    ("positive_class_scores", LOGITS.softmax(-1), LOGIT_LABELS, [LOGITS[:2].softmax(-1)[:, 1], [0, 1]]),
    ("language_model", SCORES, LABELS, [[1, 0, 1], [0, 1, 1]]),
    ("language_model", CHOSEN, LABELS, [[1, 0, 1], [0, 1, 1]]),
    ("language_model_scores", SCORES, LABELS, [NEXT_SCORES, [[0, 1, 1]]]),
    ("regression", HALF, torch.tensor([1, 2]), [[0.5, 1.5], [1, 2]]),
    ("regression", HALF, HALF, [HALF.float(), HALF.float()]),
    ("multi_label", MULTIPLE, MULTIPLE_LABELS, [MULTIPLE, [[1, 0], [0, 1]]]),
    ("multi_label_logits", MULTIPLE, MULTIPLE_LABELS, [MULTIPLE.sigmoid(), [[1, 0], [0, 1]]]),
    ("binary_logits", SINGLE, torch.tensor([1.0, 0, -100]), [SINGLE[:2].sigmoid(), [1, 0]]),
    ("binary_logits", SINGLE.reshape(3, 1), torch.tensor([1.0, 0, -100]), [SINGLE[:2].sigmoid(), [1, 0]]),
    # The first of several outputs are the logits.
    ("unchanged", (SCORES, torch.zeros(1)), LABELS, [SCORES, LABELS]),
]


@pytest.mark.parametrize(("name", "predictions", "labels", "expected"), CONVERTED, ids=[case[0] for case in CONVERTED])
def test_a_conversion_returns_the_arguments_of_update(
    name: str, predictions: Any, labels: Any, expected: list[Any]
) -> None:
    arguments = convert_batch(EvalPrediction(predictions, labels), name)
    for value, value_expected in zip(arguments or (), expected, strict=True):
        assert torch.equal(value, torch.as_tensor(value_expected, dtype=value.dtype))
        assert value.dtype in (torch.float32, torch.int64)


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
def test_a_conversion_function_gets_both_arrays_or_the_prediction(function: Any, expected: Any) -> None:
    assert convert_batch(EvalPrediction(1, 2, inputs=3), function) == expected


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


MULTI_LABEL = "multi_label_classification"
CAUSAL, NOT_CAUSAL, UNKNOWN = TaskFacts(True), TaskFacts(False), TaskFacts(None)
PREPROCESSED = TaskFacts(False, MULTI_LABEL, has_raw_scores=False)
GUESSES = {
    "one class each": (torch.rand(4, 3), ints(4), UNKNOWN, "classification"),
    "classes already": (ints(4), ints(4), UNKNOWN, "classification"),
    "one class a token": (torch.rand(4, 5, 3), ints(4, 5), NOT_CAUSAL, "classification"),
    "the next token": (torch.rand(4, 5, 3), ints(4, 5), CAUSAL, "language_model"),
    "the next token already": (ints(4, 5), ints(4, 5), CAUSAL, "language_model"),
    "further outputs": ((torch.rand(4, 3), torch.rand(2)), ints(4), UNKNOWN, "classification"),
    "one number": (torch.rand(4, 1), torch.rand(4), UNKNOWN, "regression"),
    "one number, whole labels": (torch.rand(4, 1), ints(4), UNKNOWN, "regression"),
    "numbers": (torch.rand(4, 2), torch.rand(4, 2), UNKNOWN, "regression"),
    "several labels": (torch.rand(4, 2), torch.rand(4, 2), TaskFacts(False, MULTI_LABEL), "multi_label_logits"),
    "several labels, preprocessed": (torch.rand(4, 2), torch.rand(4, 2), PREPROCESSED, "multi_label"),
    "several whole labels": (torch.rand(4, 2), ints(4, 2), UNKNOWN, "multi_label"),
    "one score": (torch.rand(4), ints(4), UNKNOWN, "unchanged"),
}


@pytest.mark.parametrize(("logits", "labels", "facts", "name"), GUESSES.values(), ids=GUESSES.keys())
def test_the_conversion_follows_from_shapes_dtypes_and_model(
    logits: Any, labels: Any, facts: TaskFacts, name: str
) -> None:
    prediction = EvalPrediction(logits, labels)
    assert guess_conversion(prediction, facts) == name
    assert len(convert_batch(prediction, name) or ()) == 2


UNKNOWN_CASES = {
    "a model of one's own": (torch.rand(4, 5, 3), ints(4, 5), UNKNOWN, "'language_model'.*is not known"),
    "two kinds of labels": (torch.rand(4, 5), (ints(4), ints(4)), NOT_CAUSAL, "not one tensor each"),
    "longer predictions": (torch.rand(4, 7, 3), ints(4, 5), CAUSAL, r"float32 \(4, 7, 3\), labels int64 \(4, 5\)"),
    "generated tokens": (ints(4, 5), ints(4, 5), TaskFacts(False, generates=True), "predict_with_generate"),
}


@pytest.mark.parametrize(("logits", "labels", "facts", "reason"), UNKNOWN_CASES.values(), ids=UNKNOWN_CASES.keys())
def test_an_unknown_conversion_is_an_error_with_all_names(
    logits: Any, labels: Any, facts: TaskFacts, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        guess_conversion(EvalPrediction(logits, labels), facts)
    assert all(name in str(caught.value) for name in CONVERSIONS)


def task_facts(model: Any, folder: Path, kind: type[Trainer] = Trainer, **trainer_kwargs: Any) -> TaskFacts:
    keywords = {"compute_metrics": MeanSquaredError(), **trainer_kwargs}
    trainer = quiet_trainer(folder, model, kind=kind, trainer_kwargs=keywords)
    overrides_prediction_step = bool(trainer._find_overrides("prediction_step"))
    loader = trainer.get_eval_dataloader()
    loop: Any = EvaluationLoop(
        trainer, loader, "Evaluation", False, None, "eval", overrides_prediction_step, False, trainer._prepare_input
    )
    loop.begin(model)
    return loop.streaming._read_facts()


def test_task_facts_are_read_from_transformers_models(tmp_path: Path) -> None:
    for new, expected in ((VectorClassifier, None), (tiny_bert_tagger, False), (tiny_llama, True), (tiny_gpt2, True)):
        assert task_facts(new(), tmp_path).is_causal_lm is expected  # type: ignore[operator]
    model = tiny_bert_classifier(problem_type=MULTI_LABEL)
    facts = task_facts(model, tmp_path)
    assert facts.problem_type == MULTI_LABEL and facts.has_multi_label_logits

    class CustomStepTrainer(Trainer):
        def prediction_step(self, *args: Any, **keywords: Any) -> Any:
            return super().prediction_step(*args, **keywords)

    assert not task_facts(model, tmp_path, CustomStepTrainer).has_multi_label_logits
    facts = task_facts(model, tmp_path, preprocess_logits_for_metrics=lambda logits, labels: logits.sigmoid())
    assert not facts.has_multi_label_logits
