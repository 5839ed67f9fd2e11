"""Times as messages carry them."""

import time
from collections.abc import Callable

from kvstore.api.wire import BadRequest
from kvstore.api.wire.messages import Message

_LONGEST_S = 3.2e9
FOR_EVER_S = 1e9
"""A timeout of more (31 years), or without end, counts as this one: timers and sockets take no longer ones."""


def milliseconds(name: str, seconds: float) -> int:
    """Whole milliseconds of the argument of a name. Raises BadRequest if it is no number, below 0, or over a hundred years."""
    if not 0 <= seconds < _LONGEST_S:
        raise BadRequest(f"{name} is {seconds}, not a number of seconds from 0 to {_LONGEST_S:g}")
    return int(seconds * 1000)


def waiting_until(message: Message, name: str, end: float) -> Callable[[], None]:
    """Something that makes a message ask for a wait until `end` (monotonic), however late it is sent: it may be sent several times."""

    def bring_up_to_date() -> None:
        setattr(message, name, max(0, int((end - time.monotonic()) * 1000)))

    return bring_up_to_date
