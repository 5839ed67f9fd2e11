"""What is wrong with a setting or a body: the field, what it was, and what is allowed; never a secret."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from kvstore.api.auth import parse_token_file, secret_digest
from kvstore.api.invalid import explain
from kvstore.api.models import NamespaceBody
from kvstore.config import load_config
from kvstore.errors import BadRequest

COMPONENT = {"kind": "full", "layers": 2, "kv_heads": 1, "head_dim": 8}
BODY = {"name": "n", "fingerprint": "f", "spec": {"page_tokens": 4, "components": [COMPONENT]}}
SECRET = "a-secret-of-some-length"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": None}, "name is null, not text"),
        ({"name": "a b"}, 'name is "a b", not of the form ^[A-Za-z0-9'),
        ({"fingerprint": ""}, "fingerprint has the wrong number of characters (0): at least 1"),
        ({"retention_s": -1}, "retention_s is -1, not at least 0"),
        ({"retention_s": "day"}, 'retention_s is "day", not a whole number'),
        ({"recipes": "yes"}, 'recipes is "yes", not true or false'),
        ({"rebuild": "often"}, "rebuild is \"often\", not 'exact', 'tolerant' or 'never'"),
        ({"prefill_us": "fast"}, 'prefill_us is "fast", not a number'),
        ({"retentions": 1}, "retentions is not known: it may be misspelt"),
        ({"spec": {"page_tokens": 4}}, "spec.components is missing"),
        ({"spec": 5}, "spec is 5, not an object of names and values"),
        ({"spec": {"page_tokens": 4, "components": []}}, "spec.components has the wrong number of items (0): at least 1"),
        ({"spec": {"page_tokens": 4, "components": [COMPONENT | {"layers": 0}]}}, "spec.components.0.layers is 0, not at least 1"),
    ],
)
def test_a_body(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as found:
        NamespaceBody.model_validate_json(json.dumps(BODY | changes))
    assert explain(found.value)[0].startswith(words)


def test_what_is_no_json() -> None:
    with pytest.raises(ValidationError) as found:
        NamespaceBody.model_validate_json(b"{not json")
    assert explain(found.value)[0].startswith("the body is not JSON: ")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"port": 99999}, "port is 99999, not at most 65535"),
        ({"port": 7420}, "port and http_port are both 7420: "),
        ({"log_level": "loud"}, 'log_level is "loud", not one of debug, info, warning, error'),
        ({"dram": "lots"}, "dram: 'lots' is not a size"),
        ({"shared_memory": "perhaps"}, 'shared_memory is "perhaps", not true or false'),
    ],
)
def test_a_setting(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest) as told:
        load_config(flags, environment={})
    assert words in told.value.message


def test_secrets_are_not_repeated_and_white_space_around_them_does_not_count() -> None:
    with pytest.raises(BadRequest) as told:
        load_config({"port": SECRET}, environment={"KVSTORE_TOKENS": f"a:read:{SECRET}"})
    assert "port is wrong: it must be a whole number" in told.value.message
    with pytest.raises(BadRequest, match="secret") as told:
        parse_token_file('[[token]]\ntenant = "a"\naccess = "read"\nsecret = "short-one"', "tokens.toml")
    assert "short-one" not in told.value.message
    table = parse_token_file(f'[[token]]\ntenant = "a"\naccess = "read"\nsecret = "{SECRET}\\n"', "tokens.toml")
    assert table.find(SECRET, 0) is not None
    assert secret_digest(f" {SECRET}\n") == secret_digest(SECRET)
