"""Sizes as they are told to people."""


def size_text(count: float) -> str:
    """Bytes for people: `512 B`, `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
