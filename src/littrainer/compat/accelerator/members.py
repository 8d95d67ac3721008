"""Each public member of accelerate's Accelerator: what `trainer.accelerator` answers, or why it does not."""

from __future__ import annotations

ANSWERED: dict[str, dict[str, str]] = {
    "Processes": {
        "device": "the device of this process",
        "num_processes": "the world size",
        "process_index": "the rank",
        "local_process_index": "the rank on this node",
        "is_main_process": "whether the rank is 0",
        "is_local_main_process": "whether the rank on this node is 0",
        "is_last_process": "whether it is the highest rank",
        "use_distributed": "whether there are several processes",
        "multi_device": "whether several processes have a GPU each",
        "distributed_type": "`NO`, `MULTI_CPU`, `MULTI_GPU`, `FSDP`, on CPUs too, `DEEPSPEED`; equal to accelerate's",
        "wait_for_everyone": "a barrier",
        "main_process_first": "rank 0 goes through the block first",
        "local_main_process_first": "the first rank of each node goes first",
        "on_main_process": "decorator: runs on rank 0 only",
        "on_local_main_process": "decorator: runs on the first rank of each node",
        "on_last_process": "decorator: runs on the highest rank",
        "on_process": "decorator: runs on the named rank",
        "on_local_process": "decorator: runs on the named rank of each node",
        "print": "prints once on each node",
        "split_between_processes": "this process's share of a collection",
        "end_training": "leaves the process group",
    },
    "Collectives": {
        "gather": "values of all processes, also where their rows differ in number",
        "gather_for_metrics": "the same without what only fills the last batch",
        "pad_across_processes": "tensors as long as the longest one",
        "reduce": "sum, mean or maximum over all processes",
        "set_trigger": "raises a flag",
        "check_trigger": "whether any process has raised it",
        "flag_tensor": "that flag",
    },
    "Steps": {
        "backward": "through Lightning's precision plugin and strategy in a `training_step` of your own; several "
        "times if called so",
        "lomo_backward": "of prepared optimizers that update the weights during backward",
        "clip_grad_norm_": "clips gradients, unscaled before, and returns their norm, also where they are split; under "
        "DeepSpeed, which clips by itself, its norm",
        "clip_grad_value_": "clips each gradient, unscaled before",
        "unscale_gradients": "divides the scale of fp16 out, once",
        "optimizer_step_was_skipped": "whether fp16 skipped the last step",
        "scaler": "the GradScaler of fp16, else None",
        "autocast": "the context of the mixed precision",
        "mixed_precision": "`no`, `bf16` or `fp16`",
        "native_amp": "whether forward passes run under autocast",
        "accumulate": "counts micro-batches of `gradient_accumulation_steps`, which is 1 as in transformers' Trainer",
        "gradient_accumulation_steps": "what `backward` divides by; writable",
        "gradient_state": "`sync_gradients`, `end_of_dataloader`, `remainder` and the rest, computed when read",
        "sync_gradients": "whether the window closes with this micro-batch; writable for one micro-batch",
        "no_sync": "gradients of a model in DistributedDataParallel, or sharded by FSDP, stay in this process",
        "trigger_sync_in_backward": "of a DistributedDataParallel model",
        "join_uneven_inputs": "between GPUs torch's `Join`, and `even_batches` of prepared loaders for the block",
        "maybe_context_parallel": "does nothing, since no sequence is split",
        "step": "micro-batches counted by `accumulate`",
        "step_scheduler_with_optimizer": "True",
    },
    "Preparing": {
        "prepare": "each object as its kind; others as they are",
        "prepare_model": "on its device, in mixed precision, compiled, and data-parallel in several processes unless "
        "`evaluation_mode`; it is not sharded, also where the Trainer's model is",
        "prepare_data_loader": "this process's part of the data, on its device; looks one batch ahead, random order "
        "seeded by epoch; in one process a loader of a class of its own is left as it is, with batches on the host",
        "prepare_optimizer": "a wrapper that steps with the Trainer's optimizer steps",
        "prepare_scheduler": "a wrapper that steps with the optimizers that did",
        "unwrap_model": "takes data-parallel wrappers off, and compilation with `keep_torch_compile=False`",
        "verify_device_map": "whether a model lies on several devices",
        "skip_first_batches": "the loader without its first batches",
        "free_memory": "forgets prepared objects, empties the device's cache",
        "clear": "the same",
        "device_placement": "True",
    },
    "Saving": {
        "get_state_dict": "under the names of the user's model; of a sharded one in the first process, if all call it",
        "save": "one file, from the first process",
        "save_model": "`model.safetensors`, or shards with an index",
        "should_save_model": "whether this process writes",
        "register_for_checkpointing": "checked and warned about: no Trainer's checkpoint holds such objects",
        "save_iteration": "0",
    },
    "Trackers": {
        "init_trackers": "does nothing and says so once: a Trainer's accelerator has no trackers, use `report_to`",
        "log": "does nothing and says so once: call `trainer.log`",
        "trackers": "none",
        "log_with": "none",
    },
    "Settings": {
        "state": "accelerate's AcceleratorState where accelerate is loaded, else one like it",
        "dataloader_config": "`accelerator_config` of the arguments, writable",
        "split_batches": "of it",
        "dispatch_batches": "of it",
        "even_batches": "of it, writable",
        "use_seedable_sampler": "of it",
        "non_blocking": "of it",
        "use_stateful_dataloader": "False",
        "rng_types": "`generator`",
        "project_configuration": "without folders",
        "project_dir": "None",
        "logging_dir": "None",
        "deepspeed_plugin": "what DeepSpeed is told, under the names of accelerate's plugin; else None",
        "parallelism_config": "what `parallelism_config` asks for, under the names of accelerate's; else None",
        "torch_device_mesh": "while a training splits the model, the mesh of all processes; else None",
        "is_fsdp2": "whether version 2 of FSDP shards the model",
        "is_composable_parallelism_enabled": "the same",
        "data_parallel_rank": "which replica of the model is this process's",
        "data_parallel_shard_rank": "which shard of `dp_shard_size` is this process's; else 0",
        "tensor_parallel_rank": "which slice of each layer of `tp_size` is this process's; else 0",
        "fp8_enabled": "False",
        "has_fp8_handler": "False",
        "delayed_fp8_autocast": "False",
        "has_lomo_optimizer": "False",
        "autocast_handler": "None",
        "scaler_handler": "None",
        "init_handler": "None",
        "profile_handler": "None",
        "fp8_recipe_handler": "None",
        "ao_recipe_handler": "None",
        "te_recipe_handler": "None",
        "msamp_recipe_handler": "None",
    },
}
"""Topic -> member -> what it is."""

REFUSED: dict[str, str] = {
    "save_state": "checkpoints are the Trainer's; set save_strategy, or call trainer.save_model() and save_state()",
    "load_state": "checkpoints are the Trainer's; call trainer.train(resume_from_checkpoint=...)",
    "register_save_state_pre_hook": "save_state is not offered; add a callback with on_save",
    "register_load_state_pre_hook": "load_state is not offered; override _load_from_checkpoint",
    "get_tracker": "a Trainer's accelerator has no trackers; report_to adds callbacks to trainer.callback_handler",
    "profile": 'profile with Trainer(lightning={"profiler": ...}), or with torch.profiler.profile() itself',
    "ddp_handler": "Lightning's strategy sets DistributedDataParallel up; see ddp_find_unused_parameters",
    "fp8_backend": "no argument of a Trainer asks for 8-bit floating point",
    "deepspeed_ulysses_dl_adapter": "accelerate's DeepSpeed engine does not run here",
    "context_parallel_rank": "sequences are not split between processes, nor does accelerate tell it",
    "pipeline_parallel_rank": "layers are not spread over processes, nor does accelerate tell it",
}
"""Member -> why it is not offered, and what to do instead."""


def documentation() -> str:
    """The section of docs/compatibility.md about the accelerator's members."""
    lines = ["| member | what `trainer.accelerator` answers |", "| --- | --- |"]
    for topic, members in ANSWERED.items():
        lines.append(f"| **{topic}** | |")
        lines += [f"| `{name}` | {meaning} |" for name, meaning in members.items()]
    lines += ["", "| not offered | why, and what to do instead |", "| --- | --- |"]
    lines += [f"| `{name}` | {reason} |" for name, reason in REFUSED.items()]
    return "\n".join(lines) + "\n"
