import re
from pathlib import Path

import pytest

from littrainer import tracking
from littrainer.tracking.base import TrackerCallback
from littrainer.tracking.selection import tracker_class
from littrainer.tracking.services import SERVICES, TAKEN_ELSEWHERE

PAGE = Path(__file__).parents[2] / "docs/tracking.md"
PACKAGE = Path(tracking.__file__).parent


def test_the_page_lists_each_service_with_what_it_needs() -> None:
    rows = [line for line in PAGE.read_text("utf-8").splitlines() if "pip install" in line and line.startswith("|")]
    assert rows == [
        f"| `{name}` | {service.about} | `pip install {service.install}` | `{service.callback.partition(':')[2]}` |"
        for name, service in SERVICES.items()
    ]


def test_the_page_names_each_environment_variable_of_its_services() -> None:
    described = set(re.findall(r"[A-Z]+(?:_[A-Z]+)+", PAGE.read_text("utf-8")))
    for name in ("tensorboard", "wandb", "mlflow", "services"):
        code = (PACKAGE / f"{name}.py").read_text("utf-8")
        read = set(re.findall(r'(?:environ\.get|environment_says)\(\s*"([A-Z_]+)"', code))
        assert read
        assert read <= described


@pytest.mark.parametrize("name", SERVICES)
def test_each_service_has_a_callback_that_names_it(name: str) -> None:
    callback = tracker_class(name)
    assert issubclass(callback, TrackerCallback)
    assert callback.service == name
    assert getattr(tracking, callback.__name__) is callback


def test_the_room_offers_its_callbacks_and_nothing_unknown() -> None:
    assert "WandbCallback" in dir(tracking)
    with pytest.raises(AttributeError, match="NeptuneCallback"):
        tracking.NeptuneCallback  # noqa: B018
    assert not set(TAKEN_ELSEWHERE) & set(SERVICES)
