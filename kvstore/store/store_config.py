"""What a store can be told."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.store.quotas import Quota
from kvstore.store.session_ends import DEFAULT_SESSIONS
from kvstore.tiers.policies.make import SSD_LOSS
from kvstore.tiers.watermarks import Watermarks


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Sizes in bytes, times in seconds."""

    data_dir: Path
    dram_bytes: int
    ssd_bytes: int
    max_pages: int = 10_000_000
    max_ghosts: int = 200_000
    policy: str = "classifier"
    """Which pages leave a tier first: a name of `kvstore.tiers.policies`."""
    ssd_loss: float | None = SSD_LOSS
    """The share of pages asked for that fewer writes to SSD may cost, with a policy that chooses; None writes all that leaves DRAM."""
    max_sessions: int = DEFAULT_SESSIONS
    """Sessions of a namespace of which it is remembered where they were last."""
    lease_bytes: int = 0
    """Payload bytes that the leases of one client may hold; half of both tiers if 0."""
    pin_bytes: int = 0
    """Payload bytes that all pins may hold; half of both tiers if 0."""
    watermarks: Watermarks = field(default_factory=Watermarks)
    put_wait_s: float = 1.0
    put_idle_s: float = 60.0
    durable_wait_s: float = 20.0
    scrub_bytes_s: int = 0
    shutdown_s: float = 30.0
    batch_bytes: int = 64 << 20
    segment_bytes: int = 64 << 20
    recipe_bytes: int = 64 << 20
    """Bytes of recipes, as they are counted."""
    recipe_ttl_s: float = 0.0
    """How long the recipe of a page that is gone is kept; as long as there is room if 0."""
    reader_threads: int = 4
    move_share: float = 0.5
    ahead_bytes: int = 0
    """Bytes of DRAM that are made before they are needed."""
    journal_bytes: int = 16 << 30
    serve_while_loading: bool = False
    """Open before all pages are back from the journal; `Store.loading` says how far it is."""
    note_faults: bool = False
    """Whether the process is this store's alone: a fault that ends it is noted, and the next start salvages the file that it was met in."""
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    events: bool = False
    """Whether somebody is to take from `Store.tier_events`."""
    event_tokens: bool = False
    """Whether they are told the token ids of namespaces that keep recipes."""
