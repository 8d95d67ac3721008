from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from littrainer.callbacks.state import TrainerState
from littrainer.checkpoint.distributed_resume import NEEDED_TO_RESUME, checkpoint_to_resume
from littrainer.checkpoint.reader import (
    load_random_states,
    load_scaler,
    optimizer_differences,
    read_state,
    scaler_differences,
    schedule_differences,
)
from littrainer.checkpoint.weights import write_weights
from tests.checkpoint.malicious import Creates
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import quiet_trainer


def complete_checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in NEEDED_TO_RESUME:
        torch.save({}, folder / name)
    step = int(folder.name.partition("checkpoint-")[2] or 0)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    save_file(VectorClassifier().state_dict(), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("nothing", [None, False, ""])
def test_a_fresh_start_has_no_checkpoint(tmp_path: Path, nothing: str | bool | None) -> None:
    complete_checkpoint(tmp_path / "checkpoint-1")
    assert checkpoint_to_resume(nothing, str(tmp_path)) is None


def test_true_means_the_checkpoint_with_the_highest_step(tmp_path: Path) -> None:
    for step in (9, 10, 2):
        complete_checkpoint(tmp_path / f"checkpoint-{step}")
    assert checkpoint_to_resume(True, str(tmp_path)) == tmp_path / "checkpoint-10"


def test_a_folder_of_any_name_may_be_given(tmp_path: Path) -> None:
    folder = complete_checkpoint(tmp_path / "elsewhere")
    assert checkpoint_to_resume(str(folder), "unused") == folder


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_no_checkpoint_at_all_is_an_error_that_names_the_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=f"{name}.*no intact checkpoint-<step>.*[Ss]tart without"):
        checkpoint_to_resume(True, str(tmp_path / name))


def test_a_checkpoint_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"checkpoint-8: there is no such folder"):
        checkpoint_to_resume(str(tmp_path / "checkpoint-8"), str(tmp_path))


def test_the_folder_of_a_run_given_for_one_of_its_checkpoints_is_refused_with_one_of_these(tmp_path: Path) -> None:
    folder = complete_checkpoint(tmp_path / "run" / "checkpoint-3")
    with pytest.raises(ValueError, match=re.escape(f"such as {folder}")):
        checkpoint_to_resume(str(tmp_path / "run"), "unused")


@pytest.mark.parametrize("missing", [[name] for name in NEEDED_TO_RESUME] + [list(NEEDED_TO_RESUME[1:])], ids=str)
def test_a_checkpoint_that_lacks_files_is_refused_with_each_of_them(tmp_path: Path, missing: list[str]) -> None:
    folder = complete_checkpoint(tmp_path / "checkpoint-3")
    for name in missing:
        os.remove(folder / name)
    with pytest.raises(ValueError, match=r"checkpoint-3.*another checkpoint.*from_pretrained") as caught:
        checkpoint_to_resume(str(folder), str(tmp_path))
    assert f"checkpoint-3: {', '.join(missing)} is missing" in str(caught.value)


@pytest.mark.parametrize("text", ["", '{"global_step": 3', "[1, 2]", '{"no_such_field": 1}', "null"])
def test_a_damaged_state_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "trainer_state.json").write_text(text)
    with pytest.raises(ValueError, match=r"trainer_state\.json is not a readable trainer state"):
        read_state(tmp_path)


def test_a_best_checkpoint_that_is_gone_is_forgotten_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gone, here = tmp_path / "checkpoint-1", tmp_path / "checkpoint-2"
    here.mkdir()
    for best in (gone, here):
        TrainerState(best_model_checkpoint=str(best), best_metric=0.5).save_to_json(str(here / "trainer_state.json"))
        state = read_state(here)
        assert state.best_model_checkpoint == (str(best) if best.is_dir() else None)
        assert state.best_metric == 0.5
    assert caplog.text.count("checkpoint-1") == 1


def test_last_checkpoint_is_the_folder_that_a_push_makes_and_else_the_newest(tmp_path: Path) -> None:
    newest = complete_checkpoint(tmp_path / "checkpoint-7")
    assert checkpoint_to_resume("last-checkpoint", str(tmp_path)) == newest
    pushed = complete_checkpoint(tmp_path / "last-checkpoint")
    assert checkpoint_to_resume("last-checkpoint", str(tmp_path)) == pushed


def test_last_checkpoint_where_there_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="resume_from_checkpoint=last-checkpoint, but there is no intact"):
        checkpoint_to_resume("last-checkpoint", str(tmp_path))


def test_a_checkpoint_of_several_processes_has_random_states_for_each(tmp_path: Path) -> None:
    folder = complete_checkpoint(tmp_path / "checkpoint-5")
    (folder / "rng_state.pth").rename(folder / "rng_state_0.pth")
    assert checkpoint_to_resume(str(folder), str(tmp_path)) == folder


def trained_checkpoint(folder: Path, **changes: Any) -> Path:
    quiet_trainer(folder, max_steps=2, save_strategy="steps", save_steps=2, **changes).train()
    return folder / "checkpoint-2"


def test_a_checkpoint_that_was_edited_and_is_complete_resumes_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = trained_checkpoint(tmp_path)
    model = VectorClassifier()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    write_weights(model, folder, max_shard_size=250)
    (folder / "notes.txt").touch()
    state = json.loads((folder / "trainer_state.json").read_text())
    (folder / "trainer_state.json").write_text(json.dumps({**state, "log_history": []}))
    again = quiet_trainer(tmp_path, max_steps=2)
    assert again.train(resume_from_checkpoint=True).global_step == 2
    told = [record.getMessage() for record in caplog.records if "edited" in record.getMessage()]
    assert len(told) == 1 and "trainer_state.json changed" in told[0] and "notes.txt added" in told[0]
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in again.model.state_dict().items())


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_code_in_a_checkpoint_does_not_run_and_is_refused_by_the_name_of_the_file(tmp_path: Path, name: str) -> None:
    folder, trace = trained_checkpoint(tmp_path), tmp_path / "was-run"
    torch.save({"state": Creates(trace)}, folder / name)
    (folder / "littrainer_manifest.json").unlink(missing_ok=True)
    with pytest.raises(ValueError, match=rf"{re.escape(name)} is refused: it names .*could run code"):
        quiet_trainer(tmp_path, max_steps=4).train(resume_from_checkpoint=str(folder))
    assert not trace.exists()


def test_pickled_training_arguments_are_never_loaded(tmp_path: Path) -> None:
    folder, trace = trained_checkpoint(tmp_path), tmp_path / "was-run"
    torch.save(Creates(trace), folder / "training_args.bin")
    (folder / "littrainer_manifest.json").unlink(missing_ok=True)
    quiet_trainer(tmp_path, max_steps=4).train(resume_from_checkpoint=str(folder))
    assert not trace.exists()


def changed_optimizer(folder: Path, change: Any) -> None:
    state = torch.load(folder / "optimizer.pt", weights_only=True)
    change(state)
    torch.save(state, folder / "optimizer.pt")
    (folder / "littrainer_manifest.json").unlink(missing_ok=True)


def test_an_optimizer_state_of_other_shapes_is_refused_with_the_name_of_the_parameter(tmp_path: Path) -> None:
    folder = trained_checkpoint(tmp_path)
    changed_optimizer(folder, lambda state: state["state"][0].update(exp_avg=torch.zeros(2, 2)))
    with pytest.raises(ValueError, match=r"optimizer\.pt does not fit .*exp_avg of inner\.weight .*\(2, 2\).*\(8, 6\)"):
        quiet_trainer(tmp_path, max_steps=4).train(resume_from_checkpoint=str(folder))


def test_the_state_of_processes_that_are_not_here_leaves_the_random_numbers_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_random_states(tmp_path)
    assert "has no rng_state.pth" in caplog.text


def test_a_state_without_its_step_is_an_error_and_no_fresh_start(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text('{"globl_step": 3, "epoch": 1.0}')
    with pytest.raises(ValueError, match="not a readable trainer state: global_step is missing"):
        read_state(tmp_path)


def test_a_field_that_is_not_known_is_passed_over_and_said_to_who_debugs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "trainer_state.json").write_text('{"global_step": 3, "of_a_later_release": [1], "epoch": 1.5}')
    with caplog.at_level(logging.DEBUG, "littrainer"):
        state = read_state(tmp_path)
    assert (state.global_step, state.epoch) == (3, 1.5)
    (record,) = [record for record in caplog.records if "of_a_later_release" in record.getMessage()]
    assert record.levelno == logging.DEBUG


def test_the_loss_scaling_goes_on_where_it_was(tmp_path: Path) -> None:
    saved, scaler = torch.amp.GradScaler("cpu", init_scale=8.0), torch.amp.GradScaler("cpu")
    torch.save(saved.state_dict(), tmp_path / "scaler.pt")
    load_scaler(scaler, tmp_path)
    assert scaler.state_dict() == saved.state_dict()
    torch.save({"scale": 1.0}, tmp_path / "scaler.pt")
    with pytest.raises(ValueError, match=r"scaler\.pt does not fit the loss scaling .* it lacks _growth_tracker"):
        load_scaler(scaler, tmp_path)


def test_a_training_without_loss_scaling_leaves_that_of_a_checkpoint(tmp_path: Path) -> None:
    torch.save("no state at all", tmp_path / "scaler.pt")
    load_scaler(None, tmp_path)


def stepped(optimizer_class: Any, *shapes: tuple[int, ...], groups: int = 1, **settings: Any) -> Any:
    """An optimizer over parameters of these shapes in each of its groups, after one step."""
    parameters = [[nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(groups)]
    optimizer = optimizer_class([{"params": group} for group in parameters], lr=0.1, **settings)
    for group in parameters:
        for parameter in group:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


OPTIMIZERS = [
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Adafactor, {}),
    (torch.optim.Rprop, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adamax, {}),
]


@pytest.mark.parametrize(("optimizer_class", "settings"), OPTIMIZERS)
def test_an_optimizer_takes_a_state_of_its_own_shapes(optimizer_class: Any, settings: Any) -> None:
    saved, optimizer = (stepped(optimizer_class, (2, 3), (4,), (), groups=2, **settings) for _ in range(2))
    assert optimizer_differences(optimizer, saved.state_dict()) == []


@pytest.mark.parametrize(("optimizer_class", "settings"), [OPTIMIZERS[0], OPTIMIZERS[1], OPTIMIZERS[6]])
def test_a_state_of_other_shapes_names_entry_parameter_and_group(optimizer_class: Any, settings: Any) -> None:
    saved, optimizer = (
        stepped(optimizer_class, (2, 3), (4,), **settings),
        stepped(optimizer_class, (2, 3), (5,), **settings),
    )
    names = {id(parameter): f"layer.{index}" for index, parameter in enumerate(optimizer.param_groups[0]["params"])}
    differences = optimizer_differences(optimizer, saved.state_dict(), names)
    assert differences
    assert all("of layer.1 (parameter group 0) is (4,) in the checkpoint" in text for text in differences)


def test_a_state_with_other_groups_says_how_many() -> None:
    saved, optimizer = stepped(torch.optim.SGD, (2,), groups=3), stepped(torch.optim.SGD, (2,), groups=2)
    (text,) = optimizer_differences(optimizer, saved.state_dict())
    assert text == "it has 3 parameter groups and the optimizer has 2"


def test_a_group_with_other_parameters_is_named_by_its_number() -> None:
    saved, optimizer = stepped(torch.optim.SGD, (2,), (2,)), stepped(torch.optim.SGD, (2,))
    (text,) = optimizer_differences(optimizer, saved.state_dict())
    assert text.startswith("parameter group 0 has 2 parameters in it and 1")


def test_a_long_list_of_differences_is_cut_off() -> None:
    shapes, others = [(2,)] * 40, [(3,)] * 40
    saved, optimizer = stepped(torch.optim.AdamW, *shapes), stepped(torch.optim.AdamW, *others)
    differences = optimizer_differences(optimizer, saved.state_dict())
    assert len(differences) < 10 and differences[-1] == "and 74 more"


@pytest.mark.parametrize("state", [[], {"state": {}}, {"state": {}, "param_groups": [3]}, 7])
def test_what_is_no_state_of_an_optimizer_is_said(state: Any) -> None:
    assert optimizer_differences(stepped(torch.optim.SGD, (2,)), state)


def test_an_optimizer_of_a_users_own_judges_its_state_itself() -> None:
    class Own(torch.optim.SGD):
        def load_state_dict(self, state_dict: Any) -> None:
            pass

    assert optimizer_differences(stepped(Own, (2,)), {"anything": 1}) == []


def test_an_optimizer_of_another_library_may_have_entries_of_other_shapes_but_no_other_groups() -> None:
    class LowRank(torch.optim.SGD):
        pass

    saved = stepped(LowRank, (2,), momentum=0.9).state_dict()
    saved["state"][0]["momentum_buffer"] = torch.zeros(1)
    assert optimizer_differences(stepped(LowRank, (2,), momentum=0.9), saved) == []
    assert optimizer_differences(stepped(LowRank, (2,), groups=2), saved) == [
        "it has 1 parameter groups and the optimizer has 2"
    ]


def test_a_schedule_for_other_groups_is_told_apart() -> None:
    def schedule(groups: int) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(stepped(torch.optim.SGD, (2,), groups=groups), lambda step: 1.0)

    assert schedule_differences(schedule(2), schedule(2).state_dict()) == []
    assert schedule_differences(schedule(2), schedule(3).state_dict()) == [
        "it has 3 base learning rates and the schedule has 2"
    ]
    assert schedule_differences(schedule(2), [1]) == ["it holds no schedule's state"]


def test_a_state_of_the_loss_scaling_has_to_be_complete_and_of_numbers() -> None:
    scaler = torch.amp.GradScaler("cpu")
    assert scaler_differences(scaler, scaler.state_dict()) == []
    assert scaler_differences(scaler, {**scaler.state_dict(), "scale": "x"}) == ["scale is no number"]
    assert "it lacks _growth_tracker, backoff_factor" in scaler_differences(scaler, {})[0]
    assert scaler_differences(scaler, None) == ["it holds no state of a loss scaling"]
