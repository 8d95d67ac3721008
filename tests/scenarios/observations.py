"""What there is to see of an argument: functions of a folder and arguments, each a run of some milliseconds."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from littrainer import Trainer, TrainerCallback, TrainingArguments
from littrainer.engine.lightning_trainer import lightning_keywords
from littrainer.evaluation.gathering import BatchCollection
from littrainer.optim.optimizers import Request, parameter_groups_with_projection
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, language_rows, token_rows, vector_rows
from tests.scenarios.models import BreakingClassifier, VectorClassifier, tiny_bert_classifier, tiny_gpt2
from tests.scenarios.trainers import quiet_arguments, quiet_trainer


def weights(folder: Path, **changes: Any) -> Any:
    """The weights after a training."""
    trainer = quiet_trainer(folder, **changes)
    trainer.train()
    return [weight.tolist() for weight in trainer.model.state_dict().values()]


def steps(folder: Path, **changes: Any) -> Any:
    """How many optimizer steps a training took."""
    trainer = quiet_trainer(folder, **changes)
    trainer.train()
    return trainer.state.global_step


class Observer(TrainerCallback):
    """Notes at which optimizer step and with which learning rate each event came."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(("rate", kwargs["lr_scheduler"].get_last_lr()))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.events.append(("log", state.global_step, sorted(logs)))

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(("evaluate", state.global_step))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(("save", state.global_step))


def events(folder: Path, model: Any = None, given: dict[str, Any] | None = None, **changes: Any) -> Any:
    """What a training logged, when it evaluated and saved, and its learning rates."""
    observer = Observer()
    trainer = quiet_trainer(folder, model, given={"callbacks": [observer], **(given or {})}, **changes)
    trainer.train()
    return observer.events


def logged_losses(folder: Path, **changes: Any) -> Any:
    """The losses a training logged, one of which is not a number."""
    trainer = quiet_trainer(
        folder, BreakingClassifier(broken=(1,)), logging_strategy="steps", logging_steps=1, **changes
    )
    trainer.train()
    return [str(entry.get("loss")) for entry in trainer.state.log_history]


def token_logs(folder: Path, **changes: Any) -> Any:
    """What a training on token ids logged about tokens."""
    rows = [
        {"input_ids": [*row["input_ids"], 0], "attention_mask": [1] * 4 + [0], "labels": 0}
        for row in token_rows(4, longest=4, shortest=4)
    ]
    trainer = quiet_trainer(
        folder,
        tiny_bert_classifier(),
        given={"train_dataset": Rows(rows)},
        logging_strategy="epoch",
        num_train_epochs=1,
        **changes,
    )
    trainer.train()
    return [entry.get("num_input_tokens_seen") for entry in trainer.state.log_history]


def files(folder: Path, **changes: Any) -> Any:
    """What a training leaves in its folder."""
    trainer = quiet_trainer(folder / "run", **changes)
    trainer.train()
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def threads_while_training(folder: Path, **changes: Any) -> Any:
    """Names of the threads of this process at the last optimizer step."""
    names = set()

    class Noting(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            names.update(thread.name for thread in threading.enumerate())

    quiet_trainer(folder, given={"callbacks": [Noting()]}, max_steps=2, **changes).train()
    return sorted(names)


def first_step_of_a_second_training(folder: Path, **changes: Any) -> Any:
    """The optimizer step at which a second call of `train()`, of another Trainer, begins."""
    saves = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    for _ in range(2):
        trainer = quiet_trainer(folder, **saves, **changes)
        trainer.train()
    return trainer.session.first_step


def writing_threads(folder: Path, **changes: Any) -> Any:
    """Names of the threads that wrote the files of checkpoints."""
    names = set()
    save = torch.save

    def noting(*arguments: Any, **keywords: Any) -> None:
        names.add(threading.current_thread().name)
        save(*arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", noting)
        quiet_trainer(folder, **changes).train()
    return names


class SigtermAfterTwoSteps(TrainerCallback):
    """Tells this process to end."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def files_after_a_signal(folder: Path, **changes: Any) -> Any:
    """What a training leaves in its folder that is told to end at its second step, if it hears it."""
    earlier = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        return files(folder, given={"callbacks": [SigtermAfterTwoSteps()]}, **changes)
    finally:
        signal.signal(signal.SIGTERM, earlier)


def folder_used(folder: Path, output_dir: str, **changes: Any) -> Any:
    """Where the model is saved."""
    Trainer(model=VectorClassifier(), args=TrainingArguments(str(folder / output_dir), use_cpu=True)).save_model()
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def training_loader(name: str) -> Callable[..., Any]:
    """An attribute of the training DataLoader."""

    def look(folder: Path, **changes: Any) -> Any:
        return str(getattr(quiet_trainer(folder, **changes).get_train_dataloader(), name))

    return look


def pinning_for_a_gpu(folder: Path, **changes: Any) -> Any:
    """Whether batches that go to a GPU are loaded into page-locked memory."""
    trainer = quiet_trainer(folder, **changes)
    trainer.args.dataloader_pin_memory = changes["dataloader_pin_memory"]
    trainer.args.device = torch.device("cuda")
    return trainer.get_train_dataloader().pin_memory


def order(folder: Path, rows: Any = None, **changes: Any) -> Any:
    """The first values of the training samples in the order in which they are drawn."""
    trainer = quiet_trainer(folder, given={"train_dataset": Rows(rows or vector_rows(10))}, **changes)
    loader = trainer.get_train_dataloader()
    loader.set_epoch(1)
    return [batch["x"][:, 0].tolist() for batch in loader]


def grouped_order(folder: Path, **changes: Any) -> Any:
    """The order of samples that name two columns of lengths."""
    from datasets import Dataset

    rows = [{"x": [float(i)] * 6, "labels": 0, "length": i, "other": 40 - i} for i in range(40)]
    trainer = quiet_trainer(
        folder,
        given={"train_dataset": Dataset.from_list(rows)},
        train_sampling_strategy="group_by_length",
        remove_unused_columns=False,
        **changes,
    )
    torch.manual_seed(0)
    return list(trainer._get_train_sampler())


def batches_by_length(folder: Path, **changes: Any) -> Any:
    """The shapes of batches of token ids."""
    given = {"train_dataset": Rows(language_rows(10)), "data_collator": pad_tokens}
    loader = quiet_trainer(folder, tiny_gpt2(), given=given, **changes).get_train_dataloader()
    return [tuple(batch["input_ids"].shape) for batch in loader]


def evaluation_batches(folder: Path, **changes: Any) -> Any:
    """How many batches an evaluation has."""
    return len(quiet_trainer(folder, **changes).get_eval_dataloader())


def handed_to_metrics(folder: Path, **changes: Any) -> Any:
    """What `compute_metrics` gets, at each call."""
    calls: list[Any] = []

    def metrics(prediction: Any, compute_result: bool = True) -> dict[str, float]:
        calls.append((type(prediction.predictions).__name__, prediction.inputs is None, prediction.losses is None))
        return {}

    quiet_trainer(folder, given={"compute_metrics": metrics}, **changes).evaluate()
    return calls


def moves_to_the_host(folder: Path, **changes: Any) -> Any:
    """How often an evaluation moves what it keeps to host memory."""
    moves: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchCollection, "move_to_host", lambda collection: moves.append(collection))
        quiet_trainer(folder, **changes).predict(Rows(vector_rows(9)))
    return len(moves)


def projected_weights(folder: Path, **changes: Any) -> Any:
    """How many weights a low-rank optimizer projects, and how many it does not."""
    args = quiet_arguments(folder, **changes)
    groups = parameter_groups_with_projection(Request(args.optim, args, {}, tiny_bert_classifier()))
    return [len(group["params"]) for group in groups]


def precision_on_a_gpu(folder: Path, **changes: Any) -> Any:
    """Lightning's precision on a machine with a GPU."""
    args = quiet_arguments(folder, **changes)
    args.device = torch.device("cuda")
    return lightning_keywords(args)["precision"]


def loss_over_unequal_batches(folder: Path, **changes: Any) -> Any:
    """The evaluation loss over batches of three and of one sample."""
    rows = vector_rows(4, seed=1)
    trainer = quiet_trainer(folder, **changes)
    loader = DataLoader(Rows(rows), batch_sampler=[[0, 1, 2], [3]])
    trainer.get_eval_dataloader = lambda *_: loader  # type: ignore[method-assign]
    return trainer.evaluate()["eval_loss"]


def predictions(folder: Path, **changes: Any) -> Any:
    """What a prediction returns."""
    output = quiet_trainer(folder, **changes).predict(Rows(vector_rows(5)))
    return str(output.predictions), str(output.label_ids)


def dtype_in_evaluation(folder: Path, **changes: Any) -> Any:
    """The number format in which the model runs when it is evaluated."""
    seen: list[Any] = []
    model = VectorClassifier()
    model.register_forward_pre_hook(lambda module, inputs: seen.append(module.head.weight.dtype))
    with contextlib.suppress(RuntimeError):
        # Float vectors do not go through a model in half precision; token ids would.
        quiet_trainer(folder, model, **changes).evaluate()
    return seen[0]


def columns_seen(folder: Path, **changes: Any) -> Any:
    """The columns that reach the collator."""
    rows = Rows([{**row, "extra": 1.0} for row in vector_rows(4)])
    return sorted(next(iter(quiet_trainer(folder, given={"train_dataset": rows}, **changes).get_train_dataloader())))


def checkpointing_of_layers(folder: Path, **changes: Any) -> Any:
    """What the model is asked about activation checkpointing."""
    model = tiny_gpt2()
    asked: list[Any] = []
    original = model.gradient_checkpointing_enable

    def enable(gradient_checkpointing_kwargs: Any = None, **keywords: Any) -> None:
        asked.append(gradient_checkpointing_kwargs)
        original(gradient_checkpointing_kwargs)

    model.gradient_checkpointing_enable = enable
    rows = Rows([{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in token_rows(2, longest=3)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quiet_trainer(folder, model, given={"train_dataset": rows}, max_steps=1, **changes).train()
    return asked


def language_weights(folder: Path, **changes: Any) -> Any:
    """The embeddings of a language model after a training."""
    torch.manual_seed(0)
    model = tiny_gpt2()
    rows = Rows([{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in token_rows(4, longest=3)])
    quiet_trainer(folder, model, given={"train_dataset": rows}, num_train_epochs=1, **changes).train()
    return model.transformer.wte.weight.tolist()


def cache_in_config(folder: Path, **changes: Any) -> Any:
    """`use_cache` of the model's configuration."""
    model = tiny_gpt2()
    quiet_trainer(folder, model, **changes)
    return model.config.use_cache


def best(folder: Path, **changes: Any) -> Any:
    """Which checkpoint counts as the best, and its metric."""
    accuracies = iter([0.1, 0.5, 0.3])
    trainer = quiet_trainer(
        folder / "run",
        given={"compute_metrics": lambda prediction: {"accuracy": next(accuracies)}},
        eval_strategy="epoch",
        save_strategy="epoch",
        **changes,
    )
    trainer.train()
    checkpoint = Path(trainer.state.best_model_checkpoint or "")
    return checkpoint.name, trainer.state.best_metric


def last_or_best_weights(folder: Path, **changes: Any) -> Any:
    """The weights in memory when training has ended, where the first evaluation was the best."""
    accuracies = iter([0.9, 0.5, 0.3])
    trainer = quiet_trainer(
        folder,
        given={"compute_metrics": lambda prediction: {"accuracy": next(accuracies)}},
        eval_strategy="epoch",
        save_strategy="epoch",
        metric_for_best_model="accuracy",
        **changes,
    )
    trainer.train()
    return trainer.model.head.weight.tolist()


class Rereading(Rows):
    """Rows that note which of them are read."""

    def __init__(self, rows: Any) -> None:
        super().__init__(rows)
        self.read: list[int] = []

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return super().__getitem__(index)


def rows_read_after_resume(folder: Path, **changes: Any) -> Any:
    """The rows that a training reads which resumes in the middle of an epoch."""
    quiet_trainer(folder, max_steps=1, save_strategy="steps", save_steps=1).train()
    dataset = Rereading(vector_rows(12))
    trainer = quiet_trainer(folder, given={"train_dataset": dataset}, max_steps=2, **changes)
    trainer.train(resume_from_checkpoint=True)
    return dataset.read


def patience_after_resume(folder: Path, **changes: Any) -> Any:
    """The patience of an early stopping that was 5 when the checkpoint was written and is 1 now."""
    from littrainer import EarlyStoppingCallback

    watching = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "metric_for_best_model": "loss",
        "load_best_model_at_end": True,
    }
    saving = {"save_strategy": "steps", "save_steps": 1, **watching}
    quiet_trainer(folder, given={"callbacks": [EarlyStoppingCallback(5)]}, max_steps=1, **saving).train()
    trainer = quiet_trainer(folder, given={"callbacks": [EarlyStoppingCallback(1)]}, max_steps=2, **saving, **changes)
    trainer.train(resume_from_checkpoint=True)
    (stopping,) = [c for c in trainer.callback_handler.callbacks if isinstance(c, EarlyStoppingCallback)]
    return stopping.early_stopping_patience


def printing_callback(folder: Path, **changes: Any) -> Any:
    """Which callback prints logs or shows bars."""
    return [type(callback).__name__ for callback in quiet_trainer(folder, **changes).callback_handler.callbacks]


def level_of_logger(folder: Path, **changes: Any) -> Any:
    """The level of our logger once a Trainer stands."""
    levels = {name: logging.getLogger(name).level for name in ("littrainer", "transformers")}
    try:
        quiet_trainer(folder, **changes)
        return logging.getLogger("littrainer").level
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def in_another_process(name: str) -> Callable[..., Any]:
    """What arguments say in the first process of the second node."""

    def look(folder: Path, **changes: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            for variable, value in {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}.items():
                patch.setenv(variable, value)
            found = getattr(quiet_arguments(folder, **changes), name)
            return found() if callable(found) else found

    return look


def level_in_a_replica(folder: Path, **changes: Any) -> Any:
    """The log level of a process that does not log."""
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
            patch.setenv(variable, value)
        return quiet_arguments(folder, **changes).get_process_log_level()


def device(folder: Path, **changes: Any) -> Any:
    """The device on a machine with a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        return quiet_arguments(folder, **changes)._find_device().type


def determinism(folder: Path, **changes: Any) -> Any:
    """Whether torch refuses algorithms that are not deterministic."""
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"):
            patch.setenv(variable, "")
        try:
            quiet_trainer(folder, **changes)
            return torch.are_deterministic_algorithms_enabled()
        finally:
            torch.use_deterministic_algorithms(False)


def metrics_about_memory(folder: Path, **changes: Any) -> Any:
    """Whether the metrics of a training tell about memory."""
    output = quiet_trainer(folder, max_steps=1, **changes).train()
    return any("mem" in name for name in output.metrics)


def stopped_at_overflow(folder: Path, **changes: Any) -> Any:
    """Whether a training stops at a number that is not finite."""
    model = VectorClassifier()
    model.norm.weight.data[2] = float("inf")
    trainer = quiet_trainer(folder, model, max_steps=1, **changes)
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            trainer.train()
        except ValueError:
            return True
    return False


def lightning_profiler(folder: Path, **changes: Any) -> Any:
    """The profiler of the `lightning.Trainer`."""
    trainer = quiet_trainer(folder, max_steps=1, **changes)
    trainer.train()
    lightning: Any = trainer.lightning_trainer
    return type(lightning.profiler).__name__


def kept_for_the_script(name: str) -> Callable[..., Any]:
    """An argument that only scripts read."""

    def look(folder: Path, **changes: Any) -> Any:
        return getattr(quiet_arguments(folder, **changes), name)

    return look
