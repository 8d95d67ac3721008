"""Resuming from a checkpoint: the second part of the run has to be what it would have been without the break.

Data that draws random numbers in the training process is left out: transformers draws them anew for the batches that
were collated ahead of the checkpoint. Ours goes on exactly there too, which tests/training/test_exact_resume.py shows.
"""

from __future__ import annotations

from typing import Any

from tests.fidelity.cases.callbacks import raising
from tests.fidelity.record import Record
from tests.fidelity.registry import scenario
from tests.fidelity.side import Side
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, Stream, token_rows, vector_rows
from tests.scenarios.models import NoisyClassifier, RememberingClassifier, VectorClassifier, tiny_bert_classifier


def broken_off_and_resumed(side: Side, dataset: Any, resume_from: Any, model: Any = None, **changes: Any) -> Record:
    """Train up to a checkpoint, then resume with a fresh Trainer and a fresh model."""
    build = model or NoisyClassifier
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "data_collator": None, **changes}
    collator = settings.pop("data_collator")

    def trainer(*callbacks: Any) -> Any:
        return side.Trainer(
            model=build(),
            args=side.arguments(**settings),
            data_collator=collator,
            train_dataset=dataset,
            eval_dataset=Rows(vector_rows(5, seed=1)),
            callbacks=[*callbacks, side.watcher],
        )

    first = trainer(raising(side, "on_step_end", 3, "should_training_stop")).train()
    second = trainer()
    return side.record(second, first, second.train(resume_from_checkpoint=resume_from))


@scenario(saves=True, resumes=True)
def resumed_in_the_middle_of_an_epoch(side: Side) -> Record:
    return broken_off_and_resumed(side, Rows(vector_rows(18)), "out/checkpoint-3")


@scenario(saves=True, resumes=True)
def resumed_from_the_last_checkpoint_found(side: Side) -> Record:
    return broken_off_and_resumed(side, Rows(vector_rows(18)), True, learning_rate=0.05)


@scenario(saves=True, resumes=True)
def resumed_at_the_end_of_an_epoch(side: Side) -> Record:
    return broken_off_and_resumed(side, Rows(vector_rows(12)), True, num_train_epochs=3)


@scenario(saves=True, resumes=True)
def resumed_while_accumulating(side: Side) -> Record:
    return broken_off_and_resumed(side, Rows(vector_rows(30)), True, gradient_accumulation_steps=2, num_train_epochs=3)


@scenario(saves=True, resumes=True)
def resumed_with_adafactor(side: Side) -> Record:
    return broken_off_and_resumed(side, Rows(vector_rows(18)), True, optim="adafactor", weight_decay=0.1)


@scenario(saves=True, resumes=True)
def resumed_with_a_schedule_that_follows_a_metric(side: Side) -> Record:
    return broken_off_and_resumed(
        side,
        Rows(vector_rows(18)),
        True,
        lr_scheduler_type="greedy",
        lr_scheduler_kwargs={"patience": 0, "factor": 0.5, "min_lr": 1e-3, "smooth": True, "window_size": 2},
        eval_strategy="steps",
        eval_steps=1,
    )


@scenario(saves=True, resumes=True)
def resumed_in_the_decay_of_a_warmup_stable_decay(side: Side) -> Record:
    return broken_off_and_resumed(
        side,
        Rows(vector_rows(18)),
        True,
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={"num_decay_steps": 7},
        warmup_steps=1,
    )


@scenario(saves=True, resumes=True)
def resumed_with_noise_in_embeddings_and_smoothed_labels(side: Side) -> Record:
    return broken_off_and_resumed(
        side,
        Rows(token_rows(18)),
        True,
        model=tiny_bert_classifier,
        data_collator=pad_tokens,
        neftune_noise_alpha=5.0,
        label_smoothing_factor=0.1,
        data_seed=5,
    )


@scenario(saves=True, resumes=True)
def resumed_with_a_model_that_loads_its_state_itself(side: Side) -> Record:
    settings = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True}
    return broken_off_and_resumed(side, Rows(vector_rows(18)), True, model=RememberingClassifier, **settings)


@scenario(saves=True, resumes=True)
def resumed_without_skipping_data(side: Side) -> Record:
    return broken_off_and_resumed(side, Rows(vector_rows(18)), True, model=VectorClassifier, ignore_data_skip=True)


@scenario(saves=True, resumes=True)
def resumed_over_a_stream(side: Side) -> Record:
    return broken_off_and_resumed(side, Stream(vector_rows(18)), True, model=VectorClassifier, max_steps=9)
