"""Resuming from a checkpoint: the second part of the run equals that of an uninterrupted run.

Data that draws random numbers in the training process is left out: transformers draws again for the batches that
were prefetched before the checkpoint. Ours resumes them exactly, which tests/loop/test_exact_resume.py shows.
"""

from __future__ import annotations

from typing import Any

from tests.fidelity.cases.callbacks import raising
from tests.fidelity.record import Record
from tests.fidelity.registry import Script, add_scripts
from tests.fidelity.side import Side
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, Stream, token_rows, vector_rows
from tests.scenarios.models import NoisyClassifier, RememberingClassifier, VectorClassifier, tiny_bert_classifier


def interrupt_and_resume(side: Side, dataset: Any, resume_from: Any, model: Any = None, **changes: Any) -> Record:
    """Train up to a checkpoint, then resume with a fresh Trainer and a fresh model."""
    build = model or NoisyClassifier
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "data_collator": None, **changes}
    keywords = {"data_collator": settings.pop("data_collator")}

    def trainer(*callbacks: Any) -> Any:
        return side.vector_trainer(
            build(), train_dataset=dataset, eval_rows=5, callbacks=callbacks, trainer_kwargs=keywords, **settings
        )

    first = trainer(raising(side, "on_step_end", 3, "should_training_stop")).train()
    second = trainer()
    return side.record(second, first, second.train(resume_from_checkpoint=resume_from))


def make_script(dataset: Any, model: Any = None, resume_from: Any = True, **changes: Any) -> Script:
    return lambda side: interrupt_and_resume(side, dataset, resume_from, model, **changes)


VECTORS = Rows(vector_rows(18))
add_scripts(
    {
        "resumed_in_the_middle_of_an_epoch": make_script(VECTORS, resume_from="out/checkpoint-3"),
        "resumed_at_the_end_of_an_epoch": make_script(Rows(vector_rows(12)), num_train_epochs=3),
        "resumed_while_accumulating": make_script(
            Rows(vector_rows(30)), gradient_accumulation_steps=2, num_train_epochs=3
        ),
        "resumed_with_adafactor": make_script(VECTORS, optim="adafactor", weight_decay=0.1),
        "resumed_with_a_schedule_that_follows_a_metric": make_script(
            VECTORS,
            lr_scheduler_type="greedy",
            lr_scheduler_kwargs={"patience": 0, "factor": 0.5, "min_lr": 1e-3, "smooth": True, "window_size": 2},
            eval_strategy="steps",
            eval_steps=1,
        ),
        "resumed_with_noise_in_embeddings_and_smoothed_labels": make_script(
            Rows(token_rows(18)),
            tiny_bert_classifier,
            data_collator=pad_tokens,
            neftune_noise_alpha=5.0,
            label_smoothing_factor=0.1,
            data_seed=5,
        ),
        "resumed_with_a_model_that_loads_its_state_itself": make_script(
            VECTORS, RememberingClassifier, eval_strategy="steps", eval_steps=3, load_best_model_at_end=True
        ),
        "resumed_without_skipping_data": make_script(VECTORS, VectorClassifier, ignore_data_skip=True),
        "resumed_over_a_stream": make_script(Stream(vector_rows(18)), VectorClassifier, max_steps=9),
    },
    saves=True,
)
