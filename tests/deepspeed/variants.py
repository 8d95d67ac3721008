"""Short trainings with DeepSpeed on CPUs, with transformers' Trainer or ours, that record logs and files.

Usage, in each process of a launcher: python -m tests.deepspeed.variants transformers|littrainer DIR NAME...
The records are DIR/NAME_RANK.json. NAME=CHECKPOINT resumes an existing checkpoint.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

AUTO_SIZES = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
ENGINE_OPTIMIZER = {
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
    }
}
ENGINE_SCHEDULE = {
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    }
}
AUTO_BUCKETS = {
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
}


def stage(number: int, sections: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """Return a configuration of ZeRO; by default stage 3 gathers the weights to save."""
    zero: dict[str, Any] = {"stage": number, **settings}
    if number == 3:
        zero.setdefault("stage3_gather_16bit_weights_on_model_save", True)
    return {"zero_optimization": zero, **AUTO_SIZES, **(sections or {})}


# Name -> arguments, and `SCRIPT_KEYS`.
VARIANTS: dict[str, dict[str, Any]] = {
    **{f"stage_{number}": {"deepspeed": stage(number)} for number in range(4)},
    "engine_optimizer_and_schedule": {
        "deepspeed": stage(2, {**ENGINE_OPTIMIZER, **ENGINE_SCHEDULE}, **AUTO_BUCKETS),
        "warmup_steps": 2,
        "adam_beta2": 0.95,
        "weight_decay": 0.1,
    },
    "engine_optimizer": {"deepspeed": stage(3, ENGINE_OPTIMIZER, **AUTO_BUCKETS), "lr_scheduler_type": "cosine"},
    "engine_schedule": {"deepspeed": stage(1, ENGINE_SCHEDULE), "warmup_steps": 2},
    "own_training_step": {"deepspeed": stage(2), "overrides": True},
    "own_training_step_stage_3": {"deepspeed": stage(3), "overrides": True, "max_grad_norm": 0.2},
    "bf16": {"deepspeed": stage(2), "bf16": True},
    "bf16_auto_stage_3": {"deepspeed": stage(3, {"bf16": {"enabled": "auto"}}), "bf16": True},
    "short_window": {"deepspeed": stage(2), "gradient_accumulation_steps": 3, "max_steps": 5},
    "tokens": {"deepspeed": stage(1), "language_model": True},
    "epochs": {
        "deepspeed": stage(2),
        "max_steps": -1,
        "num_train_epochs": 2,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
    },
    "best_model_stage_3": {
        "deepspeed": stage(3),
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "learning_rate": 0.3,
        "load_best_model_at_end": True,
    },
    "resume_stage_2": {"deepspeed": stage(2), "resumes": True},
    "resume_stage_3": {"deepspeed": stage(3), "resumes": True},
    "resume_engine_schedule": {
        "deepspeed": stage(2, {**ENGINE_OPTIMIZER, **ENGINE_SCHEDULE}),
        "warmup_steps": 2,
        "resumes": True,
    },
    "without_gathering": {"deepspeed": stage(3, stage3_gather_16bit_weights_on_model_save=False)},
    "loaded_in_shards": {"deepspeed": stage(3), "from_pretrained": True},
    "evaluated_first": {"deepspeed": stage(3), "evaluates_first": True},
    "adapters": {"deepspeed": stage(2), "adapters": True, "resumes": True},
    "adapters_stage_3": {"deepspeed": stage(3), "adapters": True, "resumes": True},
    "offloaded": {
        "deepspeed": stage(2, {"zero_force_ds_cpu_optimizer": False}, offload_optimizer={"device": "cpu"}),
    },
}
SCRIPT_KEYS = ("overrides", "language_model", "resumes", "from_pretrained", "evaluates_first", "adapters")
ARGUMENTS: dict[str, Any] = {
    "use_cpu": True,
    "max_steps": 6,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_steps": 3,
    "report_to": "none",
    "disable_tqdm": True,
}
SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
}
TIMINGS = ("runtime", "per_second", "preparation_time")


def _make_model(kind: dict[str, Any], folder: Path) -> Any:
    from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if kind.get("language_model"):
        return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2))
    if kind.get("from_pretrained"):
        return BertForSequenceClassification.from_pretrained(folder / "pretrained")
    model = BertForSequenceClassification(
        BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    )
    if not kind.get("adapters"):
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS"))


def _make_rows(kind: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)

    def numbers(*shape: int, below: int) -> torch.Tensor:
        return torch.randint(0, below, shape, generator=generator)

    rows = []
    for index in range(22):
        row = {"input_ids": numbers(8, below=50), "labels": numbers(below=2)}
        if kind.get("language_model"):
            row["labels"] = row["input_ids"].clone()
            row["labels"][: index % 6] = -100
        rows.append(row)
    return rows


def _make_trainer(kind: dict[str, Any], folder: Path, out: Path) -> Any:
    from transformers import Trainer, TrainingArguments

    class Stepwise(Trainer):  # type: ignore[misc, valid-type]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            return super().training_step(*args, **kwargs)

    changes = {name: value for name, value in kind.items() if name not in SCRIPT_KEYS}
    # Created before the model, which stage 3 shards while loading.
    args = TrainingArguments(str(out), **{**ARGUMENTS, **changes})
    model, rows = _make_model(kind, folder), _make_rows(kind)
    trainer_class = Stepwise if kind.get("overrides") else Trainer
    return trainer_class(model, args, train_dataset=rows, eval_dataset=rows[:6])


def _drop_times(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if not name.endswith(TIMINGS)}


def _list_files(folder: Path) -> list[str]:
    ours = ("littrainer_", ".unfinished")
    names = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if not Path(name).name.startswith(ours))


def _sum_weights(folder: Path) -> dict[str, float]:
    from safetensors.torch import load_file

    files = [folder / name for name in ("model.safetensors", "adapter_model.safetensors")]
    weights = {name: value for file in files if file.is_file() for name, value in load_file(file).items()}
    return {name: value.double().sum().item() for name, value in weights.items()}


def run(name: str, folder: Path, checkpoint: str) -> dict[str, Any]:
    """Run a variant and return its record.

    Parameters:
        checkpoint: folder to resume from; default: of a training that runs first.
    """
    kind = dict(VARIANTS[name])
    out = folder / name
    record: dict[str, Any] = {}
    if kind.get("resumes"):
        if not checkpoint:
            first = _make_trainer(kind, folder, out)
            first.train()
            del first
            gc.collect()
        trainer = _make_trainer(kind, folder, out)
        trainer.train(resume_from_checkpoint=checkpoint or str(out / "checkpoint-3"))
    else:
        trainer = _make_trainer(kind, folder, out)
        if kind.get("from_pretrained"):
            record["sharded"] = all(hasattr(parameter, "ds_id") for parameter in trainer.model.parameters())
        if kind.get("evaluates_first"):
            record["before"] = _drop_times(trainer.evaluate())
        trainer.train()
    record["history"] = [_drop_times(entry) for entry in trainer.state.log_history]
    record["after"] = _drop_times(trainer.evaluate())
    record["predictions"] = trainer.predict(trainer.eval_dataset).predictions.tolist()
    record["is_deepspeed_enabled"] = trainer.is_deepspeed_enabled
    record["zero_stage"] = trainer.accelerator.state.deepspeed_plugin.zero_stage
    record["engine"] = type(trainer.deepspeed).__name__
    record["wraps_the_model"] = trainer.model_wrapped.module is trainer.model
    record["learning_rates"] = [group["lr"] for group in trainer.optimizer.param_groups]
    record["best"] = trainer.state.best_global_step
    trainer.save_model(str(out / "saved"))
    torch.distributed.barrier()
    record["files"], record["sums"] = _list_files(out), _sum_weights(out / "saved")
    return record


def main(side: str, folder: Path, names: list[str]) -> None:
    """Run variants in sequence."""
    if side == "littrainer":
        import littrainer.auto  # noqa: F401
    rank = os.environ.get("RANK", "0")
    if any("from_pretrained" in VARIANTS.get(name, {}) for name in names) and rank == "0":
        _make_model({}, folder).save_pretrained(folder / "pretrained")
    for name_and_checkpoint in names:
        name, _, checkpoint = name_and_checkpoint.partition("=")
        try:
            record = run(name, folder, checkpoint)
        except Exception as error:
            import traceback

            traceback.print_exc()
            record = {"error": f"{type(error).__name__}: {error}"}
        (folder / f"{name}_{rank}.json").write_text(json.dumps(record, indent=1, sort_keys=True))
        gc.collect()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:] or list(VARIANTS))
