import pytest

from littrainer.installation.variables import HIDDEN, variables, with_tilde

HUB_TOKEN = "hf_" + "a1B2" * 8


def shown(**environment: str) -> dict[str, str]:
    return variables(environment, home="/home/ada")


def test_only_variables_that_change_a_training_are_shown() -> None:
    found = shown(
        RANK="0", ACCELERATE_USE_CPU="true", PATH="/bin", EDITOR="vi", LITTRAINER_TRACEBACK="full", SLURM_NTASKS="2"
    )
    assert found == {"ACCELERATE_USE_CPU": "true", "LITTRAINER_TRACEBACK": "full", "RANK": "0", "SLURM_NTASKS": "2"}


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "WANDB_API_KEY", "COMET_API_KEY", "MLFLOW_TRACKING_PASSWORD", "CLEARML_API_SECRET_KEY"),
        *("RAY_AUTH", "HF_MYTOKEN", "WANDB_SECRETS_FILE", "MLFLOW_DB_PW", "TORCH_APIKEY_FILE"),
    ],
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


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("ada:pass@proxy:3128", "proxy:3128"),
        ("http://ada:p/ss@proxy:3128", "http://proxy:3128"),
        ("https://ada:p@ss@host/x", "https://host/x"),
        ("s3://AKIA0:ab/cd+e@bucket", "s3://bucket"),
        ("token=abc password: 'def'", f"token={HIDDEN} password: {HIDDEN}"),
        ('{"api_key": "abc"}', f'{{"api_key": {HIDDEN}'),
        ("AWS_SECRET_ACCESS_KEY=ab/cd", f"AWS_SECRET_ACCESS_KEY={HIDDEN}"),
        ("Bearer abc", f"Bearer {HIDDEN}"),
        ("ghp_" + "a1" * 18, HIDDEN),
        ("sk-proj-" + "a1" * 18, HIDDEN),
        ("eyJhbGciOiJI.eyJzdWIiOiI.c2ln", HIDDEN),
        ("/a:/opt/openssl@3/lib:/b", "/a:/opt/openssl@3/lib:/b"),
        ("max_split_size_mb:128,garbage_collection_threshold:0.6", None),
        ("tokenizers=1", None),
    ],
)
def test_secrets_without_a_name_of_their_own_are_hidden(value: str, told: str | None) -> None:
    assert shown(WANDB_NOTES=value) == {"WANDB_NOTES": value if told is None else told}


def test_the_home_folder_is_a_tilde_and_folders_that_begin_like_it_are_not() -> None:
    assert shown(HF_HOME="/home/ada/hf") == {"HF_HOME": "~/hf"}
    assert with_tilde("/home/ada:/home/adam/x /home/ada", "/home/ada") == "~:/home/adam/x ~"
    assert with_tilde("/home/ada", "/") == "/home/ada"
