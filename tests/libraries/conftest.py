"""What a module's script leaves on both sides, for all its tests."""

from __future__ import annotations

import pytest

from tests.libraries.sides import Both, read_both, run_both
from tests.scenarios.once_per_session import carried_out_once


@pytest.fixture(scope="module")
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    script = request.module.SCRIPT
    return read_both(carried_out_once(tmp_path_factory, script, lambda folder: run_both(script, folder)))
