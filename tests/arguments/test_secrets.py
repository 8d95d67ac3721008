from typing import Any

import pytest

from littrainer.arguments.secrets import is_secret_name, redact_command, redact_secrets

SECRETS = (
    *("hub_token", "push_to_hub_token", "token", "HF-TOKEN", "hubToken", "authtoken"),
    *("wandb_api_key", "API_KEY", "apikey", "apiKey", "openai_key", "aws_secret_access_key", "AWS_ACCESS_KEY"),
    *("client_secret", "secret", "password", "DB_PASSWORD", "passwd", "credentials", "Authorization"),
)
NO_SECRETS = (
    *("bos_token", "eos_token", "pad_token", "image_token", "boi_token", "decoder_start_token", "pad_token_id"),
    *("num_tokens", "max_tokens", "num_input_tokens_seen", "loss_per_token", "additional_special_tokens"),
    *("learning_rate", "password_length", "secret_santa", "label_key", "num_key_value_heads"),
)


def test_tokens_of_a_vocabulary_are_not_secrets() -> None:
    assert [name for name in SECRETS if not is_secret_name(name)] == []
    assert [name for name in NO_SECRETS if is_secret_name(name)] == []


def test_only_secrets_are_masked_at_every_depth() -> None:
    values = {
        "model_init_kwargs": {"token": "hf_1", "eos_token": "</s>", 3: None},
        "services": [{"API_KEY": "k", "credentials": {"user": "u", "pass": "p"}}, ("plain", {"hub_token": True})],
        "hub_token": None,
    }
    assert redact_secrets(values) == {
        "model_init_kwargs": {"token": "<TOKEN>", "eos_token": "</s>", 3: None},
        "services": [{"API_KEY": "<API_KEY>", "credentials": "<CREDENTIALS>"}, ("plain", {"hub_token": True})],
        "hub_token": None,
    }
    assert values["model_init_kwargs"]["token"] == "hf_1"  # type: ignore[index]
    assert redact_secrets(values, mask=lambda name: None)["model_init_kwargs"]["token"] is None


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://u:PASS@host/x", "https://host/x"),
        ("clone https://ghp_token@github.com/a and go", "clone https://github.com/a and go"),
        ("postgresql://u:p@ss@host:5432/db", "postgresql://host:5432/db"),
        ("ssh://git@github.com/x", "ssh://git@github.com/x"),
        ("https://host:80/a?mail=b@c", "https://host:80/a?mail=b@c"),
    ],
)
def test_credentials_in_urls_are_removed(text: str, shown: str) -> None:
    assert redact_secrets({"proxies": [text]}) == {"proxies": [shown]}


@pytest.mark.parametrize("value", [{"a": [1, ("b", {})]}, "s3://bucket/x", 3, None])
def test_a_value_without_secrets_is_returned_unchanged(value: Any) -> None:
    assert redact_secrets(value) is value


def test_the_values_of_secret_options_are_masked_in_a_command() -> None:
    words = ["train.py", "--hub_token", "hf_1", "--api_key=x", "--lr", "1", "--repo", "https://me:pw@host/x"]
    masked = ["train.py", "--hub_token", "<HUB_TOKEN>", "--api_key=<API_KEY>", "--lr", "1", "--repo", "https://host/x"]
    assert redact_command(words) == masked
    hidden = ['{"hub_token": "abc=="}', "--env=WANDB_API_KEY=abc", "Authorization: Bearer abc", "token=a, abc=="]
    assert not any("abc" in word for word in redact_command([*hidden, f"hf_{'abc' * 8}"]))
    assert redact_command(["hf_trainer.py", "--output_dir=runs/sk-learn"]) == [
        "hf_trainer.py",
        "--output_dir=runs/sk-learn",
    ]
