"""Importing quickly: a command that ends within a second spends most of it here."""

import contextlib
import gc
import os
from collections.abc import Iterator

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy would start threads for linear algebra, of which there is none here


@contextlib.contextmanager
def imports() -> Iterator[None]:
    """Meanwhile no garbage is collected, as importing makes none. What it made stays: no later one looks at it, nor the end."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
