"""What public calls are given, checked before anything is sent: an error names the argument and says what is expected of it."""

import functools
import inspect
import operator
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np

from kvstore.api.wire import DIGEST_BYTES, BadRequest, Hints, KVSpec, PartRange
from kvstore_client.times import FOR_EVER_S

P = ParamSpec("P")
R = TypeVar("R")

_SHOWN = 80
_EXTRA_BYTES = 32


class BadArgument(BadRequest, TypeError):
    """An argument is not of the kind that the call takes."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of argument: what is expected, in words, and what makes it of a value, or raises TypeError, ValueError or OverflowError."""

    expected: str
    convert: Callable[[Any], Any]
    optional: bool = False
    fine: tuple[type, ...] = ()
    """Types whose values are taken as they are."""

    @property
    def passes(self) -> frozenset[type]:
        """The types whose values need no look: this is in the way of every small request."""
        return frozenset((*self.fine, type(None)) if self.optional else self.fine)

    def of(self, name: str, value: Any) -> Any:
        """The value as the call takes it. Raises BadArgument."""
        if value is None and self.optional:
            return None
        try:
            return self.convert(value)
        except (TypeError, ValueError, OverflowError):
            raise wrong(name, value, self.expected) from None


def wrong(name: str, value: object, expected: str) -> BadArgument:
    """The error for an argument that is not what is expected."""
    shown = f"a {type(value).__name__}" if hasattr(value, "__array__") else repr(value)
    return BadArgument(f"{name} is {shown if len(shown) <= _SHOWN else shown[:_SHOWN] + '…'}, not {expected}")


def instance(kind: type, expected: str = "", *, optional: bool = True) -> Kind:
    """Objects of a class."""

    def convert(value: Any) -> Any:
        if not isinstance(value, kind):
            raise TypeError
        return value

    return Kind(expected or f"a {kind.__name__}", convert, optional)


def _seconds(value: Any) -> float:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError
    return value if isinstance(value, int) else float(value)


def _bound(value: Any) -> float:
    seconds = _seconds(value)
    if not seconds >= 0:
        raise ValueError
    return seconds


def _above_0(value: Any) -> float:
    seconds = _bound(value)
    if seconds <= 0:
        raise ValueError
    return min(seconds, FOR_EVER_S)


def _flag(value: Any) -> bool:
    if value is not True and value is not False and type(value).__name__ not in ("bool_", "bool"):
        raise TypeError
    return bool(value)


def _callable(value: Any) -> Any:
    if not callable(value):
        raise TypeError
    return value


def _pair(value: Any) -> tuple[int, int]:
    first, last = value
    return operator.index(first), operator.index(last)


def _part(value: Any) -> PartRange:
    if not isinstance(value, PartRange):
        raise TypeError
    numbers = (value.component, value.layer_lo, value.layer_hi, value.head_lo, value.head_hi)
    return value if all(type(number) is int for number in numbers) else PartRange(*map(operator.index, numbers))


def _parts(value: Any) -> tuple[PartRange, ...] | None:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise TypeError
    return tuple(map(_part, value)) or None


def _bytes(value: Any, size: int) -> bytes:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise TypeError
    found = bytes(value)
    if len(found) != size:
        raise ValueError
    return found


def _digest(value: Any) -> bytes:
    return _bytes(value, DIGEST_BYTES)


def _extras(value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise TypeError
    extras = {int(operator.index(page)): _bytes(digest, _EXTRA_BYTES) for page, digest in value.items()}
    if any(page < 0 for page in extras):
        raise ValueError
    return extras


def _names(value: Any) -> Any:
    if isinstance(value, str) or not all(isinstance(name, str) for name in value):
        raise TypeError
    return list(value)


def _tls(value: Any) -> Any:
    return value if isinstance(value, ssl.SSLContext) else _flag(value)


SECONDS = Kind("a number of seconds", _seconds, fine=(float, int))
BOUND = Kind("a number of seconds, 0 or more", _bound)
TIMEOUT = Kind("a number of seconds above 0", _above_0)
WHOLE = Kind("a whole number", operator.index, fine=(int,))
FLAG = Kind("True or False", _flag, fine=(bool,))
TEXT = instance(str, "text", optional=False)
PART = Kind("a PartRange of whole numbers, such as spec.whole(0)", _part, optional=True)
ENDPOINT = Kind(
    "HOST:PORT, tls://HOST:PORT or unix:PATH, or a list of such",
    lambda value: value if isinstance(value, str) else _names(value),
    optional=True,
)
ADDRESSES = Kind("a list of addresses of this machine", _names)
TLS = Kind("an ssl.SSLContext, True or False", _tls, optional=True)
PUT_ID = Kind(f"{DIGEST_BYTES} bytes, such as secrets.token_bytes({DIGEST_BYTES}), the same for all shards", _digest)
FUNCTION = Kind("a function to call", _callable)

_KINDS = {
    **dict.fromkeys(("lease_s", "whole_s", "rebuild_s", "wait_s", "within_s", "ttl_s"), SECONDS),
    "timeout": Kind("a number of seconds above 0, or None", _above_0, optional=True),
    **dict.fromkeys(("first_page", "from_page", "group_layers", "component", "pin", "layer_lo", "layer_hi"), WHOLE),
    "from_token": Kind("a whole number", operator.index, optional=True),
    **dict.fromkeys(("durable", "boundaries", "rebuildable", "holes", "recipes", "lossy"), FLAG),
    **dict.fromkeys(("progress", "on_group"), replace(FUNCTION, optional=True)),
    **dict.fromkeys(("wanted", "part"), PART),
    "pages": Kind("a pair (first, last) of page numbers", _pair, optional=True),
    "parts": Kind("a tuple of PartRange, such as (spec.whole(0), spec.whole(1))", _parts, optional=True),
    "spans": Kind("a pair (first, last) of page numbers for each part", lambda value: tuple(map(_pair, value)), optional=True),
    "put_id": replace(PUT_ID, convert=lambda value: _digest(value) if not isinstance(value, bytes) or value else None, optional=True),
    "hints": instance(Hints, "a Hints, such as Hints(session='…')"),
    "extras": Kind(f"a mapping of pages to digests of {_EXTRA_BYTES} bytes, as extra_digest makes them", _extras, optional=True),
    "spec": instance(KVSpec),
    **dict.fromkeys(("name", "fingerprint"), instance(str, "text")),
}


def checked(**own: Kind) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Check a call's arguments by their names, and by those kinds that only it has. Numbers of numpy become Python's.

    An asynchronous call stays one: what is wrong is raised where it is awaited.
    """
    kinds = _KINDS | own

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        names = list(inspect.signature(function).parameters)
        passes = {name: kind.passes for name, kind in kinds.items()}

        def converted(args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, ...]:
            for name, value in given.items():
                if name in passes and type(value) not in passes[name]:
                    given[name] = kinds[name].of(name, value)
            if len(args) > 1:
                taken = list(args)
                for at, (name, value) in enumerate(zip(names, args, strict=False)):
                    if name in passes and type(value) not in passes[name]:
                        taken[at] = kinds[name].of(name, value)
                return tuple(taken)
            return args

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def call_async(*args: Any, **given: Any) -> Any:
                return await function(*converted(args, given), **given)

            return cast(Callable[P, R], call_async)

        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> R:
            return function(*converted(args, given), **given)

        return cast(Callable[P, R], call)

    return decorate


def readable(data: Any, name: str = "data") -> memoryview:
    """The bytes of what is to be sent, not copied. Raises BadArgument if it is no buffer, or its bytes do not lie one after the other."""
    try:
        view = memoryview(data)
    except (TypeError, ValueError):
        own = ": give its `array`" if hasattr(getattr(data, "array", None), "__array__") else ""  # a SharedBuffer
        raise wrong(name, data, f"a buffer, such as a numpy array or bytes{own}") from None
    _no_objects(view, name)
    if not view.c_contiguous:
        raise BadArgument(f"the bytes of {name} do not lie one after the other (an array of strides): give numpy.ascontiguousarray of it")
    return flat(view)


def flat(view: memoryview) -> memoryview:
    """The bytes of what lies in one piece, whatever its numbers are. Raises TypeError if it does not."""
    if not view.nbytes:
        return memoryview(b"" if view.readonly else bytearray())  # one with zeros in its shape can't be cast
    try:
        return view.cast("B")
    except ValueError:  # numbers of another machine, of several fields, or of ctypes, which says of which byte order they are
        return np.frombuffer(view, np.uint8).data


def _no_objects(view: memoryview, name: str) -> None:
    """Their bytes are addresses: stored they mean nothing, and written over they end the process."""
    if "O" in re.sub(":[^:]*:", "", view.format):  # but for names of fields
        raise BadArgument(f"{name} holds Python objects, not bytes: give an array of numbers")


def writable(out: Any, size: int, *, at_least: bool = False) -> memoryview:
    """A buffer of exactly `size` bytes to receive into; with `at_least`, the front of a larger one. Raises BadRequest for any other."""
    try:
        whole = memoryview(out)
        _no_objects(whole, "the buffer")
        target = flat(whole)
    except (TypeError, ValueError) as error:
        raise BadArgument(f"the buffer (a {type(out).__name__}) can't be received into: {error}; give a contiguous array") from None
    if at_least:
        target = target[:size]
    if len(target) != size or target.readonly:
        raise BadRequest(
            f"the buffer has {len(target)} bytes{' and is read-only' if target.readonly else ''}; {size} writable ones are needed"
        )
    return target
