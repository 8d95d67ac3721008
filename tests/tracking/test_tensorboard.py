import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from littrainer import TrainerCallback, TrainingArguments
from littrainer.tracking import TensorBoardCallback
from tests.scenarios.models import tiny_bert_classifier
from tests.scenarios.trainers import quiet_trainer
from tests.tracking.both_sides import SIDES, same_on_both_machines, trainer_of


def read_events(folder: Path) -> dict[str, Any]:
    """Scalars as (step, value) pairs and texts, by tag, over all event files in a folder."""
    scalars: dict[str, list[tuple[int, float]]] = {}
    texts: dict[str, str] = {}
    # A file's name ends in a number that counts the files of the process: the tenth comes after the ninth.
    for path in sorted(folder.glob("events.*"), key=lambda path: int(path.suffix.removeprefix("."))):
        events = EventAccumulator(str(path)).Reload()
        for tag in events.Tags()["scalars"]:
            scalars.setdefault(tag, []).extend((event.step, event.value) for event in events.Scalars(tag))
        for tag in events.Tags()["tensors"]:
            texts[tag] = events.Tensors(tag)[0].tensor_proto.string_val[0].decode()
    return {"scalars": scalars, "texts": texts}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each side left behind: training, then an evaluation."""
    found = {}
    for side in SIDES:
        folder = tmp_path_factory.mktemp(side)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TENSORBOARD_LOGGING_DIR", str(folder / "events"))
            trainer = trainer_of(side, folder / "out", report_to="tensorboard")
            trainer.train()
            trainer.evaluate()
        found[side] = read_events(folder / "events")
    return found


def test_tags_steps_and_values_are_those_of_transformers(both: dict[str, dict[str, Any]]) -> None:
    theirs, ours = (both[side]["scalars"] for side in SIDES)
    assert list(theirs) == list(ours)
    assert {"train/loss", "train/grad_norm", "eval/accuracy", "train/total_flos", "train/train_loss"} <= ours.keys()
    assert same_on_both_machines(theirs) == same_on_both_machines(ours)
    assert [step for step, _ in ours["eval/loss"]] == [3, 6, 6]


def test_arguments_and_model_config_are_the_texts_of_transformers(both: dict[str, dict[str, Any]]) -> None:
    theirs, ours = (both[side]["texts"] for side in SIDES)
    tags = ["args/text_summary", "model_config/text_summary"]
    assert [tag for tag in theirs if tag in tags] == tags
    assert theirs["model_config/text_summary"] == ours["model_config/text_summary"]
    shown = json.loads(ours["args/text_summary"])
    expected = json.loads(theirs["args/text_summary"])
    assert {name: shown[name] for name in expected if name != "output_dir"} == {
        name: value for name, value in expected.items() if name != "output_dir"
    }


def test_the_folder_is_that_of_logging_dir_before_the_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "environment"))
    quiet_trainer(tmp_path, report_to="tensorboard", max_steps=1, logging_dir=str(tmp_path / "argument")).train()
    assert list((tmp_path / "argument").glob("events.*"))
    assert not (tmp_path / "environment").exists()


def test_a_writer_that_is_given_is_written_with(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    callback = TensorBoardCallback(SummaryWriter(str(tmp_path / "mine")))
    assert callback.lightning_loggers() == []
    quiet_trainer(
        tmp_path, max_steps=2, logging_strategy="steps", logging_steps=1, given={"callbacks": [callback]}
    ).train()
    assert [step for step, _ in read_events(tmp_path / "mine")["scalars"]["train/loss"]] == [1, 2]
    assert callback.tb_writer is None


class LogsEverything(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].trainer.log(
            {"tensor": torch.tensor(1.5), "note": "text", "gap": float("nan"), "rise": float("inf"), "shapes": [1, 2]}
        )


def test_tensors_are_numbers_text_is_text_and_what_is_neither_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_bert_classifier()
    trainer = trainer_of(
        "littrainer",
        tmp_path,
        model=model,
        report_to="tensorboard",
        logging_dir=str(tmp_path / "events"),
        max_steps=2,
        eval_strategy="no",
        callbacks=[LogsEverything()],
    )
    object.__setattr__(model, "trainer", trainer)
    with caplog.at_level(logging.WARNING, "littrainer"):
        trainer.train()
    scalars = read_events(tmp_path / "events")["scalars"]
    assert scalars["train/tensor"] == [(1, 1.5), (2, 1.5)]
    assert [str(value) for _, value in scalars["train/gap"]] == ["nan", "nan"]
    assert [value for _, value in scalars["train/rise"]] == [float("inf")] * 2
    assert read_events(tmp_path / "events")["texts"]["train/note/text_summary"] == "text"
    told = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(told) == 1
    assert "'train/shapes'" in told[0]


def test_a_writer_that_fails_is_closed_and_the_next_training_has_another(tmp_path: Path) -> None:
    class Breaks(TensorBoardCallback):
        breaks = True

        def write_logs(self, *args: Any, **kwargs: Any) -> None:
            super().write_logs(*args, **kwargs)
            if self.breaks:
                self.first = self.tb_writer
                raise OSError("the disk is full")

    callback = Breaks()
    callback.logging_dir = str(tmp_path / "events")
    trainer = quiet_trainer(
        tmp_path, max_steps=2, logging_strategy="steps", logging_steps=1, given={"callbacks": [callback]}
    )
    trainer.train()
    assert callback.tb_writer is None
    assert callback.first.file_writer is None
    callback.breaks = False
    trainer.train()
    assert [step for step, _ in read_events(tmp_path / "events")["scalars"]["train/loss"]] == [1, 1, 2]


def test_secrets_in_arguments_of_a_subclass_are_not_written(tmp_path: Path) -> None:
    class KeyedArguments(TrainingArguments):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

        def to_dict(self) -> dict[str, Any]:
            return {**super().to_dict(), "service_api_key": "very secret"}

    trainer = quiet_trainer(tmp_path, report_to="tensorboard", max_steps=1, logging_dir=str(tmp_path / "events"))
    trainer.args.__class__ = KeyedArguments
    trainer.train()
    written = b"".join(path.read_bytes() for path in (tmp_path / "events").iterdir())
    assert b"<SERVICE_API_KEY>" in written
    assert b"very secret" not in written
