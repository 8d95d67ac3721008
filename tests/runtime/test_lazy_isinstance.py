from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest
import torch

from littrainer import TrainerCallback
from littrainer.runtime.lazy_isinstance import CLASSES, is_a
from tests.scenarios.models import VectorClassifier, tiny_bert_classifier

OPTIONAL = {"pytorch_lightning"}
ENTRIES = sorted({entry for entries in CLASSES.values() for entry in entries})


@pytest.mark.parametrize(("module", "name"), ENTRIES)
def test_each_class_is_where_its_library_has_it(module: str, name: str) -> None:
    if module.partition(".")[0] in OPTIONAL:
        pytest.importorskip(module)
    assert isinstance(getattr(importlib.import_module(module), name), type)


def test_other_objects_are_of_no_kind() -> None:
    for candidate in (None, 1, VectorClassifier(), TrainerCallback(), torch.utils.data.Dataset()):
        assert [kind for kind in CLASSES if is_a(candidate, kind)] == []


@pytest.mark.parametrize("loaded", [False, True])
def test_a_library_that_is_absent_or_lacks_the_class_is_no_error(monkeypatch: pytest.MonkeyPatch, loaded: bool) -> None:
    model = tiny_bert_classifier()
    for module, _ in CLASSES["pretrained model"]:
        if loaded:
            monkeypatch.setitem(sys.modules, module, ModuleType(module))
        else:
            monkeypatch.delitem(sys.modules, module, raising=False)
    before = set(sys.modules)
    assert not is_a(model, "pretrained model")
    assert set(sys.modules) == before
