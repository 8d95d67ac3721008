from importlib.machinery import PathFinder

import pytest

from littrainer.redirection.names import DERIVED, REPLACED
from littrainer.redirection.shim import Binding, bindings_in

# Scripts for transformers 4 import these; the newest release has them no longer.
ONLY_IN_TRANSFORMERS_4 = {"transformers.trainer_utils": {"EvaluationStrategy"}}


def bindings_of(fullname: str) -> dict[str, Binding]:
    """What the installed transformers binds in a module; nothing of it is imported."""
    spec = PathFinder.find_spec("transformers")
    for part in fullname.split(".")[1:]:
        assert spec is not None
        spec = PathFinder.find_spec(f"{spec.name}.{part}", list(spec.submodule_search_locations or ()))
    assert spec is not None, f"transformers has no {fullname}"
    assert spec.origin is not None
    with open(spec.origin, encoding="utf-8") as file:
        return bindings_in(file.read(), fullname)


@pytest.mark.parametrize("fullname", sorted(REPLACED))
def test_each_replaced_name_is_defined_in_that_transformers_module(fullname: str) -> None:
    bindings = bindings_of(fullname)
    missing = {name for name in REPLACED[fullname] if name not in bindings or bindings[name].module is not None}
    assert missing == ONLY_IN_TRANSFORMERS_4.get(fullname, set())


@pytest.mark.parametrize("fullname", DERIVED)
def test_each_derived_module_imports_from_a_redirected_one(fullname: str) -> None:
    assert any(binding.module in REPLACED for binding in bindings_of(fullname).values())
