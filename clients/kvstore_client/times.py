"""Times as messages carry them."""

from kvstore.api.wire import BadRequest

_LONGEST_S = 3.2e9


def milliseconds(seconds: float) -> int:
    """Whole milliseconds. Raises BadRequest if it is no number, or over a hundred years."""
    if not -_LONGEST_S < seconds < _LONGEST_S:
        raise BadRequest(f"{seconds} is no time in seconds")
    return int(seconds * 1000)
