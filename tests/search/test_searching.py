"""`hyperparameter_search` and the checks of its input before any training."""

from __future__ import annotations

from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec
import optuna
import pytest

from littrainer import BestRun, Trainer, TrainerCallback
from littrainer.arguments.choices import HPSearchBackend
from littrainer.search import searching
from littrainer.search.parameters import SearchMistake
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import quiet_trainer
from tests.search.trainers import new_model, rate_space, searched_trainer

NEEDS_RAY = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")


def search(trainer: Any, **keywords: Any) -> Any:
    return trainer.hyperparameter_search(**{"hp_space": rate_space, "n_trials": 1, "backend": "optuna", **keywords})


def test_a_trainer_without_model_init_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="pass model_init to the Trainer instead of model"):
        search(quiet_trainer(tmp_path))


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"n_trials": 0}, ValueError, "n_trials=0 is no number of trials"),
        ({"n_trials": 2.5}, TypeError, "n_trials=2.5 is no number"),
        ({"n_trials": True}, TypeError, "n_trials=True is no number"),
        ({"direction": "minimise"}, ValueError, r"direction='minimise' is .* \(did you mean 'minimize'\?\)"),
        ({"direction": ["minimize", "up"]}, ValueError, "'up'. is neither"),
        pytest.param(
            {"direction": ["minimize", "maximize"], "backend": "ray"},
            ValueError,
            "only Optuna searches with several",
            marks=NEEDS_RAY,
        ),
        ({"direction": ["minimize", "maximize"], "backend": "wandb"}, ValueError, "only Optuna searches with several"),
        pytest.param({"n_trials": None, "backend": "ray"}, TypeError, "n_trials=None", marks=NEEDS_RAY),
        ({"hp_space": {"learning_rate": 0.1}}, TypeError, "hp_space is a dict, and has to be a function"),
        ({"backend": "sigopt"}, ValueError, "backend='sigopt' is not known"),
    ],
)
def test_bad_input_is_named_before_anything_is_trained(
    tmp_path: Path, keywords: dict[str, Any], error: type[Exception], message: str
) -> None:
    class Never(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            raise AssertionError("A training has begun.")

    trainer = searched_trainer(tmp_path, trainer_kwargs={"callbacks": [Never()]})
    with pytest.raises(error, match=message):
        search(trainer, **keywords)
    assert trainer.hp_space is None


@pytest.mark.parametrize("name", ["train_dataset", "eval_dataset"])
def test_missing_data_is_named_at_once(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        search(searched_trainer(tmp_path, trainer_kwargs={name: None}))


def test_a_subclass_that_overrides_evaluate_needs_no_eval_dataset(tmp_path: Path) -> None:
    class EvaluatingTrainer(Trainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            return {"eval_loss": 0.5}

    assert (
        search(searched_trainer(tmp_path, kind=EvaluatingTrainer, trainer_kwargs={"eval_dataset": None})).objective
        == 0.5
    )


def test_a_search_in_a_search_and_in_a_training_is_refused(tmp_path: Path) -> None:
    caught: list[str] = []

    class Searches(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            with pytest.raises(RuntimeError, match="while this Trainer trains or searches") as error:
                search(trainer)
            caught.append(str(error.value))

    trainer = searched_trainer(tmp_path, trainer_kwargs={"callbacks": [Searches()]})
    trainer.train()
    search(trainer)
    assert len(caught) == 2


# ---- `apply_best` ----------------------------------------------------------------------------------------------------


def quiet_search(trainer: Any, space: Any, n_trials: int = 3, **keywords: Any) -> Any:
    """Run a search with reproducible trials."""
    sampler = optuna.samplers.RandomSampler(seed=1)
    return trainer.hyperparameter_search(space, n_trials=n_trials, backend="optuna", sampler=sampler, **keywords)


def test_training_afterwards_repeats_the_best_trial_exactly(tmp_path: Path) -> None:
    def space(trial: Any) -> dict[str, Any]:
        exponent = trial.suggest_float("exponent", -4, -1)
        return {
            "learning_rate": 10**exponent,
            "label_smoothing_factor": trial.suggest_float("smoothing", 0.0, 0.3),
            "seed": trial.suggest_int("seed", 1, 40),
            "per_device_train_batch_size": trial.suggest_categorical("batch", [2, 4]),
        }

    trainer = searched_trainer(tmp_path)
    best = quiet_search(trainer, space)
    trainer.apply_best(best)
    other = searched_trainer(tmp_path / "other")
    other.apply_best(best, hp_space=space)
    assert other.args.learning_rate == trainer.args.learning_rate == 10 ** best.hyperparameters["exponent"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] == best.objective
    assert trainer.state.is_hyper_param_search is False


@pytest.mark.filterwarnings("ignore:warmup_ratio:FutureWarning")
def test_an_earlier_name_set_by_the_script_has_the_same_effect_as_in_the_trial(tmp_path: Path) -> None:
    def space(trial: Any) -> dict[str, Any]:
        return {name: trial.suggest_float(name, 0.4, 0.5) for name in ("warmup_ratio", "learning_rate")}

    trainer = searched_trainer(tmp_path, max_steps=6)
    best = quiet_search(trainer, space, n_trials=1)
    for name, value in best.hyperparameters.items():
        setattr(trainer.args, name, value)
    trainer.args.gradient_checkpointing_kwargs = {"use_reentrant": False}
    trainer.train()
    assert trainer.evaluate()["eval_loss"] == best.objective
    assert trainer.args.warmup_steps == best.hyperparameters["warmup_ratio"]
    assert trainer.args.activation_checkpointing_kwargs == {"use_reentrant": False}
    trainer.args.warmup_steps = 3
    trainer.train()
    assert trainer.args.warmup_steps == 3


def test_a_model_init_with_a_trial_receives_the_best_trial_after_apply_best(tmp_path: Path) -> None:
    def new(trial: Any) -> VectorClassifier:
        return VectorClassifier(8 if trial is None else trial.suggest_int("hidden", 3, 7))

    trainer = searched_trainer(tmp_path, model_init=new)
    best = quiet_search(trainer, rate_space)
    trainer.apply_best(best)
    trainer.train()
    assert trainer.model.inner.out_features == best.hyperparameters["hidden"]
    assert trainer.evaluate()["eval_loss"] == best.objective
    # A further search makes models for its own trials.
    further = quiet_search(trainer, rate_space, n_trials=1)
    assert set(further.hyperparameters) == {"learning_rate", "hidden"}


def test_values_drawn_by_ray_or_a_sweep_are_set_by_name(tmp_path: Path) -> None:
    trainer = searched_trainer(tmp_path)
    trainer.apply_best(BestRun("a1b2", 0.5, {"learning_rate": 0.05, "seed": 3.7, "wandb": {}}))
    assert (trainer.args.learning_rate, trainer.args.seed) == (0.05, 3)


def test_invalid_hyperparameters_are_refused_and_none_is_set(tmp_path: Path) -> None:
    trainer = searched_trainer(tmp_path)
    with pytest.raises(TypeError, match="got a list; it has several objectives, so choose one"):
        trainer.apply_best([BestRun("0", [1.0, 2.0], {"seed": 3})])
    with pytest.raises(TypeError, match="got a dict"):
        trainer.apply_best({"seed": 3})
    with pytest.raises(ValueError, match="learning_rate"):
        trainer.apply_best(BestRun("0", 1.0, {"seed": 3, "learning_rate": -1.0}))
    assert trainer.args.seed == 42


@pytest.mark.parametrize("reads", [False, True])
def test_a_name_that_nothing_reads_is_refused(tmp_path: Path, reads: bool) -> None:
    model_init = (lambda trial: new_model()) if reads else new_model
    trainer = searched_trainer(tmp_path, model_init=model_init)

    def space(trial: Any) -> dict[str, Any]:
        return {"learning_rat": trial.suggest_float("learning_rat", 1e-4, 1e-2)}

    if reads:
        assert trainer.hyperparameter_search(space, n_trials=1).run_id == "0"
        return
    with pytest.raises(SearchMistake, match=r"sets learning_rat, which .* did you mean 'learning_rate'"):
        trainer.hyperparameter_search(space, n_trials=1)


def test_a_failing_objective_says_which_metrics_there_are(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="f1") as caught:
        search(searched_trainer(tmp_path), compute_objective=lambda metrics: metrics["f1"])
    assert "compute_objective received the metrics eval_loss, eval_runtime, " in "".join(caught.value.__notes__)


def test_a_search_with_a_remote_output_dir_uploads_its_trials_and_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    trainer = searched_trainer(f"memory://bucket{tmp_path}/search", save_strategy="steps", save_steps=1)  # type: ignore[arg-type]
    search(trainer)
    names = {path.rpartition("/search/")[2] for path in fsspec.filesystem("memory").find(f"/bucket{tmp_path}/search")}
    assert {"hyperparameter_search.json", "run-0/checkpoint-1/littrainer_manifest.json"} <= names
    monkeypatch.setattr(searching, "find_backend", lambda backend: (HPSearchBackend.RAY, None))
    with pytest.raises(ValueError, match="trials of Ray Tune are not uploaded"):
        search(trainer)


def test_a_change_within_an_argument_is_restored_and_other_containers_do_not_change(
    tmp_path: Path,
) -> None:
    class Changes(TrainerCallback):
        def on_train_begin(self, args: Any, *_: Any, **__: Any) -> None:
            args.lr_scheduler_kwargs["num_cycles"] = 7
            args.accelerator_config.even_batches = False

    kwargs = {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 1}}
    trainer = searched_trainer(tmp_path, trainer_kwargs={"callbacks": [Changes()]}, **kwargs)
    trainer.args.rows = rows = defaultdict(list, {"a": [1]})  # type: ignore[attr-defined]
    search(trainer)
    assert trainer.args.lr_scheduler_kwargs == {"num_cycles": 1} and trainer.args.accelerator_config.even_batches
    assert trainer.args.rows is rows and trainer.args.rows["b"] == []  # type: ignore[attr-defined]
