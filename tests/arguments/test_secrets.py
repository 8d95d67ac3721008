import pytest

from littrainer.arguments.secrets import holds_a_secret


@pytest.mark.parametrize("name", ["hub_token", "push_to_hub_token", "wandb_api_key", "client_secret", "password"])
def test_tokens_keys_and_passwords_are_secrets(name: str) -> None:
    assert holds_a_secret(name)


@pytest.mark.parametrize("name", ["eos_token", "pad_token", "learning_rate", "num_tokens", "password_length"])
def test_parts_of_a_vocabulary_and_other_arguments_are_none(name: str) -> None:
    assert not holds_a_secret(name)
