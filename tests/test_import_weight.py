from pathlib import Path

import littrainer

from .compat.processes import facts_of

COLLECT = """
import json, sys
heavy = {"torch", "lightning", "transformers", "accelerate", "datasets", "numpy"}
import littrainer
facts = {"package": sorted(heavy & set(sys.modules))}
import littrainer.auto
facts["auto"] = sorted(heavy & set(sys.modules))
import littrainer.cli
facts["cli"] = sorted(heavy & set(sys.modules))
facts["listed"] = [name for name in littrainer.__all__ if name not in dir(littrainer)]
facts["set_seed is in"] = littrainer.set_seed.__module__
facts["after one name"] = sorted({"lightning", "transformers"} & set(sys.modules))
print(json.dumps(facts))
"""


def test_importing_littrainer_loads_none_of_the_libraries_underneath(tmp_path: Path) -> None:
    facts = facts_of(COLLECT, tmp_path)
    assert facts["package"] == facts["auto"] == facts["cli"] == []
    assert facts["set_seed is in"] == "littrainer.seeds"
    assert facts["after one name"] == []
    assert facts["listed"] == []


def test_every_public_name_can_be_had() -> None:
    missing = [name for name in littrainer.__all__ if not hasattr(littrainer, name)]
    assert missing == []


def test_a_name_that_littrainer_lacks_raises_attribute_error() -> None:
    assert not hasattr(littrainer, "Trainner")
