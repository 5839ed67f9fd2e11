"""Tokens and quotas without a daemon: parsing, look-ups, and tables without holes."""

import asyncio
import math
import os
from hashlib import sha256
from pathlib import Path

import pytest

from kvstore.api.auth import EVERYBODY, Access, Grant, TokenTable, parse_token_file, parse_token_list, secret_digest
from kvstore.api.guard import Guard
from kvstore.api.http import ControlPlane
from kvstore.api.request_tables import ACCESS, QUICK, SLOW
from kvstore.api.wire import FrameType
from kvstore.config import load_config
from kvstore.errors import BadRequest, Busy, NoSpace, Unauthenticated
from kvstore.store.quotas import Quota, Quotas, room_to_make

SECRET = "0123456789abcdef"
OTHER = "fedcba9876543210"


def entry(tenant: str = "a", access: str = "write", more: str = f'secret = "{SECRET}"') -> str:
    return f'[[token]]\ntenant = "{tenant}"\naccess = "{access}"\n{more}\n'


def test_a_file_is_read_whole() -> None:
    digest = secret_digest(OTHER).hex()
    text = entry() + entry("b", "read", f'sha256 = "{digest}"\nname = "probe"\nexpires = 2030-01-01T00:00:00Z')
    table = parse_token_file(text + '[tenants.a]\ndram = "1GiB"\n[tenants."*"]\nconnections = 3\n', "f")
    assert table.find(SECRET, 0) == Grant("a", Access.WRITE, "", secret_digest(SECRET), math.inf)
    found = table.find(OTHER, 1_893_455_999)
    assert found == Grant("b", Access.READ, "probe", bytes.fromhex(digest), 1_893_456_000)
    assert table.find(OTHER, 1_893_456_000) is None
    assert table.find(SECRET[:-1], 0) is table.find("", 0) is table.find("ä" * 500 + "\udc80", 0) is None
    assert table.quotas == {"a": Quota(dram=1 << 30), "*": Quota(connections=3)}


def test_white_space_is_no_part_of_a_secret() -> None:
    assert parse_token_file(entry(more=f'secret = " {SECRET}\\n"'), "f").find(f"\t{SECRET} ", 0) is not None
    for short in (" " * 16, "x" + " " * 15):
        with pytest.raises(BadRequest, match=r"token\.0\.secret"):
            parse_token_file(entry(more=f'secret = "{short}"'), "f")


def test_a_digest_may_be_of_a_line_with_its_end() -> None:
    """As `echo SECRET | sha256sum` makes it. What is sent decides, then what is left of it without white space."""
    digest = sha256(SECRET.encode() + b"\n").hexdigest()
    table = parse_token_file(entry(more=f'sha256 = "{digest}"') + entry("b", more=f'secret = "{SECRET}"'), "f")
    found = [table.find(sent, 0) for sent in (f"{SECRET}\n", SECRET, f"{SECRET} ")]
    assert [grant and grant.tenant for grant in found] == ["a", "b", "b"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "token"),
        ("[[token", "TOML"),
        (entry(access="all"), "token.0.access"),
        (entry("a b"), "token.0.tenant"),
        (entry("*"), "token.0.tenant"),
        (entry(more=""), "give either"),
        (entry(more=f'secret = "{SECRET}"\nsha256 = "{"0" * 64}"'), "give either"),
        (entry(more='secret = "short-secret"'), "token.0.secret has the wrong number of characters: at least 16"),
        (entry(more='sha256 = "abc"'), "token.0.sha256"),
        (entry(more=f'secret = "{SECRET}"\nexpires = 2030-01-01T00:00:00'), "token.0.expires"),
        (entry(more=f'secret = "{SECRET}"\nexpire = 1'), "token.0.expire"),
        (entry() + entry("b"), "same secret"),
        (entry() + '[tenants.a]\ndram = "-1"\n', "tenants.a.dram"),
        (entry() + "[tenants.a]\nspace = 1\n", "tenants.a.space"),
    ],
)
def test_a_bad_file_is_named_and_no_secret_repeated(text: str, named: str) -> None:
    with pytest.raises(BadRequest) as raised:
        parse_token_file(text, "FILE")
    assert named in raised.value.message
    assert SECRET not in raised.value.message
    assert "short-secret" not in raised.value.message


def test_the_list_of_the_environment() -> None:
    table = parse_token_list(f" a:admin:{SECRET}, b:read:sha256={secret_digest(OTHER).hex()}\n")
    assert [(g.tenant, g.access) for g in table.grants] == [("a", Access.ADMIN), ("b", Access.READ)]
    assert table.find(SECRET, 0) == table.grants[0]
    assert table.find(OTHER, 0) == table.grants[1]
    assert parse_token_list(f"a:read:{SECRET}:with:colons").find(f"{SECRET}:with:colons", 0)
    for bad in ("", "a", "a:read", f"a:{SECRET}", f"a:read:{SECRET},b:none:{OTHER}", "a:read:sha256=12"):
        with pytest.raises(BadRequest, match="KVSTORE_TOKENS") as raised:
            parse_token_list(bad)
        assert SECRET not in raised.value.message


def test_every_token_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """No early exit: as many comparisons for the first entry, the last one, and one that is not there."""
    import hmac

    table = TokenTable([Grant("t", Access.READ, digest=secret_digest(f"{n:016}")) for n in range(5)])
    real, compared = hmac.compare_digest, []

    def counting(a: bytes, b: bytes) -> bool:
        compared.append(a)
        return real(a, b)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    for secret in (f"{0:016}", f"{4:016}", "nobody's"):
        compared.clear()
        table.find(secret, 0)
        assert compared == [g.digest for g in table.grants]


def test_a_grant_holds_until_its_token_ends_or_changes() -> None:
    grant = Grant("a", Access.WRITE, digest=secret_digest(SECRET), expires=100)
    assert TokenTable([grant]).holds(grant, 99)
    assert not TokenTable([grant]).holds(grant, 100)
    assert not TokenTable([]).holds(grant, 0)
    assert not TokenTable([Grant("a", Access.READ, digest=grant.digest, expires=100)]).holds(grant, 0)
    assert not TokenTable([Grant("b", Access.WRITE, digest=grant.digest, expires=100)]).holds(grant, 0)


async def test_no_tokens_no_questions() -> None:
    guard = Guard()
    assert guard.admit("") == guard.admit("anything") == EVERYBODY
    assert guard.holds(EVERYBODY)
    guard = Guard(parse_token_list(f"a:read:{SECRET}"))
    for wrong in ("", OTHER):
        with pytest.raises(Unauthenticated):
            guard.admit(wrong)
    assert guard.admit(SECRET).tenant == "a"


def private(file: Path, text: str) -> Path:
    file.write_text(text)
    file.chmod(0o600)
    return file


async def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    file = private(tmp_path / "tokens", entry())
    assert (await Guard.of_file(file)).required
    for mode in (0o640, 0o604, 0o660):
        file.chmod(mode)
        with pytest.raises(BadRequest, match="chmod 600"):
            await Guard.of_file(file)
    file.unlink()
    with pytest.raises(BadRequest, match="can't be read"):
        await Guard.of_file(file)
    os.mkfifo(file, 0o600)
    with pytest.raises(BadRequest, match="not a file"):
        await Guard.of_file(file)


async def test_what_becomes_of_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A change is taken up; a file that became bad is said once, and changes nothing."""
    file = private(tmp_path / "tokens", entry())
    guard = await Guard.of_file(file)
    ticked = asyncio.Event()
    watch = asyncio.create_task(guard.watch(ticked.set))

    async def turn() -> None:
        ticked.clear()
        guard.hurry()
        await ticked.wait()

    try:
        for bad in ("nonsense", entry(access="all"), ""):
            private(file, bad)
            await turn()
            assert guard.admit(SECRET)
        file.unlink()
        await turn()
        assert guard.admit(SECRET)
        assert caplog.text.count("the tokens stay as they were") == 4
        private(file, entry("b", "read", f'secret = "{OTHER}"'))
        ticked.clear()
        await ticked.wait()  # without a signal: within a second
        assert guard.admit(OTHER).tenant == "b"
        with pytest.raises(Unauthenticated):
            guard.admit(SECRET)
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


async def test_a_hurry_without_a_file_is_harmless() -> None:
    guard, ticks = Guard(), asyncio.Event()
    watch = asyncio.create_task(guard.watch(ticks.set))
    guard.hurry()
    await ticks.wait()
    await asyncio.sleep(0)  # gets its turn only if the watch waits again
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)


def test_every_frame_of_a_client_has_its_access() -> None:
    """Deny by default: a new frame type has to say who may send it."""
    requests = {kind for kind in FrameType if kind < 64} - {FrameType.HELLO}
    assert set(ACCESS) == requests
    assert set(QUICK) | set(SLOW) <= set(ACCESS)
    assert {kind for kind, access in ACCESS.items() if access is Access.READ} == {
        FrameType.PING, FrameType.CANCEL, FrameType.CLOSE, FrameType.NAMESPACE_GET, FrameType.NAMESPACE_LIST, FrameType.MATCH,
        FrameType.LEASE_RENEW, FrameType.LEASE_RELEASE, FrameType.FETCH, FrameType.FOLLOW, FrameType.OUTCOME, FrameType.PREFETCH,
        FrameType.RECIPES, FrameType.REBUILD,
        FrameType.SEGMENTS, FrameType.LOCATE,
    }  # fmt: skip


async def test_every_route_has_its_access() -> None:
    """Deny by default: a new route has to say who may use it."""
    control = ControlPlane([], Guard())
    routes = {(route.method, route.resource.canonical) for route in control.app.router.routes() if route.resource}
    assert {route for route in routes if route[0] != "HEAD"} == set(control.access)
    assert {path for (_, path), access in control.access.items() if access is None} == {"/healthz", "/readyz", "/openapi.json"}


@pytest.mark.parametrize(
    ("flags", "allowed"),
    [
        ({"host": "127.0.0.1"}, True),
        ({"host": "127.8.8.8"}, True),
        ({"host": "::1"}, True),
        ({"host": "localhost"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "::"}, False),
        ({"host": "192.0.2.1"}, False),
        ({"host": "localhost.example.org"}, False),
        ({"host": "0.0.0.0", "insecure": True}, True),
        ({"host": "0.0.0.0", "tokens_file": "t"}, True),
    ],
)
def test_loopback_only_unless_told_otherwise(flags: dict[str, object], allowed: bool) -> None:
    if allowed:
        load_config(flags, environment={})
        return
    with pytest.raises(BadRequest, match=r"insecure|is no address"):
        load_config(flags, environment={})


def test_tokens_are_not_for_the_configuration_file(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text(f'tokens = "a:read:{SECRET}"\n')
    with pytest.raises(BadRequest, match="tokens_file"):
        load_config({}, file, {})
    config = load_config({}, None, {"KVSTORE_TOKENS": f"a:read:{SECRET}"})
    assert config.guarded
    assert SECRET not in repr(config)
    with pytest.raises(BadRequest, match="not both"):
        load_config({"tokens_file": "t"}, None, {"KVSTORE_TOKENS": "x"})


def test_quotas() -> None:
    quotas = Quotas({"a": Quota(in_flight=100, dram=80), "*": Quota(in_flight=10)})
    assert quotas.of("nobody in particular") == Quota(in_flight=10)
    with pytest.raises(NoSpace, match="in flight"):
        quotas.start_put("a", 101)
    with pytest.raises(NoSpace, match="in DRAM"):
        quotas.start_put("a", 81)
    quotas.start_put("a", 60)
    with pytest.raises(Busy) as raised:
        quotas.start_put("a", 41)
    assert raised.value.retry_after_ms
    quotas.start_fetch("a", 40)
    for refused in (1, 1000):
        with pytest.raises(Busy):
            quotas.start_fetch("a", refused)
    quotas.end("a", 60)
    quotas.end("a", 40)
    quotas.start_fetch("a", 1000)  # larger than the quota: alone
    assert quotas.in_flight("a") == 1000
    quotas.end("a", 1000)
    assert quotas.in_flight("a") == 0
    quotas.replace({})
    quotas.start_put("a", 1 << 40)


def test_room_to_make() -> None:
    assert room_to_make(None, 10**12, 1) == room_to_make(160, 100, 60) == 0
    assert room_to_make(160, 100, 61) == 1 + 10
