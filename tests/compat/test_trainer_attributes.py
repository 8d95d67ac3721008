from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import transformers

from littrainer import Trainer
from tests.compat.page import table
from tests.scenarios.models import tiny_bert_classifier
from tests.scenarios.releases import ABSENT, earlier_release
from tests.scenarios.trainers import quiet_trainer

ATTRIBUTES = table("attribute of a Trainer | what it is")
# State of features that are absent or stateless here.
NOT_OFFERED = {"_attn_mask_causal_checked", "_mixed_mesh_grads"}
ONLY_IN_TRANSFORMERS_4 = {"is_tp_enabled"}
SINCE_5_3 = {
    "_initial_global_step",
    "_loss_shifts_labels",
    "_mixed_mesh_grads",
    "is_distributed_loading_by_transformers",
}


def find_set_attributes(package: Path) -> set[str]:
    """Return the attributes that the Trainer in transformers' source sets on itself."""
    tree = ast.parse((package / "trainer.py").read_text())
    trainer = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Trainer")
    return {
        node.attr
        for node in ast.walk(trainer)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }


def test_the_table_lists_each_attribute_that_transformers_trainer_sets() -> None:
    documented = {*ATTRIBUTES, *NOT_OFFERED}
    newest, earlier = find_set_attributes(Path(transformers.__file__).parent), earlier_release()
    assert newest == documented - ONLY_IN_TRANSFORMERS_4
    if earlier is None:
        pytest.skip(ABSENT)
    assert find_set_attributes(earlier / "transformers") == documented - ONLY_IN_TRANSFORMERS_4 - SINCE_5_3


def test_each_attribute_of_the_table_exists_before_training(tmp_path: Path) -> None:
    untrained = quiet_trainer(tmp_path)
    for name in ATTRIBUTES:
        getattr(untrained, name)


def test_the_neftune_hook_is_registered_during_training(tmp_path: Path) -> None:
    is_registered: list[Any] = []

    class HookRecorder(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            is_registered.append(self.neftune_hook_handle.id in model.get_input_embeddings()._forward_hooks)
            return super().compute_loss(model, inputs, *args, **kwargs)

    data = {"train_dataset": [{"input_ids": [1, 2, 3], "labels": 0}] * 4}
    model, changes = tiny_bert_classifier(), {"neftune_noise_alpha": 5, "max_steps": 1}
    quiet_trainer(tmp_path, model, kind=HookRecorder, trainer_kwargs=data, **changes).train()
    assert is_registered == [True]


def test_an_overridden_evaluate_can_measure_its_memory(tmp_path: Path) -> None:
    class Measured(Trainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            self._memory_tracker.start()
            metrics = {"eval_own": 1.0}
            self._memory_tracker.stop_and_update_metrics(metrics)
            return metrics

    assert quiet_trainer(tmp_path, kind=Measured).evaluate() == {"eval_own": 1.0}
    measured = quiet_trainer(tmp_path, kind=Measured, skip_memory_metrics=False).evaluate()
    assert "eval_mem_cpu_alloc_delta" in measured and "init_mem_cpu_alloc_delta" in measured
