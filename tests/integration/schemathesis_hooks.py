"""Lets schemathesis read lines of JSON, as an array of them."""

import json
from typing import Any

import schemathesis


@schemathesis.deserializer("application/x-ndjson")
def lines_of_json(context: Any, response: Any) -> list[Any]:
    return [json.loads(line) for line in response.content.splitlines()]
