"""Runs as a process of its own: lends memory to a Mooncake master. `python mooncake_segment.py OWN-ADDRESS MASTER-ADDRESS BYTES`.

Imports nothing of ours; ends when its standard input does.
"""

import sys

from mooncake.store import MooncakeDistributedStore


def main() -> None:
    """Lend until standard input ends."""
    own, master, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
    store = MooncakeDistributedStore()
    if code := store.setup(own, "P2PHANDSHAKE", size, 16 << 20, "tcp", "", master):
        sys.exit(f"setup returns {code}")
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
