"""Runs in the Python that has Mooncake: a dummy client that measures gets and puts through shared memory when it is told to.

`python mooncake_dummy.py ADDRESS SIZE ROTATION`; each line on standard input is a number of seconds, each on standard output a JSON list
[get, put] in GiB/s. Imports nothing of ours.
"""

import ctypes
import json
import sys
import time

from mooncake.store import MooncakeDistributedStore

GIB = 1 << 30


def main() -> None:
    """Answer until standard input ends."""
    address, size, rotation = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    count = rotation // size
    store = MooncakeDistributedStore()
    if store.setup_dummy(2 * rotation, 64 << 20, address):
        sys.exit("the dummy client can't be set up")
    source, target = store.alloc_from_mem_pool(rotation), store.alloc_from_mem_pool(rotation)
    if not source or not target:
        sys.exit("there is no memory in the pool")
    for memory in (source, target):
        if store.register_buffer(memory, rotation):
            sys.exit("memory of the pool can't be registered")
    for at in range(0, rotation, 1 << 20):
        ctypes.memset(source + at, at >> 20 & 255, 1 << 20)
    ctypes.memset(target, 255, rotation)
    turn = 0

    def put_all() -> float:
        started = time.perf_counter()
        for index in range(count):
            if store.put_from(f"{turn}-{index}", source + index * size, size):
                sys.exit("a put failed")
        return time.perf_counter() - started

    def get_all() -> float:
        started = time.perf_counter()
        for index in range(count):
            if store.get_into(f"{turn}-{index}", target + index * size, size) != size:
                sys.exit("a get failed")
        return time.perf_counter() - started

    def remove_all() -> None:
        removed, deadline = 0, time.monotonic() + 30
        while removed < count:  # a get leases its object, and so would a question whether it is there
            if time.monotonic() > deadline:
                sys.exit("objects can't be removed")
            time.sleep(0.5)
            removed += max(store.remove_all(), 0)

    for line in sys.stdin:
        seconds, got, put, rounds = float(line), 0.0, 0.0, 0
        while not rounds or got < seconds:
            turn += 1
            put += put_all()
            got += get_all()
            if ctypes.string_at(target + rotation - 8, 8) != ctypes.string_at(source + rotation - 8, 8):
                sys.exit("other bytes came back")
            remove_all()
            rounds += 1
        print(json.dumps([rounds * rotation / GIB / got, rounds * rotation / GIB / put]), flush=True)


if __name__ == "__main__":
    main()
