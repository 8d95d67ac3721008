"""Members of transformers' Trainer that are not here yet: said by name where a script asks for or overrides one."""

from __future__ import annotations

from typing import Any

# Public members -> what to do instead.
NOT_YET: dict[str, str] = {
    "push_to_hub": "save with save_model() and upload the folder with huggingface_hub.upload_folder()",
    "init_hf_repo": "create the repository with huggingface_hub.create_repo()",
    "create_model_card": "write the card with huggingface_hub.ModelCard",
    "hyperparameter_search": "call train() from a loop or an Optuna study of your own",
}
# Methods that transformers calls and that nothing here calls: an override would be ignored, so it is refused.
NEVER_CALLED: dict[str, str] = {
    "_inner_training_loop": "override training_step or compute_loss, or add a callback",
    "_run_epoch": "override training_step or compute_loss, or add a callback",
    "_prepare_for_training": "override create_optimizer_and_scheduler",
    "_init_training_state": "add a callback with on_train_begin",
    "_finalize_training": "add a callback with on_train_end",
    "_wrap_model": "wrap the model before it is passed to the Trainer",
    "create_accelerator_and_postprocess": "pass lightning={...}",
    "_build_accelerator_args": "pass lightning={...}",
    "_save_optimizer_and_scheduler": "override _save_checkpoint",
    "_save_rng_state": "override _save_checkpoint",
    "_save_scaler": "override _save_checkpoint",
    "_load_optimizer_and_scheduler": "override create_optimizer_and_scheduler",
    "_load_rng_state": "add a callback with on_train_begin",
    "_load_scaler": "add a callback with on_train_begin",
    "_load_callback_state": "set restore_callback_states_from_checkpoint",
    "_issue_warnings_after_load": "override _load_from_checkpoint",
}


def missing_member_message(name: str) -> str:
    """What an AttributeError says for a name that the Trainer does not have."""
    if name in NOT_YET:
        return f"littrainer's Trainer has no {name} yet; {NOT_YET[name]}, or run the script with plain `python`."
    return f"'Trainer' object has no attribute {name!r}"


def refuse_ignored_overrides(trainer: Any, own_class: type) -> None:
    """Refuse a subclass that overrides what is never called.

    Raises:
        NotImplementedError: it does; all such methods are named, with what to override instead.
    """
    ignored = [
        f"{name} ({instead})"
        for name, instead in NEVER_CALLED.items()
        if any(name in vars(base) for base in type(trainer).__mro__ if not issubclass(own_class, base))
    ]
    if ignored:
        raise NotImplementedError(
            f"{type(trainer).__name__} overrides what littrainer never calls: {', '.join(ignored)}. Or run the script "
            "with plain `python`, which uses transformers' own Trainer."
        )
