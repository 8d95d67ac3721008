"""A trial in one process whose study lies in another: the two ends of a pipe stand for the processes."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from typing import Any

import optuna
import pytest

from littrainer.search.side_by_side.conversation import CLOSED, Channel
from littrainer.search.side_by_side.distant_trial import DistantTrial
from littrainer.search.side_by_side.trial_process import answered
from littrainer.search.side_by_side.worker import asking


@pytest.fixture
def study() -> optuna.Study:
    return optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=7))


@pytest.fixture
def trial(study: optuna.Study) -> optuna.Trial:
    return study.ask()


@pytest.fixture
def distant(trial: optuna.Trial) -> Iterator[Any]:
    here, there = (Channel(end) for end in Pipe())

    def serve() -> None:
        try:
            while True:
                here.send(answered(trial, here.receive()))
        except CLOSED:
            pass

    server = threading.Thread(target=serve)
    server.start()
    yield DistantTrial(trial.number, asking(there))
    there.close()
    server.join()
    here.close()


def test_what_it_suggests_is_what_the_study_draws(study: optuna.Study, trial: optuna.Trial, distant: Any) -> None:
    drawn = (
        distant.suggest_float("rate", 1e-5, 1e-1, log=True),
        distant.suggest_int("layers", 2, 64, step=2),
        distant.suggest_categorical("activation", ["relu", "gelu", None]),
    )
    assert drawn == tuple(trial.params.values())
    other = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=7)).ask()
    assert drawn[0] == other.suggest_float("rate", 1e-5, 1e-1, log=True)
    assert distant.params == trial.params
    assert distant.distributions == trial.distributions


def test_it_counts_as_a_trial_of_optunas(distant: Any) -> None:
    assert isinstance(distant, optuna.Trial)
    assert isinstance(distant.study, optuna.Study)


def test_attributes_and_values_reach_the_study(study: optuna.Study, trial: optuna.Trial, distant: Any) -> None:
    distant.set_user_attr("parameters", 12)
    distant.report(0.5, step=3)
    study.tell(trial, 0.75)
    stored = study.trials[0]
    assert (stored.user_attrs, stored.intermediate_values) == ({"parameters": 12}, {3: 0.5})
    assert (distant.user_attrs, distant.number, distant.datetime_start) == (
        {"parameters": 12},
        0,
        stored.datetime_start,
    )


def test_the_studys_pruner_decides(study: optuna.Study, distant: Any) -> None:
    study.pruner = optuna.pruners.ThresholdPruner(lower=0.5)
    distant.report(0.75, step=1)
    assert not distant.should_prune()
    distant.report(0.25, step=2)
    assert distant.should_prune()


def test_the_study_can_be_asked_and_told(study: optuna.Study, distant: Any) -> None:
    distant.study.set_user_attr("seen", True)
    assert study.user_attrs == {"seen": True}
    assert distant.study.study_name == study.study_name
    assert distant.study.directions == [optuna.study.StudyDirection.MAXIMIZE]
    assert [trial.number for trial in distant.study.trials] == [0]
    distant.study.enqueue_trial({"rate": 0.1})
    assert len(study.trials) == 2


def test_errors_of_the_study_are_raised_in_the_trial(distant: Any) -> None:
    with pytest.raises(ValueError, match="low"):
        distant.suggest_float("rate", 2.0, 1.0)
    distant.suggest_float("rate", 1.0, 2.0)
    with pytest.raises(ValueError, match="distribution"):
        distant.suggest_int("rate", 1, 2)
    with pytest.raises(AttributeError, match="sugest_float"):
        distant.sugest_float("rate", 1.0, 2.0)
    with pytest.raises(AttributeError, match="nonsense"):
        distant.study.nonsense()


def test_it_is_bound_to_its_process(distant: Any) -> None:
    for bound in (distant, distant.study):
        with pytest.raises(TypeError, match="lies in another process"):
            pickle.dumps(bound)


def test_when_the_search_has_gone_the_trial_ends() -> None:
    here, there = (Channel(end) for end in Pipe())
    here.close()
    with pytest.raises(CLOSED):
        DistantTrial(0, asking(there)).suggest_float("rate", 0.0, 1.0)
    there.close()
