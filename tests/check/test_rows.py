from __future__ import annotations

from typing import Any

import pytest
import torch

from littrainer.check import rows
from littrainer.check.rows import SelectedRows, select_rows, summarize_rows
from tests.scenarios.data import Rows, token_rows
from tests.scenarios.models import VectorClassifier, tiny_bert_classifier


def summarize(dataset: Any, model: Any = None, columns: Any = None, own_loss: bool = False) -> rows.RowSummary:
    return summarize_rows(dataset, columns, model or VectorClassifier(), own_loss)


def test_all_rows_are_checked_and_notable_rows_are_numbered() -> None:
    data: list[dict[str, Any]] = [{"x": [1.0] * 3, "labels": number % 3} for number in range(50)]
    data[7]["x"] = [1.0] * 9
    data[13]["labels"] = None
    data[21] = {"x": [1.0] * 3}
    data[34]["x"] = [1.0, float("nan"), 1.0]
    data[40]["labels"] = 9
    summary = summarize(data)
    assert summary.total == len(summary.lengths) == 50 and summary.without_labels == 2
    assert summary.get_longest(1) == [7]
    assert {row: summary.notable[row] for row in (7, 13, 34, 40)} == {
        7: "the longest x",
        13: "labels: None",
        34: "x: 1-dimensional, real numbers, not all finite",
        40: "the greatest labels",
    }
    assert summary.notable[21] == "its columns: x"
    assert str(summary) == "50 of 50 rows looked at; lengths from 3 to 9, 3 on average; 4% without labels"


def test_rows_of_large_data_are_sampled_evenly_within_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Rows):
        def __getitem__(self, index: int) -> Any:
            clock[0] += 1
            return super().__getitem__(index)

    clock = [0.0]
    monkeypatch.setattr(rows.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(rows, "MAX_SECONDS", 20.0)
    summary = summarize(Slow(token_rows(1000)))
    assert len(summary.lengths) == 21
    numbers = sorted(summary.lengths)
    assert max(b - a for a, b in zip([0, *numbers], [*numbers, 999], strict=True)) < 100


def test_ids_out_of_the_models_range_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = tiny_bert_classifier(), token_rows(30)
    vocabulary, classes = model.config.vocab_size, model.config.num_labels
    data[4]["input_ids"][1] = vocabulary
    data[9]["input_ids"][0] = -100
    data[11]["labels"] = classes
    data[12]["labels"] = -100
    summary = summarize(data, model)
    assert {name: sorted(bad) for name, bad in summary.failing.items()} == {"input_ids": [4, 9], "labels": [11]}
    assert f"it has {classes}, and " in summary.failing["labels"][11]
    assert summary.exclude_failing([3, 4, 11]) == [3]
    # A custom loss may give labels another meaning; dropped columns do not count.
    assert set(summarize(data, model, own_loss=True).failing) == {"input_ids"}
    kind = type(model)
    monkeypatch.setattr(model, "forward", lambda **inputs: kind.forward(model, **inputs))
    assert set(summarize(data, model).failing) == {"input_ids"}
    monkeypatch.undo()
    assert summarize(data, model, columns=["attention_mask"]).failing.keys() == {"input_ids", "labels"}
    assert summarize(data, model, columns=["labels"]).failing.keys() == {"labels"}


def test_labels_are_limited_by_the_output_vocabulary() -> None:
    from transformers import BertConfig, EncoderDecoderConfig, EncoderDecoderModel

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    reads, writes = (BertConfig(vocab_size=number, **sizes) for number in (20, 50))
    model = EncoderDecoderModel(config=EncoderDecoderConfig.from_encoder_decoder_configs(reads, writes))
    data = [{"input_ids": [1, 19], "labels": [49, -100]}, {"input_ids": [1, 20], "labels": [50]}]
    failing = summarize(data, model).failing
    assert {name: sorted(bad) for name, bad in failing.items()} == {"input_ids": [1], "labels": [1]}


def test_labels_with_names_of_the_model_are_recognized() -> None:
    data = [{"input_ids": [1, 2], "start_positions": 0} for _ in range(4)]
    assert "100% without labels, unless the collator makes them" in str(summarize(data))
    assert "labels" not in str(summarize_rows(data, None, VectorClassifier(), labels={"start_positions"}))


def test_unreadable_rows_fail_and_count_against_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unreadable(Rows):
        def __getitem__(self, index: int) -> Any:
            clock[0] += 1
            if index == 5 or len(self) > 9:
                raise OSError("truncated file")
            return super().__getitem__(index)

    clock = [0.0]
    monkeypatch.setattr(rows.time, "monotonic", lambda: clock[0])
    assert summarize(Unreadable(token_rows(9))).failing == {"cannot be read": {5: "OSError: truncated file"}}
    assert len(summarize(Unreadable(token_rows(99))).failing["cannot be read"]) == 11


def test_many_rows_of_the_greatest_length_are_taken_for_truncated() -> None:
    data = [{"input_ids": [1] * min(length, 20)} for length in range(1, 41)]
    assert "52% have the greatest one, and may be cut off" in str(summarize(data))
    assert "cut off" not in str(summarize([{"input_ids": [1] * length} for length in range(1, 41)]))


def test_selected_rows_have_the_attributes_of_their_dataset() -> None:
    data = Rows(token_rows(9))
    data.languages = ["de"]  # type: ignore[attr-defined]
    selected = select_rows(data, [7, 2])
    assert isinstance(selected, SelectedRows) and len(selected) == 2 and selected.languages == ["de"]
    assert torch.equal(torch.as_tensor(selected[1]["input_ids"]), torch.as_tensor(data[2]["input_ids"]))
    datasets = pytest.importorskip("datasets")
    assert select_rows(datasets.Dataset.from_dict({"x": [0, 1, 2]}), [2, 0])["x"] == [2, 0]
