"""What `trainer.accelerator` answers, and an Accelerator of accelerate's in its place."""

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
from littrainer.compat.accelerator.facade import REFUSED, WITHOUT_EFFECT, _log_once
from tests.compat.page import table
from tests.scenarios.data import FEATURES
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import StepwiseTrainer, quiet_arguments, quiet_trainer


@pytest.fixture
def facade(tmp_path: Path) -> AcceleratorFacade:
    return AcceleratorFacade(quiet_arguments(tmp_path))


def test_the_facade_takes_torchs_wrappers_off_and_no_others(facade: AcceleratorFacade) -> None:
    model = VectorClassifier()

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = model

    own = Own()
    assert facade.unwrap_model(model) is model and facade.unwrap_model(own) is own
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


def test_a_prepared_optimizer_leaves_a_step_with_infinite_gradients_out(facade: AcceleratorFacade) -> None:
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


def test_settings_of_batches_that_are_written_count_for_the_next_loader(tmp_path: Path) -> None:
    trainer: Any = quiet_trainer(tmp_path, accelerator_config={"even_batches": False})
    settings = trainer.accelerator.dataloader_config
    assert trainer.accelerator.even_batches is settings.even_batches is False
    settings.dispatch_batches, settings.use_seedable_sampler = False, False
    loader = trainer.get_train_dataloader()
    assert loader.dispatches_streams is False and type(loader.sampler) is torch.utils.data.RandomSampler
    # As in transformers, the arguments stay as they are: libraries compare them with the defaults.
    assert trainer.args.accelerator_config == AcceleratorConfig(even_batches=False)


def test_the_accelerator_says_once_that_it_has_no_trackers_and_saves_no_registered_objects(
    facade: AcceleratorFacade, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        facade.init_trackers("project", config={})
        facade.log({"loss": 1.0}, step=1)
        facade.register_for_checkpointing(torch.nn.Linear(1, 1))
    assert [record.message for record in caplog.records] == list(WITHOUT_EFFECT.values())


def in_a_training(facade: AcceleratorFacade, model: Any, **strategy: Any) -> AcceleratorFacade:
    """The facade as it is while a strategy trains a wrapped model."""
    trainer = SimpleNamespace(strategy=SimpleNamespace(model=None, **strategy))
    facade.module = SimpleNamespace(trainer=trainer, owner=SimpleNamespace(model_wrapped=model))
    return facade


def test_a_wrapper_that_knows_the_other_pieces_and_deepspeeds_engine_clip_themselves(tmp_path: Path) -> None:
    class Wrapper(torch.nn.Linear):
        def clip_grad_norm_(self, max_norm: float, norm_type: float) -> torch.Tensor:
            return torch.tensor([max_norm, norm_type])

    wrapper, other = Wrapper(2, 1), torch.nn.Parameter(torch.zeros(2))
    other.grad = torch.tensor([3.0, 4.0])
    facade = in_a_training(AcceleratorFacade(quiet_arguments(tmp_path)), wrapper)
    assert facade.clip_grad_norm_(wrapper.parameters(), 0.5, 1).tolist() == [0.5, 1.0]
    assert facade.clip_grad_norm_([other], 1.0).item() == 5.0
    assert other.grad.norm().item() == pytest.approx(1.0)
    engine = SimpleNamespace(get_global_grad_norm=lambda: 2.5)
    facade = in_a_training(facade, None, deepspeed_engine=engine)
    assert facade.clip_grad_norm_([other], 0.1) == 2.5 and other.grad.norm().item() == pytest.approx(1.0)


@pytest.mark.parametrize(("version", "kind"), [(None, "GradScaler"), (1, "ShardedGradScaler"), (2, "GradScaler")])
def test_version_1_of_fsdp_has_a_scaler_that_asks_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int | None, kind: str
) -> None:
    plan = None if version is None else SimpleNamespace(version=version)
    monkeypatch.setattr("littrainer.compat.accelerator.facade.get_sharding_plan", lambda args: plan)
    monkeypatch.setattr("littrainer.compat.accelerator.facade.get_autocast_dtype", lambda args: torch.float16)
    facade = AcceleratorFacade(quiet_arguments(tmp_path))
    assert type(facade.scaler).__name__ == kind and facade.scaler is facade.scaler


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_gradients_of_deepspeeds_later_stages_are_never_held_back(tmp_path: Path, stage: int) -> None:
    asked: list[str] = []
    engine = SimpleNamespace(no_sync=lambda: nullcontext(asked.append("no_sync")))
    args = quiet_arguments(tmp_path)
    args.deepspeed_plugin = SimpleNamespace(zero_stage=stage)
    with AcceleratorFacade(args).no_sync(engine):
        assert asked == ["no_sync"] * (stage == 1)


@pytest.mark.parametrize("kind", [Trainer, StepwiseTrainer])
def test_nothing_of_the_accelerator_runs_at_a_step_that_nobody_looks_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Trainer]
) -> None:
    asked: list[str] = []

    def note(self: Any, name: str) -> Any:
        asked.append(name)
        return object.__getattribute__(self, name)

    trainer = quiet_trainer(tmp_path, kind=kind, max_steps=5)
    monkeypatch.setattr(type(trainer.accelerator.gradient_state), "__getattribute__", note)
    trainer.train()
    # What a script may have set for backward to divide by.
    allowed = {"num_steps", "plugin_kwargs"} if kind is StepwiseTrainer else {"plugin_kwargs"}
    assert set(asked) == allowed


def test_a_facade_that_replaces_another_goes_on_with_what_fit_carries_out(tmp_path: Path) -> None:
    trainer: Any = quiet_trainer(tmp_path)
    trainer.accelerator.module = module = object()
    trainer.accelerator = AcceleratorFacade(trainer.args)
    assert trainer.accelerator.module is module


def with_accelerator(**settings: Any) -> type[Trainer]:
    class Own(Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            AcceleratorState._reset_state()
            self.accelerator = Accelerator(cpu=True, **settings)

    return Own


def test_another_precision_than_the_arguments_ask_for_is_refused_at_construction(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"create_accelerator_and_postprocess .* has mixed_precision='bf16'"):
        quiet_trainer(tmp_path, kind=with_accelerator(mixed_precision="bf16"))


def test_an_accelerator_in_float32_trains_in_it_whatever_the_arguments_say(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    losses = []
    _log_once.cache_clear()
    for settings, bf16 in (({}, True), ({}, False), ({"mixed_precision": "bf16"}, True)):
        set_seed(0)
        trainer = quiet_trainer(tmp_path, kind=with_accelerator(**settings), bf16=bf16, max_steps=2)
        losses.append(trainer.train().training_loss)
    assert losses[0] == losses[1] != losses[2]
    assert ["bf16 of the arguments has no effect" in record.message for record in caplog.records] == [True]


NAMES = table("member | what `trainer.accelerator` answers")


def test_each_member_of_the_table_is_there_or_says_why_not(facade: AcceleratorFacade) -> None:
    assert table("not offered | why, and what to do instead") == REFUSED
    for name in NAMES:
        getattr(facade, name)
    for name, reason in REFUSED.items():
        with pytest.raises(AttributeError) as caught:
            getattr(facade, name)
        assert f"does not offer {name}: {reason}" in str(caught.value)
    with pytest.raises(AttributeError, match=r"no 'frobnicate'.*trainer.lightning_trainer"):
        facade.frobnicate  # noqa: B018
