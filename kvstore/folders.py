"""Folders that last: what was done in one is on the disk only once it was synced."""

import os
from pathlib import Path


def sync_folder(path: Path) -> None:
    """Return when what was made, renamed or deleted in a folder is so on the disk, too. Blocking. Raises OSError."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
