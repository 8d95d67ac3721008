from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from littrainer.callbacks.state import TrainerState
from littrainer.checkpoint.reader import NEEDED_TO_RESUME, checkpoint_to_resume, load_weights, read_state, read_weights
from tests.scenarios.models import VectorClassifier, tiny_bert_for_masked_tokens, tiny_gpt2
from tests.scenarios.trainers import quiet_trainer


def complete_checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in NEEDED_TO_RESUME:
        (folder / name).touch()
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
    with pytest.raises(ValueError, match=f"no checkpoint-<step>.*{name}.*[Ss]tart without"):
        checkpoint_to_resume(True, str(tmp_path / name))


def test_a_checkpoint_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no checkpoint folder .*checkpoint-8"):
        checkpoint_to_resume(str(tmp_path / "checkpoint-8"), str(tmp_path))


@pytest.mark.parametrize("missing", [[name] for name in NEEDED_TO_RESUME] + [list(NEEDED_TO_RESUME[1:])], ids=str)
def test_a_checkpoint_that_lacks_files_is_refused_with_each_of_them(tmp_path: Path, missing: list[str]) -> None:
    folder = complete_checkpoint(tmp_path / "checkpoint-3")
    for name in missing:
        os.remove(folder / name)
    with pytest.raises(ValueError, match=r"checkpoint-3.*another checkpoint.*from_pretrained") as caught:
        checkpoint_to_resume(True, str(tmp_path))
    assert f"exactly: {', '.join(missing)} is missing" in str(caught.value)


def test_resuming_from_a_saved_model_only_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    quiet_trainer(tmp_path, save_only_model=True, **settings).train()
    trainer = quiet_trainer(tmp_path, **settings)
    weights = trainer.model.head.weight.clone()
    with pytest.raises(ValueError, match=r"optimizer\.pt, scheduler\.pt, rng_state\.pth is missing"):
        trainer.train(resume_from_checkpoint=True)
    assert torch.equal(trainer.model.head.weight, weights) and not trainer.is_in_train


WEIGHTS = {"a": torch.arange(3.0), "b.c": torch.ones(2, 2, dtype=torch.bfloat16)}


def write_one_file(folder: Path) -> None:
    save_file(WEIGHTS, folder / "model.safetensors")


def write_shards(folder: Path) -> None:
    files = {"a": "model-00001-of-00002.safetensors", "b.c": "model-00002-of-00002.safetensors"}
    for name, file in files.items():
        save_file({name: WEIGHTS[name]}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def write_with_torch(folder: Path) -> None:
    torch.save(WEIGHTS, folder / "pytorch_model.bin")


@pytest.mark.parametrize("write", [write_one_file, write_shards, write_with_torch])
def test_weights_are_read_from_each_format(tmp_path: Path, write: object) -> None:
    assert callable(write)
    write(tmp_path)
    weights = read_weights(tmp_path)
    assert set(weights) == set(WEIGHTS)
    for name, tensor in WEIGHTS.items():
        assert weights[name].dtype == tensor.dtype and torch.equal(weights[name], tensor)


def test_shards_that_transformers_wrote_are_read(tmp_path: Path) -> None:
    model = tiny_gpt2(tie_word_embeddings=False)
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    weights = read_weights(tmp_path)
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())


def test_a_folder_without_weights_is_refused_with_the_names_that_were_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.safetensors, model\.safetensors\.index\.json or pytorch_model\.bin"):
        read_weights(tmp_path)


def test_weights_that_do_not_match_the_model_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = VectorClassifier().state_dict()
    state["surplus"] = state.pop("head.bias")
    save_file(state, tmp_path / "model.safetensors")
    model = VectorClassifier()
    load_weights(model, tmp_path)
    assert torch.equal(model.head.weight, state["head.weight"])
    assert "no weights for head.bias." in caplog.text and "does not have: surplus." in caplog.text


@pytest.mark.parametrize("build", [tiny_gpt2, tiny_bert_for_masked_tokens])
def test_tied_weights_are_loaded_without_a_warning_and_stay_tied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, build: object
) -> None:
    assert callable(build)
    saved, model = build(), build()
    saved.save_pretrained(tmp_path)
    load_weights(model, tmp_path)
    assert caplog.records == []
    assert all(torch.equal(tensor, saved.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_weights_of_another_shape_are_an_error_that_names_them(tmp_path: Path) -> None:
    save_file(VectorClassifier(hidden=5).state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match=r"inner\.weight"):
        load_weights(VectorClassifier(), tmp_path)


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


def test_a_linear_layer_is_no_pretrained_model_and_loads_all_the_same(tmp_path: Path) -> None:
    saved, model = nn.Linear(2, 2), nn.Linear(2, 2)
    save_file(saved.state_dict(), tmp_path / "model.safetensors")
    load_weights(model, tmp_path)
    assert torch.equal(model.weight, saved.weight)
