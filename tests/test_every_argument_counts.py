"""Every argument that is not refused counts: for each there is something to see that differs between two values.

`EFFECTS` holds, for each argument, two values and what to look at. What cannot be seen in a short run on a CPU is in
`SEEN_ELSEWHERE`, with the test that fails when the argument is ignored; what only matters together with an argument
that is refused so far is in `ONLY_WITH`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from littrainer import Trainer, TrainerCallback, TrainingArguments
from littrainer.arguments.support import NOT_YET_SUPPORTED
from littrainer.engine import lightning_keywords
from littrainer.evaluation.gathering import BatchCollection
from littrainer.optim.entries import Request
from littrainer.optim.low_rank import parameter_groups_with_projection
from tests.scenarios.data import Rows, token_rows, vector_rows
from tests.scenarios.models import BreakingClassifier, VectorClassifier, tiny_bert_classifier, tiny_gpt2
from tests.scenarios.trainers import quiet_arguments, quiet_trainer

ROOT = Path(__file__).parent


class Effect(NamedTuple):
    """Where an argument shows.

    Parameters:
        first, second: two of its values.
        look: takes a folder and arguments, returns what differs between the two.
        beside: further arguments, the same for both values.
    """

    first: Any
    second: Any
    look: Callable[..., Any]
    beside: dict[str, Any] = {}  # noqa: RUF012


# ---- What there is to see --------------------------------------------------------------------------------------------


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
    trainer.args._device = torch.device("cuda")
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
    args._device = torch.device("cuda")
    return lightning_keywords(args)["precision"]


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
    """Whether a training stops at a loss that is not a number."""
    trainer = quiet_trainer(folder, BreakingClassifier(broken=(0,)), max_steps=1, **changes)
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


BY_STEPS = {"logging_strategy": "steps", "logging_steps": 1}
EVALUATING = {"eval_strategy": "steps", "eval_steps": 2}
SAVING = {"save_strategy": "steps", "save_steps": 2}
ADAM = {"optim": "adamw_torch"}
WORKERS = {"dataloader_num_workers": 1}

EFFECTS: dict[str, Effect] = {
    # Schedule and length of the run
    "output_dir": Effect("one", "two", folder_used),
    "per_device_train_batch_size": Effect(2, 4, steps),
    "num_train_epochs": Effect(1, 1.5, steps),
    "max_steps": Effect(1, 2, steps),
    "learning_rate": Effect(1e-3, 1e-2, weights),
    "lr_scheduler_type": Effect("linear", "constant", events),
    "lr_scheduler_kwargs": Effect(None, {"num_cycles": 2.0}, events, {"lr_scheduler_type": "cosine"}),
    "warmup_steps": Effect(0, 0.5, events),
    "warmup_ratio": Effect(None, 0.5, events),
    # Optimizer
    "optim": Effect("adamw_torch", "sgd", weights),
    "optim_args": Effect(None, "momentum=0.9", weights, {"optim": "sgd"}),
    "optim_target_modules": Effect("all-linear", ["query"], projected_weights, {"optim": "galore_adamw"}),
    "weight_decay": Effect(0.0, 0.5, weights),
    "adam_beta1": Effect(0.9, 0.1, weights, ADAM),
    "adam_beta2": Effect(0.999, 0.1, weights, ADAM),
    "adam_epsilon": Effect(1e-8, 1.0, weights, ADAM),
    "gradient_accumulation_steps": Effect(1, 2, steps),
    "max_grad_norm": Effect(0.0, 0.01, weights, {"optim": "sgd"}),
    "label_smoothing_factor": Effect(0.0, 0.5, weights),
    # Number formats and memory
    "bf16": Effect(False, True, weights),
    "fp16": Effect(False, True, precision_on_a_gpu),
    "bf16_full_eval": Effect(False, True, dtype_in_evaluation),
    "fp16_full_eval": Effect(False, True, dtype_in_evaluation),
    "activation_checkpointing": Effect(False, True, checkpointing_of_layers),
    "activation_checkpointing_kwargs": Effect(
        None, {"use_reentrant": True}, checkpointing_of_layers, {"activation_checkpointing": True}
    ),
    "gradient_checkpointing": Effect(False, True, checkpointing_of_layers),
    "gradient_checkpointing_kwargs": Effect(
        None, {"use_reentrant": True}, checkpointing_of_layers, {"gradient_checkpointing": True}
    ),
    "use_cache": Effect(False, True, cache_in_config),
    "neftune_noise_alpha": Effect(None, 10.0, language_weights),
    # Logs
    "logging_strategy": Effect("steps", "epoch", events, {"logging_steps": 2}),
    "logging_steps": Effect(2, 3, events, {"logging_strategy": "steps"}),
    "logging_first_step": Effect(False, True, events, {"logging_strategy": "steps", "logging_steps": 5}),
    "log_on_each_node": Effect(True, False, in_another_process("should_log")),
    "logging_nan_inf_filter": Effect(True, False, logged_losses),
    "include_num_input_tokens_seen": Effect("all", "non_padding", token_logs),
    "log_level": Effect("info", "error", level_of_logger),
    "log_level_replica": Effect("info", "error", level_in_a_replica),
    "disable_tqdm": Effect(False, True, printing_callback),
    # Evaluation
    "eval_strategy": Effect("no", "epoch", events),
    "eval_steps": Effect(2, 3, events, {"eval_strategy": "steps"}),
    "eval_delay": Effect(0, 3, events, EVALUATING),
    "per_device_eval_batch_size": Effect(2, 7, evaluation_batches),
    "prediction_loss_only": Effect(False, True, predictions),
    "eval_on_start": Effect(False, True, events, EVALUATING),
    "eval_do_concat_batches": Effect(True, False, handed_to_metrics),
    "eval_accumulation_steps": Effect(1, 2, moves_to_the_host),
    "include_for_metrics": Effect([], ["loss"], handed_to_metrics),
    "batch_eval_metrics": Effect(False, True, handed_to_metrics),
    # Checkpoints
    "save_only_model": Effect(False, True, files, SAVING),
    "save_strategy": Effect("no", "epoch", files),
    "save_steps": Effect(2, 3, files, {"save_strategy": "steps"}),
    "save_on_each_node": Effect(False, True, in_another_process("should_save")),
    "save_total_limit": Effect(None, 1, files, SAVING),
    "load_best_model_at_end": Effect(False, True, last_or_best_weights),
    "metric_for_best_model": Effect("loss", "accuracy", best),
    "greater_is_better": Effect(True, False, best, {"metric_for_best_model": "accuracy"}),
    "ignore_data_skip": Effect(False, True, rows_read_after_resume),
    "restore_callback_states_from_checkpoint": Effect(False, True, patience_after_resume),
    # Seeds and device
    "full_determinism": Effect(False, True, determinism),
    "seed": Effect(1, 2, order),
    "data_seed": Effect(1, 2, order),
    "use_cpu": Effect(False, True, device),
    "accelerator_config": Effect(None, {"use_seedable_sampler": False}, order),
    # Data
    "dataloader_drop_last": Effect(False, True, steps),
    "dataloader_num_workers": Effect(0, 1, training_loader("num_workers")),
    "dataloader_pin_memory": Effect(False, True, pinning_for_a_gpu),
    "dataloader_persistent_workers": Effect(False, True, training_loader("persistent_workers"), WORKERS),
    "dataloader_prefetch_factor": Effect(None, 4, training_loader("prefetch_factor"), WORKERS),
    "dataloader_multiprocessing_context": Effect("fork", "spawn", training_loader("multiprocessing_context"), WORKERS),
    "dataloader_in_order": Effect(True, False, training_loader("in_order"), WORKERS),
    "remove_unused_columns": Effect(True, False, columns_seen),
    "label_names": Effect(None, ["x"], predictions),
    "train_sampling_strategy": Effect("random", "sequential", order),
    "length_column_name": Effect("length", "other", grouped_order),
    # Debugging, scripts, Lightning
    "debug": Effect("", "underflow_overflow", stopped_at_overflow),
    "skip_memory_metrics": Effect(True, False, metrics_about_memory),
    "lightning": Effect(None, {"profiler": "simple"}, lightning_profiler),
    **{name: Effect(False, True, kept_for_the_script(name)) for name in ("do_train", "do_eval", "do_predict")},
    "resume_from_checkpoint": Effect(None, "checkpoint-1", kept_for_the_script("resume_from_checkpoint")),
    "local_rank": Effect(-1, 0, kept_for_the_script("local_rank")),
    "ddp_timeout": Effect(1800, 60, kept_for_the_script("ddp_timeout_delta")),
}

# Argument -> the file and the test that fails when it is ignored.
LIGER = ("training/test_fused_kernels.py", "test_the_kernels_that_the_config_names_are_put_into_the_model")
COMPILER = ("test_model_wrapping.py", "test_naming_a_backend_or_a_mode_compiles_with_them")
SEEN_ELSEWHERE: dict[str, tuple[str, str]] = {
    "tf32": ("arguments/test_hardware.py", "test_the_switch_for_tf32_is_set_as_asked_and_by_compilation"),
    "torch_compile": (
        "test_model_wrapping.py",
        "test_steps_run_the_compiled_model_and_the_users_module_is_what_is_saved",
    ),
    "torch_compile_backend": COMPILER,
    "torch_compile_mode": COMPILER,
    "use_liger_kernel": LIGER,
    "liger_kernel_config": LIGER,
    "torch_empty_cache_steps": (
        "training/test_device_memory.py",
        "test_the_cache_is_emptied_in_every_so_many_optimizer_steps",
    ),
    "auto_find_batch_size": (
        "training/test_batch_size_search.py",
        "test_the_size_shrinks_by_a_tenth_until_it_fits_and_is_told",
    ),
}

# Argument -> the wish, refused so far, without which it has no meaning.
TRACKING: dict[str, Any] = {"report_to": "all"}
PUSHING: dict[str, Any] = {"push_to_hub": True}
SEVERAL_PROCESSES: dict[str, Any] = {}
TRACKIO = ("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id")
DDP = ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend")
ONLY_WITH: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("report_to", "run_name", "project", "logging_dir", *TRACKIO),
        TRACKING,
    ),
    **dict.fromkeys(
        ("hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision"), PUSHING
    ),
    **dict.fromkeys(
        ("average_tokens_across_devices", "eval_use_gather_object", *DDP),
        SEVERAL_PROCESSES,
    ),
}


@pytest.mark.parametrize("name", EFFECTS)
@pytest.mark.filterwarnings("ignore")
def test_two_values_of_an_argument_differ_in_what_there_is_to_see(tmp_path: Path, name: str) -> None:
    first, second, look, beside = EFFECTS[name]
    seen = []
    for number, value in enumerate((first, second)):
        folder = tmp_path / str(number)
        folder.mkdir()
        seen.append(look(folder, **{**beside, name: value}))
    assert seen[0] != seen[1]


@pytest.mark.parametrize("name", ["learning_rate", "logging_steps", "seed", "save_steps", "eval_do_concat_batches"])
def test_equal_values_look_equal(tmp_path: Path, name: str) -> None:
    first, _, look, beside = EFFECTS[name]
    seen = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        seen.append(look(folder, **{**beside, name: first}))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("name", SEEN_ELSEWHERE)
def test_the_test_that_sees_an_argument_is_there_and_names_it(name: str) -> None:
    path, function = SEEN_ELSEWHERE[name]
    text = (ROOT / path).read_text(encoding="utf-8")
    assert f"def {function}(" in text and name in text


@pytest.mark.parametrize("name", ONLY_WITH)
def test_an_argument_without_meaning_of_its_own_belongs_to_a_wish_that_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    wish = ONLY_WITH[name]
    if wish is SEVERAL_PROCESSES:
        monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(NotImplementedError, match=next(iter(wish), "processes")):
        quiet_trainer(tmp_path, **wish)


def test_each_argument_is_refused_or_has_its_effect_in_one_of_the_tables() -> None:
    tables = [set(EFFECTS), set(SEEN_ELSEWHERE), set(ONLY_WITH), set(NOT_YET_SUPPORTED)]
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert set().union(*tables) == fields
    assert sum(map(len, tables)) == len(fields)
