"""What a namespace is created with."""

import re
from dataclasses import dataclass
from typing import Any, Literal

from kvstore.errors import BadRequest
from kvstore.kvspec import KVSpec, namespace_digest
from kvstore.prefill import Prefill

_NAME = re.compile(r"[A-Za-z0-9._:@-]{1,200}")
Rebuild = Literal["exact", "tolerant", "never"]
"""What a namespace makes of pages that are computed again: they must come out as they were (else they are a new version), they count
as equally good, or nothing can be computed again, so that nothing is discarded."""
REBUILDS: tuple[Rebuild, ...] = ("exact", "tolerant", "never")


@dataclass(frozen=True, slots=True)
class NamespaceSettings:
    """What a namespace was created with. Pages acknowledged as durable are kept at least `retention_s` seconds.

    Pages that nobody used for `ttl_s` seconds are removed, once their retention is over; 0 keeps them while there is room.
    With `recipes`, a page is discarded only once its recipe is durable, unless it is `lossy`: then pages may be lost without one.
    """

    tenant: str
    name: str
    fingerprint: str
    spec: KVSpec
    recipes: bool = False
    retention_s: int = 86_400
    ttl_s: int = 0
    rebuild: Rebuild = "exact"
    lossy: bool = False
    prefill: Prefill | None = None
    """What computing its pages costs, if somebody has said so."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise BadRequest(f"the name {self.name[:100]!r} is not 1 to 200 letters, digits and ._:@- characters")
        if not self.fingerprint:
            raise BadRequest("the model fingerprint is empty: compute one, or give an explicit revision")
        if not 0 <= self.retention_s <= 10 * 365 * 86_400:
            raise BadRequest(f"retention_s is {self.retention_s}, not 0 to ten years")
        if not 0 <= self.ttl_s <= 10 * 365 * 86_400:
            raise BadRequest(f"ttl_s is {self.ttl_s}, not 0 (none) to ten years")
        if self.recipes and self.spec.hash_bytes:
            raise BadRequest("recipes are made of token ids, and this namespace is given only digests")
        if self.rebuild not in REBUILDS:
            raise BadRequest(f"rebuild is {str(self.rebuild)[:40]!r}, not one of {', '.join(REBUILDS)}")
        if self.rebuild == "never" and (self.recipes or self.lossy):
            raise BadRequest("rebuild = never says that pages can't be computed again: it goes with neither recipes nor lossy")
        if not any(c.kind == "full" for c in self.spec.components):
            raise BadRequest("a KV spec has at least one component of kind full: it is what makes a page")

    @property
    def digest(self) -> bytes:
        """The namespace's identity (32 bytes): over tenant, fingerprint and spec."""
        return namespace_digest(self.tenant, self.fingerprint, self.spec)

    def to_dict(self) -> dict[str, Any]:
        """Plain data. What is at its default is left out where daemons before it knew nothing of it."""
        data: dict[str, Any] = {
            "tenant": self.tenant, "name": self.name, "fingerprint": self.fingerprint,
            "spec": self.spec.to_dict(), "recipes": self.recipes, "retention_s": self.retention_s,
        }  # fmt: skip
        later: dict[str, Any] = {
            "ttl_s": self.ttl_s, "rebuild": self.rebuild if self.rebuild != "exact" else "", "lossy": self.lossy,
            "prefill": [self.prefill.base_s, self.prefill.slope_s] if self.prefill else None,
        }  # fmt: skip
        return data | {name: value for name, value in later.items() if value}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "NamespaceSettings":
        """The inverse of `to_dict`."""
        prefill = Prefill(*data["prefill"]) if "prefill" in data else None
        return cls(**{**data, "spec": KVSpec.from_dict(data["spec"]), "prefill": prefill})
