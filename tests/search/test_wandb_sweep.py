"""Searches that are sweeps of Weights & Biases, on runs that are kept on the disk, with the server left out."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
import yaml

import littrainer
from littrainer import TrainerCallback
from littrainer.search.parameters import SearchMistake
from littrainer.search.record import load_search_record
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.trainers import quiet_arguments
from tests.search.trainers import new_model, searched_trainer
from tests.tracking.stores import redirect_store

RATES = [0.02, 0.04]
SPACE = {"method": "grid", "parameters": {"learning_rate": {"values": RATES}}}


class Server:
    """A substitute for wandb's server and its agent.

    Like the agent it calls the function in a new thread for each run, and continues after an error.
    """

    def __init__(self) -> None:
        self.sweeps: list[tuple[dict[str, Any], Any, Any]] = []
        self.configs: list[dict[str, Any]] = []
        self.errors: list[BaseException] = []

    def sweep(self, sweep: dict[str, Any], entity: Any = None, project: Any = None) -> str:
        self.sweeps.append((sweep, entity, project))
        return "sweep7"

    def agent(
        self,
        sweep_id: str,
        function: Any = None,
        entity: Any = None,
        project: Any = None,
        count: int | None = None,
    ) -> None:
        assert sweep_id == "sweep7" and count is not None
        for rate in (RATES * count)[:count]:
            thread = threading.Thread(target=self._run, args=(function, rate, len(self.configs)))
            thread.start()
            thread.join()

    def _run(self, function: Any, rate: float, number: int) -> None:
        file = Path(os.environ["WANDB_DIR"], f"config-{number}.yaml")
        file.write_text(yaml.safe_dump({"wandb_version": 1, "learning_rate": {"value": rate}}))
        names = {"WANDB_RUN_ID": f"r{number}", "WANDB_SWEEP_ID": "sweep7", "WANDB_SWEEP_PARAM_PATH": str(file)}
        wandb.teardown()
        os.environ.update(names)
        try:
            function()
        except Exception as error:
            if not _is_interruption(error):
                self.errors.append(error)
        finally:
            self.configs.append(dict(wandb.run.config) if wandb.run is not None else {})
            wandb.finish()
            for name in names:
                del os.environ[name]


def _is_interruption(error: BaseException) -> bool:
    """Return whether the agent has interrupted a run that the server has stopped."""
    return type(error) is Exception and not error.args


def open_run() -> Any:
    return wandb.run


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with redirect_store(tmp_path_factory.mktemp("wandb")):
        yield


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()
    monkeypatch.setattr(wandb, "sweep", server.sweep)
    monkeypatch.setattr(wandb, "agent", server.agent)
    return server


def searched(trainer: Any, n_trials: int = 1, space: Any = SPACE, **keywords: Any) -> Any:
    return trainer.hyperparameter_search(lambda trial: space, n_trials=n_trials, backend="wandb", **keywords)


class RunRecorder(TrainerCallback):
    """A callback that records run and learning rate of each training."""

    def __init__(self) -> None:
        self.runs: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            run = open_run()
            self.runs.append((run.id, run.sweep_id, args.learning_rate, state.trial_params))


def test_each_run_of_the_sweep_is_a_trial_and_the_best_trial_is_returned(server: Server, tmp_path: Path) -> None:
    notes = RunRecorder()
    trainer = searched_trainer(
        tmp_path,
        trainer_kwargs={"callbacks": [notes]},
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=1,
    )
    callbacks = list(trainer.callback_handler.callbacks)
    best = searched(trainer, 2, project="mine", entity="us", name="rates", metric="objective")
    assert trainer.callback_handler.callbacks == callbacks
    assert trainer.args.learning_rate == 0.01 and trainer.hp_search_backend is None
    configuration = {**SPACE, "metric": {"goal": "minimize", "name": "objective"}, "name": "rates"}
    assert server.sweeps == [(configuration, "us", "mine")] and "metric" not in SPACE
    assert notes.runs == [(f"r{n}", "sweep7", rate, {"learning_rate": rate}) for n, rate in enumerate(RATES)]
    assert [config["max_steps"] for config in server.configs] == [2, 2]
    record = load_search_record(tmp_path)
    assert [(trial.id, trial.state, len(trial.intermediate)) for trial in record.trials] == [
        ("r0", "complete", 2),
        ("r1", "complete", 2),
    ]
    objectives: list[Any] = [trial.objective for trial in record.trials]
    assert best.objective == min(objectives) and len(set(objectives)) == 2
    assert best.hyperparameters == {"learning_rate": RATES[objectives.index(best.objective)]}
    assert best.run_summary == record.name == "sweep7"
    assert sorted(path.name for path in tmp_path.glob("run-*")) == ["run-r0", "run-r1"]


def test_a_metric_that_no_run_logs_is_warned_of(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING"):
        searched(searched_trainer(tmp_path), metric="eval/f1")
    assert "metric='eval/f1', which no run logs" in caplog.text and "eval/loss" in caplog.text


def test_objectives_are_those_of_transformers(server: Server, tmp_path: Path) -> None:
    import transformers

    results = []
    for side in (transformers, littrainer):
        torch.manual_seed(0)
        trainer: Any = side.Trainer(
            model_init=lambda: new_model(),
            args=quiet_arguments(tmp_path / side.__name__, side.TrainingArguments, max_steps=2),
            train_dataset=Rows(vector_rows(10)),
            eval_dataset=Rows(vector_rows(7, seed=1)),
        )
        space = {**SPACE, "metric": {}}
        results.append(searched(trainer, 2, space, direction="maximize"))
    theirs, ours = results
    assert (theirs.objective, theirs.run_summary) == (ours.objective, ours.run_summary)
    assert ours.hyperparameters == {"learning_rate": theirs.hyperparameters["learning_rate"]}
    assert server.sweeps[0] == server.sweeps[1]


class Failing(littrainer.Trainer):
    """A Trainer that fails with the first learning rate."""

    error: Exception = RuntimeError("out of memory")

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        if self.args.learning_rate == RATES[0]:
            raise self.error
        return super().compute_loss(*args, **kwargs)


def test_a_trial_that_fails_is_recorded_and_an_error_of_the_script_ends_the_sweep(
    server: Server, tmp_path: Path
) -> None:
    best = searched(searched_trainer(tmp_path, kind=Failing), 2)
    first, second = load_search_record(tmp_path).trials
    assert (first.state, first.error) == ("failed", "RuntimeError: out of memory")
    assert best.run_id == second.id == "r1" and server.errors == []
    # Run the agent of an existing sweep.
    with pytest.raises(RuntimeError, match=r"None of 1 trials of this search was completed.*: out of memory"):
        searched(searched_trainer(tmp_path, kind=Failing), space={}, sweep_id="sweep7")
    assert len(server.sweeps) == 1

    class Misspelled(Failing):
        error = NameError("name 'logit' is not defined")

    with pytest.raises(NameError, match="'logit' is not defined"):
        searched(searched_trainer(tmp_path, kind=Misspelled), 2)
    assert len(load_search_record(tmp_path).trials) == 1


def test_a_run_that_the_server_stops_is_pruned(server: Server, tmp_path: Path) -> None:
    class Stopped(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if args.learning_rate == RATES[0] and state.global_step == 2:
                # The agent interrupts the thread like this.
                raise Exception

    trainer = searched_trainer(
        tmp_path, trainer_kwargs={"callbacks": [Stopped()]}, max_steps=3, save_strategy="steps", save_steps=1
    )
    best = searched(trainer, 2)
    assert [trial.state for trial in load_search_record(tmp_path).trials] == ["pruned", "complete"]
    assert best.run_id == "r1"


@pytest.mark.parametrize(
    ("space", "keywords", "message"),
    [
        (SPACE, {"sweepid": "sweep7"}, "takes no 'sweepid': did you mean 'sweep_id'?"),
        ({"method": "random"}, {}, "has to return the configuration of a sweep"),
        ({"learning_rate": {"values": RATES}}, {}, "under 'parameters'"),
        (SPACE["parameters"].items(), {}, "dict"),  # type: ignore[attr-defined]
    ],
)
def test_an_invalid_sweep_configuration_is_refused_before_a_sweep_is_created(
    server: Server, tmp_path: Path, space: Any, keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(SearchMistake) as raised:
        searched(searched_trainer(tmp_path), space=space, **keywords)
    assert message in str(raised.value)
    assert server.sweeps == []
