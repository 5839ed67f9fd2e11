"""A matched prefix as the blocking client has it."""

from collections.abc import Iterator
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvstore.api.wire import PartRange
from kvstore_client.estimate import Estimate
from kvstore_client.match import Lack
from kvstore_client.match import Match as AsyncMatch

if TYPE_CHECKING:
    from kvstore_client.blocking import Client


class Match:
    """As the asynchronous Match; a context manager that releases its lease."""

    def __init__(self, client: "Client", inner: AsyncMatch) -> None:
        self._client = client
        self.inner = inner

    @property
    def pages(self) -> int:
        """Whole pages matched."""
        return self.inner.pages

    @property
    def tokens(self) -> int:
        """Tokens matched."""
        return self.inner.tokens

    @property
    def known_pages(self) -> int:
        """Pages that the store knows; beyond `pages` a window or state is missing."""
        return self.inner.known_pages

    @property
    def boundaries(self) -> list[tuple[int, int]]:
        """All usable boundaries as half-open runs, if asked for."""
        return self.inner.boundaries

    @property
    def lacks(self) -> tuple[Lack, ...]:
        """Which component is missing beyond `pages`, and where."""
        return self.inner.lacks

    @property
    def dram_pages(self) -> int:
        """Matched pages that are in the daemon's DRAM."""
        return self.inner.dram_pages

    @property
    def rebuildable_pages(self) -> int:
        """Pages after those matched that are gone, but can be computed again (-1 if that was not asked)."""
        return self.inner.rebuildable_pages

    @property
    def estimate(self) -> Estimate | None:
        """What loading it costs beside computing it, if that was asked for."""
        return self.inner.estimate

    @property
    def valid(self) -> bool:
        """Whether the lease still holds, as far as can be known here."""
        return self.inner.valid

    def there(self) -> list[int]:
        """The pages that there are parts of: all of them, but for a match with holes."""
        return self.inner.there()

    def parts(self) -> Iterator[tuple[int, PartRange, bytes]]:
        """Every part to load, as page, range and blob id."""
        return self.inner.parts()

    def usable_boundaries(self) -> npt.NDArray[np.int64]:
        """All usable boundaries in pages, rising; what ranks intersect to agree on one."""
        return self.inner.usable_boundaries()

    def pages_of(self, component: int) -> tuple[int, int]:
        """The pages [first, last) on which a component is needed to go on from this boundary."""
        return self.inner.pages_of(component)

    def renew(self, lease_s: float) -> None:
        """Let the lease last `lease_s` seconds from now."""
        self._client.quickly(partial(self.inner.renew, lease_s))

    def release(self) -> None:
        """End the lease. Harmless if it is over already."""
        if not self._client.closed:
            self._client.quickly(self.inner.release, answered=False)

    def __repr__(self) -> str:
        return repr(self.inner)

    def __enter__(self) -> "Match":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()
