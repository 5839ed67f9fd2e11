"""The bytes of whole pages as `kvstore put` takes and `get` gives them: page after page, of each page its components in order."""

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.cli.labels import load_npy
from kvstore.errors import BadRequest
from kvstore.kvspec import KVSpec, PartRange
from kvstore_client.blocking import Namespace
from kvstore_client.blocking_match import Match


def all_parts(spec: KVSpec) -> tuple[PartRange, ...]:
    """What is put of each page: all layers and heads of every component."""
    return tuple(spec.whole(component) for component in range(len(spec.components)))


def check_size(spec: KVSpec, pages: int, nbytes: int) -> None:
    """Raise BadRequest, saying what is wanted, unless so many bytes are those of so many pages."""
    if nbytes == pages * spec.page_bytes:
        return
    each = " + ".join(f"{spec.part_bytes(spec.whole(number))} ({one.kind})" for number, one in enumerate(spec.components))
    what = f"{pages} pages of {spec.page_bytes} bytes" if pages != 1 else f"a page of {spec.page_bytes} bytes"
    of_each = f", each its components in order: {each}" if len(spec.components) > 1 else ""
    raise BadRequest(f"the data has {nbytes} bytes, not the {pages * spec.page_bytes} of {what}{of_each}")


def read_pages(path: Path, wanted: int) -> npt.NDArray[np.uint8]:
    """The bytes of a file, of an .npy file those of its array, or for - of standard input. Raises BadRequest.

    What may never end is read no further than it takes to see that it is more than what is `wanted`.
    """
    try:
        if str(path) == "-":
            found = sys.stdin.buffer.read(wanted + 1)
        elif path.suffix == ".npy":
            return np.frombuffer(np.ascontiguousarray(load_npy(path)).data.cast("B"), np.uint8)
        elif path.is_file():
            return np.fromfile(path, np.uint8)
        else:
            with path.open("rb") as pipe:
                found = pipe.read(wanted + 1)
    except (OSError, ValueError, TypeError) as error:
        raise BadRequest(f"can't read {path}: {error}") from error
    if len(found) > wanted:
        raise BadRequest(f"there is more to read from {path} than the {wanted} bytes of the pages")
    return np.frombuffer(found, np.uint8)


def fetch(space: Namespace, match: Match, timeout: float) -> npt.NDArray[np.uint8]:
    """The bytes of all matched pages: of each the components that are needed there to go on from the end of the match.

    A component that is needed on the last pages only (a window, a state) may not be stored for those before. `timeout` bounds each.
    """
    spec, found = space.spec, list[tuple[int, int, npt.NDArray[np.uint8]]]()
    for part in all_parts(spec):
        first, last = match.pages_of(part.component)
        out = np.empty((last - first, spec.part_bytes(part)), np.uint8)
        space.fetch(match, out.reshape(-1), pages=(first, last), wanted=part, timeout=timeout)
        found.append((first, last, out))
    if len(found) == 1:
        return found[0][2].reshape(-1)
    return np.concatenate([out[page - first] for page in range(match.pages) for first, last, out in found if first <= page < last])
