"""`trainer.accelerator`, and accelerate's Accelerator in its place."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from littrainer import Trainer, set_seed
from littrainer.arguments.accelerator_config import AcceleratorConfig
from littrainer.compat.accelerator import AcceleratorFacade
from littrainer.compat.accelerator.facade import WITHOUT_EFFECT, _log_once
from tests.compat.page import table
from tests.scenarios.data import FEATURES
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import StepwiseTrainer, quiet_arguments, quiet_trainer


@pytest.fixture
def facade(tmp_path: Path) -> AcceleratorFacade:
    return AcceleratorFacade(quiet_arguments(tmp_path))


def test_unwrap_model_unwraps_only_torchs_wrappers(facade: AcceleratorFacade) -> None:
    model = VectorClassifier()

    class CustomWrapper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = model

    custom = CustomWrapper()
    assert facade.unwrap_model(model) is model and facade.unwrap_model(custom) is custom
    assert facade.unwrap_model(torch.nn.DataParallel(model)) is model
    compiled: Any = torch.compile(torch.nn.DataParallel(model))
    assert facade.unwrap_model(compiled, keep_torch_compile=False) is model
    assert facade.unwrap_model(compiled) is compiled and compiled._orig_mod is model
    assert sorted(facade.get_state_dict(compiled)) == sorted(model.state_dict())


def test_objects_are_prepared_once(tmp_path: Path) -> None:
    facade = AcceleratorFacade(quiet_arguments(tmp_path, bf16=True))
    model = VectorClassifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    prepared = facade.prepare(optimizer, model, schedule)
    assert facade.prepare(*prepared) == prepared and prepared[2].optimizers == [prepared[0]]
    assert model(torch.ones(1, FEATURES))["logits"].dtype == torch.float32
    assert facade.free_memory(*prepared) == [None, None, None] and facade._optimizers == []


def test_a_prepared_optimizer_skips_a_step_with_nonfinite_gradients(facade: AcceleratorFacade) -> None:
    facade._scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = facade.prepare(torch.optim.SGD([weight], lr=1.0))
    schedule = facade.prepare(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    facade.backward(weight.sum())
    assert weight.grad is not None and weight.grad.tolist() == [4.0, 4.0]
    assert facade.clip_grad_norm_([weight], 100.0).item() == pytest.approx(2**0.5)
    facade.unscale_gradients(optimizer)
    optimizer.step()
    schedule.step()
    assert weight.tolist() == [0.0, 0.0] and not facade.optimizer_step_was_skipped
    optimizer.zero_grad()
    facade.backward(weight.sum() * float("inf"))
    optimizer.step()
    schedule.step()
    assert weight.tolist() == [0.0, 0.0] and facade.optimizer_step_was_skipped
    assert schedule.get_last_lr() == [0.5]


def test_changed_settings_of_batches_affect_the_next_loader(tmp_path: Path) -> None:
    trainer: Any = quiet_trainer(tmp_path, accelerator_config={"even_batches": False})
    settings = trainer.accelerator.dataloader_config
    assert trainer.accelerator.even_batches is settings.even_batches is False
    settings.dispatch_batches, settings.use_seedable_sampler = False, False
    loader = trainer.get_train_dataloader()
    assert loader.dispatches_streams is False and type(loader.sampler) is torch.utils.data.RandomSampler
    # The arguments do not change, as in transformers.
    assert trainer.args.accelerator_config == AcceleratorConfig(even_batches=False)


def test_methods_without_effect_warn_once(facade: AcceleratorFacade, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        facade.init_trackers("project", config={})
        facade.log({"loss": 1.0}, step=1)
        facade.register_for_checkpointing(torch.nn.Linear(1, 1))
    assert [record.message for record in caplog.records] == list(WITHOUT_EFFECT.values())


def set_training(facade: AcceleratorFacade, model: Any, **strategy: Any) -> AcceleratorFacade:
    """Set a strategy and a wrapped model as in a training, and return the facade."""
    trainer = SimpleNamespace(strategy=SimpleNamespace(model=None, **strategy))
    facade.module = SimpleNamespace(trainer=trainer, owner=SimpleNamespace(model_wrapped=model))
    return facade


def test_gradients_of_fsdp_version_1_and_deepspeed_are_clipped_by_their_engines(tmp_path: Path) -> None:
    class Wrapper(torch.nn.Linear):
        def clip_grad_norm_(self, max_norm: float, norm_type: float) -> torch.Tensor:
            return torch.tensor([max_norm, norm_type])

    wrapper, other = Wrapper(2, 1), torch.nn.Parameter(torch.zeros(2))
    other.grad = torch.tensor([3.0, 4.0])
    facade = set_training(AcceleratorFacade(quiet_arguments(tmp_path)), wrapper)
    assert facade.clip_grad_norm_(wrapper.parameters(), 0.5, 1).tolist() == [0.5, 1.0]
    assert facade.clip_grad_norm_([other], 1.0).item() == 5.0
    assert other.grad.norm().item() == pytest.approx(1.0)
    engine = SimpleNamespace(get_global_grad_norm=lambda: 2.5)
    facade = set_training(facade, None, deepspeed_engine=engine)
    assert facade.clip_grad_norm_([other], 0.1) == 2.5 and other.grad.norm().item() == pytest.approx(1.0)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_no_sync_has_no_effect_from_deepspeed_stage_2(tmp_path: Path, stage: int) -> None:
    calls: list[str] = []
    engine = SimpleNamespace(no_sync=lambda: nullcontext(calls.append("no_sync")))
    args = quiet_arguments(tmp_path)
    args.deepspeed_plugin = SimpleNamespace(zero_stage=stage)
    with AcceleratorFacade(args).no_sync(engine):
        assert calls == ["no_sync"] * (stage == 1)


@pytest.mark.parametrize("kind", [Trainer, StepwiseTrainer])
def test_a_step_does_not_read_the_gradient_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Trainer]
) -> None:
    names: list[str] = []

    def record_access(instance: object, name: str) -> Any:
        names.append(name)
        return object.__getattribute__(instance, name)

    trainer = quiet_trainer(tmp_path, kind=kind, max_steps=5)
    monkeypatch.setattr(type(trainer.accelerator.gradient_state), "__getattribute__", record_access)
    trainer.train()
    # Divisor of backward.
    allowed = {"num_steps", "plugin_kwargs"} if kind is StepwiseTrainer else {"plugin_kwargs"}
    assert set(names) == allowed


def test_a_facade_that_replaces_another_keeps_its_module(tmp_path: Path) -> None:
    trainer: Any = quiet_trainer(tmp_path)
    trainer.accelerator.module = module = object()
    trainer.accelerator = AcceleratorFacade(trainer.args)
    assert trainer.accelerator.module is module


def make_class_with_accelerator(**settings: Any) -> type[Trainer]:
    class WithAccelerator(Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            AcceleratorState._reset_state()
            self.accelerator = Accelerator(cpu=True, **settings)

    return WithAccelerator


def test_an_accelerator_with_a_different_precision_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"create_accelerator_and_postprocess .* has mixed_precision='bf16'"):
        quiet_trainer(tmp_path, kind=make_class_with_accelerator(mixed_precision="bf16"))


def test_an_accelerator_in_float32_overrides_the_arguments(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    losses = []
    _log_once.cache_clear()
    for settings, bf16 in (({}, True), ({}, False), ({"mixed_precision": "bf16"}, True)):
        set_seed(0)
        trainer = quiet_trainer(tmp_path, kind=make_class_with_accelerator(**settings), bf16=bf16, max_steps=2)
        losses.append(trainer.train().training_loss)
    assert losses[0] == losses[1] != losses[2]
    assert ["bf16 of the arguments has no effect" in record.message for record in caplog.records] == [True]


def test_each_member_of_the_page_exists_and_another_raises_with_alternatives(facade: AcceleratorFacade) -> None:
    for name in table("member | what `trainer.accelerator` answers"):
        getattr(facade, name)
    with pytest.raises(AttributeError, match=r"no 'save_state'.*save_model.*trainer.lightning_trainer"):
        facade.save_state  # noqa: B018
