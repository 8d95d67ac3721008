"""A training goes on from the last checkpoint that lies on the Hub, with the numbers it would have had."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from littrainer import Trainer
from tests.hub.runs import AtStep, pushing_trainer
from tests.hub.server import GOOD_TOKEN, Hub


def weights(trainer: Trainer) -> dict[str, list[float]]:
    return {name: tensor.flatten().tolist() for name, tensor in trainer.model.state_dict().items()}


def test_a_download_of_the_repository_is_an_output_folder_to_resume_in(hub: Hub, tmp_path: Path) -> None:
    from huggingface_hub import snapshot_download

    whole = pushing_trainer(tmp_path / "whole", push_to_hub=False)
    whole.train()

    class Stopped(Exception):
        pass

    def stop() -> None:
        raise Stopped

    first = pushing_trainer(tmp_path / "first", hub_strategy="checkpoint", given={"callbacks": [AtStep(5, stop)]})
    with pytest.raises(Stopped):
        first.train()
    first.push_in_progress.wait_until_done()
    shutil.rmtree(tmp_path / "first")

    folder = tmp_path / "second" / "run"
    snapshot_download("someone/run", local_dir=folder, token=GOOD_TOKEN)
    second = pushing_trainer(tmp_path / "second", hub_strategy="checkpoint")
    second.train(resume_from_checkpoint="last-checkpoint")
    assert second.state.global_step == 6
    assert weights(second) == weights(whole)
    assert hub.repository().messages()[-1] == "Training in progress, step 6, checkpoint"
