"""Names of transformers' modules around the Trainer that stay transformers' own, as plain data.

They know nothing of the Trainer's classes, or take littrainer's as well as their own. Together with
`littrainer.compat.names` this lists every public name that these modules define in the releases below.
"""

RELEASES = ("5.3.0", "5.23.0")
"""The releases of transformers whose names these tables hold; each is tested."""

_LEFT: dict[str, str] = {
    "transformers.data.data_collator": """
        DataCollator DataCollatorForLanguageModeling DataCollatorForMultipleChoice
        DataCollatorForPermutationLanguageModeling DataCollatorForSOP DataCollatorForSeq2Seq
        DataCollatorForTokenClassification DataCollatorForWholeWordMask DataCollatorMixin DataCollatorWithFlattening
        DataCollatorWithPadding DefaultDataCollator InputDataClass default_data_collator numpy_default_data_collator
        pad_without_fast_tokenizer_warning to_numpy tolist torch_default_data_collator
    """,
    "transformers.debug_utils": "detect_overflow get_abs_min_max",
    "transformers.hf_argparser": "DataClass DataClassType make_choice_type_function string_to_bool",
    "transformers.hyperparameter_search": "",
    "transformers.integrations.integration_utils": """
        INTEGRATION_TO_CALLBACK KubeflowCallback NeptuneCallback NeptuneMissingConfiguration default_logdir
        is_azureml_available is_clearml_available is_codecarbon_available is_comet_available is_dagshub_available
        is_dvclive_available is_flyte_deck_standard_available is_flytekit_available is_kubeflow_available
        is_mlflow_available is_neptune_available is_optuna_available is_ray_available is_ray_tune_available
        is_swanlab_available is_tensorboard_available is_trackio_available is_wandb_available
        save_model_architecture_to_file
    """,
    "transformers.optimization": """
        AdafactorSchedule GreedyLR StreamingAverage TYPE_TO_SCHEDULER_FUNCTION get_adafactor_schedule
        get_constant_schedule get_constant_schedule_with_warmup get_cosine_schedule_with_warmup
        get_cosine_with_hard_restarts_schedule_with_warmup get_cosine_with_min_lr_schedule_with_warmup
        get_cosine_with_min_lr_schedule_with_warmup_lr_rate get_greedy_schedule get_inverse_sqrt_schedule
        get_linear_schedule_with_warmup get_polynomial_decay_schedule_with_warmup get_reduce_on_plateau_schedule
        get_scheduler get_wsd_schedule
    """,
    "transformers.trainer": "FSDP_MODEL_NAME IS_XLA_FSDPV2_POST_2_2 OPTIMIZER_NAME_BIN",
    "transformers.trainer_callback": "",
    "transformers.trainer_jit_checkpoint": "CheckpointManager JITCheckpointCallback",
    "transformers.trainer_optimizer": "OptimizerContext OptimizerHandler has_mixed_dtensor is_optimizer_factory",
    "transformers.trainer_pt_utils": """
        DistributedLengthGroupedSampler DistributedSamplerWithLoop EvalLoopContainer IterableDatasetShard
        LayerWiseDummyOptimizer LayerWiseDummyScheduler ShardSampler atleast_1d distributed_broadcast_scalars
        distributed_concat expand_like find_batch_size get_dataloader_sampler get_learning_rates get_model_param_count
        get_module_class_from_name get_num_trainable_parameters get_optimizer_group get_parameter_names get_tpu_sampler
        is_attention_mask_causal log_metrics metrics_format nested_concat nested_detach nested_gather nested_new_like
        nested_numpify nested_truncate nested_xla_mesh_reduce numpy_pad_and_concatenate reissue_pt_warnings
        remove_dummy_checkpoint safe_globals save_metrics save_state set_rng_state_for_device smp_forward_backward
        smp_forward_only smp_gather smp_nested_concat torch_distributed_zero_first torch_pad_and_concatenate
    """,
    "transformers.trainer_seq2seq": "",
    "transformers.trainer_utils": """
        TrainerMemoryTracker align_special_tokens check_target_module_exists compare_trainer_and_checkpoint_args
        find_executable_batch_size is_main_process load_sharded_checkpoint number_of_arguments suppress_progress_bars
        total_processes_number unwrap_peft_model validate_quantization_for_training
    """,
    "transformers.training_args": "ParallelismConfig log_levels str_to_bool trainer_log_levels",
    "transformers.training_args_seq2seq": "",
    "transformers.utils.notebook": """
        NotebookProgressBar NotebookProgressCallback NotebookTrainingTracker format_time html_progress_bar
        text_to_html_table
    """,
}

LEFT_TO_TRANSFORMERS: dict[str, tuple[str, ...]] = {module: tuple(names.split()) for module, names in _LEFT.items()}
"""transformers module -> public names that it defines and littrainer does not."""

MISSING_IN: dict[str, dict[str, tuple[str, ...]]] = {
    "5.3.0": {
        "transformers.integrations.integration_utils": ("KubeflowCallback", "is_kubeflow_available"),
        "transformers.optimization": ("GreedyLR", "StreamingAverage", "get_greedy_schedule"),
        "transformers.trainer_optimizer": ("has_mixed_dtensor",),
        "transformers.trainer_pt_utils": ("BatchRebalanceSampler",),
        "transformers.trainer_utils": ("EvaluationStrategy",),
    },
    "5.23.0": {
        "transformers.data.data_collator": ("DataCollatorForSOP", "DataCollatorForWholeWordMask", "tolist"),
        "transformers.trainer_utils": ("EvaluationStrategy",),
    },
}
"""Release -> module -> names of both tables that this release does not have.

Those that littrainer answers are there all the same, so that a script written for another release runs.
"""
