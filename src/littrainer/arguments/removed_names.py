"""Argument names that earlier transformers releases took and the newest does not, with what stands in their place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RemovedName:
    """What became of one argument.

    Parameters:
        advice: what to write instead, as the end of the sentence "X is no longer an argument: ...".
        replaced_by: the argument that took over, None where there is none.
    """

    advice: str
    replaced_by: str | None = None


def _renamed(name: str) -> RemovedName:
    return RemovedName(f"use {name}", replaced_by=name)


REMOVED_NAMES: dict[str, RemovedName] = {
    # Spelled differently today.
    "evaluation_strategy": _renamed("eval_strategy"),
    "per_gpu_train_batch_size": _renamed("per_device_train_batch_size"),
    "per_gpu_eval_batch_size": _renamed("per_device_eval_batch_size"),
    "no_cuda": _renamed("use_cpu"),
    "push_to_hub_token": _renamed("hub_token"),
    "include_tokens_per_second": _renamed("include_num_input_tokens_seen"),
    "torchdynamo": _renamed("torch_compile_backend"),
    # A value of another argument today.
    "adafactor": RemovedName('use optim="adafactor"', "optim"),
    "group_by_length": RemovedName('use train_sampling_strategy="group_by_length"', "train_sampling_strategy"),
    "include_inputs_for_metrics": RemovedName('use include_for_metrics=["inputs"]', "include_for_metrics"),
    "jit_mode_eval": RemovedName("use torch_compile=True", "torch_compile"),
    "push_to_hub_model_id": RemovedName('use hub_model_id="name" or "organisation/name"', "hub_model_id"),
    "push_to_hub_organization": RemovedName('use hub_model_id="organisation/name"', "hub_model_id"),
    "tpu_metrics_debug": RemovedName('use debug="tpu_metrics_debug"', "debug"),
    "fsdp_min_num_params": RemovedName('use fsdp_config={"min_num_params": ...}', "fsdp_config"),
    "fsdp_transformer_layer_cls_to_wrap": RemovedName(
        'use fsdp_config={"transformer_layer_cls_to_wrap": [...]}', "fsdp_config"
    ),
    "dispatch_batches": RemovedName('use accelerator_config={"dispatch_batches": ...}', "accelerator_config"),
    "split_batches": RemovedName('use accelerator_config={"split_batches": ...}', "accelerator_config"),
    # Set through the environment today.
    "tpu_num_cores": RemovedName("set the environment variable TPU_NUM_CORES"),
    "ray_scope": RemovedName("set the environment variable RAY_SCOPE"),
    # Nothing to set any more.
    "overwrite_output_dir": RemovedName("drop it, an existing folder is never an error"),
    "use_mps_device": RemovedName("drop it, an Apple GPU is found by itself"),
    "fp16_backend": RemovedName("drop it, mixed precision always comes from torch"),
    "half_precision_backend": RemovedName("drop it, mixed precision always comes from torch"),
    "fp16_opt_level": RemovedName("drop it, mixed precision always comes from torch"),
    "save_safetensors": RemovedName("drop it, weights are always saved as safetensors"),
    "past_index": RemovedName("drop it, there is no replacement"),
    "use_legacy_prediction_loop": RemovedName("drop it, there is no replacement"),
    "mp_parameters": RemovedName("drop it, there is no replacement"),
    "_n_gpu": RemovedName("drop it, each process uses one GPU"),
}
