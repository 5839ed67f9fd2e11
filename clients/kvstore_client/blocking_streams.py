"""Streams and sessions of the blocking client: the asynchronous ones, each call run to its end."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.api.wire import PartRange
from kvstore_client import session, streams
from kvstore_client.estimate import Estimate
from kvstore_client.fetching import OnGroup
from kvstore_client.put import PutResult
from kvstore_client.put_layout import by_default
from kvstore_client.tokens import Tokens
from kvstore_client.transfer import Progress

Run = Callable[..., Any]
"""Runs a coroutine on the client's loop to its end."""
Inner = TypeVar("Inner", bound=streams.PutStream | streams.Follower)


class _Stream(Generic[Inner]):
    """What is entered, and left, in the client's thread."""

    def __init__(self, run: Run, inner: Inner) -> None:
        self._run = run
        self.inner = inner

    def __enter__(self) -> Self:
        self._run(self.inner.__aenter__())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._run(self.inner.__aexit__(kind, error, trace))

    @property
    def pages(self) -> tuple[int, int]:
        """The pages [first, last) of the put."""
        return self.inner.pages


class PutStream(_Stream[streams.PutStream]):
    """As the asynchronous PutStream. Use as a context manager."""

    def __init__(self, run: Run, inner: streams.PutStream) -> None:
        super().__init__(run, inner)
        self.put_id = inner.put_id

    def send(self, layer_lo: int, layer_hi: int, data: Any, *, timeout: float | None = None) -> None:
        """Send the layers [lo, hi) of all pages."""
        self._run(self.inner.send(layer_lo, layer_hi, data, timeout=timeout))

    def commit(self, *, timeout: float | None = None) -> PutResult:
        """Make the pages count."""
        done: PutResult = self._run(self.inner.commit(timeout=timeout))
        return done


class Follower(_Stream[streams.Follower]):
    """As the asynchronous Follower. Use as a context manager."""

    def fetch(
        self, out: Any, *, pages: tuple[int, int] | None = None, wanted: PartRange | None = None, group_layers: int = 0,
        on_group: OnGroup | None = None, progress: Progress | None = None, timeout: float | None = None,
    ) -> int:  # fmt: skip
        """Fetch while it arrives; callbacks run in the client's thread."""
        done = self.inner.fetch(
            out, pages=pages, wanted=wanted, group_layers=group_layers, on_group=on_group, progress=progress, timeout=timeout
        )
        nbytes: int = self._run(done)
        return nbytes

    def committed(self, *, timeout: float | None = None) -> None:
        """Wait until all puts that were followed are committed."""
        self._run(self.inner.committed(timeout=timeout))


class Session:
    """As the asynchronous Session. Use as a context manager."""

    def __init__(self, run: Run, inner: session.Session) -> None:
        self._run = run
        self.inner = inner

    def __repr__(self) -> str:
        return repr(self.inner)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the lease; the pages stay."""
        self._run(self.inner.close())

    @property
    def pages(self) -> int:
        """Pages up to the cursor."""
        return self.inner.pages

    @property
    def tokens(self) -> npt.NDArray[np.uint32] | npt.NDArray[np.uint8]:
        """All tokens so far; where pages are labelled with digests, the bytes of those."""
        return self.inner.tokens

    @property
    def estimate(self) -> Estimate | None:
        """What loading all up to the cursor costs beside computing it."""
        return self.inner.estimate

    def extend(self, tokens: Tokens) -> int:
        """The conversation goes on with these tokens. Returns the pages up to the cursor."""
        pages: int = self._run(self.inner.extend(tokens))
        return pages

    def fetch(self, out: Any, **options: Any) -> int:
        """Fetch pages up to the cursor."""
        nbytes: int = self._run(self.inner.fetch(out, **options))
        return nbytes

    def put(self, data: Any, **options: Any) -> PutResult:
        """Put the whole pages after the cursor, and move it to their end."""
        options["parts"] = by_default(self.inner.namespace.spec, options.get("parts"), options.get("put_id"))
        done: PutResult = self._run(self.inner.put(data, **options))
        return done

    def abandon(self, from_page: int = 0, *, from_token: int | None = None) -> int:
        """The conversation will not go on from a page, or a token, on."""
        pages: int = self._run(self.inner.abandon(from_page, from_token=from_token))
        return pages
