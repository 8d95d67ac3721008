"""Tables of the names that the redirection replaces, by the transformers module that defines them.

`littrainer.redirection.shim` resolves all other names in transformers' module.
"""

# transformers module -> module of littrainer -> names that both have.
_SAME_NAMES: dict[str, dict[str, str]] = {
    "transformers.debug_utils": {"arguments.choices": "DebugOption"},
    "transformers.hf_argparser": {"arguments.parser": "HfArgumentParser"},
    "transformers.hyperparameter_search": {
        "search.backends": (
            "ALL_HYPERPARAMETER_SEARCH_BACKENDS HyperParamSearchBackendBase OptunaBackend RayTuneBackend "
            "WandbBackend default_hp_search_backend"
        ),
    },
    "transformers.integrations.integration_utils": {
        "tracking.transformers_callbacks": (
            "AzureMLCallback ClearMLCallback CodeCarbonCallback CometCallback DVCLiveCallback DagsHubCallback "
            "FlyteCallback SwanLabCallback"
        ),
        "tracking.mlflow": "MLflowCallback",
        "tracking.tensorboard": "TensorBoardCallback",
        "tracking.trackio": "TrackioCallback",
        "tracking.wandb": "WandbCallback WandbLogModel",
        "callbacks.state": "hp_params",
        "search.optuna_backend": "run_hp_search_optuna",
        "search.backends": "run_hp_search_ray",
        "search.wandb_sweep": "run_hp_search_wandb",
    },
    "transformers.trainer": {
        "trainer": "Trainer DEFAULT_CALLBACKS DEFAULT_PROGRESS_CALLBACK",
        "checkpoint.layout": "OPTIMIZER_NAME SCALER_NAME SCHEDULER_NAME TRAINER_STATE_NAME TRAINING_ARGS_NAME",
    },
    "transformers.trainer_callback": {
        "callbacks.handler": "CallbackHandler DefaultFlowCallback",
        "callbacks.early_stopping": "EarlyStoppingCallback",
        "callbacks.state": "ExportableState TrainerControl TrainerState",
        "callbacks.progress": "PrinterCallback ProgressCallback",
        "callbacks.base": "TrainerCallback",
    },
    "transformers.trainer_pt_utils": {
        "arguments.accelerator_config": "AcceleratorConfig",
        "loop.loss": "LabelSmoother",
        "data.samplers": "LengthGroupedSampler get_length_grouped_indices",
    },
    "transformers.trainer_seq2seq": {"seq2seq": "Seq2SeqTrainer"},
    "transformers.trainer_utils": {
        "search.record": "BestRun",
        "evaluation.results": (
            "EvalLoopOutput EvalPrediction PredictionOutput TrainOutput denumpify_detensorize speed_metrics"
        ),
        "arguments.choices": (
            "EvaluationStrategy FSDPOption HPSearchBackend HubStrategy IntervalStrategy SaveStrategy SchedulerType"
        ),
        "checkpoint.layout": "PREFIX_CHECKPOINT_DIR",
        "data.collators": "RemoveColumnsCollator",
        "search.trial": "default_compute_objective",
        "search.parameters": "default_hp_space_optuna default_hp_space_ray default_hp_space_wandb",
        "runtime.seeds": "enable_full_determinism seed_worker set_seed",
        "checkpoint.manager": "get_last_checkpoint",
        "data.loaders": "has_length",
        "checkpoint.retention": "rotate_checkpoints sort_checkpoints",
    },
    "transformers.training_args": {
        "arguments.choices": "OptimizerNames ParallelMode",
        "arguments.training_arguments": "TrainingArguments",
    },
    "transformers.training_args_seq2seq": {"arguments.training_arguments": "Seq2SeqTrainingArguments"},
}
# transformers module -> name -> littrainer's "module:attribute" with a different name.
_OTHER_NAMES: dict[str, dict[str, str]] = {
    "transformers.integrations.integration_utils": {
        "get_available_reporting_integrations": "littrainer.arguments.report_to:list_available_services",
        "get_reporting_integration_callbacks": "littrainer.tracking.selection:get_tracker_classes",
        "rewrite_logs": "littrainer.tracking.base:rename_for_trackers",
    },
}

REPLACED: dict[str, dict[str, str]] = {
    module: {
        **{name: f"littrainer.{ours}:{name}" for ours, names in homes.items() for name in names.split()},
        **_OTHER_NAMES.get(module, {}),
    }
    for module, homes in _SAME_NAMES.items()
}
"""transformers module -> name -> littrainer's "module:attribute"."""

# Names in modules of transformers 4 that scripts import from there.
EARLIER: dict[str, dict[str, str]] = {
    "transformers.trainer": {
        "transformers.pytorch_utils": "ALL_LAYERNORM_LAYERS is_torch_greater_or_equal_than_1_13",
        "transformers.trainer_pt_utils": (
            "LayerWiseDummyOptimizer distributed_concat get_dataloader_sampler get_module_class_from_name "
            "nested_concat nested_numpify nested_xla_mesh_reduce"
        ),
        "transformers.trainer_utils": "FSDPOption IntervalStrategy check_target_module_exists",
        "transformers.utils": (
            "PushToHubMixin is_apex_available is_bitsandbytes_available is_galore_torch_available "
            "is_grokadamw_available is_liger_kernel_available is_lomo_available is_schedulefree_available "
            "is_torch_mps_available is_torch_tpu_available is_torch_xpu_available is_torchao_available strtobool"
        ),
    },
    "transformers.training_args": {
        "accelerate.utils": "get_int_from_env",
        "transformers.trainer_utils": "EvaluationStrategy",
        "transformers.utils": "is_apex_available",
    },
}
"""transformers module -> current module -> names, used if the transformers module lacks them."""

DERIVED: tuple[str, ...] = ("transformers.trainer_jit_checkpoint", "transformers.utils.notebook")
"""transformers modules with classes derived from names in REPLACED; reimported if imported before the redirection."""

WITHDRAWN: dict[str, dict[str, str]] = {
    "transformers.trainer_tf": {"TFTrainer": "littrainer.keras.trainer:TFTrainer"},
    "transformers.training_args_tf": {"TFTrainingArguments": "littrainer.keras.arguments:TFTrainingArguments"},
    "transformers.deepspeed": {
        name: f"transformers.integrations.deepspeed:{name}"
        for name in (
            *("HfDeepSpeedConfig", "HfTrainerDeepSpeedConfig", "deepspeed_config", "deepspeed_init"),
            *("deepspeed_load_checkpoint", "is_deepspeed_available", "is_deepspeed_zero3_enabled"),
            *("set_hf_deepspeed_config", "unset_hf_deepspeed_config"),
        )
    },
}
"""Module of earlier transformers releases -> name -> current "module:attribute"."""

WITHDRAWN_FROM_PACKAGE = WITHDRAWN["transformers.trainer_tf"] | WITHDRAWN["transformers.training_args_tf"]
"""Withdrawn names of the package `transformers` -> current "module:attribute"."""
