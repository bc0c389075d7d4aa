"""Masking: the secrets of command lines and variables are hidden, also in other texts."""

from __future__ import annotations

import pytest

from trainwright.distributed.masking import HIDDEN, is_secret, masked, shown


@pytest.mark.parametrize(("arguments", "text"), [
    (["train.py", "--lr", "0.1"], "train.py --lr 0.1"),
    (["--api-key", "abc", "--lr=1"], f"--api-key {HIDDEN} --lr=1"),
    (["--hf_token=abc"], f"--hf_token={HIDDEN}"),
    (["--password", "a b c"], f"--password {HIDDEN}"),
    (["--use-auth-token", "--lr", "1"], "--use-auth-token --lr 1"),
    (["+wandb.api_key=abc", "lr=1"], f"+wandb.api_key={HIDDEN} lr=1"),
    (["model={name: net, SECRET: abc, width: 8}"], f"'model={{name: net, SECRET: {HIDDEN}, width: 8}}'"),
    (["--config", '{"token": "abc", "lr": 1}'], f"""--config '{{"token": "{HIDDEN}", "lr": 1}}'"""),
    (["--data", "https://host/x?token=abc&part=1"], f"--data 'https://host/x?token={HIDDEN}&part=1'"),
    (["--data", "s3://me:abc@host/x"], f"--data 's3://{HIDDEN}@host/x'"),
    (["--data", "s3://me@firm:abc@host/x"], f"--data 's3://{HIDDEN}@host/x'"),
    (["--name", "<b>'x'"], """--name '<b>'"'"'x'"'"''"""),
    (["--token="], f"--token={HIDDEN}"),
    (["--tokenizer", "bert", "--max_tokens=512"], "--tokenizer bert --max_tokens=512"),
    (["model={num_keys: 4, apiKey: abc}"], f"'model={{num_keys: 4, apiKey: {HIDDEN}}}'"),
    ([], ""),
])  # fmt: skip
def test_secrets_are_hidden_in_command_lines(arguments: list[str], text: str) -> None:
    assert masked(arguments).text == text
    assert "abc" not in masked(arguments).text


def test_known_secrets_are_hidden_in_other_texts() -> None:
    line = masked(["--token", "a-long-token", "--auth", "true", "--key=a-long-token-too"])
    assert line.hidden == ("a-long-token-too", "a-long-token")
    text = line.applied_to("a-long-token-too and a-long-token are true for ftp://me:word@host")
    assert text == f"{HIDDEN} and {HIDDEN} are true for ftp://{HIDDEN}@host"


def test_secrets_are_hidden_in_variables() -> None:
    assert shown("NCCL_DEBUG", "INFO") == "INFO"
    assert shown("HF_TOKEN", "abc") == HIDDEN
    assert shown("PROXY", "http://me:abc@host") == f"http://{HIDDEN}@host"


def test_a_name_is_secret_by_its_whole_words() -> None:
    secret = """HF_TOKEN hfToken token --api-key apiKey APIKey apikey openai_api_keys AWS_SECRET_ACCESS_KEY db.password auth
        wandb_key key oauth2 DB_PASS"""
    plain = """tokenizer max_tokens max_token num_keys key_dim keyboard author token_dim pad_token eos_token_id label_key
        num_passes bypass"""
    assert [each for each in secret.split() if not is_secret(each)] == []
    assert [each for each in plain.split() if is_secret(each)] == []


def test_nested_values_are_shown_without_secrets() -> None:
    values = {
        "model": {"token": "abc", "width": 8, "tokenizer": "bert"},
        "hosts": [{"password": 1}],
        "use_auth_token": True,
    }
    assert shown("", {**values, "api_keys": {"one": "abc"}, "data": "s3://me:abc@host"}) == {
        "model": {"token": HIDDEN, "width": 8, "tokenizer": "bert"}, "hosts": [{"password": HIDDEN}], "use_auth_token": True,
        "api_keys": HIDDEN, "data": f"s3://{HIDDEN}@host",
    }  # fmt: skip
