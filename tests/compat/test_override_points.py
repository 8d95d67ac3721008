"""Tables of the methods that transformers' Trainer calls on itself."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

from littrainer import Trainer
from littrainer.loop.overrides import NEVER_CALLED
from tests.scenarios.overrides import OTHER_CALLS, OVERRIDE_POINTS
from tests.scenarios.releases import earlier_release


def find_called_methods(package: Path) -> set[str]:
    """Return the methods that the Trainer in transformers' source calls on itself or passes on."""
    tree = ast.parse((package / "trainer.py").read_text())
    trainer = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Trainer")
    methods = {node.name for node in trainer.body if isinstance(node, ast.FunctionDef)}
    return methods & {
        node.attr for node in ast.walk(trainer) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"
    }


def test_each_called_method_is_in_a_table() -> None:
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    earlier = earlier_release()
    for package in (Path(spec.origin).parent, *([] if earlier is None else [earlier / "transformers"])):
        assert find_called_methods(package) <= {*OVERRIDE_POINTS, *OTHER_CALLS, *NEVER_CALLED}


def test_each_method_of_the_tables_exists_and_is_in_a_single_table() -> None:
    assert [name for name in {*OVERRIDE_POINTS, *OTHER_CALLS} if not hasattr(Trainer, name)] == []
    assert len({*OVERRIDE_POINTS, *OTHER_CALLS, *NEVER_CALLED}) == sum(
        map(len, (OVERRIDE_POINTS, OTHER_CALLS, NEVER_CALLED))
    )
