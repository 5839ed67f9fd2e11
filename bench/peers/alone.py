"""A network namespace with nothing but loopback, so that whatever a peer listens on, nobody else can reach it."""

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys

_INSIDE = "KVSTORE_BENCH_ALONE"
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def only_loopback() -> bool:
    """Whether there is no interface but loopback."""
    return [name for _, name in socket.if_nameindex()] == ["lo"]


def enter(module: str, arguments: list[str]) -> None:
    """Run the module again in such a namespace, and end with its exit code; or, if that can't be, go on here."""
    if os.environ.get(_INSIDE) or only_loopback():
        loopback_up()
        return
    unshare = shutil.which("unshare")
    command = [unshare or "unshare", "--net", *([] if os.geteuid() == 0 else ["--user", "--map-current-user"])]
    if unshare is None or subprocess.run([*command, "true"], capture_output=True).returncode:
        print("there can be no network namespace here: what listens on all interfaces is left out", file=sys.stderr)
        return
    os.execve(unshare, [*command, sys.executable, "-m", module, *arguments], {**os.environ, _INSIDE: "1"})


def loopback_up() -> None:
    """Bring loopback up, which is down in a new namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request))[1]
        if not flags & _IFF_UP:
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))
