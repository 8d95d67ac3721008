from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import pytest

from littrainer import TrainingArguments
from littrainer.check import findings
from littrainer.check.findings import FAILS, NOTE, PASSED, check_disk, check_hub_permissions, check_tracker_logins
from littrainer.tracking.base import TrackerCallback


def fine_grained(name: str, *permissions: str) -> dict[str, Any]:
    scope = {"entity": {"type": "user", "name": name}, "permissions": list(permissions)}
    return {"role": "fineGrained", "fineGrained": {"scoped": [scope]}}


@pytest.mark.parametrize(
    ("token", "repository", "status"),
    [
        ({"role": "write"}, "acme/model", PASSED),
        ({"role": "write"}, "others/model", FAILS),
        ({"role": "read"}, "ann/model", FAILS),
        (fine_grained("ann", "repo.write"), "ann/model", PASSED),
        (fine_grained("ann/model", "repo.write"), "acme/model", FAILS),
    ],
)
def test_permissions_are_read_from_the_hubs_description_of_the_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, token: dict[str, Any], repository: str, status: str
) -> None:
    user = {"name": "ann", "orgs": [{"name": "acme"}], "auth": {"accessToken": token}}
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "whoami", lambda *_, **__: user)
    finding = check_hub_permissions(TrainingArguments(tmp_path, push_to_hub=True, hub_model_id=repository))
    assert finding.status == status and bool(finding.when) == (status == FAILS)


def test_without_a_network_permissions_are_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise error

    args = TrainingArguments(tmp_path, push_to_hub=True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert check_hub_permissions(args).status == NOTE
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "whoami", refuse)
    error: Exception = ConnectionError("no route to host")
    assert check_hub_permissions(args).status == NOTE
    error.response = SimpleNamespace(status_code=401)  # type: ignore[attr-defined]
    assert check_hub_permissions(args).status == FAILS


@pytest.mark.parametrize(
    ("arguments", "free", "expected"),
    [
        ({}, 999, (FAILS, "at save 10 of 10")),
        # The newest checkpoint is written before the oldest is deleted.
        ({"save_total_limit": 2}, 300, (PASSED, "")),
        ({"save_total_limit": 2}, 299, (FAILS, "at save 3 of 10")),
        (
            {"save_total_limit": 2, "load_best_model_at_end": True, "eval_strategy": "steps"},
            399,
            (FAILS, "at save 4 of 10"),
        ),
        ({"save_total_limit_best": 1, "eval_strategy": "steps"}, 299, (FAILS, "at save 3 of 10")),
        # Two checkpoints with optimizer states (the older is thinned next), and eight without.
        ({"keep_optimizer_states": 1}, 519, (FAILS, "at save 10 of 10")),
    ],
)
def test_the_disk_needs_space_for_all_checkpoints_that_coexist(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: dict[str, Any], free: int, expected: tuple[str, str]
) -> None:
    monkeypatch.setattr(findings.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    (tmp_path / "model.safetensors").write_bytes(b"0" * 40)
    (tmp_path / "optimizer.pt").write_bytes(b"0" * 60)
    finding = check_disk(TrainingArguments(tmp_path, **arguments), tmp_path, 10)
    assert (finding.status, finding.when) == expected


def test_disk_space_is_measured_where_output_dir_links_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to("/")
    paths: list[Any] = []
    monkeypatch.setattr(
        findings.shutil, "disk_usage", lambda path: paths.append(os.path.realpath(path)) or SimpleNamespace(free=1)
    )
    for folder in ("run", "not there yet"):
        check_disk(TrainingArguments(tmp_path / folder), tmp_path, 1)
    assert paths == ["/", str(tmp_path.resolve())]


def test_tracker_logins_are_checked_without_starting_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Service(TrackerCallback):
        def __init__(self, service: str) -> None:
            self.service = service  # type: ignore[misc]

    monkeypatch.setenv("HOME", str(tmp_path))
    for name in os.environ:
        if name.startswith(("WANDB", "CLEARML", "NETRC")):
            monkeypatch.delenv(name)
    (tmp_path / "clearml.conf").touch()
    results = list(check_tracker_logins([object(), *map(Service, ("wandb", "clearml", "tensorboard"))]))
    statuses = {finding.about: finding.status for finding in results}
    assert statuses == {"wandb": NOTE, "clearml": PASSED, "tensorboard": PASSED}
    assert "run `wandb login`, or set WANDB_API_KEY" in results[0].text
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert next(check_tracker_logins([Service("wandb")])).status == PASSED
