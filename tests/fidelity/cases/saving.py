"""Files of a run: checkpoints, rotation, results."""

from __future__ import annotations

from tests.fidelity.record import Record
from tests.fidelity.registry import scenario
from tests.fidelity.side import Side
from tests.scenarios.data import tiny_tokenizer, token_rows
from tests.scenarios.metrics import accuracy
from tests.scenarios.models import tiny_bert_classifier


@scenario(saves=True)
def oldest_checkpoints_deleted_beyond_a_limit(side: Side) -> Record:
    return side.train(side.vector_trainer(save_strategy="steps", save_steps=2, save_total_limit=2))


@scenario(saves=True)
def results_of_a_script(side: Side) -> Record:
    """The ending of transformers' example scripts: save the model, the metrics and the state."""
    trainer = side.token_trainer(
        tiny_bert_classifier(),
        token_rows,
        compute_metrics=accuracy,
        trainer_kwargs={"processing_class": tiny_tokenizer()},
        num_train_epochs=1,
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
