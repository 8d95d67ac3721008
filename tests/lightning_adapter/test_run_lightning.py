from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.profilers import SimpleProfiler

from littrainer import Trainer
from littrainer.lightning_adapter.lightning_trainer import lightning_keywords
from tests.compat.processes import run_python
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import StepwiseTrainer, quiet_arguments, quiet_trainer


def test_keywords_follow_from_the_arguments_and_the_user_overrides_them(tmp_path: Path) -> None:
    args = quiet_arguments(tmp_path, gradient_accumulation_steps=5)
    keywords = lightning_keywords(args)
    assert (keywords["accelerator"], keywords["accumulate_grad_batches"], keywords["logger"]) == ("cpu", 5, False)
    args.lightning = {"profiler": "simple", "enable_model_summary": True}
    changed = lightning_keywords(args)
    assert changed == {**keywords, "profiler": "simple", "enable_model_summary": True}


@pytest.mark.parametrize(("kind", "through"), [(Trainer, "arguments"), (StepwiseTrainer, "trainer")])
def test_keywords_of_the_users_own_reach_lightning(tmp_path: Path, kind: type[Trainer], through: str) -> None:
    profiler = SimpleProfiler()
    further: dict[str, Any] = {"lightning": {"profiler": profiler, "detect_anomaly": True}}
    keywords = {"trainer_kwargs": further} if through == "trainer" else further
    trainer = quiet_trainer(tmp_path, kind=kind, **keywords, max_steps=2, eval_strategy="steps", eval_steps=2)
    trainer.train()
    lightning: Any = trainer.lightning_trainer
    assert lightning.profiler is profiler and lightning._detect_anomaly
    durations = {name.rpartition(".")[2]: times for name, times in profiler.recorded_durations.items()}
    counts = [len(durations[name]) for name in ("run_training_batch", "training_step", "validation_step")]
    assert counts == [2, 2, 3]


@pytest.mark.parametrize("kind", [Trainer, StepwiseTrainer])
def test_an_anomaly_ends_training_and_names_the_operation(tmp_path: Path, kind: type[Trainer]) -> None:
    class AnomalousModel(VectorClassifier):
        def logits(self, x: torch.Tensor) -> torch.Tensor:
            # A finite value with an infinite gradient, multiplied by zero.
            return self.head(torch.sqrt(self.inner(x) * 0)) + super().logits(x)

    trainer = quiet_trainer(tmp_path, AnomalousModel(), kind=kind, max_steps=1, lightning={"detect_anomaly": True})
    with (
        pytest.warns(UserWarning, match="Error detected in MulBackward0"),
        pytest.raises(RuntimeError, match="'MulBackward0' returned nan values"),
    ):
        trainer.train()
    assert not torch.is_anomaly_enabled()


def test_lightning_callbacks_are_accepted_as_keyword(tmp_path: Path) -> None:
    class Counter(pl.Callback):
        steps = 0

        def on_train_batch_end(self, *_: Any) -> None:
            self.steps += 1

    callback, by_keyword = Counter(), Counter()
    options = {"callbacks": [callback], "lightning": {"callbacks": by_keyword}}
    quiet_trainer(tmp_path, trainer_kwargs=options, max_steps=2).train()
    assert (callback.steps, by_keyword.steps) == (2, 2)


@pytest.mark.parametrize("kind", [Trainer, StepwiseTrainer])
def test_the_model_is_not_moved_or_replaced(tmp_path: Path, kind: type[Trainer]) -> None:
    model = VectorClassifier()
    parameters = list(model.parameters())
    moves: list[Any] = []
    trainer = quiet_trainer(tmp_path, model, kind=kind, max_steps=2)
    model.cpu = lambda: moves.append("cpu")  # type: ignore[method-assign]
    trainer.train()
    trainer.evaluate()
    assert moves == []
    assert list(map(id, model.parameters())) == list(map(id, parameters))
    assert trainer.model is model
    assert trainer.lightning_module is None and trainer.accelerator.module is None


EVERYTHING = """
import sys
sys.path.insert(0, {root!r})
from tests.scenarios.data import Rows, Stream, vector_rows
from tests.scenarios.trainers import StepwiseTrainer, Trainer, quiet_trainer
for kind in (Trainer, StepwiseTrainer):
    steps = dict(max_steps=2, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1)
    trainer = quiet_trainer("out", kind=kind, **steps)
    trainer.callback_handler.callbacks.pop()
    trainer.train()
    trainer.evaluate()
    trainer.predict(Rows(vector_rows(4)))
    trainer.train(resume_from_checkpoint="out/checkpoint-1")
"""


def test_a_run_writes_nothing_of_lightnings_to_the_terminal_or_the_disk(tmp_path: Path) -> None:
    root = str(Path(__file__).resolve().parents[2])
    (tmp_path / "script.py").write_text(EVERYTHING.format(root=root))
    done = run_python("script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr) == ("", "")
    assert {path.name for path in tmp_path.iterdir()} == {"script.py", "out"}


@pytest.mark.parametrize("method", ["train", "evaluate"])
def test_warnings_of_the_users_model_are_shown(tmp_path: Path, method: str) -> None:
    class WarningModel(VectorClassifier):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            warnings.warn("the model's own warning", stacklevel=1)
            return super().forward(x, labels)

    trainer = quiet_trainer(tmp_path, WarningModel(), max_steps=1)
    with pytest.warns(UserWarning, match="the model's own warning"):
        getattr(trainer, method)()


@pytest.mark.parametrize(
    ("further", "kind", "message"),
    [
        ({"profilr": "simple"}, TypeError, r"'profilr': .* no keyword of lightning.Trainer .did you mean 'profiler'"),
        ({"profiler": "nonsense"}, ValueError, r"refuses a keyword, one given as `lightning` or.*: .*profiler"),
    ],
)
def test_a_keyword_that_lightning_refuses_is_named(
    tmp_path: Path, further: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        quiet_trainer(tmp_path, lightning=further, max_steps=1).train()
