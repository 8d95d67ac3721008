from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import littrainer
from littrainer.arguments.fields import LOG_LEVELS
from littrainer.redirection.redirect import RedirectFinder
from littrainer.runtime.log_levels import apply_log_level
from tests.scenarios.trainers import quiet_arguments, quiet_trainer

SCRIPT = """
import logging, sys
logging.basicConfig(level=logging.INFO)
from littrainer import EarlyStoppingCallback, Trainer, TrainingArguments, TrainerCallback
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.models import VectorClassifier

class Draws(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        print("bars" if "ProgressCallback" in trainer.callback_handler.callback_list else "lines")

stopping = EarlyStoppingCallback()
arguments = TrainingArguments(
    sys.argv[1], use_cpu=True, report_to="none", save_strategy="no", logging_steps=1, max_steps=2,
    eval_strategy="steps", metric_for_best_model="loss", greater_is_better=False, log_level=sys.argv[2],
)
trainer = Trainer(
    VectorClassifier(), arguments, train_dataset=Rows(vector_rows(8)), eval_dataset=Rows(vector_rows(4)),
    callbacks=[stopping, Draws],
)
trainer.train()
trainer.evaluate()
trainer.predict(Rows(vector_rows(4)))
"""


@pytest.fixture(autouse=True)
def loggers() -> Iterator[dict[str, logging.Logger]]:
    """Yield the loggers, and restore their levels and handlers."""
    by_name = {name: logging.getLogger(name) for name in ("littrainer", "transformers")}
    originals = {name: (logger.level, logger.handlers[:]) for name, logger in by_name.items()}
    yield by_name
    for name, (level, handlers) in originals.items():
        by_name[name].setLevel(level)
        by_name[name].handlers[:] = handlers


def arguments(level: str = "passive", replica: str = "warning", should_log: bool = True) -> Any:
    numbers = {name: getattr(logging, name.upper(), logging.DEBUG) for name in LOG_LEVELS}
    numbers["passive"] = logging.getLogger("transformers").level
    return SimpleNamespace(
        log_level=level,
        log_level_replica=replica,
        should_log=should_log,
        get_process_log_level=lambda: numbers[level if should_log else replica],
    )


def output_of_script(folder: Path, level: str) -> tuple[str, str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), level],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return process.stdout, process.stderr


def test_a_default_script_gets_the_logs_and_a_single_warning(tmp_path: Path) -> None:
    out, err = output_of_script(tmp_path, "passive")
    lines = out.splitlines()
    assert lines[0] == "bars" and [line.split("'")[1] for line in lines[1:]] == [
        "loss", "eval_loss", "loss", "eval_loss", "train_runtime",
    ]  # fmt: skip
    # No progress bar and no messages of Lightning, although the root logger's level is INFO.
    assert len(err.splitlines()) == 1 and "load_best_model_at_end" in err


def test_a_level_applies_to_both_loggers_and_replicas_have_another_level(
    tmp_path: Path, loggers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    levels = {"log_level": "info", "log_level_replica": "error", "log_on_each_node": False}
    quiet_trainer(tmp_path, **levels)
    assert {logger.level for logger in loggers.values()} == {logging.INFO}
    # The first process of the second node.
    monkeypatch.setenv("RANK", "4")
    monkeypatch.setenv("LOCAL_RANK", "0")
    for on_each_node, expected in ((True, logging.INFO), (False, logging.ERROR)):
        apply_log_level(quiet_arguments(tmp_path, **{**levels, "log_on_each_node": on_each_node}))
        assert {logger.level for logger in loggers.values()} == {expected}


def test_passive_changes_no_level_and_littrainer_follows_transformers(loggers: dict[str, Any]) -> None:
    ours, theirs = loggers["littrainer"], loggers["transformers"]
    ours.setLevel(logging.NOTSET), theirs.setLevel(logging.WARNING)
    apply_log_level(arguments())
    assert ours.level == logging.WARNING
    theirs.setLevel(logging.INFO)
    apply_log_level(arguments())
    assert (ours.level, theirs.level) == (logging.INFO, logging.INFO)
    ours.setLevel(logging.ERROR)
    apply_log_level(arguments())
    assert (ours.level, theirs.level) == (logging.ERROR, logging.INFO)


def test_records_are_printed_once_although_the_script_has_a_handler(
    loggers: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    for _ in range(2):
        apply_log_level(arguments("info"))
    logger = logging.getLogger(f"{littrainer.__name__}.anything")
    logger.info("first")
    assert capsys.readouterr().err == "[littrainer] first\n"
    root.handlers.append(logging.StreamHandler(sys.stdout))
    logger.info("second")
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("second\n", "")


def test_under_the_redirection_the_logger_of_transformers_trainer_decides_at_any_time(
    loggers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", records.append)
    monkeypatch.setattr(sys, "meta_path", [RedirectFinder(), *sys.meta_path])
    loggers["transformers"].addHandler(handler)
    apply_log_level(arguments())
    logger = logging.getLogger("littrainer.anything")
    for level in (logging.WARNING, logging.INFO, logging.ERROR):
        loggers["transformers"].setLevel(level)
        logger.info("details at %d", level)
        logger.warning("warning at %d", level)
    messages = [record.getMessage() for record in records]
    assert messages == ["warning at 30", "details at 20", "warning at 20"]
    assert {record.name for record in records} == {"transformers.trainer"}


def test_a_line_under_the_redirection_names_the_package_whose_message_it_is(
    loggers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = io.StringIO()
    handler = logging.StreamHandler(page)
    handler.setFormatter(logging.Formatter("[transformers] %(message)s"))
    monkeypatch.setattr(loggers["transformers"], "handlers", [handler])
    monkeypatch.setattr(sys, "meta_path", [RedirectFinder(), *sys.meta_path])
    apply_log_level(arguments("warning"))
    logging.getLogger("littrainer.anything").warning("of the Trainer")
    logging.getLogger("transformers.models").warning("of a model")
    assert page.getvalue() == "[littrainer] of the Trainer\n[transformers] of a model\n"
