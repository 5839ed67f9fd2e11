"""The store: joins the radix tree and the tiers behind one façade. No sockets in it."""

from kvstore.store.clock import Clock
from kvstore.store.dram.reading import Held
from kvstore.store.matching.leases import Lease
from kvstore.store.matching.matching import Match
from kvstore.store.matching.part_table import PartRun, PartTable
from kvstore.store.puts.put import Put
from kvstore.store.puts.request import Ack, PutRequest, PutResult
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
