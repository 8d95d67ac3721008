from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
from transformers import DataCollatorWithFlattening

from littrainer import Trainer
from littrainer.data.collators import default_data_collator
from littrainer.data.packing import (
    PackedCollator,
    PackedStream,
    collate_with_labels,
    count_document_tokens,
    pack_best_fit,
)
from tests.loop.exact_resume import differences_after_resuming
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, Stream, language_rows
from tests.scenarios.models import tiny_gpt2, tiny_llama
from tests.scenarios.trainers import quiet_arguments, quiet_trainer

# transformers' token count for GPT-2 excludes the first token only if it is masked.
ROWS = [{**row, "labels": [-100, *row["labels"][1:]]} for row in language_rows(24)]
SIZE = 20


def language_trainer(folder: Path, data: Any, model: Any = None, collate: Any = pad_tokens, **changes: Any) -> Any:
    torch.manual_seed(0)
    keywords = {"train_dataset": data, "data_collator": collate}
    return quiet_trainer(folder, tiny_llama() if model is None else model, trainer_kwargs=keywords, **changes)


def tokens_read(batches: Any) -> list[tuple[int, ...]]:
    """Return the documents of packed batches."""
    documents = []
    for batch in batches:
        for ids, positions in zip(batch["input_ids"].tolist(), batch["position_ids"].tolist(), strict=True):
            document: list[int] = []
            for token, position in [*zip(ids, positions, strict=True), (0, 0)]:
                if position == 0 and len(document) > 1:
                    documents.append(tuple(document))
                document = [token] if position == 0 else [*document, token]
    return sorted(documents)


DOCUMENTS = sorted(tuple(row["input_ids"]) for row in ROWS)


def test_each_document_is_packed_once_and_rows_are_shuffled_in_each_epoch(tmp_path: Path) -> None:
    trainer = language_trainer(tmp_path, Rows(ROWS), pack_to_length=SIZE)
    loader = trainer.get_train_dataloader()
    batches = [list(loader) for _ in range(2)]
    assert [tokens_read(epoch) for epoch in batches] == [DOCUMENTS, DOCUMENTS]
    assert not torch.equal(batches[0][0]["input_ids"], batches[1][0]["input_ids"])
    assert trainer.num_examples(loader) == sum(len(batch["input_ids"]) for batch in batches[0])
    assert all(batch["input_ids"].shape[1] <= SIZE for epoch in batches for batch in epoch)


def attend_within_documents(
    module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: Any = None, cu_seq_lens_q: Any = None, **_: Any
) -> Any:
    """Compute flash attention over packed documents on the CPU."""
    assert mask is None and (cu_seq_lens_q is None or len(query) == 1)
    begins = [0, query.shape[2]] if cu_seq_lens_q is None else cu_seq_lens_q.tolist()
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            *(states[:, :, begin:end] for states in (query, key, value)), is_causal=True, scale=scaling, enable_gqa=True
        )
        for begin, end in pairwise(begins)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2), None


FLASH = "flash_attention_on_the_cpu"
transformers.AttentionInterface.register(FLASH, attend_within_documents)


def loss_and_weights(folder: Path, data: Any, make: Any, attention: str, **changes: Any) -> tuple[float, Any]:
    """Return the loss and the weights of an SGD step on all documents, packed or not."""
    torch.manual_seed(0)
    model = make()
    if attention != FLASH:
        model.set_attn_implementation(attention)
    elif "pack_to_length" in changes:
        model.config._attn_implementation = attention
    steps: Any = {"logging_strategy": "steps", "logging_steps": 1, "optim": "sgd", "learning_rate": 1.0}
    changes = {"per_device_train_batch_size": len(ROWS), "max_steps": 1, "max_grad_norm": 0, **steps, **changes}
    trainer = language_trainer(folder, data, model, **changes)
    trainer.train()
    return trainer.state.log_history[0]["loss"], trainer.model.state_dict()


PACKED: Any = {"pack_to_length": SIZE, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 3}
tiny_deterministic_gpt2 = functools.partial(tiny_gpt2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


@pytest.mark.parametrize(
    ("make", "attention", "kind"),
    [
        (tiny_llama, "eager", Rows),
        (tiny_llama, "sdpa", Rows),
        (tiny_llama, "sdpa", Stream),
        (tiny_llama, FLASH, Rows),
        (tiny_deterministic_gpt2, "eager", Rows),
        (tiny_deterministic_gpt2, "sdpa", Rows),
    ],
)
def test_loss_and_gradients_are_those_of_unpacked_documents(
    tmp_path: Path, make: Any, attention: str, kind: Any
) -> None:
    separate, packed = (loss_and_weights(tmp_path, kind(ROWS), make, attention, **changes) for changes in ({}, PACKED))
    torch.testing.assert_close(packed, separate, rtol=1e-5, atol=1e-5)


def test_flex_attention_separates_documents() -> None:
    # Its backward pass needs a GPU, where tests/gpu compares gradients.
    torch.manual_seed(0)
    model = tiny_llama(attn_implementation="flex_attention", use_cache=False).eval()
    batch = PackedCollator(pad_tokens, SIZE, 0)([ROWS[:2], ROWS[2:3]])
    with torch.no_grad():
        packed = model(**batch, num_items_in_batch=1).loss
        # Compiled flex attention over rows of a few tokens is not exact on every CPU.
        model.set_attn_implementation("eager")
        separate = [model(**pad_tokens([row]), num_items_in_batch=1).loss for row in ROWS[:3]]
    assert float(packed) == pytest.approx(float(sum(separate)), rel=1e-5)


def test_rows_are_joined_as_transformers_does_for_flash_attention() -> None:
    theirs = DataCollatorWithFlattening(return_flash_attn_kwargs=True)([dict(row) for row in ROWS[:4]])
    ours = PackedCollator(pad_tokens, SIZE, 0, flattens=True)([ROWS[:2], ROWS[2:4]])
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(torch.as_tensor(ours[name]), torch.as_tensor(value)), name
    assert ours["cu_seq_lens_q"].dtype == torch.int32


def test_labels_default_to_tokens_and_padding_is_not_counted(tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}, {"input_ids": [0, 0, 0, 0]}]
    batch = PackedCollator(default_data_collator, 8, 0)([rows[:2], rows[2:]])
    assert batch["labels"].tolist() == [[-100, 6, 7, -100, 9], [-100, 0, 0, 0, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]
    assert count_document_tokens(batch["position_ids"]) == 9
    trainer = language_trainer(
        tmp_path, Rows(ROWS), pack_to_length=SIZE, num_train_epochs=1, include_num_input_tokens_seen="non_padding"
    )
    trainer.train()
    assert trainer.state.num_input_tokens_seen == sum(map(len, DOCUMENTS))


class LanguageStream(Stream):
    """Stream with a state, which counts the documents read."""

    def __init__(self, rows: list[Any]) -> None:
        super().__init__(rows)
        self.next_row = self.rows_read = 0

    def state_dict(self) -> dict[str, int]:
        return {"next_row": self.next_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next_row = state["next_row"]

    def __iter__(self) -> Iterator[Any]:
        while self.next_row < len(self.rows):
            self.next_row += 1
            self.rows_read += 1
            yield dict(self.rows[self.next_row - 1])
        self.next_row = 0


MANY = language_rows(600, seed=4)


@pytest.mark.parametrize(("kind", "workers"), [(Rows, 0), (Rows, 2), (Stream, 0), (LanguageStream, 0)])
def test_a_resumed_training_on_packed_rows_equals_an_uninterrupted_training(
    tmp_path: Path, kind: Any, workers: int
) -> None:
    built: list[Any] = []

    def build() -> Trainer:
        torch.manual_seed(0)
        settings: Any = {"logging_strategy": "steps", "logging_steps": 1, "save_strategy": "steps", "save_steps": 20}
        built.append(kind(MANY if kind is not Rows else ROWS))
        steps = {"max_steps": 42} if kind is not Rows else {"num_train_epochs": 6, "save_steps": 5}
        settings.update(steps, pack_to_length=SIZE, dataloader_num_workers=workers)
        arguments = quiet_arguments(tmp_path, **settings)
        return Trainer(tiny_gpt2(), arguments, pad_tokens, built[-1])

    steps = (5,) if kind is Rows else (20, 40)
    assert differences_after_resuming(tmp_path, build, *steps) == {}
    if kind is LanguageStream:
        # Documents before the checkpoint are not read again.
        assert built[-1].rows_read < built[0].rows_read


def test_packed_rows_are_trained_once_if_the_batch_size_changes(tmp_path: Path) -> None:
    class RecordingTrainer(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **keywords: Any) -> Any:
            trained.extend(tokens_read([inputs]))
            return super().compute_loss(model, inputs, *args, **keywords)

    trained: list[Any] = []
    for size, resumed in ((2, None), (3, str(tmp_path / "checkpoint-2"))):
        settings: Any = {"per_device_train_batch_size": size, "save_strategy": "steps", "save_steps": 2}
        stop = {"max_steps": 2} if resumed is None else {"num_train_epochs": 1}
        torch.manual_seed(0)
        arguments = quiet_arguments(tmp_path, **settings, **stop, pack_to_length=SIZE)
        RecordingTrainer(tiny_gpt2(), arguments, pad_tokens, Rows(ROWS)).train(resume_from_checkpoint=resumed)
    assert sorted(trained) == DOCUMENTS


def test_a_stream_is_packed_without_losing_a_document() -> None:
    size = 64
    rows = list(PackedStream(Stream(MANY), size))
    assert sorted(tuple(document["input_ids"]) for row in rows for document in row) == sorted(
        tuple(row["input_ids"]) for row in MANY
    )
    tokens = [sum(len(document["input_ids"]) for document in row) for row in rows]
    assert max(tokens) <= size and sum(tokens) / (len(tokens) * size) > 0.96


def test_best_fit_fills_rows_with_all_documents() -> None:
    lengths = np.sort(torch.randint(1, 64, (2000,), generator=torch.Generator().manual_seed(0)).numpy())[::-1]
    rows = pack_best_fit(lengths.tolist(), 128)
    assert sorted(chain.from_iterable(rows)) == list(range(len(lengths)))
    assert max(lengths[row].sum() for row in rows) <= 128
    assert len(rows) == -(-lengths.sum() // 128)


@pytest.mark.parametrize("make", [Rows, Stream, datasets.Dataset.from_list], ids=["rows", "stream", "table"])
def test_padded_documents_are_packed_without_padding(tmp_path: Path, make: Any) -> None:
    gaps = [[0] * (SIZE - len(row["input_ids"])) for row in ROWS]
    padded = [
        {
            "input_ids": row["input_ids"] + gap,
            "attention_mask": [1] * len(row["input_ids"]) + gap,
            "labels": row["labels"] + [-100] * len(gap),
        }
        for row, gap in zip(ROWS, gaps, strict=True)
    ]
    settings: Any = {"pack_to_length": SIZE, "per_device_train_batch_size": 1, "max_steps": 2}
    loaders = [
        language_trainer(tmp_path, data, collate=default_data_collator, **settings).get_train_dataloader()
        for data in (make(padded), Rows(ROWS))
    ]
    batches, expected = map(list, loaders)
    assert tokens_read(batches) == DOCUMENTS
    assert len(batches) <= len(expected)


# Case -> data, collator, and pattern of the error.
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "a document that is too long": (Rows(ROWS), pad_tokens, r"longer, the longest has \d+ tokens.*cut them"),
    "one of a stream": (Stream(ROWS), pad_tokens, "a document of the stream has"),
    "texts in a stream": (Stream([{"text": "a"}]), pad_tokens, "tokenize the texts"),
    "nothing to predict": (Rows([{"input_ids": [3], "labels": [3]}]), pad_tokens, "no document has 2 tokens"),
    "a label for each document": (
        Rows([{"input_ids": [3, 4], "labels": 1}] * 4),
        pad_tokens,
        "one entry for each token, which labels of the batch does not have",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_data_that_cannot_be_packed_is_refused(tmp_path: Path, name: str) -> None:
    data, collate, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        language_trainer(tmp_path, data, collate=collate, pack_to_length=5, max_steps=2).train()


def test_an_evaluation_set_without_labels_has_the_loss_of_its_tokens_as_in_training(tmp_path: Path) -> None:
    labelled = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in ROWS]
    losses = []
    for rows in (labelled, [{"input_ids": row["input_ids"]} for row in ROWS]):

        def collate(batch: list[Any]) -> Any:
            padded = pad_tokens([{**row, "labels": row["input_ids"]} for row in batch])
            return padded if "labels" in batch[0] else {name: padded[name] for name in ("input_ids", "attention_mask")}

        trainer = language_trainer(tmp_path, Rows(rows), collate=collate, pack_to_length=SIZE)
        losses.append(trainer.evaluate(Rows(rows))["eval_loss"])
        assert trainer.predict(Rows(rows)).metrics.keys().isdisjoint({"test_loss"}) is ("labels" not in rows[0])
    assert losses[0] == losses[1]


def test_padding_without_an_attention_mask_is_refused_in_an_evaluation_set_without_labels() -> None:
    def collate(rows: list[Any]) -> Any:
        return {"input_ids": pad_tokens([{**row, "labels": 0} for row in rows])["input_ids"]}

    equal: list[Any] = [{"input_ids": [3, 4]}, {"input_ids": [5, 6]}]
    assert collate_with_labels(collate, equal)["labels"].tolist() == [[3, 4], [5, 6]]
    with pytest.raises(ValueError, match="rows of 3 tokens without attention_mask"):
        collate_with_labels(collate, [*equal, {"input_ids": [7, 8, 9]}])
