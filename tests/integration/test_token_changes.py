"""Tokens that come, change and go while a daemon runs, and where it gets them from."""

import signal
import time
from pathlib import Path

import pytest

from kvstore.api.wire import PROTOCOL_VERSION, FrameType, unpack
from kvstore.api.wire.messages import CreateNamespace, Hello, NamespaceInfo
from kvstore.api.wire.put_messages import PutStart
from kvstore_client import Client, Forbidden, KVStoreError, Unauthenticated
from kvstore_workers.daemon_process import DaemonProcess
from tests.integration.pages import SPEC, context, open_namespace
from tests.integration.raw import RawClient, stat, wait_for_baseline
from tests.integration.secured import ADMIN, ALICE, BOB, EXPIRED, TOKENS, ask, write_tokens
from tests.waiting import wait_until


def client(daemon: DaemonProcess, token: str) -> Client:
    return Client(daemon.endpoint, token=token)


def test_tokens_change_without_a_restart(tmp_path: Path) -> None:
    file = write_tokens(tmp_path / "tokens.toml")
    with DaemonProcess(tmp_path / "data", "--dram", "16MiB", "--ssd", "64MiB", "--tokens-file", str(file)) as daemon:
        with RawClient(daemon.endpoint, token=ALICE) as alice, RawClient(daemon.endpoint, token=BOB) as bob:
            text = TOKENS.replace(BOB, "bobs-next-0123456789abcdef")
            write_tokens(file, text)
            assert bob.error().code == "unauthenticated"  # the last words before it is closed
            assert bob.closed()
            assert alice.alive()
            with pytest.raises(Unauthenticated), client(daemon, BOB):
                pass
            assert ask(f"{daemon.http}/v1/stat", BOB)[0] == 401
            with client(daemon, "bobs-next-0123456789abcdef"):
                pass
            file.write_text("nonsense")
            daemon.send_signal(signal.SIGHUP)
            wait_until(lambda: any("stay as they were" in line for line in daemon.lines), "no word on the bad file")
            assert alice.alive()
            file.unlink()
            write_tokens(file, text.replace('access = "write"', 'access = "read"'))
            daemon.send_signal(signal.SIGHUP)
            assert alice.error().code == "unauthenticated"
        with client(daemon, ALICE) as demoted, pytest.raises(Forbidden):
            open_namespace(demoted)
        with of_a_token_that_expires(daemon, file) as raw:
            assert raw.error().code == "unauthenticated"
            assert raw.closed()
        assert not any(token in line for line in daemon.lines for token in (ALICE, BOB, ADMIN, EXPIRED)), "a secret is in the log"
        wait_for_baseline(daemon.http, 0, token=ADMIN)


def of_a_token_that_expires(daemon: DaemonProcess, file: Path) -> RawClient:
    """A client of a token that is over soon. On a machine that is slow it may be over before it was used once: then it gets longer."""
    for seconds in (2, 8, 30):
        end = int(time.time()) + seconds
        write_tokens(file, TOKENS.replace("2020-01-01T00:00:00Z", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(end))))
        daemon.send_signal(signal.SIGHUP)
        while ask(f"{daemon.http}/v1/stat", EXPIRED)[0] != 200 and time.time() < end:
            time.sleep(0.01)
        raw = RawClient(daemon.endpoint, hello=False)
        raw.send(FrameType.HELLO, 0, Hello(versions=[PROTOCOL_VERSION], token=EXPIRED))
        if raw.receive()[0].type is FrameType.WELCOME:
            return raw
        raw.sock.close()
    raise AssertionError("the token is not taken up")


def test_a_removed_token_ends_what_its_session_held(tmp_path: Path) -> None:
    file = write_tokens(tmp_path / "tokens.toml")
    arguments = ("--dram", "16MiB", "--ssd", "64MiB", "--tokens-file", str(file))
    with DaemonProcess(tmp_path / "data", *arguments) as daemon, RawClient(daemon.endpoint, token=ALICE) as raw:
        info = raw.ask(FrameType.NAMESPACE_CREATE, CreateNamespace(name="n", fingerprint="f", spec=SPEC.to_dict()))[1]
        start = PutStart(namespace=unpack(NamespaceInfo, info).id, put_id=bytes(16), first_page=0, parts=[(0, 0, 8, 0, 2)])
        assert raw.ask(FrameType.PUT, start, context(1).tobytes())[0].type is FrameType.PUT_READY
        write_tokens(file, TOKENS.replace(ALICE, "x" * 32))
        assert raw.error().code == "unauthenticated"
        wait_for_baseline(daemon.http, 0, token=ADMIN)


def last_words(data_dir: Path, *arguments: str) -> str:
    daemon = DaemonProcess(data_dir, *arguments)
    assert daemon.wait_exit(20) == 2
    return daemon.lines[-1]


def test_a_daemon_does_not_start_unsafe(data_dir: Path, tmp_path: Path) -> None:
    assert "insecure" in last_words(data_dir, "--host", "0.0.0.0")  # the other cases: tests/api/test_auth.py
    file = write_tokens(tmp_path / "tokens.toml")
    file.chmod(0o644)
    assert "chmod 600" in last_words(data_dir, "--tokens-file", str(file))


def test_tokens_from_the_environment(data_dir: Path) -> None:
    environment = {"KVSTORE_TOKENS": f"alice:write:{ALICE},ops:admin:{ADMIN}"}
    with DaemonProcess(data_dir, "--dram", "16MiB", "--ssd", "64MiB", environment=environment) as daemon:
        with client(daemon, ALICE) as alice:
            open_namespace(alice)
        with pytest.raises(KVStoreError), client(daemon, BOB):
            pass
        assert stat(daemon.http, ADMIN)["namespaces"][0]["tenant"] == "alice"
