"""Which names of which transformers modules are answered by littrainer, as plain data.

A name that does not stand in the table is transformers' own: `littrainer.redirection.shim` fetches it from there.
A name needs a row only in the module that defines it.
"""

# transformers module -> module of littrainer -> the names that it has there too.
_SAME_NAMES: dict[str, dict[str, str]] = {
    "transformers.debug_utils": {"arguments.choices": "DebugOption"},
    "transformers.hf_argparser": {"arguments.parser": "HfArg HfArgumentParser"},
    "transformers.hyperparameter_search": {
        "search.backends": (
            "ALL_HYPERPARAMETER_SEARCH_BACKENDS HyperParamSearchBackendBase OptunaBackend RayTuneBackend "
            "WandbBackend default_hp_search_backend"
        ),
    },
    "transformers.integrations.integration_utils": {
        "tracking.services": (
            "AzureMLCallback CodeCarbonCallback CometCallback DVCLiveCallback FlyteCallback SwanLabCallback"
        ),
        "tracking.clearml": "ClearMLCallback",
        "tracking.mlflow": "DagsHubCallback MLflowCallback",
        "tracking.tensorboard": "TensorBoardCallback",
        "tracking.trackio": "TrackioCallback",
        "tracking.wandb": "WandbCallback WandbLogModel",
        "callbacks.state": "hp_params",
        "search.optuna_backend": "run_hp_search_optuna",
        "search.ray_backend": "run_hp_search_ray",
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
        "training.loss": "LabelSmoother",
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
        "errors.seeds": "enable_full_determinism seed_worker set_seed",
        "checkpoint.verification": "get_last_checkpoint",
        "data.loaders": "has_length",
        "checkpoint.atomic_write": "rotate_checkpoints sort_checkpoints",
    },
    "transformers.training_args": {
        "arguments.choices": "OptimizerNames ParallelMode",
        "arguments.training_arguments": "TrainingArguments",
    },
    "transformers.training_args_seq2seq": {"arguments.training_arguments": "Seq2SeqTrainingArguments"},
}
# transformers module -> name in it -> littrainer's, which has another name.
_OTHER_NAMES: dict[str, dict[str, str]] = {
    "transformers.integrations.integration_utils": {
        "get_available_reporting_integrations": "littrainer.arguments.report_to:available_services",
        "get_reporting_integration_callbacks": "littrainer.tracking.selection:tracker_classes",
        "rewrite_logs": "littrainer.tracking.base:with_tracked_names",
    },
}

REPLACED: dict[str, dict[str, str]] = {
    module: {
        **{name: f"littrainer.{ours}:{name}" for ours, names in homes.items() for name in names.split()},
        **_OTHER_NAMES.get(module, {}),
    }
    for module, homes in _SAME_NAMES.items()
}
"""transformers module -> name in it -> littrainer's, as "module:attribute"."""

DERIVED: tuple[str, ...] = ("transformers.trainer_jit_checkpoint", "transformers.utils.notebook")
"""transformers modules whose classes derive from names in REPLACED. If they were imported before the redirection, they
are imported once more, on top of littrainer's classes."""
