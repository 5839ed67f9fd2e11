"""What `kv_connector_extra_config` may say to the vLLM connector."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvstore_client import DEFAULT_ENDPOINT, BadRequest

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Settings:
    """Times are in seconds, sizes in bytes. The bearer token is `KVSTORE_TOKEN` of the environment."""

    endpoint: str = DEFAULT_ENDPOINT
    connections: int = 2
    shared_memory: bool = True
    revision: str = ""
    """An explicit, immutable revision of the weights, in place of a digest of their files."""
    namespace: str = ""
    """Name of the namespace; made of the model's name and a digest of what its bytes depend on, if not given."""
    recipes: bool = False
    """Let the store keep token ids on disk, so that pages can be computed again."""
    rebuild: str = "exact"
    """What counts as the same page when it was computed again: `exact` or `tolerant`."""
    durable: bool = False
    """Saves count only once they would survive a power cut."""
    read: bool = True
    write: bool = True
    layerwise: bool = False
    """Let a forward pass start while its own prefix is loading, each layer waiting for its bytes, in place of loading between steps."""
    lookup_wait_s: float = 0.005
    """How long the scheduler waits for a look-up before it turns to other requests and asks again in its next step."""
    lookup_timeout_s: float = 1.0
    """After so long a look-up is a miss."""
    call_timeout_s: float = 2.0
    """Bound of one call of a load; a load is made of calls of at most `load_buffer_bytes`."""
    load_timeout_s: float = 30.0
    """Bound of a whole load."""
    save_timeout_s: float = 10.0
    lease_s: float = 30.0
    retry_s: float = 5.0
    """How long a store that failed is left alone, at first; up to twelve times as long when it goes on failing."""
    load_buffer_bytes: int = 32 * _MIB
    load_buffers: int = 3
    save_buffer_bytes: int = 64 * _MIB
    save_buffers: int = 4
    """Computed pages that wait to be put take at most `save_buffers` times `save_buffer_bytes`; what finds no room is not saved."""

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> "Settings":
        """The settings that the user gave. Raises BadRequest for an unknown name or a value that makes no sense."""
        known = {field.name: field for field in fields(cls)}
        if unknown := sorted(set(extra) - set(known)):
            raise BadRequest(f"kv_connector_extra_config has {', '.join(unknown)}; kvstore knows {', '.join(known)}")
        given: dict[str, Any] = {}
        for name, value in extra.items():
            wanted: type = type(known[name].default)
            if wanted is float and isinstance(value, int) and not isinstance(value, bool):
                value = float(value)
            if type(value) is not wanted:
                raise BadRequest(f"kv_connector_extra_config: {name} is {value!r}, not of type {wanted.__name__}")
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value <= 0:
                raise BadRequest(f"kv_connector_extra_config: {name} is {value}, not more than 0")
            given[name] = value
        return cls(**given)
