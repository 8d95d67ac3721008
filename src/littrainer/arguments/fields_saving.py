"""Arguments about checkpoints, the Hub, the best model and continuing a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from littrainer.arguments.about import about
from littrainer.arguments.choices import HubStrategy, SaveStrategy


@dataclass
class SavingFields:
    """What is written and when, what is pushed, which checkpoint is best, how a resume behaves."""

    save_only_model: bool = field(
        default=False,
        metadata=about(
            "Write the model without optimizer, schedule and random states; such a checkpoint cannot resume."
        ),
    )
    save_strategy: SaveStrategy | str = field(
        default="steps",
        metadata=about("When to write a checkpoint: `no`, every `steps`, each `epoch` or at each `best` metric."),
    )
    save_steps: float = field(
        default=500, metadata=about("Optimizer steps between two checkpoints; below 1 it is a share of all steps.")
    )
    save_on_each_node: bool = field(
        default=False,
        metadata=about("Write on every node, for nodes that share no disk; on a shared disk leave it off."),
    )
    save_total_limit: int | None = field(
        default=None,
        metadata=about(
            "Checkpoints to keep, the newest and the best among them; older ones are deleted, with 0 or below none is."
        ),
    )
    enable_jit_checkpoint: bool = field(
        default=False,
        metadata=about("Write a checkpoint and end training when the process is told to stop (SIGTERM)."),
    )
    push_to_hub: bool = field(default=False, metadata=about("Push the model to the Hub when it is saved."))
    hub_token: str | None = field(
        default=None, metadata=about("Token for pushing to the Hub; unset takes the one of `hf auth login`.")
    )
    hub_private_repo: bool | None = field(
        default=None, metadata=about("Create the Hub repository as private; unset leaves it to the organisation.")
    )
    hub_model_id: str | None = field(
        default=None,
        metadata=about("Hub repository, `name` or `organisation/name`; unset takes the name of the output folder."),
    )
    hub_strategy: HubStrategy | str = field(
        default="every_save",
        metadata=about("What to push and when: `end`, `every_save`, `checkpoint` or `all_checkpoints`."),
    )
    hub_always_push: bool = field(default=False, metadata=about("Push even while the previous push is still running."))
    hub_revision: str | None = field(default=None, metadata=about("Branch of the Hub repository to push to."))
    load_best_model_at_end: bool = field(
        default=False,
        metadata=about("Load the best checkpoint when training ends; evaluation and saving must then happen together."),
    )
    metric_for_best_model: str | None = field(
        default=None,
        metadata=about(
            "Evaluation metric that ranks checkpoints, with or without `eval_`; the loss where it is needed and unset."
        ),
    )
    greater_is_better: bool | None = field(
        default=None,
        metadata=about("Whether a larger metric is better; unset it is true for names that do not end in `loss`."),
    )
    ignore_data_skip: bool = field(
        default=False,
        metadata=about(
            "On resume start with the first batch of the epoch again instead of skipping those already seen."
        ),
    )
    restore_callback_states_from_checkpoint: bool = field(
        default=False,
        metadata=about("On resume give callbacks back the state they had when the checkpoint was written."),
    )
