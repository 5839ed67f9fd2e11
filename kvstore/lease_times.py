"""How long leases and pins may last."""

from kvstore.errors import BadRequest

MAX_LEASE_S = 3600.0
MAX_PIN_S = 30 * 86_400.0


def check_seconds(name: str, seconds: float, most: float) -> None:
    """Raise BadRequest, naming the argument, unless a lease or a pin may last so long."""
    if not 0 < seconds <= most:
        raise BadRequest(f"{name} is {seconds:.10g}: it is more than 0 and up to {most:.0f} (seconds)")
