"""Trainings with the stand-in for DeepSpeed: its calls, and the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from littrainer import Trainer, TrainerCallback
from tests.deepspeed.variants import ENGINE_OPTIMIZER, ENGINE_SCHEDULE, stage
from tests.scenarios.trainers import StepwiseTrainer, quiet_trainer

# Without `torch_adam`, which torch's optimizer of the stand-in does not accept.
TORCH_OPTIMIZER = {
    "optimizer": {
        "type": "AdamW",
        "params": {name: value for name, value in ENGINE_OPTIMIZER["optimizer"]["params"].items() if value == "auto"},  # type: ignore[attr-defined]
    }
}
RUN: dict[str, Any] = {
    "logging_strategy": "steps",
    "logging_steps": 1,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.1,
    "num_train_epochs": 2,
    "lr_scheduler_type": "linear",
}


def train(folder: Path, kind: type[Trainer] = Trainer, **changes: Any) -> Trainer:
    trainer = quiet_trainer(folder, kind=kind, **{**RUN, **changes})
    trainer.train()
    return trainer


def steps(trainer: Trainer) -> list[tuple[float, float, float]]:
    return [
        (entry["loss"], entry["grad_norm"], entry["learning_rate"])
        for entry in trainer.state.log_history
        if "loss" in entry
    ]


def last_keywords(deepspeed: Any, name: str = "initialize") -> dict[str, Any]:
    return next(keywords for called, keywords in reversed(deepspeed.CALLS) if called == name)


@pytest.mark.parametrize("kind", [Trainer, StepwiseTrainer])
@pytest.mark.parametrize("number", [0, 2, 3])
def test_an_engine_without_sharding_trains_like_a_single_process(
    deepspeed: Any, tmp_path: Path, kind: type[Trainer], number: int
) -> None:
    # Ten rows in micro-batches of four: the last window of an epoch is shorter.
    by_engine, plain = train(tmp_path, kind, deepspeed=stage(number)), train(tmp_path, kind)
    assert steps(by_engine) == steps(plain)
    assert len(steps(plain)) == 4
    for ours, theirs in zip(by_engine.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    # The engine does not divide gradients again, and each window steps once.
    backward, step = ("backward", False), ("step", None)
    calls = [call for call in by_engine.deepspeed.calls if call[0] in ("backward", "step")]
    assert calls == [backward, backward, step, backward, step] * 2


def test_the_engine_holds_the_users_model_and_gets_the_resolved_configuration(deepspeed: Any, tmp_path: Path) -> None:
    trainer = train(tmp_path, deepspeed=stage(2))
    keywords = last_keywords(deepspeed)
    config = keywords["config"]
    assert keywords["model"] is trainer.model and config is trainer.args.hf_deepspeed_config.config
    assert config["gradient_clipping"] == 0.1 and config["train_batch_size"] == 8
    assert config["zero_allow_untested_optimizer"] is True and keywords["dist_init_required"] is False
    assert isinstance(keywords["optimizer"], torch.optim.AdamW) and "lr_scheduler" not in keywords
    assert trainer.deepspeed is trainer.model_wrapped and trainer.deepspeed.module is trainer.model
    assert last_keywords(deepspeed, "init_distributed")["auto_mpi_discovery"] is False


def test_an_overridden_training_step_may_call_the_engine(deepspeed: Any, tmp_path: Path) -> None:
    class Overriding(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
            self.accelerator.backward(loss)
            return loss.detach()

    trainer = train(tmp_path, Overriding, deepspeed=stage(2), max_steps=1)
    # As under transformers, DeepSpeed divides by default.
    assert trainer.deepspeed.calls == [("backward", True), ("backward", True), ("step", None)]


def test_the_engine_creates_optimizer_and_schedule_of_the_configuration(deepspeed: Any, tmp_path: Path) -> None:
    sections = {**TORCH_OPTIMIZER, **ENGINE_SCHEDULE}
    trainer = train(tmp_path, deepspeed=stage(2, sections), warmup_steps=2, weight_decay=0.3, learning_rate=0.01)
    keywords = last_keywords(deepspeed)
    assert "optimizer" not in keywords and "lr_scheduler" not in keywords
    assert keywords["config"]["optimizer"]["params"]["weight_decay"] == 0.3
    assert isinstance(trainer.lr_scheduler.scheduler, deepspeed.WarmupDecayLR)
    # The engine steps its schedule before the rate is logged.
    assert [rate for _, _, rate in steps(trainer)] == [0.005, 0.01, 0.01, 0.01]
    assert trainer.lr_scheduler.scheduler.steps == 3


def test_schedules_of_all_origins_pause_at_skipped_steps(
    deepspeed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rates(sections: dict[str, Any], skipped: set[int], **changes: Any) -> list[float]:
        monkeypatch.setattr(deepspeed, "SKIPPED", skipped)
        trainer = train(tmp_path, deepspeed=stage(1, sections), learning_rate=0.01, **changes)
        assert ("optimizer" in last_keywords(deepspeed)) is ("optimizer" not in sections)
        assert callable(last_keywords(deepspeed).get("lr_scheduler")) is (
            "scheduler" not in sections and bool(sections)
        )
        return [rate for _, _, rate in steps(trainer)]

    assert rates({}, {1, 3}) == [0.01, 0.01, 0.0075, 0.0075]
    assert rates(TORCH_OPTIMIZER, set()) == [0.0075, 0.005, 0.0025, 0.0]
    assert rates(ENGINE_SCHEDULE, set(), warmup_steps=4, max_steps=2) == [0.0025, 0.005]
    # Before the first step of the engine's schedule.
    assert rates(ENGINE_SCHEDULE, {1}, warmup_steps=2, max_steps=2) == [0.0, 0.005]


def test_an_offloaded_optimizer_is_replaced_by_deepspeed_unless_the_configuration_forbids_it(
    deepspeed: Any, tmp_path: Path
) -> None:
    host = {"offload_optimizer": {"device": "cpu"}}
    train(tmp_path, deepspeed=stage(2, **host), max_steps=1)
    optimizer = last_keywords(deepspeed)["optimizer"]
    assert type(optimizer).__name__ == "DeepSpeedCPUAdam" and optimizer.adamw_mode is True
    train(tmp_path, deepspeed=stage(2, {"zero_force_ds_cpu_optimizer": False}, **host), max_steps=1)
    assert type(last_keywords(deepspeed)["optimizer"]) is torch.optim.AdamW


def test_the_engine_compiles_and_a_second_training_creates_a_new_engine(deepspeed: Any, tmp_path: Path) -> None:
    trainer = train(
        tmp_path, deepspeed=stage(2), max_steps=1, torch_compile_backend="eager", torch_compile_mode="default"
    )
    first = trainer.deepspeed
    assert ("compile", ("eager", {"mode": "default"})) in first.calls
    trainer.train()
    assert first.calls[-1] == ("destroy", None) and trainer.deepspeed is not first
    assert trainer.deepspeed.global_steps == 1 and trainer.place_model_on_device is False


def test_the_engine_steps_an_optimizer_of_the_user(deepspeed: Any, tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, deepspeed=stage(2), **RUN)
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.5)
    trainer.optimizer = optimizer
    trainer.train()
    assert last_keywords(deepspeed)["optimizer"] is optimizer
    with pytest.raises(ValueError, match=r"a second train.. cannot go on with it"):
        trainer.train()


def test_floating_point_inputs_are_cast_to_the_dtype_of_the_engine(deepspeed: Any, tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, deepspeed=stage(2), bf16=True)
    inputs = trainer._prepare_inputs({"x": torch.ones(2), "labels": torch.ones(2, dtype=torch.long)})
    assert inputs["x"].dtype is torch.bfloat16 and inputs["labels"].dtype is torch.long
    # The engine scales.
    assert trainer.accelerator.scaler is None


def test_evaluation_without_training_creates_an_engine_in_stage_3_only(deepspeed: Any, tmp_path: Path) -> None:
    deepspeed.CALLS.clear()
    plain = quiet_trainer(tmp_path).evaluate()["eval_loss"]
    assert quiet_trainer(tmp_path, deepspeed=stage(2)).evaluate()["eval_loss"] == plain
    assert not any(name == "initialize" for name, _ in deepspeed.CALLS)
    trainer = quiet_trainer(tmp_path, deepspeed=stage(3, TORCH_OPTIMIZER))
    assert trainer.evaluate()["eval_loss"] == plain
    assert "optimizer" not in last_keywords(deepspeed)["config"] and trainer.deepspeed.optimizer is None
    trainer.train()
    assert trainer.deepspeed.optimizer is not None


def test_classes_of_experts_from_the_launcher_are_gathered_as_units(
    deepspeed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", "Linear")
    trainer = train(tmp_path, deepspeed=stage(3), max_steps=1)
    from deepspeed.utils import LEAVES

    assert LEAVES[-1] == (trainer.model, [nn.Linear])
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", "Experts")
    with pytest.raises(ValueError, match="names Experts, and VectorClassifier has no module of that class"):
        train(tmp_path, deepspeed=stage(3), max_steps=1)


def test_callbacks_see_the_step_before_on_pre_optimizer_step_as_under_transformers(
    deepspeed: Any, tmp_path: Path
) -> None:
    events: list[tuple[str, int]] = []

    class Recorder(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            events.append(("before", trainer.deepspeed.global_steps))

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            events.append(("after", trainer.deepspeed.global_steps))

    trainer = quiet_trainer(
        tmp_path, deepspeed=stage(2), trainer_kwargs={"callbacks": [Recorder()]}, **{**RUN, "max_steps": 1}
    )
    trainer.train()
    assert events == [("before", 1), ("after", 1)]


def test_the_engine_gets_all_parameters_except_frozen_parameters(deepspeed: Any, tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, deepspeed=stage(2, TORCH_OPTIMIZER), **{**RUN, "max_steps": 1})
    frozen = next(iter(trainer.model.parameters()))
    frozen.requires_grad_(False)
    trainer.train()
    passed = last_keywords(deepspeed)["model_parameters"]
    assert len(passed) == len(list(trainer.model.parameters())) - 1
    assert all(parameter is not frozen for parameter in passed)
