"""Seq2SeqTrainer: what is generated in evaluations and predictions, and the arguments that it follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.fidelity.record import Record
from tests.fidelity.registry import scenario
from tests.fidelity.side import ORACLE, Side
from tests.scenarios.collators import pad_translations
from tests.scenarios.data import Rows, Stream, text_rows, tiny_tokenizer, translation_rows
from tests.scenarios.metrics import shapes_and_sums
from tests.scenarios.models import END_TOKEN, tiny_bart, tiny_gpt2, tiny_t5


def matches(prediction: Any) -> dict[str, float]:
    """Share of generated tokens that equal their label, and the function's other inputs."""
    labels = np.asarray(prediction.label_ids)
    tokens = np.asarray(prediction.predictions)
    width = min(labels.shape[1], tokens.shape[1] - 1)
    right = (tokens[:, 1 : width + 1] == labels[:, :width]).mean()
    return {"matches": float(right), **shapes_and_sums(prediction)}


def translating_trainer(side: Side, model: Any = None, keywords: dict[str, Any] | None = None, **changes: Any) -> Any:
    """A Seq2SeqTrainer that learns to reverse token ids, generating at most 9 tokens.

    Parameters:
        keywords: of the Trainer, instead of those here.
        changes: of the arguments.
    """
    trainer_kwargs = {
        "model": tiny_t5() if model is None else model,
        "data_collator": pad_translations,
        "train_dataset": Rows(translation_rows(10)),
        "eval_dataset": Rows(translation_rows(7, seed=1)),
        "compute_metrics": matches,
        "callbacks": [side.watcher],
        **(keywords or {}),
    }
    settings = {"predict_with_generate": True, "generation_max_length": 9, "num_train_epochs": 1, **changes}
    return side.Seq2SeqTrainer(args=side.seq2seq_arguments(**settings), **trainer_kwargs)


def questions(count: int = 5) -> Rows:
    """Rows without labels."""
    return Rows([{"input_ids": row["input_ids"]} for row in translation_rows(count, seed=2)])


@scenario(saves=True, predicts=True)
def t5_generating_while_it_trains(side: Side) -> Record:
    trainer = translating_trainer(
        side,
        num_train_epochs=3,
        learning_rate=0.05,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="matches",
        save_total_limit=1,
    )
    return side.record(trainer, trainer.train(), predictions=trainer.predict(Rows(translation_rows(5, seed=2))))


@scenario(predicts=True)
def bart_generating_with_beams(side: Side) -> Record:
    trainer = translating_trainer(side, tiny_bart(), generation_num_beams=3, eval_strategy="steps", eval_steps=2)
    return side.record(trainer, trainer.train(), predictions=trainer.predict(questions()))


@scenario(predicts=True, extra=True)
def keywords_of_a_single_call(side: Side) -> Record:
    trainer = translating_trainer(side, tiny_bart(), generation_num_beams=2)
    outputs = [
        trainer.evaluate(max_length=5, num_beams=1),
        trainer.evaluate(metric_key_prefix="again"),
        trainer.evaluate(Rows(translation_rows(4, seed=4)), max_new_tokens=3, metric_key_prefix="new"),
        trainer.evaluate(max_length=None, num_beams=None, do_sample=True, top_k=5, metric_key_prefix="drawn"),
    ]
    predictions = trainer.predict(questions(), None, "asked", min_length=6, num_beams=4)
    config = trainer.model.generation_config
    extra = {"plain": trainer.predict(questions()).predictions, "config": config.to_dict()}
    return side.record(trainer, *outputs, predictions=predictions, extra=extra)


@scenario(predicts=True, extra=True)
def generation_config_as_an_object(side: Side) -> Record:
    from transformers import GenerationConfig

    expected = GenerationConfig(
        max_length=11, num_beams=2, decoder_start_token_id=0, pad_token_id=0, eos_token_id=END_TOKEN, length_penalty=2.0
    )
    trainer = translating_trainer(side, generation_max_length=None, generation_config=expected, eval_strategy="epoch")
    output, predictions = trainer.train(), trainer.predict(questions())
    trainer.save_model("final")
    extra = {"to_dict": trainer.args.to_dict()["generation_config"], "own copy": expected.max_new_tokens}
    return side.record(trainer, output, predictions=predictions, extra=extra)


@scenario(saves=True, predicts=True)
def generation_config_from_a_file(side: Side) -> Record:
    from transformers import GenerationConfig

    settings = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": END_TOKEN}
    GenerationConfig(max_new_tokens=25, **settings).save_pretrained("folder", "other.json")
    trainer = translating_trainer(
        side,
        generation_max_length=None,
        generation_config=Path("folder", "other.json"),
        save_strategy="epoch",
        eval_strategy="epoch",
    )
    return side.record(trainer, trainer.train(), predictions=trainer.predict(questions()))


@scenario(predicts=True)
def labels_longer_than_what_is_generated(side: Side) -> Record:
    rows = Rows(translation_rows(7, seed=5, longest_answer=9))
    trainer = translating_trainer(side, generation_max_length=3, keywords={"eval_dataset": rows})
    trainer.model.generation_config.max_length = 4
    return side.record(trainer, trainer.evaluate(), predictions=trainer.predict(rows))


@scenario()
def generating_for_the_loss_only(side: Side) -> Record:
    trainer = translating_trainer(side, prediction_loss_only=True, eval_strategy="epoch")
    return side.train(trainer)


@scenario(predicts=True)
def seq2seq_trainer_that_does_not_generate(side: Side) -> Record:
    trainer = translating_trainer(
        side, predict_with_generate=False, eval_strategy="epoch", keywords={"compute_metrics": shapes_and_sums}
    )
    return side.record(trainer, trainer.train(), predictions=trainer.predict(Rows(translation_rows(5, seed=2))))


@scenario(predicts=True)
def seq2seq_collator_with_smoothed_labels(side: Side) -> Record:
    tokenizer, model = tiny_tokenizer(), tiny_bart()
    rows = []
    for row in text_rows(9):
        ids = tokenizer(row["text"])["input_ids"]
        rows.append({"input_ids": ids, "labels": [*ids[::-1], END_TOKEN], "weight": len(ids)})
    trainer = translating_trainer(
        side,
        model,
        {
            "data_collator": side.DataCollatorForSeq2Seq(tokenizer, model=model, pad_to_multiple_of=4),
            "processing_class": tokenizer,
            "train_dataset": Rows(rows[:6]),
            "eval_dataset": Rows(rows[4:]),
        },
        label_smoothing_factor=0.2,
        eval_strategy="epoch",
    )
    return side.record(trainer, trainer.train(), predictions=trainer.predict(Rows(rows[2:5])))


@scenario(predicts=True)
def generating_in_mixed_precision(side: Side) -> Record:
    trainer = translating_trainer(side, tiny_bart(), bf16=True, eval_strategy="epoch")
    return side.record(trainer, trainer.train(), predictions=trainer.predict(questions()))


@scenario(predicts=True)
def generating_with_a_model_cast_to_bfloat16(side: Side) -> Record:
    trainer = translating_trainer(side, bf16_full_eval=True)
    return side.record(trainer, trainer.evaluate(), predictions=trainer.predict(questions()))


@scenario()
def generating_for_several_datasets_and_a_stream(side: Side) -> Record:
    datasets = {"rows": Rows(translation_rows(4, seed=1)), "stream": Stream(translation_rows(5, seed=2))}
    trainer = translating_trainer(side, keywords={"eval_dataset": datasets}, eval_strategy="epoch")
    return side.train(trainer)


@scenario(extra=True)
def decoder_only_model_continuing_its_prompt(side: Side) -> Record:
    rows = [{"input_ids": row["input_ids"][:3], "labels": row["input_ids"][:3]} for row in translation_rows(6)]
    datasets = {"eval_dataset": Rows(rows), "train_dataset": Rows(rows), "compute_metrics": None}
    trainer = translating_trainer(side, tiny_gpt2(), datasets, eval_strategy="epoch")
    output, tokens = trainer.train(), trainer.predict(Rows(rows)).predictions
    # transformers returns the prompts too, and pads.
    tokens = tokens[:, 3:] if side.name == ORACLE else tokens
    completions = [[token for token in row if token not in (-100, 0)] for row in tokens.tolist()]
    return side.record(trainer, output, extra={"completions": completions})


@scenario(predicts=True)
def prompts_for_the_decoder_are_continued(side: Side) -> Record:
    def add_prompt(rows: list[dict[str, Any]]) -> Any:
        batch = pad_translations(rows)
        batch["decoder_input_ids"] = batch["input_ids"][:, :2]
        return batch

    trainer = translating_trainer(side, keywords={"data_collator": add_prompt})
    return side.record(trainer, predictions=trainer.predict(questions()))


@scenario()
def prediction_step_called_with_custom_keywords(side: Side) -> Record:
    Seq2SeqTrainer: Any = side.Seq2SeqTrainer

    class GenerationTrainer(Seq2SeqTrainer):
        def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, num_beams=2, max_length=4)

    trainer = GenerationTrainer(
        model=tiny_t5(),
        args=side.seq2seq_arguments(predict_with_generate=True, generation_max_length=9),
        data_collator=pad_translations,
        eval_dataset=Rows(translation_rows(7, seed=1)),
        compute_metrics=matches,
        callbacks=[side.watcher],
    )
    return side.record(trainer, trainer.evaluate())
