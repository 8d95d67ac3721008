"""Sharded models in two processes: `python -m tests.distributed.sharded_process FOLDER`.

A launcher's variables set rank and size. Each process writes its results to `FOLDER/RANK.pickle`. DDP is the reference.
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.fsdp import fully_shard

from littrainer import Trainer
from littrainer.loop import chunked_loss
from littrainer.strategies.full_state import get_full_state_dict, is_sharded
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, language_rows
from tests.scenarios.models import tiny_llama
from tests.scenarios.trainers import StepwiseTrainer, quiet_arguments, quiet_trainer

PROMPT = [[5, 6, 7]]
STEPS = 4
# Arguments of each training.
RUN: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": STEPS,
    "max_grad_norm": 0.5,
    "logging_strategy": "steps",
    "logging_steps": 1,
    "weight_decay": 0.1,
    "seed": 3,
}


def is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    return tiny_llama(**{"num_hidden_layers": 2, "tie_word_embeddings": False, **changes})


def make_trainer(
    folder: Path,
    model: Any = None,
    config: Any = None,
    kind: type[Trainer] = Trainer,
    trainer_kwargs: Any = None,
    **changes: Any,
) -> Any:
    """Return a Trainer over token rows; sharded if `config` is a dict, even if it is empty."""
    sharding = {} if config is None else {"fsdp": True, "fsdp_config": config}
    args = quiet_arguments(folder, **{**RUN, **sharding, **changes})
    rows = language_rows(20)
    return kind(
        model=llama() if model is None else model,
        args=args,
        train_dataset=Rows(rows),
        eval_dataset=Rows(rows[:7]),
        data_collator=pad_tokens,
        **(trainer_kwargs or {}),
    )


def curve(trainer: Any) -> list[tuple[float, float]]:
    history = trainer.state.log_history
    return [(entry["loss"], entry["grad_norm"]) for entry in history if "grad_norm" in entry]


def get_full_state(model: Any) -> dict[str, torch.Tensor]:
    state = get_full_state_dict(model) if is_sharded(model) else model.state_dict()
    return {name: value.detach().clone() for name, value in state.items()}


def train(trainer: Any, **keywords: Any) -> dict[str, Any]:
    trainer.train(**keywords)
    return {"curve": curve(trainer), "weights": get_full_state(trainer.model), "is_sharded": is_sharded(trainer.model)}


def train_with_ddp(folder: Path) -> Any:
    trainer = make_trainer(folder)
    result = train(trainer)
    return {**result, "evaluated": trainer.evaluate()["eval_loss"]}


def run_all_phases(folder: Path) -> Any:
    """Evaluate before, within and after training, generate, save a full model, and train again."""
    trainer = make_trainer(
        folder,
        None,
        {},
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
    )
    first = trainer.evaluate()["eval_loss"]
    result = train(trainer)
    model = trainer.model
    result["names"] = sorted(name for name, module in model.named_modules() if type(module).__name__.startswith("FSDP"))
    result["local elements"] = sum(parameter.to_local().numel() for parameter in model.parameters())
    result["elements"] = sum(parameter.numel() for parameter in model.parameters())
    result["evaluated"] = [first, *(entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry)]
    result["after"] = trainer.evaluate()["eval_loss"]
    result["predicted"] = trainer.predict(trainer.eval_dataset).predictions[0].shape
    result["generated"] = model.generate(
        torch.tensor(PROMPT), max_new_tokens=4, do_sample=False, synced_gpus=True, pad_token_id=0
    ).tolist()
    trainer.save_model(str(folder / "saved"))
    if is_first():
        (folder / "checkpoint-2").rename(folder / "kept")
    trainer.train()
    result["second curve"] = curve(trainer)[-STEPS:]
    return result


def train_and_save(state_dict_type: str, **changes: Any) -> Callable[[Path], Any]:
    """Return a function that trains with sharded or full checkpoints, and saves a full model."""

    def run(folder: Path) -> Any:
        trainer = make_trainer(
            folder, None, {"state_dict_type": state_dict_type}, save_strategy="steps", save_steps=2, **changes
        )
        result = train(trainer)
        trainer.save_model(str(folder / "saved"))
        return result

    return run


def resume(written_by: str, **config: Any) -> Callable[[Path], Any]:
    def run(folder: Path) -> Any:
        checkpoint = folder.parent / written_by
        return train(make_trainer(folder, None, config), resume_from_checkpoint=str(checkpoint))

    return run


def train_with(
    create_model: Callable[[], Any] = llama,
    config: Any = None,
    kind: type[Trainer] = Trainer,
    passes_optimizer: bool = False,
) -> Callable[[Path], Any]:
    """Return a function that trains; sharded if `config` is a dict.

    Parameters:
        passes_optimizer: create the optimizer before the model is sharded.
    """

    def run(folder: Path) -> Any:
        model = create_model()
        if not passes_optimizer:
            return train(make_trainer(folder, model, config, kind=kind))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        return train(make_trainer(folder, model, config, trainer_kwargs={"optimizers": (optimizer, schedule)}))

    return run


def create_tied_model() -> Any:
    return llama(tie_word_embeddings=True)


def create_adapter() -> Any:
    from peft import LoraConfig, get_peft_model

    model = llama()
    torch.manual_seed(5)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def train_adapter(folder: Path) -> Any:
    trainer = make_trainer(folder, create_adapter(), {}, save_strategy="steps", save_steps=2)
    result = train(trainer)
    trainer.save_model(str(folder / "saved"))
    again = make_trainer(folder / "resumed", create_adapter(), {})
    result["resumed"] = train(again, resume_from_checkpoint=str(folder / "checkpoint-2"))
    result["generated"] = trainer.model.generate(
        input_ids=torch.tensor(PROMPT), max_new_tokens=3, do_sample=False, synced_gpus=True, pad_token_id=0
    ).tolist()
    return result


def create_in_first_process() -> Any:
    """Return a model with weights in the first process, and on the meta device in the second."""
    return llama() if is_first() else llama().to("meta")


def load_in_first_process(folder: Path) -> Any:
    """Load by `from_pretrained` in the first process only, as the arguments request."""
    from transformers import LlamaForCausalLM
    from transformers.integrations import is_fsdp_enabled

    if is_first():
        llama().save_pretrained(folder / "model")
    torch.distributed.barrier()
    arguments = quiet_arguments(folder, **RUN, fsdp=True, fsdp_config={"cpu_ram_efficient_loading": True})
    model = LlamaForCausalLM.from_pretrained(folder / "model")
    is_enabled = is_fsdp_enabled()
    rows = language_rows(20)
    result = train(Trainer(model=model, args=arguments, train_dataset=Rows(rows), data_collator=pad_tokens))
    quiet_arguments(folder)
    return {**result, "is fsdp enabled": [is_enabled, is_fsdp_enabled()]}


def train_in_half_precision(folder: Path) -> Any:
    formats = set()

    class RecordsFormats(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss, outputs = super().compute_loss(*args, **{**kwargs, "return_outputs": True})
            formats.add((loss.dtype, outputs["logits"].dtype))
            return (loss, outputs) if kwargs.get("return_outputs") else loss

    trainer = make_trainer(folder, None, {}, kind=RecordsFormats, bf16=True)
    result = train(trainer)
    return {**result, "evaluated": trainer.evaluate()["eval_loss"], "formats": formats}


def train_with_replicated_modules(folder: Path) -> Any:
    """Train with replicated modules, without weights in the second process."""
    config = {"ignored_modules": r"lm_head|model\.layers\.0\.mlp", "cpu_ram_efficient_loading": True}
    trainer = make_trainer(folder, create_in_first_process(), config)
    result = train(trainer)
    result["replicated"] = {
        name: parameter.detach().clone()
        for name, parameter in trainer.model.named_parameters()
        if not hasattr(parameter, "to_local")
    }
    return result


def measure_full_elements(folder: Path) -> Any:
    """Return the additional elements of full parameters after each unit is sharded."""
    trainer = make_trainer(folder, create_in_first_process(), {"cpu_ram_efficient_loading": True})
    gc.collect()
    before = _count_full_elements()
    counts = []

    def shard(*modules: Any, **keywords: Any) -> Any:
        result = fully_shard(*modules, **keywords)
        counts.append(_count_full_elements() - before)
        return result

    with mock.patch.object(torch.distributed.fsdp, "fully_shard", shard):
        trainer.evaluate()
    return counts


def _count_full_elements() -> int:
    parameters = [value for value in gc.get_objects() if type(value) is torch.nn.Parameter]
    return sum(parameter.numel() for parameter in parameters if not parameter.is_meta)


def train_in_chunks(config: Any = None, create_model: Callable[[], Any] = llama) -> Callable[[Path], Any]:
    """Return a function that trains with a loss over chunks of three tokens."""

    def run(folder: Path) -> Any:
        with mock.patch.object(chunked_loss, "MIN_CHUNK_TOKENS", 3):
            return train(make_trainer(folder, create_model(), config, chunked_loss=True))

    return run


def plain_module(**sharding: Any) -> Callable[[Path], Any]:
    return lambda folder: train(quiet_trainer(folder, **{**RUN, "max_steps": 2, **sharding}))


# Name -> function, and the name of the reference with the same numbers.
CHECKS: dict[str, tuple[Callable[[Path], Any], str | None]] = {
    "ddp": (train_with_ddp, None),
    "full": (run_all_phases, "ddp"),
    "sharded": (train_and_save("SHARDED_STATE_DICT"), "ddp"),
    "sharded in background": (train_and_save("SHARDED_STATE_DICT", async_save=True), "ddp"),
    "full in background": (train_and_save("FULL_STATE_DICT", async_save=True), "ddp"),
    "sharded after full": (resume("full/kept", state_dict_type="SHARDED_STATE_DICT"), "ddp"),
    "full after sharded": (resume("sharded/checkpoint-2"), "ddp"),
    "after one process": (resume("alone/checkpoint-2"), None),
    "own training_step": (train_with(config={}, kind=StepwiseTrainer), "ddp"),
    "not freed": (train_with(config={"reshard_after_forward": False, "forward_prefetch": True}), "ddp"),
    "recomputed and offloaded": (
        train_with(
            config={"activation_checkpointing": True, "activation_checkpointing_offload": True, "cpu_offload": True}
        ),
        "ddp",
    ),
    "tied ddp": (train_with(create_tied_model), None),
    "tied": (train_with(create_tied_model, {}), "tied ddp"),
    "own optimizer ddp": (train_with(passes_optimizer=True), None),
    "own optimizer": (train_with(config={}, passes_optimizer=True), "own optimizer ddp"),
    "adapter ddp": (train_with(create_adapter), None),
    "adapter": (train_adapter, "adapter ddp"),
    "without weights": (train_with(create_in_first_process, {"cpu_ram_efficient_loading": True}), "ddp"),
    "loaded in first process": (load_in_first_process, "ddp"),
    "replicated modules": (train_with_replicated_modules, "ddp"),
    "full elements": (measure_full_elements, None),
    "half precision": (train_in_half_precision, None),
    "chunked loss ddp": (train_in_chunks(), None),
    "chunked loss": (train_in_chunks({}), "chunked loss ddp"),
    "chunked loss, tied": (train_in_chunks({}, create_tied_model), "tied ddp"),
    "chunked loss, by size": (train_in_chunks({"min_num_params": 30}), "chunked loss ddp"),
    "plain module ddp": (plain_module(), None),
    "plain module": (
        plain_module(fsdp=True, fsdp_config={"min_num_params": 30}, torch_compile=True, torch_compile_backend="eager"),
        "plain module ddp",
    ),
}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    results = {name: check(folder / name.replace(" ", "-")) for name, (check, _) in CHECKS.items()}
    (folder / f"{os.environ['RANK']}.pickle").write_bytes(pickle.dumps(results))
