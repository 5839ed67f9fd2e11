"""A daemon with tokens, and the two ways to ask it."""

import urllib.error
import urllib.request
from pathlib import Path

ALICE, ALICE_READS, BOB, ADMIN, EXPIRED = (f"{name}-{'0123456789abcdef' * 2}" for name in ("alice", "reads", "bob", "admin", "expired"))

TOKENS = f"""
[[token]]
tenant = "alice"
secret = "{ALICE}"
access = "write"

[[token]]
tenant = "alice"
secret = "{ALICE_READS}"
access = "read"

[[token]]
tenant = "bob"
secret = "{BOB}"
access = "write"

[[token]]
tenant = "ops"
secret = "{ADMIN}"
access = "admin"

[[token]]
tenant = "alice"
secret = "{EXPIRED}"
access = "admin"
expires = 2020-01-01T00:00:00Z
"""


def write_tokens(file: Path, text: str = TOKENS) -> Path:
    """A token file, put in place in one step."""
    new = file.with_suffix(".new")
    new.touch(0o600)
    new.write_text(text)
    new.rename(file)
    return file


def ask(url: str, token: str = "", method: str = "GET", body: bytes | None = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers without the date, and body."""
    sent = {"X-Request-Id": "fixed", **{k.replace("_", "-"): v for k, v in headers.items()}}
    if token:
        sent["Authorization"] = f"Bearer {token}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, sent, method=method), timeout=10) as response:
            status, found, data = response.status, dict(response.headers), response.read()
    except urllib.error.HTTPError as error:
        status, found, data = error.code, dict(error.headers), error.read()
    found.pop("Date", None)
    return status, found, data
