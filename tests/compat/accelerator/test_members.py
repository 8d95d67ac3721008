from __future__ import annotations

from pathlib import Path

import pytest
from accelerate import Accelerator

from littrainer.compat.accelerator import AcceleratorFacade
from littrainer.compat.accelerator.members import ANSWERED, REFUSED, documentation
from tests.scenarios.trainers import quiet_arguments

PAGE = Path(__file__).parents[3] / "docs" / "compatibility.md"
NAMES = [name for members in ANSWERED.values() for name in members]


def test_the_table_names_each_public_member_of_the_installed_accelerate_once() -> None:
    public = {name for name in {*vars(Accelerator), *vars(Accelerator(cpu=True))} if not name.startswith("_")}
    assert sorted([*NAMES, *REFUSED]) == sorted(public)


@pytest.mark.parametrize("name", NAMES)
def test_what_the_table_says_is_answered_is_there(tmp_path: Path, name: str) -> None:
    getattr(AcceleratorFacade(quiet_arguments(tmp_path)), name)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_offered_says_why(tmp_path: Path, name: str) -> None:
    facade = AcceleratorFacade(quiet_arguments(tmp_path))
    assert getattr(facade, name, "default") == "default"
    with pytest.raises(AttributeError) as caught:
        getattr(facade, name)
    assert f"does not offer {name}: {REFUSED[name]}" in str(caught.value)


def test_a_name_that_no_accelerator_has_is_an_error_that_says_where_to_look(tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match=r"no 'frobnicate'.*trainer.lightning_trainer"):
        AcceleratorFacade(quiet_arguments(tmp_path)).frobnicate  # noqa: B018


def test_the_page_shows_the_table() -> None:
    assert documentation() in PAGE.read_text()
