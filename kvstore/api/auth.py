"""Who may do what: bearer tokens, and the tenants they stand for. Pure; `guard.py` reads the file and watches it.

A token is looked up by its SHA-256, compared with every entry in constant time. Secrets must be long and random, so that a
digest that leaks is of no use.
"""

import hmac
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import sha256
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator

from kvstore.api.invalid import explain
from kvstore.errors import BadRequest, Forbidden
from kvstore.sizes import Size
from kvstore.store.quotas import Quota

DEFAULT_TENANT = "default"
MIN_SECRET = 16


class Access(IntEnum):
    """What a token allows; each level allows what is below it. `ADMIN` sees the whole daemon, but no other tenant's pages."""

    READ = 1
    WRITE = 2
    ADMIN = 3


@dataclass(frozen=True, slots=True)
class Grant:
    """What a token stands for. `name` is for logs; `expires` is in Unix seconds."""

    tenant: str
    access: Access
    name: str = ""
    digest: bytes = field(default=b"", repr=False)
    expires: float = math.inf


def forbidden(grant: Grant, needed: Access | None) -> Forbidden:
    """Why a grant is not enough."""
    wanted = "nobody may do this" if needed is None else f"the request needs {needed.name.lower()} access"
    return Forbidden(f"the token has {grant.access.name.lower()} access, and {wanted}")


EVERYBODY = Grant(DEFAULT_TENANT, Access.ADMIN)
"""Who comes to a daemon without tokens."""


class TokenTable:
    """The tokens of a daemon at one time, and the quotas that came with them."""

    def __init__(self, grants: Sequence[Grant], quotas: Mapping[str, Quota] | None = None) -> None:
        self.grants = tuple(grants)
        self.quotas = dict(quotas or {})
        self._by_digest = {grant.digest: grant for grant in grants}
        if len(self._by_digest) != len(self.grants):
            raise BadRequest("two tokens have the same secret: give each its own")

    def find(self, secret: str, now: float) -> Grant | None:
        """What a secret stands for; None if it is unknown or expired. Takes as long whether and wherever it is found."""
        found = None
        for digest in dict.fromkeys((secret_digest(secret), _digest(secret))):  # one may have been made of the white space, too
            for grant in self.grants:
                if hmac.compare_digest(grant.digest, digest):
                    found = grant
        return found if found is not None and found.expires > now else None

    def holds(self, grant: Grant, now: float) -> bool:
        """Whether a grant given out earlier is still good, unchanged."""
        return grant.expires > now and self._by_digest.get(grant.digest) == grant


def secret_digest(secret: str) -> bytes:
    """What is kept of a secret. White space at its ends is none of it: files and variables often have a line's end there."""
    return _digest(secret.strip())


def _digest(secret: str) -> bytes:
    return sha256(secret.encode(errors="surrogatepass")).digest()


# --- parsing ---------------------------------------------------------------------------------------------------------------

TenantName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]


class QuotaBody(BaseModel):
    """`[tenants.NAME]`: what a tenant may take up. Sizes take units."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dram: Annotated[Size, Field(gt=0)] | None = None
    ssd: Annotated[Size, Field(gt=0)] | None = None
    in_flight: Annotated[Size, Field(gt=0)] | None = None
    connections: Annotated[int, Field(gt=0)] | None = None

    def quota(self) -> Quota:
        """As the store takes it."""
        return Quota(self.dram, self.ssd, self.in_flight, self.connections)


Tenants = dict[TenantName | Literal["*"], QuotaBody]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    tenant: TenantName
    access: Literal["read", "write", "admin"]
    secret: Annotated[SecretStr, Field(min_length=MIN_SECRET)] | None = None
    sha256: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")] | None = None
    name: Annotated[str, Field(max_length=100)] = ""
    expires: AwareDatetime | None = None

    @field_validator("secret", mode="before")
    @classmethod
    def _without_white_space(cls, secret: object) -> object:
        return secret.strip() if isinstance(secret, str) else secret  # before it is measured

    @model_validator(mode="after")
    def _one_of_both(self) -> "_Entry":
        if (self.secret is None) == (self.sha256 is None):
            raise ValueError("give either sha256 (the secret's, in hex) or secret")
        return self

    def grant(self) -> Grant:
        digest = bytes.fromhex(self.sha256) if self.sha256 else secret_digest(self.secret.get_secret_value() if self.secret else "")
        expires = math.inf if self.expires is None else self.expires.timestamp()
        return Grant(self.tenant, Access[self.access.upper()], self.name, digest, expires)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    token: Annotated[list[_Entry], Field(min_length=1, max_length=10_000)]
    tenants: Tenants = {}


def parse_token_file(text: str, name: str) -> TokenTable:
    """The tokens in a file's text (TOML). Raises BadRequest, which repeats no secret."""
    try:
        parsed = _File.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise BadRequest(f"{name} is not TOML: {error}") from None
    except ValidationError as error:
        raise BadRequest(f"{name}: {explain(error, secret=True)[0]}") from None
    return TokenTable([entry.grant() for entry in parsed.token], {tenant: body.quota() for tenant, body in parsed.tenants.items()})


def parse_token_list(text: str) -> TokenTable:
    """The tokens of `KVSTORE_TOKENS`: `TENANT:ACCESS:SECRET`, or `TENANT:ACCESS:sha256=HEX`, separated by commas or spaces."""
    grants = []
    for number, item in enumerate(re.split(r"[,\s]+", text.strip(", \t\n")), 1):
        tenant, access, secret = (*item.split(":", 2), "", "")[:3]
        digest = secret.removeprefix("sha256=")
        given = {"sha256": digest} if digest != secret else {"secret": secret}
        try:
            grants.append(_Entry.model_validate({"tenant": tenant, "access": access, **given}).grant())
        except ValidationError as error:
            raise BadRequest(
                f"KVSTORE_TOKENS, item {number} (it should read TENANT:ACCESS:SECRET): {explain(error, secret=True)[0]}"
            ) from None
    return TokenTable(grants)
