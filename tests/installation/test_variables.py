import pytest

from littrainer.installation.variables import HIDDEN, variables, with_tilde

HUB_TOKEN = "hf_" + "a1B2" * 8


def shown(**environment: str) -> dict[str, str]:
    return variables(environment, home="/home/ada")


def test_only_variables_that_change_a_training_are_shown() -> None:
    found = shown(
        RANK="0", ACCELERATE_USE_CPU="true", PATH="/bin", EDITOR="vi", LITTRAINER_PROCESSES="2", SLURM_NTASKS="2"
    )
    assert found == {"ACCELERATE_USE_CPU": "true", "LITTRAINER_PROCESSES": "2", "RANK": "0", "SLURM_NTASKS": "2"}


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "WANDB_API_KEY", "COMET_API_KEY", "MLFLOW_TRACKING_PASSWORD", "CLEARML_API_SECRET_KEY", "RAY_AUTH"],
)
def test_a_secret_is_hidden_by_its_name(name: str) -> None:
    assert shown(**{name: "s3cr3t-value"}) == {name: HIDDEN}


@pytest.mark.parametrize(
    ("name", "value"),
    [("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1"), ("TOKENIZERS_PARALLELISM", "false"), ("HF_TOKEN", "")],
)
def test_a_switch_and_a_name_that_only_looks_like_a_secret_are_shown(name: str, value: str) -> None:
    assert shown(**{name: value}) == {name: value}


def test_secrets_in_other_values_are_hidden() -> None:
    found = shown(
        HF_TOKEN="s3cr3t-value",
        HF_ENDPOINT="https://ada:pass@hub.example/",
        MLFLOW_TRACKING_URI="https://mlflow.example/path?key=abc",
        WANDB_NOTES="with s3cr3t-value inside",
        WANDB_NAME=f"run {HUB_TOKEN}",
        https_proxy="http://ada:pass@proxy:3128",
    )
    for text in found.values():
        assert not any(secret in text for secret in ("s3cr3t", "pass", "abc", HUB_TOKEN)), text
    assert found["HF_ENDPOINT"] == "https://hub.example/"
    assert found["MLFLOW_TRACKING_URI"] == f"https://mlflow.example/path?{HIDDEN}"
    assert found["WANDB_NOTES"] == f"with {HIDDEN} inside"


def test_the_home_folder_is_a_tilde_and_folders_that_begin_like_it_are_not() -> None:
    assert shown(HF_HOME="/home/ada/hf") == {"HF_HOME": "~/hf"}
    assert with_tilde("/home/ada:/home/adam/x /home/ada", "/home/ada") == "~:/home/adam/x ~"
    assert with_tilde("/home/ada", "/") == "/home/ada"
