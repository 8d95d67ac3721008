"""Packing of several documents into a row, for causal language models.

Position ids restart with each document. transformers' models derive from them attention masks that separate the
documents; flash attention gets the documents' beginnings.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from littrainer.data.resume.progress import has_shuffle_buffer
from littrainer.data.samplers import get_sample_length, measure_lengths
from littrainer.data.sharding import set_epoch_on
from littrainer.data.token_batches import LengthGroups, check_fit, follow_sampler
from littrainer.data.windows import IGNORED_LABEL
from littrainer.distributed.layout import data_parallel_size

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments

# The first token of a document has no label.
MIN_TOKENS = 2
ROWS_PER_PACKING = 64


def pack_documents(
    args: TrainingArguments,
    datasets: tuple[Any, Any],
    sampler: Any,
    collate: Callable[[list[Any]], Any],
    processing_class: Any,
    model: Any,
) -> tuple[Any, Any, PackedCollator]:
    """Return dataset, sampler and collator for training rows of up to `pack_to_length` tokens.

    Parameters:
        datasets: the dataset with all columns, and without unused columns.
        collate: collator of a single document.
    """
    full_dataset, dataset = datasets
    size, is_stream = args.pack_to_length, isinstance(dataset, IterableDataset)
    assert size is not None
    dispatches = getattr(args.accelerator_config, "dispatch_batches", None)
    # Dispatched batches are joined and split, which requires rows of equal length.
    fills = data_parallel_size(args) > 1 and (is_stream if dispatches is None else dispatches)
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    flattens = "flash" in (attention or "")
    if fills and flattens:
        raise ValueError(
            f"pack_to_length={size} with {attention} joins the rows of a batch, and one process that reads for all "
            'could not cut them apart again. Set accelerator_config={"dispatch_batches": False}.'
        )
    padding = getattr(processing_class, "pad_token_id", None) or 0
    collator = PackedCollator(collate, size, padding, flattens=flattens, fills=bool(fills))
    if is_stream:
        return PackedStream(dataset, size), None, collator
    lengths = measure_lengths(args, full_dataset, processing_class, "pack_to_length")
    check_fit(lengths, size, "pack_to_length", "documents")
    documents = np.flatnonzero(lengths >= MIN_TOKENS)
    if not len(documents):
        raise ValueError(f"pack_to_length={size}: no document has {MIN_TOKENS} tokens, so there is none to predict.")
    widths = lengths[documents]
    rows = [np.array(row) for row in pack_best_fit(np.sort(widths)[::-1].tolist(), size)]
    groups = follow_sampler(args, LengthGroups(widths, rows), sampler, "pack_to_length")
    return PackedDocuments(dataset, documents, len(rows)), groups, collator


def pack_best_fit(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Return rows of document indices by best fit: each document is added to the fullest row with enough space.

    Parameters:
        lengths: tokens of the documents in descending order, at most `size`.
    """
    rows: list[list[int]] = []
    # Rows by free space; bit n of `spaces` is set if any row has n tokens free.
    rows_by_space: list[list[int]] = [[] for _ in range(size + 1)]
    spaces = 0
    for document, length in enumerate(lengths):
        if fitting := spaces >> length:
            space = length + (fitting & -fitting).bit_length() - 1
            row = rows_by_space[space].pop()
            if not rows_by_space[space]:
                spaces ^= 1 << space
        else:
            space, row = size, len(rows)
            rows.append([])
        rows[row].append(document)
        if space > length:
            rows_by_space[space - length].append(row)
            spaces |= 1 << (space - length)
    return rows


class PackedDocuments(Dataset[list[Any]]):
    """Rows of documents of a map-style dataset."""

    def __init__(self, dataset: Any, documents: np.ndarray, rows: int):
        self.dataset, self.documents, self.rows = dataset, documents, rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: Sequence[int]) -> list[Any]:
        indices = self.documents[row].tolist()
        if hasattr(self.dataset, "__getitems__"):
            return list(self.dataset.__getitems__(indices))
        return [self.dataset[index] for index in indices]


class PackedStream(IterableDataset[list[Any]]):
    """Rows of documents of a stream, with up to `size` tokens each.

    Documents for 64 rows are prefetched and packed together.
    """

    def __init__(self, dataset: Any, size: int):
        self.dataset, self.size = dataset, size
        self.generator = getattr(dataset, "generator", None)
        self._rows_done = self._rows_to_skip = 0
        self._stream_state: Any = None
        self._has_state = callable(getattr(dataset, "state_dict", None)) and not has_shuffle_buffer(dataset)
        if self._has_state:
            # A resume checks for these methods.
            self.state_dict = self._state
            self.load_state_dict = self._load_state

    def set_epoch(self, epoch: int) -> None:
        set_epoch_on(epoch, self.dataset)

    def _state(self) -> dict[str, Any]:
        return {"stream": self._stream_state, "rows": self._rows_done}

    def _load_state(self, state: dict[str, Any]) -> None:
        if state["stream"] is not None:
            self.dataset.load_state_dict(state["stream"])
        self._rows_to_skip = state["rows"]

    def __iter__(self) -> Iterator[list[Any]]:
        documents = iter(self.dataset)
        while True:
            self._stream_state = copy.deepcopy(self.dataset.state_dict()) if self._has_state else None
            self._rows_done, self._rows_to_skip = self._rows_to_skip, 0
            rows = self._pack_rows(documents)
            if not rows:
                return
            for row in rows[self._rows_done :]:
                self._rows_done += 1
                yield row

    def _pack_rows(self, stream: Iterator[Any]) -> list[list[Any]]:
        documents, tokens = [], 0
        for document in stream:
            if "input_ids" not in document:
                raise ValueError(
                    f"pack_to_length={self.size} packs `input_ids`, and a document of the stream has "
                    f"{', '.join(document)}: tokenize the texts in the dataset."
                )
            length = get_sample_length(document, "input_ids", without_padding=True)
            if length > self.size:
                raise ValueError(
                    f"pack_to_length={self.size}: a document of the stream has {length} tokens. Cut it in the dataset, "
                    "or set a larger pack_to_length."
                )
            if length >= MIN_TOKENS:
                documents.append((length, document))
                tokens += length
            if tokens >= ROWS_PER_PACKING * self.size:
                break
        documents.sort(key=lambda pair: -pair[0])
        rows = pack_best_fit([length for length, _ in documents], self.size)
        return [[documents[number][1] for number in row] for row in rows]


def collate_with_labels(collate: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    """Return a batch of an evaluation, whose tokens are the labels if it has none, as in training.

    Parameters:
        collate: collator of the samples.

    Raises:
        ValueError: neither an attention mask nor the samples tell what is padding.
    """
    batch = collate(samples)
    if not isinstance(batch, Mapping) or "input_ids" not in batch or "labels" in batch:
        return batch
    labels, mask = batch["input_ids"], batch.get("attention_mask")
    width = labels.shape[-1]
    if mask is None and not all(
        "input_ids" in sample and get_sample_length(sample, "input_ids", without_padding=True) >= width
        for sample in samples
    ):
        raise ValueError(
            f"pack_to_length: data_collator returns rows of {width} tokens without attention_mask, so that padding may "
            "count in the evaluation loss. Let it return attention_mask or labels."
        )
    return {**batch, "labels": labels if mask is None else labels.masked_fill(~mask.bool(), IGNORED_LABEL)}


class PackedCollator:
    """Collator of rows of documents.

    Parameters:
        collate: collator of a single document; its tokens are the labels if it has none.
        flattens: join all rows without padding, for flash attention.
        fills: pad rows to `size`; else to the longest row.

    The label of each document's first token is -100, since the previous token belongs to another document. Position
    ids restart in each document, and are 0 for padding.
    """

    def __init__(
        self,
        collate: Callable[[list[Any]], Any],
        size: int,
        padding: int,
        *,
        flattens: bool = False,
        fills: bool = False,
    ):
        self.collate, self.size, self.padding = collate, size, padding
        self.flattens, self.fills = flattens, fills

    def __call__(self, rows: list[list[Any]]) -> dict[str, Any]:
        packed_rows = [[self._collate_document(sample) for sample in row] for row in rows]
        tokens = [sum(len(document["input_ids"]) for document in row) for row in packed_rows]
        if max(tokens) > self.size:
            raise ValueError(
                f"pack_to_length={self.size}: a row has {max(tokens)} tokens: its documents are longer than their "
                "lengths in the dataset. Correct the lengths, or leave out what data_collator adds."
            )
        if self.flattens:
            packed_rows, tokens = [list(chain.from_iterable(packed_rows))], [sum(tokens)]
        width = self.size if self.fills else max(tokens)
        batch: dict[str, Any] = {}
        for name in packed_rows[0][0]:
            fill = {"input_ids": self.padding, "labels": IGNORED_LABEL}.get(name, 0)
            joined = [torch.cat([document[name] for document in row]) for row in packed_rows]
            batch[name] = torch.stack(
                [torch.nn.functional.pad(row, (0, width - len(row)), value=fill) for row in joined]
            )
        if self.flattens:
            lengths = [0, *(len(document["input_ids"]) for document in packed_rows[0])]
            begins = torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32)
            batch.update(
                cu_seq_lens_q=begins, cu_seq_lens_k=begins, max_length_q=max(lengths), max_length_k=max(lengths)
            )
        return batch

    def _collate_document(self, sample: Any) -> dict[str, torch.Tensor]:
        batch = self.collate([sample])
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if ids is None:
            raise ValueError("pack_to_length packs `input_ids`, and the batch of data_collator has none: add them.")
        entries = {name: value for name, value in batch.items() if name not in ("attention_mask", "position_ids")}
        entries.setdefault("labels", ids)
        mismatched = [name for name, value in entries.items() if getattr(value, "shape", None) != ids.shape]
        if mismatched:
            raise ValueError(
                f"pack_to_length joins what has one entry for each token, which {', '.join(mismatched)} of the batch "
                "does not have: leave it out of the dataset, or out of what data_collator returns."
            )
        mask = batch.get("attention_mask")
        is_token = slice(None) if mask is None else mask[0].bool()
        document = {name: value[0][is_token] for name, value in entries.items()}
        document["labels"] = document["labels"].clone()
        document["labels"][:1] = IGNORED_LABEL
        document["position_ids"] = torch.arange(len(document["input_ids"]))
        return document


def count_document_tokens(position_ids: torch.Tensor) -> torch.Tensor:
    begins = (position_ids[:, :-1] == 0) & (position_ids[:, 1:] == 1)
    return (position_ids > 0).sum() + begins.sum()
