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

ANSWERED = table("attribute of a Trainer | what it is")
# Sequences are not split between processes, and mixed meshes are looked for at each clipping.
NOT_OFFERED = {"_attn_mask_causal_checked", "_mixed_mesh_grads"}
ONLY_IN_TRANSFORMERS_4 = {"is_tp_enabled"}
SINCE_5_3 = {
    "_initial_global_step",
    "_loss_shifts_labels",
    "_mixed_mesh_grads",
    "is_distributed_loading_by_transformers",
}


def attributes_set_in(package: Path) -> set[str]:
    """The attributes that the Trainer of a release of transformers sets on itself, read from its source."""
    tree = ast.parse((package / "trainer.py").read_text())
    trainer = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Trainer")
    return {
        node.attr
        for node in ast.walk(trainer)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }


def test_the_table_names_each_attribute_that_a_trainer_of_transformers_sets() -> None:
    named = {*ANSWERED, *NOT_OFFERED}
    newest, earlier = attributes_set_in(Path(transformers.__file__).parent), earlier_release()
    assert newest == named - ONLY_IN_TRANSFORMERS_4
    if earlier is None:
        pytest.skip(ABSENT)
    assert attributes_set_in(earlier / "transformers") == named - ONLY_IN_TRANSFORMERS_4 - SINCE_5_3


def test_each_attribute_of_the_table_is_there_before_training(tmp_path: Path) -> None:
    untrained = quiet_trainer(tmp_path)
    for name in ANSWERED:
        getattr(untrained, name)


def test_neftunes_handle_is_there_while_it_trains(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Looking(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(self.neftune_hook_handle.id in model.get_input_embeddings()._forward_hooks)
            return super().compute_loss(model, inputs, *args, **kwargs)

    given = {"train_dataset": [{"input_ids": [1, 2, 3], "labels": 0}] * 4}
    model, changes = tiny_bert_classifier(), {"neftune_noise_alpha": 5, "max_steps": 1}
    quiet_trainer(tmp_path, model, kind=Looking, given=given, **changes).train()
    assert seen == [True]


def test_an_overridden_evaluate_measures_its_memory_as_transformers_scripts_do(tmp_path: Path) -> None:
    class Measured(Trainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            self._memory_tracker.start()
            metrics = {"eval_own": 1.0}
            self._memory_tracker.stop_and_update_metrics(metrics)
            return metrics

    assert quiet_trainer(tmp_path, kind=Measured).evaluate() == {"eval_own": 1.0}
    measured = quiet_trainer(tmp_path, kind=Measured, skip_memory_metrics=False).evaluate()
    assert "eval_mem_cpu_alloc_delta" in measured and "init_mem_cpu_alloc_delta" in measured
