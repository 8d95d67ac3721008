"""Members of transformers' Trainer that are not here, or never called: said where a script asks for or has its own."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from littrainer.compat.trainer_attributes import REFUSED

if TYPE_CHECKING:
    from littrainer.trainer import Trainer

logger = logging.getLogger(__name__)

# Methods that transformers calls and that nothing here calls: an override would be ignored, so it is refused.
NEVER_CALLED: dict[str, str] = {
    "_run_epoch": "Lightning runs the epochs: override training_step, get_batch_samples or _inner_training_loop, or "
    "add a callback with on_epoch_begin and on_epoch_end",
    "_prepare_for_training": "override create_optimizer, create_scheduler, _wrap_model or "
    "_load_optimizer_and_scheduler, or add a callback with on_train_begin",
    "_build_accelerator_args": "Lightning takes the accelerator's place: override create_accelerator_and_postprocess, "
    "or pass lightning={...}",
    "_prepare_context_parallel_inputs": "override _prepare_inputs",
    "_defer_fsdp_gradient_reduction": "pass a strategy as lightning={...}",
    "_sync_replicated_trainable_parameters": "add a callback with on_train_begin",
}
# Methods that the Trainer of transformers 4 called, and that of transformers 5 does not either.
CALLED_IN_TRANSFORMERS_4: dict[str, str] = {
    "_nested_gather": "override _maybe_log_save_evaluate, or set gather_function",
    "_gather_and_numpify": "override evaluation_loop",
    "_sorted_checkpoints": "override _save_checkpoint",
    "_rotate_checkpoints": "override _save_checkpoint",
    "_activate_neftune": "set neftune_noise_alpha",
    "_deactivate_neftune": "set neftune_noise_alpha",
    "_align_special_tokens": "set the model's config before it is passed to the Trainer",
    "prediction_loop": "override evaluation_loop",
    "num_tokens": "override _track_num_input_tokens",
    "_fsdp_qlora_plugin_updates": "override create_accelerator_and_postprocess",
    "propagate_args_to_deepspeed": "override create_accelerator_and_postprocess",
    "ipex_optimize_model": "override _wrap_model",
    "torch_jit_model_eval": "override _wrap_model",
    "_save_tpu": "override _save",
}


def missing_member_message(name: str) -> str:
    """What an AttributeError says for a name that the Trainer does not have."""
    if name in REFUSED:
        return f"littrainer's Trainer does not have {name}: {REFUSED[name]}."
    return f"'Trainer' object has no attribute {name!r}"


def refuse_ignored_overrides(trainer: Trainer) -> None:
    """Refuse a Trainer with methods of its own that are never called, in a subclass, set on the class or the instance.

    Raises:
        NotImplementedError: it has some; all are named, with what to override instead.
    """
    ignored = [f"{name} ({NEVER_CALLED[name]})" for name in trainer._own_methods(*NEVER_CALLED)]
    if ignored:
        raise NotImplementedError(
            f"{type(trainer).__name__} overrides what littrainer never calls: {'; '.join(ignored)}. Or run the script "
            "with plain `python`, which uses transformers' own Trainer."
        )


def warn_of_earlier_overrides(trainer: Trainer) -> None:
    """Say which methods of its own a Trainer has that only the Trainer of transformers 4 called."""
    earlier = [f"{name} ({CALLED_IN_TRANSFORMERS_4[name]})" for name in trainer._own_methods(*CALLED_IN_TRANSFORMERS_4)]
    if earlier:
        logger.warning(
            "%s overrides methods that only transformers 4 calls: %s.", type(trainer).__name__, "; ".join(earlier)
        )
