"""The store: joins the radix tree and the tiers behind one façade. No sockets in it."""

from kvstore.store.clock import Clock
from kvstore.store.leases import Lease
from kvstore.store.matching import Match
from kvstore.store.part_table import PartRun, PartTable
from kvstore.store.put_request import Ack, PutRequest, PutResult
from kvstore.store.puts import Put
from kvstore.store.reading import Held
from kvstore.store.settings import NamespaceSettings
from kvstore.store.space import Space
from kvstore.store.store import Store
from kvstore.store.store_config import StoreConfig

__all__ = [
    "Ack",
    "Clock",
    "Held",
    "Lease",
    "Match",
    "NamespaceSettings",
    "PartRun",
    "PartTable",
    "Put",
    "PutRequest",
    "PutResult",
    "Space",
    "Store",
    "StoreConfig",
]
