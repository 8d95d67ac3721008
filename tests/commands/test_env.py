import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import pytest

from littrainer.cli import main
from littrainer.commands import env
from littrainer.commands.env import HIDDEN, find_problems, select_variables
from tests.compat.processes import facts_of, run_python

SECTIONS = ["littrainer", "findings", "packages", "torch", "accelerate's configuration", "environment variables"]
TORCH = importlib.metadata.version("torch")
# Content of a fake torch.py -> finding.
FAILING_TORCH_MODULES = {
    "raise ImportError('no libcudart.so.12')": "status 1: ImportError: no libcudart.so.12",
    "import os; os.abort()": "import torch ended its process with status -6",
}


def test_torch_is_queried_without_importing_torch_or_lightning(tmp_path: Path) -> None:
    script = (
        "import contextlib, io, json, sys\nfrom littrainer.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()) as printed:\n    status = main(['env'])\n"
        "loaded = sorted({'torch', 'lightning', 'transformers', 'datasets', 'numpy'} & set(sys.modules))\n"
        "print(json.dumps([status, loaded, printed.getvalue()]))\n"
    )
    status, loaded, printed = facts_of(script, tmp_path, HF_TOKEN="hf_secret_of_mine", RANK="0")
    assert (status, loaded) == (0, [])
    assert f"installed: torch {TORCH}, " in printed and f"\ntorch_version: {TORCH}\n" in printed
    assert f"\nHF_TOKEN: {HIDDEN}\n" in printed and "\nRANK: 0\n" in printed and "hf_secret" not in printed


@pytest.mark.parametrize("statement", FAILING_TORCH_MODULES)
@pytest.mark.skipif(sys.platform == "win32", reason="signals are those of POSIX")
def test_an_import_error_of_torch_is_a_finding(tmp_path: Path, statement: str) -> None:
    (tmp_path / "torch.py").write_text(statement)
    # `python -m` puts the working directory first on the import path.
    done = run_python("-m", "littrainer", "env", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert FAILING_TORCH_MODULES[statement] in done.stdout.partition("### findings")[2].partition("### packages")[0]
    assert f"torch {TORCH}, lightning " in done.stdout


def test_the_text_is_markdown_with_accelerates_configuration_and_without_the_home_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    configuration = tmp_path / "hf" / "accelerate" / "default_config.yaml"
    configuration.parent.mkdir(parents=True)
    configuration.write_text("mixed_precision: bf16\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(env, "query_torch", lambda: {"torch_version": "none"})
    assert main(["env"]) == 0
    printed = capsys.readouterr().out
    headings = [line[4:] for line in printed.splitlines() if line.startswith("### ")]
    assert [headings[0].split()[0], *headings[1:]] == SECTIONS
    assert "HF_HOME: ~/hf\n" in printed and "mixed_precision: bf16\n" in printed


def test_missing_and_unsupported_packages_are_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [finding for finding in find_problems() if "is outside" in finding] == []
    requirements = ['torch>1; extra == "old"', "torch>=2,<2.1", "absent>=1", 'torch==9; extra == "test"']
    monkeypatch.setattr(env, "requires", lambda name: requirements)
    assert list(find_problems()) == [
        f"torch {TORCH} is outside what littrainer supports: pip install 'torch<2.1,>=2'",
        "absent is not installed, and littrainer needs it: pip install 'absent>=1'",
    ]


SHOWN = {
    "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
    "HF_HOME": "/home/ada/hf",
    "LD_LIBRARY_PATH": "/a:/opt/openssl@3/lib:/b",
    "LITTRAINER_TRACEBACK": "full",
    "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128,garbage_collection_threshold:0.6",
    "TOKENIZERS_PARALLELISM": "false",
}
SECRETS = {
    **dict.fromkeys(("HF_TOKEN", "WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "CLEARML_API_SECRET_KEY"), "s3cr3t"),
    "HF_ENDPOINT": "https://ada:pass@hub.example/",
    "MLFLOW_TRACKING_URI": "https://mlflow.example/path?key=abc",
    "WANDB_NAME": "run hf_" + "a1B2" * 8,
    "WANDB_NOTES": "with s3cr3t inside",
}


def test_only_variables_that_change_a_training_are_shown_and_secrets_are_hidden() -> None:
    result: dict[str, Any] = select_variables({**SHOWN, **SECRETS, "PATH": "/bin", "EDITOR": "vi"})
    assert result == {**SHOWN, **dict.fromkeys(SECRETS, HIDDEN)}
