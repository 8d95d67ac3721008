"""Checkpoints of each kind of model: their content, and a resume that equals an uninterrupted run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.fidelity.cases.callbacks import raising
from tests.fidelity.record import Record
from tests.fidelity.registry import scenario
from tests.fidelity.side import Side
from tests.scenarios.data import Rows, language_rows, tag_rows, tiny_tokenizer
from tests.scenarios.models import tiny_gpt2, tiny_lora_tagger


def saved_resumed_and_best_loaded(side: Side, build: Any, rows: Any, kind: Any = None, **changes: Any) -> Record:
    """Train up to a checkpoint, resume with a new model, and load the best model at the end."""
    settings: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        # The earliest score counts as best, so that the model at the end is not the last.
        "greater_is_better": True,
        "metric_for_best_model": "loss",
        "learning_rate": 0.3,
        **changes,
    }

    def trainer(*callbacks: Any) -> Any:
        return (kind or side.Trainer)(
            model=build(),
            args=side.arguments(**settings),
            data_collator=side.DataCollatorForTokenClassification(tiny_tokenizer()),
            train_dataset=Rows(rows(12)),
            eval_dataset=Rows(rows(5, seed=1)),
            callbacks=[*callbacks, side.watcher],
        )

    first = trainer(raising(side, "on_step_end", 2, "should_training_stop")).train()
    second = trainer()
    return side.record(second, first, second.train(resume_from_checkpoint=True))


@scenario(saves=True)
def adapter_and_new_classifier_trained(side: Side) -> Record:
    return saved_resumed_and_best_loaded(side, tiny_lora_tagger, tag_rows)


@scenario(saves=True)
def single_trained_adapter_of_two(side: Side) -> Record:
    return saved_resumed_and_best_loaded(
        side, lambda: tiny_lora_tagger(("default", "other")), tag_rows, save_total_limit=1
    )


@scenario(saves=True)
def tied_embeddings_saved_once(side: Side) -> Record:
    return saved_resumed_and_best_loaded(side, tiny_gpt2, language_rows)


@scenario(saves=True)
def weights_spread_over_several_files(side: Side) -> Record:
    Base: Any = side.Trainer

    class SmallFiles(Base):
        def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
            super()._save(output_dir, state_dict)
            self.model.save_pretrained(output_dir, max_shard_size="5KB")
            (Path(output_dir) / "model.safetensors").unlink()

    return saved_resumed_and_best_loaded(side, tiny_gpt2, language_rows, SmallFiles)
