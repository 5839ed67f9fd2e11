"""What is said when a connector is imported where its engine is not installed, or another version of it."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs(engine: str, install: str, docs: str) -> Iterator[None]:
    """Around the imports of an engine's own modules. Raises ImportError that says what to install, and what was missing."""
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"this connector runs inside {engine}, which is not here, or in another version ({error}): {install}. See {docs}",
            name=error.name,
        ) from error
