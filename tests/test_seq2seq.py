from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import SequentialSampler
from transformers import GenerationConfig

from littrainer import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, default_data_collator
from littrainer.data.samplers import LengthGroupedSampler
from tests.scenarios.collators import pad_translations
from tests.scenarios.data import Rows, Stream, translation_rows
from tests.scenarios.models import END_TOKEN, VectorClassifier, tiny_bart, tiny_bert_classifier, tiny_gpt2
from tests.scenarios.trainers import QUIET_RUN

ROWS = translation_rows(5)
QUESTIONS = Rows([{"input_ids": row["input_ids"]} for row in ROWS])
SIX_TOKENS = GenerationConfig(max_length=6, decoder_start_token_id=END_TOKEN, eos_token_id=END_TOKEN, pad_token_id=0)


def translator(
    folder: Path,
    model: Any = None,
    kind: type[Trainer] = Seq2SeqTrainer,
    trainer_kwargs: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """Return a Trainer for the reversal of token ids; `given` are keywords of the Trainer, `changes` arguments."""
    torch.manual_seed(3)
    keywords = {
        "data_collator": pad_translations,
        "train_dataset": Rows(ROWS),
        "eval_dataset": Rows(ROWS),
        "compute_metrics": lambda prediction: {"batches": len(prediction.predictions)},
        **(trainer_kwargs or {}),
    }
    if "model_init" not in keywords:
        keywords["model"] = tiny_bart() if model is None else model
    args = Seq2SeqTrainingArguments(str(folder), **{**QUIET_RUN, "predict_with_generate": True, **changes})
    return kind(args=args, **keywords)


@pytest.mark.parametrize("kind", [Seq2SeqTrainer, Trainer])
def test_sortish_sampling_groups_training_samples_by_length_and_evaluates_in_order(
    tmp_path: Path, kind: type[Trainer]
) -> None:
    trainer = translator(tmp_path, kind=kind, sortish_sampler=True, predict_with_generate=False)
    assert isinstance(trainer.get_train_dataloader().sampler, LengthGroupedSampler)
    assert isinstance(trainer.get_eval_dataloader().sampler, SequentialSampler)


def test_sortish_sampling_of_a_stream_has_no_effect_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = translator(tmp_path, trainer_kwargs={"train_dataset": Stream(ROWS)}, sortish_sampler=True, max_steps=1)
    trainer.get_train_dataloader()
    assert any("has no effect" in message for message in caplog.messages)


# ---- Keywords of a call ----------------------------------------------------------------------------------------------


def test_keywords_of_a_call_are_forgotten_when_it_fails(tmp_path: Path) -> None:
    def fail(prediction: Any) -> dict[str, float]:
        raise ArithmeticError("metric")

    trainer = translator(tmp_path, trainer_kwargs={"compute_metrics": fail}, generation_max_length=9)
    with pytest.raises(ArithmeticError):
        trainer.evaluate(max_length=4)
    loader = trainer.get_test_dataloader(QUESTIONS)
    predictions = trainer.evaluation_loop(loader, "Prediction").predictions
    assert (predictions[:, 4:] != 0).any()
    assert trainer.gather_function != trainer.accelerator.gather


def test_keywords_of_a_call_hold_for_each_of_several_datasets(tmp_path: Path) -> None:
    lengths: list[int] = []

    def longest(prediction: Any) -> dict[str, float]:
        lengths.append(int((prediction.predictions != 0).sum(axis=1).max()))
        return {}

    trainer = translator(tmp_path, trainer_kwargs={"compute_metrics": longest})
    metrics = trainer.evaluate({"one": Rows(ROWS), "two": Rows(ROWS)}, max_length=4)
    assert lengths == [4, 4]
    assert {"eval_one_loss", "eval_two_loss"} <= set(metrics)


@pytest.mark.parametrize("keywords", [{"num_bems": 2}, {"num_return_sequences": 3, "num_beams": 2}])
def test_errors_of_generate_are_not_changed(tmp_path: Path, keywords: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(keywords))):
        translator(tmp_path).evaluate(**keywords)  # type: ignore[arg-type]


def test_keywords_without_generation_are_logged_once_at_level_info(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = translator(tmp_path, predict_with_generate=False, trainer_kwargs={"compute_metrics": None})
    trainer.evaluate(max_length=None)
    assert not any("without effect" in message for message in caplog.messages)
    with caplog.at_level("INFO", "littrainer"):
        trainer.evaluate(max_length=4)
        trainer.predict(trainer.eval_dataset, max_length=4)
    (record,) = [record for record in caplog.records if "max_length=4: without effect" in record.getMessage()]
    assert record.levelname == "INFO"


# ---- Models and their generation config ------------------------------------------------------------------------------


def test_an_invalid_generation_config_stops_the_trainer_before_it_trains(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"temperature": 0.5, "do_sample": false}')
    with pytest.raises(ValueError, match=r"(?s)config\.json' is not valid.*temperature"):
        translator(tmp_path, generation_config=str(tmp_path / "config.json"))


@pytest.mark.parametrize("make", [VectorClassifier, tiny_bert_classifier])
def test_a_model_that_cannot_generate_is_refused_by_class(tmp_path: Path, make: Any) -> None:
    model = make()
    with pytest.raises(ValueError, match=f"can generate, and {type(model).__name__} has no `generate`"):
        translator(tmp_path, model)
    translator(tmp_path, model, predict_with_generate=False)


def test_a_model_without_a_generation_config_is_refused(tmp_path: Path) -> None:
    class Generating(VectorClassifier):
        def generate(self, **inputs: Any) -> Any:
            return inputs

    with pytest.raises(ValueError, match="Generating has no `generation_config`"):
        translator(tmp_path, Generating())


def test_an_overridden_prediction_step_needs_no_model_that_generates(tmp_path: Path) -> None:
    class PredictingTrainer(Seq2SeqTrainer):
        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            return None, torch.ones(3, 2), torch.ones(3, 2)

    trainer = translator(tmp_path, VectorClassifier(), PredictingTrainer, remove_unused_columns=False)
    assert trainer.predict(QUESTIONS).predictions.shape[1] == 2


def test_a_plain_trainer_says_that_it_generates_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    translator(tmp_path, kind=Trainer, generation_config=SIX_TOKENS)
    message = "predict_with_generate, generation_config: without effect in a plain Trainer; use Seq2SeqTrainer."
    assert message in caplog.messages


def test_predict_with_generate_set_later_is_refused_at_the_first_batch(tmp_path: Path) -> None:
    trainer = translator(tmp_path, VectorClassifier(), predict_with_generate=False, remove_unused_columns=False)
    trainer.args.predict_with_generate = True
    with pytest.raises(ValueError, match="VectorClassifier has no `generate`"):
        trainer.predict(QUESTIONS)


# ---- Batches without labels, padding ---------------------------------------------------------------------------------


def test_outputs_without_a_padding_token_are_refused_with_the_setting_to_change(tmp_path: Path) -> None:
    trainer = translator(tmp_path, generation_max_length=4)
    trainer.model.config.pad_token_id = None
    with pytest.raises(ValueError, match=r"set model\.config\.pad_token_id"):
        trainer.predict(QUESTIONS)


def test_a_decoder_only_model_completes_the_prompt_before_the_labels(tmp_path: Path) -> None:
    rows = Rows([{"input_ids": [5, 6, 7, 8 + row], "labels": [-100, -100, 7, 8 + row]} for row in range(3)])
    model, prompts = tiny_gpt2(), []
    completion = model.generate(input_ids=torch.tensor([[5, 6]]), max_length=6, do_sample=False)[0, 2:].tolist()
    generate = model.generate
    model.generate = lambda **inputs: prompts.append(inputs["input_ids"].tolist()) or generate(**inputs)
    keywords = {"eval_dataset": rows, "data_collator": default_data_collator}
    trainer = translator(tmp_path, model, trainer_kwargs=keywords, generation_max_length=6)
    output = trainer.predict(rows)
    assert [prompt for batch in prompts for prompt in batch] == [[5, 6]] * 3
    assert output.predictions[:, : len(completion)].tolist() == [completion] * 3
    assert output.label_ids[:, 2:4].tolist() == [[7, 8], [7, 9], [7, 10]]
    # The loss is computed for the labels only.
    assert trainer.evaluate()["eval_loss"] == pytest.approx(output.metrics["test_loss"])
