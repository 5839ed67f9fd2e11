"""A blocking client and forks of the process that made it."""

import os

from kvstore_client import BadRequest, Client
from kvstore_workers.daemon_process import DaemonProcess


def test_a_fork_is_told_to_make_a_client_of_its_own(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint) as client:
        for _ in range(8):
            client.ping()
        child = os.fork()
        if not child:
            code = 1
            try:
                client.ping()
            except BadRequest as error:
                code = 0 if "make a client here" in error.message else 2
            finally:
                client.close()  # and this leaves the parent's connections alone
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        client.ping()
        assert client.namespaces() == []
