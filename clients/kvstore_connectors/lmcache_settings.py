"""What can be set of the LMCache adapter: the `adapter_params` of its plugin."""

from typing import Any

from kvstore_connectors.engines import needs

with needs("LMCache 0.5.6", "pip install lmcache==0.5.6", "docs/lmcache.md"):
    from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase

from kvstore_client import BadRequest
from kvstore_connectors.hashed_link import LinkOptions
from kvstore_connectors.lmcache_spaces import Layout, space_of

_LEAST_HASH_BYTES = 16


class KVStoreL2AdapterConfig(L2AdapterConfigBase):  # type: ignore[misc]
    """The `adapter_params`: `revision`, and what is not to be as it is by default."""

    def __init__(self, revision: str, link: LinkOptions, *, chunk_tokens: int = 256, min_hash_bytes: int = _LEAST_HASH_BYTES) -> None:
        super().__init__()
        self.revision = revision
        self.link = link
        self.chunk_tokens = chunk_tokens
        self.min_hash_bytes = min_hash_bytes

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> "KVStoreL2AdapterConfig":
        """Checked settings. Raises ValueError that says what is wrong."""
        given = dict(d)
        revision = given.pop("revision", "")
        if not isinstance(revision, str) or not revision.strip():
            raise ValueError("revision must name the weights: a commit hash or a version, so that new weights never read old state")
        numbers = {"chunk_tokens": 256, "min_hash_bytes": _LEAST_HASH_BYTES}
        for name in numbers:
            numbers[name] = given.pop(name, numbers[name])
            if type(numbers[name]) is not int or numbers[name] < 1:
                raise ValueError(f"{name} must be a whole number, 1 or more")
        try:
            link = LinkOptions.take(given)
            space_of("any", revision, 0, Layout.raw_bytes(1), 1).fingerprint  # noqa: B018 - a revision that moves is refused here
        except (BadRequest, TypeError) as error:
            raise ValueError(str(error)) from None
        if given:
            raise ValueError(f"unknown settings: {', '.join(sorted(given))}\n{cls.help()}")
        return cls(revision, link, **numbers)

    @classmethod
    def help(cls) -> str:
        """What can be set."""
        return (
            "kvstore L2 adapter config fields (adapter_params of a plugin):\n"
            "- revision (str): which weights the model has, a commit hash or a version (required)\n"
            "- endpoint (str): HOST:PORT, tls://HOST:PORT or unix:PATH of the data plane (default 127.0.0.1:7421)\n"
            "- token (str): bearer token (default: KVSTORE_TOKEN)\n"
            "- connections (int): default 2\n"
            "- durable (bool): stores count once they would survive a power cut (default false)\n"
            "- lookup_timeout_s, transfer_timeout_s (float): default 2 and 20\n"
            "- lease_s (float): how long a look-up locks what nobody unlocks (default 60)\n"
            "- chunk_tokens (int): tokens of a chunk (default 256)\n"
            "- min_hash_bytes (int): shorter chunk hashes are refused, as they collide (default 16)"
        )
