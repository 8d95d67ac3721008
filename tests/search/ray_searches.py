"""Searches on Ray Tune by an unchanged script: `littrainer run ray_searches.py FOLDER TEMPORARY` carries them out in
FOLDER, where it leaves `outcomes.json`; Ray keeps its own files in TEMPORARY."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import ray
from ray import tune
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.models import VectorClassifier

BETTER_RATE, WORSE_RATE, FAILING_RATE, NEW_RATE, NEW_DECAY = 1e-4, 0.05, 0.02, 0.03, 0.1
MEGABYTE = 2**20
TRIES_TO_START_RAY = 3


class NotesRates(TrainerCallback):
    """Notes in a file what each optimizer step of each trial had."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        note(args, state, "begins")

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        group = optimizer.param_groups[0]
        note(args, state, "steps", rate=group["lr"], decay=group["weight_decay"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        note(args, state, "ends")


class RunsOutOfMemory(Trainer):
    """Fails in one of the trials."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.args.learning_rate == FAILING_RATE:
            raise RuntimeError("memory ran out in this trial")
        return super().training_step(*args, **kwargs)


class Misspells(TrainerCallback):
    """Has a mistake that one of the trials comes to."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.learning_rate == FAILING_RATE:
            control.no_such_switch.flip()


def note(args: Any, state: Any, event: str, **values: Any) -> None:
    """Add a line to `events.jsonl` in the folder of the search."""
    line = {"event": event, "step": state.global_step, "asked_for": args.learning_rate, "pid": os.getpid(), **values}
    with (Path(args.output_dir) / "events.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def new_model() -> VectorClassifier:
    """A model whose first weights depend on the seed."""
    return VectorClassifier()


def model_of_size(trial: Any) -> VectorClassifier:
    """A model whose size is drawn, made where names of transformers are ours."""
    import transformers

    assert transformers.Trainer.__module__.startswith("littrainer"), transformers.Trainer.__module__
    return VectorClassifier(hidden=8 if trial is None else trial["hidden"])


def trainer_for(folder: str, model_init: Any = new_model, callbacks: Any = (), **changes: Any) -> Any:
    """A Trainer over eight training vectors, two optimizer steps an epoch."""
    arguments = {
        "per_device_train_batch_size": 4,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        **changes,
    }
    return RunsOutOfMemory(
        model_init=model_init,
        args=TrainingArguments(output_dir=folder, **arguments),
        train_dataset=Rows(vector_rows(8)),
        eval_dataset=Rows(vector_rows(7, seed=1)),
        callbacks=list(callbacks),
    )


def stopped_and_failing() -> dict[str, Any]:
    """ASHA over three trials, one after the other in one process: one is complete, one stopped, one fails."""
    # Relative to where the search is started, as scripts have it.
    trainer = trainer_for(
        "stopped", callbacks=[NotesRates()], max_steps=4, eval_strategy="steps", eval_steps=1, save_strategy="steps",
        save_steps=1,
    )  # fmt: skip
    before = trainer.args.to_dict()
    best = trainer.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": tune.grid_search([BETTER_RATE, WORSE_RATE, FAILING_RATE])},
        backend="ray",
        n_trials=1,
        scheduler=tune.schedulers.ASHAScheduler(max_t=4, grace_period=1, reduction_factor=2),
        max_concurrent_trials=1,
        reuse_actors=True,
        storage_path=os.path.abspath("stopped_ray"),
    )
    return {
        "best": best[:3],
        "trials_in_analysis": len(best.run_summary.trials),
        "arguments_kept": trainer.args.to_dict() == before,
        "backend_after": trainer.hp_search_backend,
    }


def population() -> dict[str, Any]:
    """Population based training of two trials: at the second of three epochs the worse one takes the better's place."""
    trainer = trainer_for("population", callbacks=[NotesRates()], num_train_epochs=3, eval_strategy="epoch")
    scheduler = tune.schedulers.PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=2,
        quantile_fraction=0.5,
        hyperparam_mutations={"learning_rate": [NEW_RATE], "weight_decay": [NEW_DECAY]},
        synch=True,
    )
    best = trainer.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": tune.grid_search([BETTER_RATE, WORSE_RATE]), "weight_decay": 0.0},
        backend="ray",
        n_trials=1,
        scheduler=scheduler,
        storage_path=os.path.abspath("population_ray"),
    )
    return {"best": best[:3], "objectives": [trial.last_result["objective"] for trial in best.run_summary.trials]}


def ended_by_a_mistake() -> dict[str, Any]:
    """The first trial is evaluated at its end only, its model is made from it; the second comes to a mistake."""
    trainer = trainer_for(
        "mistaken", model_of_size, callbacks=[Misspells()], max_steps=1, save_strategy="steps", save_steps=1
    )
    try:
        trainer.hyperparameter_search(
            hp_space=lambda trial: {"hidden": 5, "learning_rate": tune.grid_search([BETTER_RATE, FAILING_RATE])},
            compute_objective=lambda metrics: -metrics["eval_loss"],
            backend="ray",
            n_trials=1,
            direction="maximize",
            hp_name=lambda trial: f"rate-{trial['learning_rate']}",
            max_concurrent_trials=1,
            reuse_actors=True,
            storage_path=os.path.abspath("mistaken_ray"),
        )
    except AttributeError as error:
        return {"error": str(error), "backend_after": trainer.hp_search_backend}
    return {}


SEARCHES = (stopped_and_failing, population, ended_by_a_mistake)


def start_ray(temporary: str) -> None:
    """Start Ray; on a busy machine its processes may not be there in the time that it gives them, so more than once."""
    for tries_left in reversed(range(TRIES_TO_START_RAY)):
        try:
            ray.init(
                num_cpus=2,
                include_dashboard=False,
                object_store_memory=80 * MEGABYTE,
                _temp_dir=temporary,
                logging_level=logging.ERROR,
            )
            return
        except Exception:
            ray.shutdown()
            if not tries_left:
                raise


def main(folder: str, temporary: str) -> None:
    """Carry out all searches; each leaves what it found, or its error."""
    os.chdir(folder)
    outcomes: dict[str, Any] = {}
    try:
        start_ray(temporary)
    except Exception as error:
        not_started = {"failed": f"Ray does not start: {type(error).__name__}: {error}"}
        Path("outcomes.json").write_text(json.dumps({search.__name__: not_started for search in SEARCHES}))
        return
    for search in SEARCHES:
        try:
            outcomes[search.__name__] = search()
        except Exception as error:
            outcomes[search.__name__] = {"failed": f"{type(error).__name__}: {error}"}
        Path("outcomes.json").write_text(json.dumps(outcomes))
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
