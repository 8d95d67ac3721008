"""Arguments about data loaders, columns and the order of training samples."""

from __future__ import annotations

from dataclasses import dataclass, field

from littrainer.arguments.about import about

SAMPLING_STRATEGIES = ("random", "sequential", "group_by_length", "batch_rebalance")
WORKER_START_METHODS = ("fork", "spawn", "forkserver")


@dataclass
class DataFields:
    """Loader workers, which columns the model gets, how training samples are ordered."""

    dataloader_drop_last: bool = field(
        default=False, metadata=about("Leave out the last batch of an epoch where it is not full.")
    )
    dataloader_num_workers: int = field(
        default=0, metadata=about("Processes that load data; 0 loads in the training process.")
    )
    dataloader_pin_memory: bool = field(
        default=True, metadata=about("Load batches into page-locked memory, for faster copies to a GPU.")
    )
    dataloader_persistent_workers: bool = field(
        default=False,
        metadata=about("Keep loader processes alive between epochs: a faster start of an epoch for more memory."),
    )
    dataloader_prefetch_factor: int | None = field(
        default=None,
        metadata=about("Batches each loader process prepares ahead; needs `dataloader_num_workers` above 0."),
    )
    dataloader_multiprocessing_context: str | None = field(
        default=None,
        metadata=about(
            "How loader processes are started; unset takes torch's way.", choices=list(WORKER_START_METHODS)
        ),
    )
    dataloader_in_order: bool = field(
        default=True,
        metadata=about("Hand out batches in the order they were asked for; false hands out whichever is ready first."),
    )
    remove_unused_columns: bool = field(
        default=True, metadata=about("Drop dataset columns that the model's forward does not take.")
    )
    label_names: list[str] | None = field(
        default=None, metadata=about("Keys of the inputs that are labels; unset finds them in the model's forward.")
    )
    train_sampling_strategy: str = field(
        default="random",
        metadata=about("Order of training samples for datasets that have a length.", choices=list(SAMPLING_STRATEGIES)),
    )
    length_column_name: str = field(
        default="length",
        metadata=about(
            "Column with sample lengths, where samples are ordered by length; `remove_unused_columns=False` keeps one "
            "that the model does not take."
        ),
    )
