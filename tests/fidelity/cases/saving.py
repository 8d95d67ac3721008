"""What a run writes: checkpoints, rotation, results."""

from __future__ import annotations

from tests.fidelity.record import Record
from tests.fidelity.registry import scenario
from tests.fidelity.side import Side
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, tiny_tokenizer, token_rows, vector_rows
from tests.scenarios.metrics import accuracy
from tests.scenarios.models import VectorClassifier, tiny_bert_classifier


@scenario(saves=True)
def oldest_checkpoints_deleted_beyond_a_limit(side: Side) -> Record:
    return side.train(
        side.Trainer(
            model=VectorClassifier(),
            args=side.arguments(save_strategy="steps", save_steps=2, save_total_limit=2),
            train_dataset=Rows(vector_rows(18)),
            callbacks=[side.watcher],
        )
    )


@scenario(saves=True)
def only_the_model_saved(side: Side) -> Record:
    return side.train(
        side.Trainer(
            model=tiny_bert_classifier(),
            args=side.arguments(save_strategy="epoch", save_only_model=True, num_train_epochs=1),
            data_collator=pad_tokens,
            train_dataset=Rows(token_rows(10)),
            callbacks=[side.watcher],
        )
    )


@scenario(saves=True)
def results_of_a_whole_script_written_down(side: Side) -> Record:
    """The ending of transformers' example scripts: save the model, the metrics and the state."""
    trainer = side.Trainer(
        model=tiny_bert_classifier(),
        args=side.arguments(num_train_epochs=1),
        data_collator=pad_tokens,
        train_dataset=Rows(token_rows(10)),
        eval_dataset=Rows(token_rows(5, seed=1)),
        processing_class=tiny_tokenizer(),
        compute_metrics=accuracy,
        callbacks=[side.watcher],
    )
    output = trainer.train()
    trainer.save_model()
    trainer.log_metrics("train", output.metrics)
    trainer.save_metrics("train", output.metrics)
    trainer.save_state()
    metrics = trainer.evaluate()
    metrics["eval_samples"] = 5
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.save_model("elsewhere/model")
    return side.record(trainer, output, metrics)
