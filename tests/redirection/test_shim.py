import importlib
import importlib.util
import sys
import typing
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

import pytest

from littrainer.redirection.names import REPLACED
from littrainer.redirection.shim import Binding, ShimLoader, parse_bindings

ORIGINAL = """
from __future__ import annotations

import sys
from json import dumps

from .neighbour import shout

try:
    from no_such_package import Optional
except ImportError:
    pass

sys.modules["house"].runs += 1
LIMIT = 3
_private = 4


class Item:
    pass


class Box:
    item: Item


def set_seed(seed):
    return "original"
"""


@pytest.fixture
def shim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Return a shim of `house.room` with littrainer's `set_seed`; `house.runs` counts runs of the original."""
    package = tmp_path / "house"
    package.mkdir()
    (package / "__init__.py").write_text("runs = 0\n")
    (package / "neighbour.py").write_text("def shout():\n    return 'hey'\n")
    (package / "room.py").write_text(ORIGINAL)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(REPLACED, "house.room", {"set_seed": "littrainer.runtime.seeds:set_seed"})
    house = importlib.import_module("house")
    original = PathFinder.find_spec("house.room", list(house.__path__))
    assert original is not None
    loader = ShimLoader("house.room", original)
    module = importlib.util.module_from_spec(loader.spec())
    loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "house.room", module)
    yield module
    for name in [name for name in sys.modules if name.partition(".")[0] == "house"]:
        monkeypatch.delitem(sys.modules, name)


def count_runs() -> int:
    return int(sys.modules["house"].runs)


def test_imported_names_constants_and_ours_do_not_run_the_original(shim: ModuleType) -> None:
    assert shim.shout() == "hey"
    assert shim.dumps([1]) == "[1]"
    assert shim.LIMIT == 3
    assert shim.set_seed.__module__ == "littrainer.runtime.seeds"
    assert not hasattr(shim, "made_up")
    assert "Item" in dir(shim)
    assert count_runs() == 0


def test_a_defined_name_runs_the_original_once(shim: ModuleType) -> None:
    assert shim.Item.__module__ == "house.room"
    assert typing.get_type_hints(shim.Box) == {"item": shim.Item}
    assert count_runs() == 1
    assert shim.set_seed.__module__ == "littrainer.runtime.seeds"
    with pytest.raises(AttributeError, match=r"module 'house\.room' has no attribute 'Optional'"):
        _ = shim.Optional


def test_a_missing_module_of_littrainer_raises_an_import_error(
    shim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(REPLACED["house.room"], "Item", "littrainer.no_such_room:Item")
    with pytest.raises(ImportError, match=r"littrainer cannot load its Item: .*no_such_room") as caught:
        _ = shim.Item
    # transformers' package object would hide a ModuleNotFoundError.
    assert type(caught.value) is ImportError


# Source -> its bindings.
SOURCES: dict[str, dict[str, Binding]] = {
    "from .neighbour import thing as renamed\nfrom . import sibling": {
        "renamed": Binding("package.neighbour", "thing"),
        "sibling": Binding("package", "sibling"),
    },
    "import torch.nn\nimport numpy.linalg as la": {"torch": Binding("torch"), "la": Binding("numpy.linalg")},
    'NAME = "a.pt"\nSIZE: int = 3': {"NAME": Binding(constant=("a.pt",)), "SIZE": Binding(constant=(3,))},
    "def f(): pass\nclass C: pass\nvalue = f()": {name: Binding() for name in ("f", "C", "value")},
    "if have():\n    from peft import A": {"A": Binding("peft", "A", conditional=True)},
    "with quiet():\n    from peft import A": {"A": Binding("peft", "A", conditional=True)},
    # Several bindings count as a definition.
    "Progress = Plain\nif notebook():\n    from .notebook import Progress": {"Progress": Binding()},
    "try:\n    from a import A\nexcept ImportError:\n    from b import A": {"A": Binding(conditional=True)},
    "if TYPE_CHECKING:\n    from .trainer import Trainer": {},
    "def f():\n    import json\nclass C:\n    attribute = 1": {"f": Binding(), "C": Binding()},
}


@pytest.mark.parametrize("source", SOURCES)
def test_bindings_are_parsed_from_the_source(source: str) -> None:
    assert parse_bindings(source, "package.module") == SOURCES[source]
