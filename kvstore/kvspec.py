"""KV specs: what a page's bytes are, how they are cut into parts and slices, and whose they are.

Pure values. A namespace is identified by a digest over tenant, model fingerprint and KV spec, so two engines that
disagree in anything the bytes depend on get two namespaces.
"""

import json
import operator
from dataclasses import asdict, dataclass, fields
from functools import cached_property, lru_cache
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Literal

from kvstore.errors import BadRequest

DTYPE_BYTES = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2, "f8e4m3": 1, "f8e5m2": 1, "i8": 1, "u8": 1}
AXIS_ORDER = "layer,plane,head,token,dim"
MAX_SLICE_BYTES = 1 << 20
MAX_PART_BYTES = 1 << 30
MAX_SLICES = 4096
"""Of a part. Layouts are kept in memory, so they must stay small whatever specs clients make up."""
MAX_PAGE_TOKENS = 1 << 16
_MAX_RANGE = (1 << 16) - 1

ComponentKind = Literal["full", "window", "state"]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise BadRequest(message)


def _make_whole(owner: object, names: tuple[str, ...]) -> None:
    """Make the whole numbers of others (numpy's) Python's, in a frozen value. Raises BadRequest for what is none."""
    for name in names:
        value = getattr(owner, name)
        if type(value) is not int:
            object.__setattr__(owner, name, whole_number(name, value))


def whole_number(name: str, value: object) -> int:
    """A whole number as Python's. Raises BadRequest for anything else."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise BadRequest(f"{name} is {value!r}, not a whole number") from None


@dataclass(frozen=True, slots=True)
class Component:
    """One kind of state in a model.

    `planes` is 2 for separate keys and values, 1 for a compressed latent. For `full` and `window` the state of one layer
    and head is `planes * page_tokens * head_dim` elements a page; for `state` it is `planes * head_dim`, once.
    """

    kind: ComponentKind
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str = "bf16"
    planes: int = 2
    window: int = 0

    def __post_init__(self) -> None:
        _require(self.kind in ("full", "window", "state"), f"component kind {self.kind!r} is not full, window or state")
        known = isinstance(self.dtype, str) and self.dtype in DTYPE_BYTES
        _require(known, f"dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        _make_whole(self, ("layers", "kv_heads", "head_dim", "planes", "window"))
        for name in ("layers", "kv_heads", "head_dim", "planes"):
            value = getattr(self, name)
            _require(1 <= value <= _MAX_RANGE, f"{name} is {value!r}, not 1 to {_MAX_RANGE}")
        wants = self.kind == "window"
        _require((self.window > 0) == wants, f"window is {self.window}: it must be set for a window component, and only there")


@dataclass(frozen=True, slots=True)
class PartRange:
    """Which layers and KV heads of which component a part holds; ranges are half-open."""

    component: int
    layer_lo: int
    layer_hi: int
    head_lo: int
    head_hi: int

    def overlaps(self, other: "PartRange") -> bool:
        """Whether both hold something that is the same."""
        return (
            self.component == other.component
            and max(self.layer_lo, other.layer_lo) < min(self.layer_hi, other.layer_hi)
            and max(self.head_lo, other.head_lo) < min(self.head_hi, other.head_hi)
        )


@dataclass(frozen=True)
class KVSpec:
    """The KV spec of a namespace. Sizes are in bytes, ranges half-open, axis order as in `axis_order`."""

    page_tokens: int
    components: tuple[Component, ...]
    axis_order: str = AXIS_ORDER
    max_slice_bytes: int = MAX_SLICE_BYTES
    group_layers: int = 0
    """Most layers in one slice, so that a layer group can be streamed by itself; 0 for as many as fit."""
    hash_bytes: int = 0
    """Pages are labelled with digests of so many bytes that the engine computes, in place of token ids; 0 for token ids."""
    flat: bool = False
    """The digests do not form chains: every page stands alone, and a look-up is for the front of a list."""

    def __post_init__(self) -> None:
        _make_whole(self, ("page_tokens", "max_slice_bytes", "group_layers", "hash_bytes"))
        several = isinstance(self.components, tuple | list) and all(isinstance(c, Component) for c in self.components)
        _require(several, f"components is {self.components!r}, not a tuple of Component, such as (Component('full', 32, 8, 128),)")
        object.__setattr__(self, "components", tuple(self.components))
        _require(1 <= self.page_tokens <= MAX_PAGE_TOKENS, f"page_tokens is {self.page_tokens}, not 1 to {MAX_PAGE_TOKENS}")
        _require(1 <= len(self.components) <= 16, f"{len(self.components)} components: a KV spec has 1 to 16")
        _require(self.axis_order == AXIS_ORDER, f"axis_order {self.axis_order!r}: only {AXIS_ORDER!r} is defined")
        _require(
            4096 <= self.max_slice_bytes <= MAX_SLICE_BYTES,
            f"max_slice_bytes is {self.max_slice_bytes}, not 4096 to {MAX_SLICE_BYTES}",
        )
        _require(0 <= self.group_layers <= _MAX_RANGE, f"group_layers is {self.group_layers}, not 0 to {_MAX_RANGE}")
        if self.hash_bytes:
            _require(self.hash_bytes in range(16, 33, 4), f"hash_bytes is {self.hash_bytes}: digests have 16, 20, 24, 28 or 32 bytes")
        _require(isinstance(self.flat, bool), f"flat is {self.flat!r}, not True or False")
        _require(bool(self.hash_bytes) or not self.flat, "flat is for pages that are labelled with digests")
        for index in range(len(self.components)):
            size = self.part_bytes(self.whole(index))
            _require(size <= MAX_PART_BYTES, f"a page of component {index} is {size} bytes, over the limit of {MAX_PART_BYTES}")
            slices = self._slice_count(self.whole(index))
            _require(slices <= MAX_SLICES, f"a page of component {index} has {slices} slices, over the limit of {MAX_SLICES}")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """What is known of a spec is looked up by it with each request."""
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def check_component(self, component: int) -> None:
        """Raise BadRequest unless there is a component of this number."""
        if type(component) is not int:
            component = whole_number("component", component)
        if not 0 <= component < len(self.components):
            raise BadRequest(f"component {component} does not exist: there are {len(self.components)}, from 0 on")

    def whole(self, component: int = 0) -> PartRange:
        """The part range that covers all layers and heads of a component."""
        self.check_component(component)
        c = self.components[component]
        return PartRange(component, 0, c.layers, 0, c.kv_heads)

    def check_range(self, part: PartRange) -> None:
        """Raise BadRequest unless `part` lies inside the component it names."""
        _require(isinstance(part, PartRange), f"the part range is {part!r}, not a PartRange, such as spec.whole(0)")
        self.check_component(part.component)
        c = self.components[part.component]
        try:
            layers, heads = 0 <= part.layer_lo < part.layer_hi <= c.layers, 0 <= part.head_lo < part.head_hi <= c.kv_heads
        except TypeError:
            raise BadRequest(f"{part!r} is not of whole numbers") from None
        _require(layers, f"layers [{part.layer_lo}, {part.layer_hi}) are not inside [0, {c.layers})")
        _require(heads, f"heads [{part.head_lo}, {part.head_hi}) are not inside [0, {c.kv_heads})")

    @property
    def label_words(self) -> int:
        """Length of a page's label in uint32 words: its token ids, or the engine's digest."""
        return self.hash_bytes // 4 or self.page_tokens

    def first_page(self, from_page: int = 0, from_token: int | None = None) -> int:
        """The first page that a change from a page on, or from a token on, concerns: the one that the token is in."""
        if from_token is not None and from_page:
            raise BadRequest("say from where on either by a page or by a token")
        given = from_page if from_token is None else from_token
        first = whole_number("from_page" if from_token is None else "from_token", given)
        first = first if from_token is None else first // self.page_tokens
        if first < 0:
            raise BadRequest(f"it starts at page 0, not at {first}")
        return first

    def boundary_pages(self, component: int) -> int:
        """On how many pages right before a boundary a component is needed to go on from it; 0 for all pages."""
        self.check_component(component)
        c = self.components[component]
        return {"full": 0, "window": -(-c.window // self.page_tokens), "state": 1}[c.kind]

    def layer_bytes(self, part: PartRange) -> int:
        """Bytes of one layer of a part."""
        c = self.components[part.component]
        tokens = 1 if c.kind == "state" else self.page_tokens
        return (part.head_hi - part.head_lo) * c.planes * tokens * c.head_dim * DTYPE_BYTES[c.dtype]

    def part_bytes(self, part: PartRange) -> int:
        """Payload bytes of one page's part."""
        try:
            return (part.layer_hi - part.layer_lo) * self.layer_bytes(part)
        except (AttributeError, IndexError, TypeError):
            self.check_range(part)
            raise

    def _slice_count(self, part: PartRange) -> int:
        layer, layers = self.layer_bytes(part), part.layer_hi - part.layer_lo
        if layer > self.max_slice_bytes:
            return layers * -(-layer // self.max_slice_bytes)
        return -(-layers // min(self.max_slice_bytes // layer, self.group_layers or layers))

    def slice_layout(self, part: PartRange) -> "SliceLayout":
        """How the part's payload is cut into slices."""
        return _slice_layout(self.layer_bytes(part), part.layer_hi - part.layer_lo, self.max_slice_bytes, self.group_layers)

    @cached_property
    def page_bytes(self) -> int:
        """Payload bytes of a whole page over all components."""
        return sum(self.part_bytes(self.whole(i)) for i in range(len(self.components)))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON and MessagePack. What is left at its default of 0 is left out, so that older digests stay."""
        data: dict[str, Any] = {
            "page_tokens": self.page_tokens,
            "components": [asdict(c) for c in self.components],
            "axis_order": self.axis_order,
            "max_slice_bytes": self.max_slice_bytes,
        }
        return data | {name: value for name in ("group_layers", "hash_bytes", "flat") if (value := getattr(self, name))}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "KVSpec":
        """The inverse of `to_dict`; raises BadRequest for anything missing, unknown or out of range."""
        try:
            given = dict(data)
            components = tuple(Component(**c) for c in given.pop("components"))
            return cls(components=components, **given)
        except (TypeError, KeyError) as error:
            raise BadRequest(f"the KV spec is malformed: {error}") from error


@dataclass(frozen=True)
class SliceLayout:
    """Slice sizes of one part, in order: `pattern` so many times, then `rest`. A slice is some whole layers, or a piece of one.

    There may be thousands: they are written out where they are asked for, as of a put that is taken.
    """

    pattern: tuple[int, ...]
    times: int = 1
    rest: tuple[int, ...] = ()

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The size of each slice."""
        return self.pattern * self.times + self.rest

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Offset of each slice in the payload, and the payload's size as the last element."""
        return tuple(accumulate(self.sizes, initial=0))

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes of the payload: the sum of the slices."""
        return sum(self.pattern) * self.times + sum(self.rest)

    @cached_property
    def count(self) -> int:
        """Number of slices."""
        return len(self.pattern) * self.times + len(self.rest)


@lru_cache(maxsize=256)
def _slice_layout(layer_bytes: int, layers: int, max_slice: int, group_layers: int) -> SliceLayout:
    if layer_bytes <= max_slice:
        group = min(max_slice // layer_bytes, group_layers or layers, layers)
        times, left = divmod(layers, group)
        return SliceLayout((layer_bytes * group,), times, (layer_bytes * left,) if left else ())
    times, left = divmod(layer_bytes, max_slice)
    return SliceLayout((max_slice,) * times + ((left,) if left else ()), layers)


def canonical_json(data: object) -> bytes:
    """One byte string for one value: keys sorted, no spaces, ASCII only."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def namespace_digest(tenant: str, fingerprint: str, spec: KVSpec) -> bytes:
    """The 32-byte identity of a namespace and the page key of its root."""
    data = {"tenant": tenant, "fingerprint": fingerprint, "spec": spec.to_dict()}
    return blake2b(canonical_json(data), digest_size=32, person=b"kvstore.space").digest()
