"""Which namespace an object of LMCache belongs to, and under which label. Needs LMCache only for its types.

LMCache's key says model, rank, object group, salt and the hash of a chunk, but neither dtype nor layout: those are seen on the objects.
So a namespace is one model at one revision, one object group, one layout; it is flat, as the hashes come without their chain in
any order and with gaps (windows, several ranks). The hash, the rank and the salt make the label.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from kvstore_client import KVSpec, fingerprint_revision
from kvstore_connectors.hashed_pages import LABEL_BYTES, label, namespace_name, page_tokens_for, rows_component, settings_digest

ENGINE = "lmcache"


@dataclass(frozen=True, slots=True)
class Layout:
    """What an object's bytes are: shapes and dtypes of its tensors, one after the other, and their size in all."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    nbytes: int

    @property
    def raw(self) -> bool:
        """Whether it is bytes in a row, as a serde makes them."""
        return self.dtypes == ("uint8",) and len(self.shapes[0]) == 1

    @classmethod
    def raw_bytes(cls, nbytes: int) -> "Layout":
        """The layout of so many bytes in a row."""
        return cls(((nbytes,),), ("uint8",), nbytes)

    @classmethod
    def of_object(cls, memory_obj: Any) -> "Layout":
        """That of a memory object. One that was cut to fewer bytes than its tensors have is bytes in a row."""
        meta, size = memory_obj.metadata, memory_obj.get_size()
        several = meta.shapes is not None and meta.dtypes is not None
        found = cls.of_tensors(meta.shapes, meta.dtypes) if several else cls.of_tensors([meta.shape], [meta.dtype])
        return found if found.nbytes == size else cls.raw_bytes(size)

    @classmethod
    def of_tensors(cls, shapes: Any, dtypes: Any) -> "Layout":
        """That of some tensors."""
        plain = tuple(tuple(int(n) for n in shape) for shape in shapes)
        nbytes = sum(shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
        return cls(plain, tuple(str(dtype).removeprefix("torch.") for dtype in dtypes), nbytes)


@dataclass(frozen=True)
class Space:
    """One model at one revision, one object group, one layout."""

    model: str
    revision: str
    group: int
    layout: Layout
    chunk_tokens: int

    @cached_property
    def spec(self) -> KVSpec:
        """Its KV spec. Raises BadRequest if the store can't describe objects of this size."""
        nbytes = self.layout.nbytes
        tokens = page_tokens_for(nbytes, self.chunk_tokens)
        return KVSpec(tokens, (rows_component("full", 1, nbytes, tokens),), hash_bytes=LABEL_BYTES, flat=True)

    @cached_property
    def fingerprint(self) -> str:
        """What the bytes depend on."""
        layout = {"shapes": self.layout.shapes, "dtypes": self.layout.dtypes}
        settings = {"engine": ENGINE, "object_group": str(self.group), "layout": layout}
        return fingerprint_revision(self.model, self.revision, settings=settings_digest(settings))

    @cached_property
    def name(self) -> str:
        """Its name in the store."""
        kind = "raw" if self.layout.raw else "kv"
        return namespace_name(ENGINE, self.model, f"{kind}{self.group}", self.fingerprint, self.spec)


@lru_cache(maxsize=1024)
def space_of(model: str, revision: str, group: int, layout: Layout, chunk_tokens: int) -> Space:
    """The one Space of these, which has worked out its spec and name before."""
    return Space(model, revision, group, layout, chunk_tokens)


def label_of(key: Any) -> bytes:
    """The label of an ObjectKey: its hash, rank and salt."""
    return label(key.chunk_hash, int(key.kv_rank).to_bytes(8, "little", signed=True), key.cache_salt.encode())


def layout_asked(descs: Mapping[int, Any], group: int) -> Layout | None:
    """The layout that a look-up says an object group has; None if it does not say."""
    desc = descs.get(group)
    return Layout.of_tensors(desc.shapes, desc.dtypes) if desc is not None and len(desc.shapes) else None
