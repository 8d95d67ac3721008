"""Output of a script under five logging configurations: `python -m tests.compat.console SIDE FOLDER`.

SIDE is "transformers" or "littrainer run", with the redirection. A forked process per configuration writes its stdout
and stderr to `FOLDER/CONFIGURATION.out` and `.err`.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

THEIRS, OURS = "transformers", "littrainer run"
TRAINER = "transformers.trainer"
NAMED = "%(levelname)s:%(name)s:%(message)s"


def _root_at_info() -> None:
    logging.basicConfig(level=logging.INFO)


def _verbosity_info() -> None:
    import transformers

    transformers.logging.set_verbosity_info()


def _explicit_format() -> None:
    import transformers

    _verbosity_info()
    transformers.logging.enable_explicit_format()


def _propagate_to_the_root() -> None:
    import transformers

    logging.basicConfig(level=logging.INFO, format=NAMED, stream=sys.stdout)
    _verbosity_info()
    transformers.logging.disable_default_handler()
    transformers.logging.enable_propagation()


def _nothing() -> None:
    """Keep the defaults."""


# Name -> configuration function, and `log_level`.
CONFIGURATIONS: dict[str, tuple[Callable[[], None], str]] = {
    "nothing": (_nothing, "passive"),
    "verbosity_info": (_verbosity_info, "passive"),
    "explicit_format": (_explicit_format, "passive"),
    "propagated_to_the_root": (_propagate_to_the_root, "passive"),
    "log_level_debug": (_root_at_info, "debug"),
}


def script(configure: Callable[[], None], log_level: str) -> None:
    """Train, resume, evaluate and save."""
    configure()
    from transformers import Trainer, TrainingArguments

    from tests.scenarios.collators import pad_tokens
    from tests.scenarios.data import Rows, token_rows
    from tests.scenarios.models import tiny_bert_classifier

    def trainer(**changes: Any) -> Any:
        arguments: dict[str, Any] = {
            "output_dir": "out",
            "num_train_epochs": 2,
            "logging_steps": 2,
            "save_steps": 2,
            "eval_steps": 2,
            "eval_strategy": "steps",
            "learning_rate": 0.01,
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
            "log_level": log_level,
        }
        args = TrainingArguments(**{**arguments, **changes})
        data = {"train_dataset": Rows(token_rows(16)), "eval_dataset": Rows(token_rows(6, seed=1))}
        return Trainer(tiny_bert_classifier(), args, pad_tokens, **data)

    torch.manual_seed(5)
    trainer(save_total_limit=1, load_best_model_at_end=True).train()
    resumed = trainer(output_dir="again")
    resumed.train()
    resumed.train(resume_from_checkpoint="again/checkpoint-2")
    resumed.evaluate()
    resumed.predict(Rows(token_rows(4, seed=2)))
    resumed.save_model("model")


def main(side: str, folder: Path) -> None:
    torch.set_num_threads(1)
    if side == OURS:
        from littrainer.redirection.redirect import install

        install()
    import transformers

    _ = transformers.Trainer
    if side == OURS:
        from littrainer.lightning_adapter.run_lightning import import_lightning

        # Lightning adds handlers to its loggers before a script configures logging.
        import_lightning()
    for name, configuration in CONFIGURATIONS.items():
        run_folder = folder / f"{name}.run"
        run_folder.mkdir(parents=True)
        child = os.fork()
        if child == 0:
            for number, suffix in ((1, "out"), (2, "err")):
                os.dup2(os.open(folder / f"{name}.{suffix}", os.O_WRONLY | os.O_CREAT), number)
            os.chdir(run_folder)
            try:
                script(*configuration)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            sys.stdout.flush()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, (folder / f"{name}.err").read_text()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).resolve())
