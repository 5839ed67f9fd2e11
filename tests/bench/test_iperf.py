"""Servers of iperf3 are waited for, and not longer than they may take."""

import shutil
import socket

import pytest

from bench import iperf
from tests.ports import own_port


@pytest.mark.skipif(shutil.which("iperf3") is None, reason="there is no iperf3")
def test_a_server_listens_once_it_is_there() -> None:
    port = own_port()
    server = iperf.iperf_server("-B", "127.0.0.1", "-p", str(port))
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    finally:
        server.terminate()
        server.wait()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("echo busy; exec sleep 60", "^iperf3 does not listen after 0.5 s: busy$"),
        ("echo no such port; exit 1", "^iperf3 has ended: no such port$"),
    ],
)
def test_one_that_does_not_is_ended(command: str, said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        iperf.started(["sh", "-c", command], 0.5)
