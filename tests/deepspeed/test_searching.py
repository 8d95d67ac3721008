"""A hyperparameter search whose trials DeepSpeed trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from littrainer.search.searching import searching
from littrainer.search.trial import run_trial
from tests.deepspeed.test_training import TORCH_OPTIMIZER, last_keywords
from tests.deepspeed.variants import AUTO_SIZES, ENGINE_SCHEDULE
from tests.search.trainers import searched_trainer

TRIALS = (
    {"learning_rate": 0.05, "per_device_train_batch_size": 2, "weight_decay": 0.1},
    {"learning_rate": 0.02, "gradient_accumulation_steps": 2},
)
CONFIG = {**AUTO_SIZES, **TORCH_OPTIMIZER, **ENGINE_SCHEDULE, "zero_optimization": {"stage": 2}}


def test_auto_values_follow_each_trial_and_the_plugin_is_restored_after_the_search(
    deepspeed: Any, tmp_path: Path
) -> None:
    trainer = searched_trainer(tmp_path / "searched", deepspeed=CONFIG)
    plugin = trainer.args.deepspeed_plugin
    trainer.compute_objective = lambda metrics: metrics["eval_loss"]
    results = []
    with searching(trainer, "some backend"):
        for trial in TRIALS:
            objective = run_trial(trainer, trial)
            config = last_keywords(deepspeed)["config"]
            settings = config["optimizer"]["params"]
            results.append(
                (objective, settings["lr"], settings["weight_decay"], config["train_micro_batch_size_per_gpu"])
            )
    assert [result[1:] for result in results] == [(0.05, 0.1, 2), (0.02, 0.1, 2)]
    assert trainer.args.deepspeed_plugin is plugin
    assert trainer.deepspeed is None
    # As in transformers, the second trial keeps values that only the first trial sets.
    for values, result in zip((TRIALS[0], {**TRIALS[0], **TRIALS[1]}), results, strict=True):
        single = searched_trainer(tmp_path / "single", deepspeed=CONFIG, **values)
        single.train()
        assert single.evaluate()["eval_loss"] == result[0]
