"""A client in a process of its own, made to be killed: `python -m tests.faults.victim ENDPOINT MODE FIRST_SEED`.

It prints the seed of each context once that is acknowledged as durable, or a line once it is at it, or holds what it is to hold.
"""

import sys
import time

import numpy as np

from kvstore_client import Client
from tests.integration.pages import SPEC, content, context, open_namespace

PAGES = 64
LONG_PAGES = 2048
"""32 MiB: more than sockets take in while the client is stopped."""
LEASES = 30


def main() -> None:
    """Do one thing over and over until killed."""
    endpoint, mode, first = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with Client(endpoint, connections=2, name="victim", shared_memory=False) as client:
        namespace = open_namespace(client)
        if mode == "put":
            data = np.zeros((LONG_PAGES, SPEC.page_bytes // 8), np.uint64)
            print("putting", flush=True)
            for seed in range(first, first + 100_000):  # next to nothing is done between two puts
                data[:, 0] = np.arange(seed * LONG_PAGES, (seed + 1) * LONG_PAGES)
                namespace.put(context(seed, LONG_PAGES), data)
        if mode == "durable":
            for seed in range(first, first + 100_000):
                namespace.put(context(seed, PAGES), content(context(seed, PAGES)), durable=True)
                print(seed, flush=True)
        pages = LONG_PAGES if mode == "fetch" else PAGES
        tokens = context(first, pages)
        namespace.put(tokens, content(tokens))
        if mode == "lease":
            held = [namespace.match(tokens, lease_s=3000) for _ in range(LEASES)]
            print(len(held), flush=True)
            time.sleep(600)
        out = np.empty(pages * SPEC.page_bytes, np.uint8)
        print("fetching", flush=True)
        while mode == "fetch":
            with namespace.match(tokens) as match:
                namespace.fetch(match, out)


if __name__ == "__main__":
    main()
