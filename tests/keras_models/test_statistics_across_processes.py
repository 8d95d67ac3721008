"""Two processes evaluate, and save, a Keras model with one and the same moving statistics."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from tests.distributed.together import found_together


def test_all_processes_evaluate_with_the_statistics_that_are_saved(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder, (first, second) = found_together(
        tmp_path_factory, "keras-statistics", "tests.keras_models.statistics_process"
    )
    # The last forward pass in training has read other rows in each.
    assert first["trained"] != second["trained"]
    assert first["evaluated"] == second["evaluated"] == first["trained"]
    (saved,) = [one for name, one in load_file(folder / "saved" / "model.safetensors").items() if "moving_mean" in name]
    assert saved.tolist() == first["trained"]
