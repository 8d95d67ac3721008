"""How much each hyperparameter counts for the objective, by Optuna's evaluator."""

from __future__ import annotations

import importlib.util
import logging
import math
import warnings
from typing import Any, NamedTuple

from littrainer.report.searches import Parameter, Search, is_number
from littrainer.search.record import TrialRecord

# With fewer trials chance alone decides.
FEWEST_TRIALS = 8
# The evaluator compares the best tenth with all.
ROUGH_BELOW = 30
# More than so many take long, and change little.
MOST_TRIALS = 2000
MOST_PARAMETERS = 30
MOST_CHOICES = 50


class Importance(NamedTuple):
    """What the evaluator found.

    Parameters:
        shares: parameter -> share of all, the most important first; empty where nothing can be said.
        remark: from how many trials, or why nothing can be said.
    """

    shares: dict[str, float]
    remark: str


def importance_of(search: Search, parameters: list[Parameter], objective: int = 0) -> Importance:
    """Weigh the parameters by the complete trials of a search, whichever backend made them.

    Parameters:
        objective: for which one of several.
    """
    trials = search.complete()
    parameters = [each for each in parameters if each.choices is None or len(each.choices) <= MOST_CHOICES]
    parameters = parameters[:MOST_PARAMETERS]
    if len(parameters) < 2:
        return Importance({}, "")
    if len(trials) < FEWEST_TRIALS:
        return Importance({}, f"Importance needs {FEWEST_TRIALS} complete trials at least; there are {len(trials)}.")
    if len({trial.objectives()[objective] for trial in trials}) < 2:
        return Importance({}, "All complete trials have the same objective, so that no parameter counts.")
    if importlib.util.find_spec("optuna") is None:
        return Importance({}, "Importance is not shown, since Optuna is not installed: pip install 'littrainer[tune]'.")
    every = math.ceil(len(trials) / MOST_TRIALS)
    used = trials[::every]
    remark = f"from {len(used)} complete trials" + (": rough with so few" if len(used) < ROUGH_BELOW else "")
    try:
        shares = _evaluated(search, used, parameters, objective)
    # What a record holds that another program wrote, Optuna may refuse for reasons of its own.
    except Exception as error:
        return Importance({}, f"Importance is not shown: Optuna cannot weigh these trials ({error}).")
    if not shares or not all(map(math.isfinite, shares.values())):
        return Importance({}, "Importance is not shown: these trials do not tell the parameters apart.")
    return Importance(shares, remark)


def _evaluated(
    search: Search, trials: list[TrialRecord], parameters: list[Parameter], objective: int
) -> dict[str, float]:
    import optuna

    distributions = {parameter.name: _distribution(parameter, trials) for parameter in parameters}
    indices = {
        parameter.name: {text: place for place, text in enumerate(parameter.choices)}
        for parameter in parameters
        if parameter.choices is not None
    }
    told = logging.getLogger("optuna").level
    with warnings.catch_warnings():
        # The evaluator calls itself experimental in earlier releases.
        warnings.simplefilter("ignore")
        logging.getLogger("optuna").setLevel(logging.WARNING)
        try:
            direction: Any = search.directions[objective]
            study = optuna.create_study(direction=direction)
            for trial in trials:
                values = {
                    name: indices[name][str(trial.parameters[name])] if name in indices else trial.parameters[name]
                    for name in distributions
                    if name in trial.parameters
                }
                study.add_trial(
                    optuna.trial.create_trial(
                        params=values,
                        distributions={name: distributions[name] for name in values},
                        value=trial.objectives()[objective],
                    )
                )
            evaluator = optuna.importance.PedAnovaImportanceEvaluator()
            found = optuna.importance.get_param_importances(study, evaluator=evaluator)
        finally:
            logging.getLogger("optuna").setLevel(told)
    return {name: float(share) for name, share in found.items()}


def _distribution(parameter: Parameter, trials: list[TrialRecord]) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if parameter.choices is not None:
        return CategoricalDistribution(list(range(len(parameter.choices))))
    low, high, logarithmic = parameter.axis.low, parameter.axis.high, parameter.axis.logarithmic
    drawn = [trial.distributions[parameter.name] for trial in trials if parameter.name in trial.distributions]
    steps = {entry.get("step") for entry in drawn if is_number(entry.get("step"))}
    step = steps.pop() if len(steps) == 1 and not logarithmic else None
    # A step holds where all values lie on it, which those of another program need not.
    values = [trial.parameters[parameter.name] for trial in trials if parameter.name in trial.parameters]
    if step is not None and not (step > 0 and all(_lies_on(value - low, step) for value in values)):
        step = None
    if parameter.whole:
        whole_step = int(step) if step is not None and step == int(step) else 1
        return IntDistribution(math.ceil(low), math.floor(high), log=logarithmic, step=whole_step)
    return FloatDistribution(low, high, log=logarithmic, step=step)


def _lies_on(distance: float, step: float) -> bool:
    return abs(distance / step - round(distance / step)) < 1e-8
