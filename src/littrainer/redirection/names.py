"""Which names of which transformers modules are answered by littrainer, as plain data.

A name that does not stand in the table is transformers' own: `littrainer.redirection.shim` fetches it from there.
A name needs a row only in the module that defines it.
"""

CHOICES = "littrainer.arguments.choices"
LAYOUT = "littrainer.checkpoint.layout"
RESULTS = "littrainer.evaluation.results"
SEARCH = "littrainer.search"

REPLACED: dict[str, dict[str, str]] = {
    "transformers.debug_utils": {"DebugOption": f"{CHOICES}:DebugOption"},
    "transformers.hf_argparser": {
        "HfArg": "littrainer.arguments.parser:HfArg",
        "HfArgumentParser": "littrainer.arguments.parser:HfArgumentParser",
    },
    "transformers.hyperparameter_search": {
        "ALL_HYPERPARAMETER_SEARCH_BACKENDS": f"{SEARCH}.backends:ALL_HYPERPARAMETER_SEARCH_BACKENDS",
        "HyperParamSearchBackendBase": f"{SEARCH}.backends:HyperParamSearchBackendBase",
        "OptunaBackend": f"{SEARCH}.backends:OptunaBackend",
        "RayTuneBackend": f"{SEARCH}.backends:RayTuneBackend",
        "WandbBackend": f"{SEARCH}.backends:WandbBackend",
        "default_hp_search_backend": f"{SEARCH}.backends:default_hp_search_backend",
    },
    "transformers.integrations.integration_utils": {
        "AzureMLCallback": "littrainer.tracking.services:AzureMLCallback",
        "ClearMLCallback": "littrainer.tracking.clearml:ClearMLCallback",
        "CodeCarbonCallback": "littrainer.tracking.services:CodeCarbonCallback",
        "CometCallback": "littrainer.tracking.services:CometCallback",
        "DVCLiveCallback": "littrainer.tracking.services:DVCLiveCallback",
        "DagsHubCallback": "littrainer.tracking.mlflow:DagsHubCallback",
        "FlyteCallback": "littrainer.tracking.services:FlyteCallback",
        "MLflowCallback": "littrainer.tracking.mlflow:MLflowCallback",
        "SwanLabCallback": "littrainer.tracking.services:SwanLabCallback",
        "TensorBoardCallback": "littrainer.tracking.tensorboard:TensorBoardCallback",
        "TrackioCallback": "littrainer.tracking.trackio:TrackioCallback",
        "WandbCallback": "littrainer.tracking.wandb:WandbCallback",
        "WandbLogModel": "littrainer.tracking.wandb:WandbLogModel",
        "get_available_reporting_integrations": "littrainer.arguments.report_to:available_services",
        "get_reporting_integration_callbacks": "littrainer.tracking.selection:tracker_classes",
        "hp_params": "littrainer.callbacks.state:hp_params",
        "rewrite_logs": "littrainer.tracking.base:with_tracked_names",
        "run_hp_search_optuna": f"{SEARCH}.optuna_backend:run_hp_search_optuna",
        "run_hp_search_ray": f"{SEARCH}.ray_backend:run_hp_search_ray",
        "run_hp_search_wandb": f"{SEARCH}.wandb_sweep:run_hp_search_wandb",
    },
    "transformers.trainer": {
        "Trainer": "littrainer.trainer:Trainer",
        "DEFAULT_CALLBACKS": "littrainer.trainer:DEFAULT_CALLBACKS",
        "DEFAULT_PROGRESS_CALLBACK": "littrainer.trainer:DEFAULT_PROGRESS_CALLBACK",
        "OPTIMIZER_NAME": f"{LAYOUT}:OPTIMIZER_NAME",
        "SCALER_NAME": f"{LAYOUT}:SCALER_NAME",
        "SCHEDULER_NAME": f"{LAYOUT}:SCHEDULER_NAME",
        "TRAINER_STATE_NAME": f"{LAYOUT}:TRAINER_STATE_NAME",
        "TRAINING_ARGS_NAME": f"{LAYOUT}:TRAINING_ARGS_NAME",
    },
    "transformers.trainer_callback": {
        "CallbackHandler": "littrainer.callbacks.handler:CallbackHandler",
        "DefaultFlowCallback": "littrainer.callbacks.handler:DefaultFlowCallback",
        "EarlyStoppingCallback": "littrainer.callbacks.early_stopping:EarlyStoppingCallback",
        "ExportableState": "littrainer.callbacks.state:ExportableState",
        "PrinterCallback": "littrainer.callbacks.progress:PrinterCallback",
        "ProgressCallback": "littrainer.callbacks.progress:ProgressCallback",
        "TrainerCallback": "littrainer.callbacks.base:TrainerCallback",
        "TrainerControl": "littrainer.callbacks.state:TrainerControl",
        "TrainerState": "littrainer.callbacks.state:TrainerState",
    },
    "transformers.trainer_pt_utils": {
        "AcceleratorConfig": "littrainer.arguments.accelerator_config:AcceleratorConfig",
        "LabelSmoother": "littrainer.training.loss:LabelSmoother",
        "LengthGroupedSampler": "littrainer.data.samplers:LengthGroupedSampler",
        "get_length_grouped_indices": "littrainer.data.samplers:get_length_grouped_indices",
    },
    "transformers.trainer_seq2seq": {"Seq2SeqTrainer": "littrainer.seq2seq:Seq2SeqTrainer"},
    "transformers.trainer_utils": {
        "BestRun": f"{SEARCH}.record:BestRun",
        "EvalLoopOutput": f"{RESULTS}:EvalLoopOutput",
        "EvalPrediction": f"{RESULTS}:EvalPrediction",
        "EvaluationStrategy": f"{CHOICES}:EvaluationStrategy",
        "FSDPOption": f"{CHOICES}:FSDPOption",
        "HPSearchBackend": f"{CHOICES}:HPSearchBackend",
        "HubStrategy": f"{CHOICES}:HubStrategy",
        "IntervalStrategy": f"{CHOICES}:IntervalStrategy",
        "PREFIX_CHECKPOINT_DIR": f"{LAYOUT}:PREFIX_CHECKPOINT_DIR",
        "PredictionOutput": f"{RESULTS}:PredictionOutput",
        "RemoveColumnsCollator": "littrainer.data.collators:RemoveColumnsCollator",
        "SaveStrategy": f"{CHOICES}:SaveStrategy",
        "SchedulerType": f"{CHOICES}:SchedulerType",
        "TrainOutput": f"{RESULTS}:TrainOutput",
        "default_compute_objective": f"{SEARCH}.trial:default_compute_objective",
        "default_hp_space_optuna": f"{SEARCH}.parameters:default_hp_space_optuna",
        "default_hp_space_ray": f"{SEARCH}.parameters:default_hp_space_ray",
        "default_hp_space_wandb": f"{SEARCH}.parameters:default_hp_space_wandb",
        "denumpify_detensorize": f"{RESULTS}:denumpify_detensorize",
        "enable_full_determinism": "littrainer.errors.seeds:enable_full_determinism",
        "get_last_checkpoint": "littrainer.checkpoint.verification:get_last_checkpoint",
        "has_length": "littrainer.data.loaders:has_length",
        "rotate_checkpoints": "littrainer.checkpoint.atomic_write:rotate_checkpoints",
        "seed_worker": "littrainer.errors.seeds:seed_worker",
        "set_seed": "littrainer.errors.seeds:set_seed",
        "sort_checkpoints": "littrainer.checkpoint.atomic_write:sort_checkpoints",
        "speed_metrics": f"{RESULTS}:speed_metrics",
    },
    "transformers.training_args": {
        "OptimizerNames": f"{CHOICES}:OptimizerNames",
        "ParallelMode": f"{CHOICES}:ParallelMode",
        "TrainingArguments": "littrainer.arguments.training_arguments:TrainingArguments",
    },
    "transformers.training_args_seq2seq": {
        "Seq2SeqTrainingArguments": "littrainer.arguments.training_arguments:Seq2SeqTrainingArguments",
    },
}
"""transformers module -> name in it -> littrainer's, as "module:attribute"."""

DERIVED: tuple[str, ...] = ("transformers.trainer_jit_checkpoint", "transformers.utils.notebook")
"""transformers modules whose classes derive from names in REPLACED. If they were imported before the redirection, they
are imported once more, on top of littrainer's classes."""
