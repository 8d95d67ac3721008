"""One of two processes that share a model: `python -m tests.distributed.sharded_process FOLDER`.

Rank and size come from the environment, as a launcher sets it. Each process writes what it found to
`FOLDER/RANK.pickle`. A training that is not sharded, DDP's, says what numbers are right.
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
from littrainer.strategies.full_state import get_full_state_dict, is_sharded
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, language_rows
from tests.scenarios.models import tiny_llama
from tests.scenarios.trainers import StepwiseTrainer, quiet_arguments, quiet_trainer

PROMPT = [[5, 6, 7]]
STEPS = 4
# Arguments of each training here.
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


def trainer_of(
    folder: Path,
    model: Any = None,
    config: Any = None,
    kind: type[Trainer] = Trainer,
    given: Any = None,
    **changes: Any,
) -> Any:
    """A Trainer over token rows; sharded where there is a `config`, which may be empty."""
    sharding = {} if config is None else {"fsdp": True, "fsdp_config": config}
    args = quiet_arguments(folder, **{**RUN, **sharding, **changes})
    rows = language_rows(20)
    return kind(
        model=llama() if model is None else model,
        args=args,
        train_dataset=Rows(rows),
        eval_dataset=Rows(rows[:7]),
        data_collator=pad_tokens,
        **(given or {}),
    )


def curve(trainer: Any) -> list[tuple[float, float]]:
    history = trainer.state.log_history
    return [(entry["loss"], entry["grad_norm"]) for entry in history if "grad_norm" in entry]


def whole(model: Any) -> dict[str, torch.Tensor]:
    state = get_full_state_dict(model) if is_sharded(model) else model.state_dict()
    return {name: value.detach().clone() for name, value in state.items()}


def trained(trainer: Any, **keywords: Any) -> dict[str, Any]:
    trainer.train(**keywords)
    return {"curve": curve(trainer), "weights": whole(trainer.model), "is_sharded": is_sharded(trainer.model)}


def by_ddp(folder: Path) -> Any:
    trainer = trainer_of(folder)
    found = trained(trainer)
    return {**found, "evaluated": trainer.evaluate()["eval_loss"]}


def whole_run(folder: Path) -> Any:
    """Evaluates before, within and after training, generates, saves a file for all, and trains again."""
    trainer = trainer_of(
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
    found = trained(trainer)
    model = trainer.model
    found["names"] = sorted(name for name, module in model.named_modules() if type(module).__name__.startswith("FSDP"))
    found["local elements"] = sum(parameter.to_local().numel() for parameter in model.parameters())
    found["elements"] = sum(parameter.numel() for parameter in model.parameters())
    found["evaluated"] = [first, *(entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry)]
    found["after"] = trainer.evaluate()["eval_loss"]
    found["predicted"] = trainer.predict(trainer.eval_dataset).predictions[0].shape
    found["generated"] = model.generate(
        torch.tensor(PROMPT), max_new_tokens=4, do_sample=False, synced_gpus=True, pad_token_id=0
    ).tolist()
    trainer.save_model(str(folder / "saved"))
    if is_first():
        (folder / "checkpoint-2").rename(folder / "kept")
    trainer.train()
    found["again"] = curve(trainer)[-STEPS:]
    return found


def saving(state_dict_type: str, **changes: Any) -> Callable[[Path], Any]:
    """A training that saves checkpoints in one of the two forms, and then a model in one file."""

    def run(folder: Path) -> Any:
        trainer = trainer_of(
            folder, None, {"state_dict_type": state_dict_type}, save_strategy="steps", save_steps=2, **changes
        )
        found = trained(trainer)
        trainer.save_model(str(folder / "saved"))
        return found

    return run


def resumed(written_by: str, **config: Any) -> Callable[[Path], Any]:
    def run(folder: Path) -> Any:
        checkpoint = folder.parent / written_by
        return trained(trainer_of(folder, None, config), resume_from_checkpoint=str(checkpoint))

    return run


def training(
    model: Callable[[], Any] = llama, config: Any = None, kind: type[Trainer] = Trainer, own_optimizer: bool = False
) -> Callable[[Path], Any]:
    """A training alone; sharded if there is a `config`.

    Parameters:
        own_optimizer: it, and its state, are made before anything is sharded.
    """

    def run(folder: Path) -> Any:
        made = model()
        if not own_optimizer:
            return trained(trainer_of(folder, made, config, kind=kind))
        optimizer = torch.optim.AdamW(made.parameters(), lr=0.01, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        return trained(trainer_of(folder, made, config, given={"optimizers": (optimizer, schedule)}))

    return run


def tied() -> Any:
    return llama(tie_word_embeddings=True)


def adapter() -> Any:
    from peft import LoraConfig, get_peft_model

    model = llama()
    torch.manual_seed(5)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def adapter_run(folder: Path) -> Any:
    trainer = trainer_of(folder, adapter(), {}, save_strategy="steps", save_steps=2)
    found = trained(trainer)
    trainer.save_model(str(folder / "saved"))
    again = trainer_of(folder / "resumed", adapter(), {})
    found["resumed"] = trained(again, resume_from_checkpoint=str(folder / "checkpoint-2"))
    found["generated"] = trainer.model.generate(
        input_ids=torch.tensor(PROMPT), max_new_tokens=3, do_sample=False, synced_gpus=True, pad_token_id=0
    ).tolist()
    return found


def weights_of_the_first() -> Any:
    """The other process has no memory for its weights at all."""
    return llama() if is_first() else llama().to("meta")


def loaded_by_the_first(folder: Path) -> Any:
    """`from_pretrained` after the arguments is told that only the first process needs weights."""
    from transformers import LlamaForCausalLM
    from transformers.integrations import is_fsdp_enabled

    if is_first():
        llama().save_pretrained(folder / "model")
    torch.distributed.barrier()
    arguments = quiet_arguments(folder, **RUN, fsdp=True, fsdp_config={"cpu_ram_efficient_loading": True})
    model = LlamaForCausalLM.from_pretrained(folder / "model")
    told = [is_fsdp_enabled()]
    rows = language_rows(20)
    found = trained(Trainer(model=model, args=arguments, train_dataset=Rows(rows), data_collator=pad_tokens))
    quiet_arguments(folder)
    return {**found, "told": [*told, is_fsdp_enabled()]}


def in_half_precision(folder: Path) -> Any:
    formats = set()

    class NotesFormats(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss, outputs = super().compute_loss(*args, **{**kwargs, "return_outputs": True})
            formats.add((loss.dtype, outputs["logits"].dtype))
            return (loss, outputs) if kwargs.get("return_outputs") else loss

    trainer = trainer_of(folder, None, {}, kind=NotesFormats, bf16=True)
    found = trained(trainer)
    return {**found, "evaluated": trainer.evaluate()["eval_loss"], "formats": formats}


def with_whole_modules(folder: Path) -> Any:
    """Modules that are left out of the sharding, trained on other samples in each process; without values in one."""
    config = {"ignored_modules": r"lm_head|model\.layers\.0\.mlp", "cpu_ram_efficient_loading": True}
    trainer = trainer_of(folder, weights_of_the_first(), config)
    found = trained(trainer)
    found["whole"] = {
        name: one.detach().clone() for name, one in trainer.model.named_parameters() if not hasattr(one, "to_local")
    }
    return found


def whole_elements_after_each_unit(folder: Path) -> Any:
    """How many more elements of parameters that are whole there are, each time that some modules have been sharded."""
    trainer = trainer_of(folder, weights_of_the_first(), {"cpu_ram_efficient_loading": True})
    gc.collect()
    before, found = _elements_of_whole_parameters(), []

    def shard(*modules: Any, **keywords: Any) -> Any:
        result = fully_shard(*modules, **keywords)
        found.append(_elements_of_whole_parameters() - before)
        return result

    with mock.patch.object(torch.distributed.fsdp, "fully_shard", shard):
        trainer.evaluate()
    return found


def _elements_of_whole_parameters() -> int:
    return sum(one.numel() for one in gc.get_objects() if type(one) is torch.nn.Parameter and not one.is_meta)


def plain_module(**sharding: Any) -> Callable[[Path], Any]:
    return lambda folder: trained(quiet_trainer(folder, **{**RUN, "max_steps": 2, **sharding}))


# Name -> what is done; trainings that are to find the same numbers as the one named after them.
CHECKS: dict[str, tuple[Callable[[Path], Any], str | None]] = {
    "ddp": (by_ddp, None),
    "whole": (whole_run, "ddp"),
    "parts": (saving("SHARDED_STATE_DICT"), "ddp"),
    "parts in background": (saving("SHARDED_STATE_DICT", async_save=True), "ddp"),
    "whole in background": (saving("FULL_STATE_DICT", async_save=True), "ddp"),
    "parts after whole": (resumed("whole/kept", state_dict_type="SHARDED_STATE_DICT"), "ddp"),
    "whole after parts": (resumed("parts/checkpoint-2"), "ddp"),
    "after one process": (resumed("alone/checkpoint-2"), None),
    "own training_step": (training(config={}, kind=StepwiseTrainer), "ddp"),
    "not freed": (training(config={"reshard_after_forward": False, "forward_prefetch": True}), "ddp"),
    "recomputed and offloaded": (
        training(
            config={"activation_checkpointing": True, "activation_checkpointing_offload": True, "cpu_offload": True}
        ),
        "ddp",
    ),
    "tied ddp": (training(tied), None),
    "tied": (training(tied, {}), "tied ddp"),
    "own optimizer ddp": (training(own_optimizer=True), None),
    "own optimizer": (training(config={}, own_optimizer=True), "own optimizer ddp"),
    "adapter ddp": (training(adapter), None),
    "adapter": (adapter_run, "adapter ddp"),
    "without weights": (training(weights_of_the_first, {"cpu_ram_efficient_loading": True}), "ddp"),
    "loaded by the first": (loaded_by_the_first, "ddp"),
    "whole modules": (with_whole_modules, "ddp"),
    "kept whole": (whole_elements_after_each_unit, None),
    "half precision": (in_half_precision, None),
    "plain module ddp": (plain_module(), None),
    "plain module": (
        plain_module(fsdp=True, fsdp_config={"min_num_params": 30}, torch_compile=True, torch_compile_backend="eager"),
        "plain module ddp",
    ),
}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    found = {name: check(folder / name.replace(" ", "-")) for name, (check, _) in CHECKS.items()}
    (folder / f"{os.environ['RANK']}.pickle").write_bytes(pickle.dumps(found))
