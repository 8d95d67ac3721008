"""Searches on Ray Tune by an unchanged script: `littrainer run ray_searches.py FOLDER TEMPORARY` runs them and writes
FOLDER/outcomes.json; Ray's files are in TEMPORARY."""

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
MAX_RAY_STARTS = 3


class RateRecorder(TrainerCallback):
    """A callback that writes the events of each trial to a file."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        note(args, state, "begins")

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        group = optimizer.param_groups[0]
        note(args, state, "steps", rate=group["lr"], decay=group["weight_decay"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        note(args, state, "ends")


class RunsOutOfMemory(Trainer):
    """A Trainer that fails in a trial."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.args.learning_rate == FAILING_RATE:
            raise RuntimeError("memory ran out in this trial")
        return super().training_step(*args, **kwargs)


class Misspells(TrainerCallback):
    """A callback with a mistake that occurs in a trial."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.learning_rate == FAILING_RATE:
            control.no_such_switch.flip()


def note(args: Any, state: Any, event: str, **values: Any) -> None:
    """Add a line to `events.jsonl` in the folder of the search."""
    line = {"event": event, "step": state.global_step, "drawn_rate": args.learning_rate, "pid": os.getpid(), **values}
    with (Path(args.output_dir) / "events.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def new_model() -> VectorClassifier:
    """Return a model whose first weights depend on the seed."""
    return VectorClassifier()


def model_of_size(trial: Any) -> VectorClassifier:
    """Return a model of a drawn size; transformers' names must be redirected."""
    import transformers

    assert transformers.Trainer.__module__.startswith("littrainer"), transformers.Trainer.__module__
    return VectorClassifier(hidden=8 if trial is None else trial["hidden"])


def trainer_for(folder: str, model_init: Any = new_model, callbacks: Any = (), **changes: Any) -> Any:
    """Return a Trainer with eight training vectors, two optimizer steps per epoch."""
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
    """Run ASHA over three trials in sequence: the first is complete, the second is stopped, the third fails."""
    # Relative to the folder in which the search is started.
    trainer = trainer_for(
        "stopped", callbacks=[RateRecorder()], max_steps=4, eval_strategy="steps", eval_steps=1, save_strategy="steps",
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
        "arguments_restored": trainer.args.to_dict() == before,
        "backend_after": trainer.hp_search_backend,
    }


def population() -> dict[str, Any]:
    """Run population based training: at the second of three epochs the worse trial continues from the better."""
    trainer = trainer_for("population", callbacks=[RateRecorder()], num_train_epochs=3, eval_strategy="epoch")
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
    """Run a trial that is evaluated at its end only and determines its model, and a trial with a mistake."""
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
    """Start Ray, repeatedly, since its processes may be too slow on a busy machine."""
    for remaining_tries in reversed(range(MAX_RAY_STARTS)):
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
            if not remaining_tries:
                raise


def main(folder: str, temporary: str) -> None:
    """Run all searches, and write the result or error of each."""
    os.chdir(folder)
    outcomes: dict[str, Any] = {}
    try:
        start_ray(temporary)
    except Exception as error:
        failure = {"failed": f"Ray does not start: {type(error).__name__}: {error}"}
        Path("outcomes.json").write_text(json.dumps({search.__name__: failure for search in SEARCHES}))
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
