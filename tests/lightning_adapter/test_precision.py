"""Loss scaling, on the CPU instead of a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn

import littrainer
from littrainer import Trainer, TrainerCallback, UnhealthyTrainingError
from littrainer.arguments.destinations import DERIVED_KEYWORDS
from littrainer.lightning_adapter import fast_training_loop
from littrainer.lightning_adapter.precision import build_precision_plugin
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import StepwiseTrainer, quiet_trainer

SCALE = 2.0**10


class Overflowing(VectorClassifier):
    """A model with infinite gradients in some micro-batches of training, counted from 0."""

    def __init__(self, *overflows: int, factor: float = 3e38) -> None:
        super().__init__()
        self.overflows = overflows
        self.factor = factor
        self.micro_batches = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        outputs = super().forward(x, labels)
        if self.training:
            if self.micro_batches in self.overflows:
                outputs["loss"] = outputs["loss"] * torch.tensor(self.factor)
            self.micro_batches += 1
        return outputs


@pytest.fixture(autouse=True)
def scaling_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("arguments.destinations", "strategies.model_wrapping"):
        monkeypatch.setattr(f"littrainer.{module}.get_lightning_precision", lambda args: "16-mixed")
    monkeypatch.setitem(DERIVED_KEYWORDS, "precision", (lambda args: "16-mixed", "from fp16"))


def scaled_trainer(folder: Path, model: nn.Module, kind: type[Trainer] = Trainer, **changes: Any) -> Trainer:
    settings: dict[str, Any] = {"optim": "sgd", "num_train_epochs": 1, "logging_strategy": "steps", "logging_steps": 1}
    options = {"train_dataset": Rows(vector_rows(20))}
    trainer = quiet_trainer(folder, model, kind=kind, trainer_kwargs=options, **{**settings, **changes})
    trainer.accelerator._scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    return trainer


@pytest.mark.parametrize("policy", ["warn", "skip", "rollback", "stop"])
def test_an_overflow_is_handled_by_loss_scaling_and_a_nonfinite_loss_by_on_nonfinite(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, policy: str
) -> None:
    changes = {"on_nonfinite": policy, "save_strategy": "steps", "save_steps": 1}
    trainer = scaled_trainer(tmp_path, Overflowing(1, factor=1e37), **changes)
    trainer.train()
    assert not caplog.records and trainer.accelerator.scaler.get_scale() == SCALE / 2
    rows = vector_rows(20)
    rows[7]["x"] = rows[7]["x"] * torch.inf
    trainer = scaled_trainer(tmp_path / "nonfinite", VectorClassifier(), **changes)
    trainer.train_dataset = Rows(rows)
    with pytest.raises(UnhealthyTrainingError) if policy == "stop" else nullcontext():
        trainer.train()
    assert policy == "stop" or "row 7 in x" in caplog.text
    assert all(torch.isfinite(part).all() for part in trainer.model.parameters())


def values(trainer: Trainer, name: str) -> list[float]:
    return [log[name] for log in trainer.state.log_history if name in log]


@pytest.mark.parametrize(
    ("kind", "optim"), [(StepwiseTrainer, "sgd"), (Trainer, "adamw_torch"), (StepwiseTrainer, "adamw_torch_fused")]
)
def test_scaling_changes_neither_losses_nor_norms_nor_steps(tmp_path: Path, kind: type[Trainer], optim: str) -> None:
    torch.manual_seed(0)
    scaled_model = VectorClassifier()
    plain_model = VectorClassifier()
    plain_model.load_state_dict(scaled_model.state_dict())
    scaled = scaled_trainer(tmp_path, scaled_model, kind, optim=optim, max_grad_norm=0.5)
    scaled.train()
    unscaled = scaled_trainer(tmp_path, plain_model, kind, optim=optim, max_grad_norm=0.5)
    # A scale of 1 that never grows means no scaling.
    unscaled.accelerator._scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    unscaled.train()
    for name in ("loss", "grad_norm", "learning_rate"):
        assert values(scaled, name) == pytest.approx(values(unscaled, name), rel=1e-3)
    for scaled_weight, plain_weight in zip(scaled_model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(scaled_weight, plain_weight, rtol=1e-3, atol=1e-5)
    assert len(values(scaled, "loss")) == 5


@pytest.mark.parametrize("kind", [Trainer, StepwiseTrainer])
def test_an_optimizer_that_replaces_another_steps_with_its_unscaled_gradients(
    tmp_path: Path, kind: type[Trainer]
) -> None:
    class Replacing(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.05)

    weights = []
    for scale in (SCALE, 1.0):
        torch.manual_seed(0)
        trainer = scaled_trainer(tmp_path, VectorClassifier(), kind, max_grad_norm=0.5)
        trainer.accelerator._scaler = scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        trainer.add_callback(Replacing())
        with pytest.MonkeyPatch.context() as patch:
            step = Mock(wraps=scaler.step)
            patch.setattr(scaler, "step", step)
            trainer.train()
        # The scaler takes each step except the replacement's.
        assert step.call_count == trainer.state.global_step - 1 == 4
        weights.append([weight.detach().clone() for weight in trainer.model.parameters()])
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("kind", "accumulation"), [(Trainer, 1), (Trainer, 2), (StepwiseTrainer, 2)])
def test_scaling_is_the_same_in_lightnings_loop(
    tmp_path: Path, kind: type[Trainer], accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for releases in (fast_training_loop.SUPPORTED_RELEASES, frozenset[str]()):
        monkeypatch.setattr(fast_training_loop, "SUPPORTED_RELEASES", releases)
        torch.manual_seed(0)
        trainer = scaled_trainer(tmp_path, Overflowing(1), kind, gradient_accumulation_steps=accumulation)
        scaled: list[Any] = []

        class Recorder(pl.Callback):
            records = scaled

            def on_before_backward(self, trainer: pl.Trainer, module: Any, loss: torch.Tensor) -> None:
                self.records.append(float(loss))

            def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
                gradients = [parameter.grad for parameter in module.parameters()]
                self.records.append([None if gradient is None else gradient.tolist() for gradient in gradients])

        trainer.add_callback(Recorder())
        trainer.train()
        assert trainer.accelerator.scaler is not None
        is_fast = getattr(trainer.lightning_trainer.fit_loop.epoch_loop, "_is_fast", False)
        rates = values(trainer, "learning_rate")
        weights = [parameter.tolist() for parameter in trainer.model.parameters()]
        results.append((str(scaled), rates, weights, trainer.accelerator.scaler.get_scale(), trainer.state.global_step))
        assert is_fast is bool(releases) and len(scaled) > 5
    assert results[0] == results[1]


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_a_step_that_overflows_skips_the_schedule_as_under_transformers(tmp_path: Path, optim: str) -> None:
    import transformers

    def rates(library: Any, scaled: str) -> list[float]:
        settings = {"optim": optim, "max_steps": 5, "max_grad_norm": 0, "logging_steps": 1, "save_strategy": "no"}
        quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True}
        args = library.TrainingArguments(str(tmp_path / library.__name__), **settings, **quiet)
        trainer = library.Trainer(Overflowing(0, 1), args, train_dataset=Rows(vector_rows(40)))
        setattr(trainer.accelerator, scaled, torch.amp.GradScaler("cpu", init_scale=SCALE))
        trainer.train()
        return values(trainer, "learning_rate")

    ours = rates(littrainer, "_scaler")
    assert ours == rates(transformers, "scaler")
    # A fused optimizer skips the update within its step, which counts.
    assert (ours[0] == ours[1] == ours[2]) is (optim == "adamw_torch")


def test_the_scale_is_saved_in_checkpoints_and_resumed(tmp_path: Path) -> None:
    first = scaled_trainer(tmp_path, Overflowing(1), save_strategy="steps", save_steps=3)
    first.train()
    assert torch.load(tmp_path / "checkpoint-3" / "scaler.pt")["scale"] == SCALE / 2
    resumed = scaled_trainer(tmp_path, VectorClassifier())
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.accelerator.scaler is not None
    assert resumed.accelerator.scaler.get_scale() == SCALE / 2


# Strategy and precision -> class of the plugin, and whether it scales losses.
PLUGINS = {
    (DDPStrategy, "32-true"): None,
    (DDPStrategy, "bf16-mixed"): ("ForwardMixedPrecision", False),
    (ModelParallelStrategy, "16-mixed"): ("ForwardMixedPrecision", True),
    (FSDPStrategy, "32-true"): ("ForwardFSDPPrecision", False),
    (FSDPStrategy, "bf16-mixed"): ("ForwardFSDPPrecision", False),
    (FSDPStrategy, "16-mixed"): ("ForwardFSDPPrecision", True),
}


def plugin_for(kind: type, precision: str, trainer: Trainer) -> Any:
    # `__new__`, since FSDP's strategy needs a GPU.
    model = trainer.model if trainer.is_in_train else None
    return build_precision_plugin(precision, kind.__new__(kind), trainer.args, trainer.accelerator.scaler, model)


@pytest.mark.parametrize(
    ("kind", "precision"), PLUGINS, ids=[f"{kind.__name__} {precision}" for kind, precision in PLUGINS]
)
def test_each_strategy_gets_its_kind_of_plugin_and_the_trainers_scaler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type, precision: str
) -> None:
    monkeypatch.setattr("littrainer.strategies.model_wrapping.get_lightning_precision", lambda args: precision)
    trainer = quiet_trainer(tmp_path)
    plugin = plugin_for(kind, precision, trainer)
    expected = PLUGINS[kind, precision]
    if expected is None:
        assert plugin is None
        return
    name, scales = expected
    assert (type(plugin).__name__, plugin.precision) == (name, precision)
    assert getattr(plugin, "scaler", None) is (trainer.accelerator.scaler if scales else None)
    # The Trainer enters autocast and converts inputs.
    batch, module = {"x": torch.ones(1)}, nn.Linear(1, 1).to(torch.bfloat16)
    with plugin.forward_context():
        assert not torch.is_autocast_enabled("cpu") and torch.get_default_dtype() is torch.float32
    assert plugin.convert_input(batch) is batch and plugin.convert_output(batch) is batch
    assert plugin.convert_module(module) is module and module.weight.dtype is torch.bfloat16


def test_fsdp_1_gathers_in_half_precision_only_under_mixed_precision(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path)
    mixed = plugin_for(FSDPStrategy, "bf16-mixed", trainer).mixed_precision_config
    assert (mixed.param_dtype, mixed.reduce_dtype, mixed.buffer_dtype) == (torch.bfloat16,) * 3
    assert plugin_for(FSDPStrategy, "32-true", trainer).mixed_precision_config is None


def test_loss_scaling_is_refused_with_tensor_parallelism(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = quiet_trainer(tmp_path)
    monkeypatch.setattr("littrainer.lightning_adapter.precision.tensor_parallel_size", lambda args: 2)
    with pytest.raises(ValueError, match=r"fp16=True does not go with tensor parallelism .*Set bf16=True"):
        plugin_for(ModelParallelStrategy, "16-mixed", trainer)
    monkeypatch.setattr("littrainer.strategies.model_wrapping.get_lightning_precision", lambda args: "bf16-mixed")
    assert plugin_for(ModelParallelStrategy, "bf16-mixed", quiet_trainer(tmp_path)).scaler is None
