"""Evaluations and predictions outside of training: their results, and unchanged work after them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from tests.fidelity.record import Record
from tests.fidelity.registry import scenario
from tests.fidelity.side import Side
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import AugmentedRows, Rows, SizedStream, language_rows, text_rows, tiny_tokenizer, vector_rows
from tests.scenarios.metrics import accuracy, shapes_and_sums
from tests.scenarios.models import NoisyClassifier, VectorClassifier, tiny_bert_for_masked_tokens, tiny_gpt2


def drawing_trainer(side: Side, **changes: Any) -> Any:
    """A Trainer whose datasets draw from all three generators, and whose model draws for dropout."""
    return side.vector_trainer(
        NoisyClassifier(),
        train_dataset=AugmentedRows(vector_rows(10)),
        eval_dataset=AugmentedRows(vector_rows(7, seed=1)),
        compute_metrics=accuracy,
        num_train_epochs=1,
        **changes,
    )


@scenario(predicts=True)
def work_of_all_kinds_in_turn_with_random_data(side: Side) -> Record:
    trainer = drawing_trainer(side)
    first, trained, again = trainer.evaluate(), trainer.train(), trainer.evaluate()
    predictions = trainer.predict(AugmentedRows(vector_rows(5, seed=2)))
    return side.record(trainer, first, trained, again, trainer.train(), trainer.evaluate(), predictions=predictions)


@scenario()
def masked_tokens_drawn_at_each_evaluation(side: Side) -> Record:
    tokenizer = tiny_tokenizer()
    collator = side.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.4)
    rows = [{"input_ids": tokenizer(row["text"])["input_ids"]} for row in text_rows(9)]
    trainer = side.Trainer(
        model=tiny_bert_for_masked_tokens(),
        args=side.arguments(max_steps=2),
        data_collator=collator,
        train_dataset=Rows(rows),
        eval_dataset={"one": Rows(rows[:5]), "two": Rows(rows[5:])},
        callbacks=[side.watcher],
    )
    return side.record(trainer, trainer.evaluate(), trainer.evaluate(), trainer.train(), trainer.evaluate("two"))


@scenario()
def seeding_between_an_evaluation_and_a_training(side: Side) -> Record:
    trainer = drawing_trainer(side)
    before = trainer.evaluate()
    side.set_seed(42)
    return side.record(trainer, before, trainer.train())


def halved_trainer(side: Side, model: Any = None, **changes: Any) -> Any:
    return side.vector_trainer(model, rows=10, compute_metrics=shapes_and_sums, num_train_epochs=1, **changes)


class FixedPrecisionClassifier(VectorClassifier):
    """Casts float inputs to the precision of its weights."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return super().logits(x.to(self.head.weight.dtype))


@scenario(predicts=True)
def evaluating_a_model_in_bf16(side: Side) -> Record:
    model = FixedPrecisionClassifier().to(torch.bfloat16)
    trainer = halved_trainer(side, model, eval_strategy="epoch", eval_accumulation_steps=2)
    return side.record(trainer, trainer.train(), predictions=trainer.predict(Rows(vector_rows(5, seed=2))))


@scenario(predicts=True)
def evaluating_and_predicting_over_custom_loaders(side: Side) -> Record:
    Trainer: Any = side.Trainer

    class CustomLoaders(Trainer):
        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return DataLoader(self.eval_dataset, batch_size=3, collate_fn=self.data_collator)

        def get_test_dataloader(self, test_dataset: Any) -> Any:
            loader = DataLoader(test_dataset, batch_size=2, collate_fn=self.data_collator)
            return self.accelerator.prepare(loader)

    trainer = CustomLoaders(
        model=VectorClassifier(),
        args=side.arguments(),
        eval_dataset=Rows(vector_rows(7, seed=1)),
        compute_metrics=shapes_and_sums,
        callbacks=[side.watcher],
    )
    first = trainer.evaluate()
    predictions = trainer.predict(Rows(vector_rows(5, seed=2)))
    return side.record(trainer, first, predictions=predictions)


@scenario()
def samples_counted_as_the_script_counts_them(side: Side) -> Record:
    Trainer: Any = side.Trainer

    class Batches:
        """Batches without a dataset."""

        def __len__(self) -> int:
            return 2

        def __iter__(self) -> Any:
            for size in (3, 2):
                yield {"x": torch.ones(size, 6), "labels": torch.zeros(size, dtype=torch.long)}

    class Counting(Trainer):
        def num_examples(self, dataloader: Any) -> int:
            return 5

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return Batches()

    trainer = Counting(model=VectorClassifier(), args=side.arguments(), callbacks=[side.watcher])
    metrics = trainer.evaluate()
    output = trainer.evaluation_loop(Batches(), "Evaluation", metric_key_prefix="own")
    extra = {"num_samples": output.num_samples, "metrics": output.metrics, "predictions": output.predictions}
    return side.record(trainer, metrics, extra=extra)


@scenario()
def evaluating_a_stream_with_a_length(side: Side) -> Record:
    trainer = halved_trainer(side, eval_strategy="epoch")
    trained = trainer.train()
    loader = trainer.get_eval_dataloader(SizedStream(vector_rows(7, seed=1)))
    output = trainer.evaluation_loop(loader, "Evaluation")
    return side.record(
        trainer, trained, trainer.evaluate(SizedStream(vector_rows(8, seed=3))), extra={"number": output.num_samples}
    )


@scenario(predicts=True)
def a_metric_function_removed_and_restored_around_the_loop(side: Side) -> Record:
    Trainer: Any = side.Trainer

    class PostProcessing(Trainer):
        def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
            loader = self.get_eval_dataloader(eval_dataset)
            compute_metrics, self.compute_metrics = self.compute_metrics, None
            try:
                output = self.evaluation_loop(
                    loader, description="Evaluation", prediction_loss_only=False, ignore_keys=ignore_keys
                )
            finally:
                self.compute_metrics = compute_metrics
            results = self.compute_metrics(
                side.EvalPrediction(predictions=output.predictions, label_ids=output.label_ids)
            )
            metrics = {f"{metric_key_prefix}_{name}": value for name, value in results.items()} | output.metrics
            self.log(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics

    trainer = side.vector_trainer(
        rows=10,
        kind=PostProcessing,
        compute_metrics=accuracy,
        eval_strategy="epoch",
        save_strategy="no",
        metric_for_best_model="accuracy",
    )
    trained = trainer.train()
    return side.record(trainer, trained, trainer.evaluate(), predictions=trainer.predict(Rows(vector_rows(4, seed=2))))


@scenario(predicts=True)
def a_cache_of_keys_excluded_from_the_predictions(side: Side) -> Record:
    trainer = side.Trainer(
        model=tiny_gpt2(),
        args=side.arguments(use_cache=True),
        data_collator=pad_tokens,
        eval_dataset=Rows(language_rows(5, seed=1)),
        compute_metrics=shapes_and_sums,
        callbacks=[side.watcher],
    )
    first = trainer.evaluate(ignore_keys=["past_key_values"])
    predictions = trainer.predict(Rows(language_rows(4, seed=2)), metric_key_prefix="plain")
    return side.record(trainer, first, predictions=predictions)
