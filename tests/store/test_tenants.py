"""What tenants share in one store, and what not."""

from pathlib import Path

import pytest

from kvstore.errors import Busy, NotFound, UnknownNamespace
from kvstore.store import NamespaceSettings, Store
from kvstore.store.checking.check import check
from tests.store.test_store import SPEC, config, put, tokens_of


async def test_pins_of_one_tenant_leave_those_of_another_alone(tmp_path: Path) -> None:
    async with Store(config(tmp_path, pin_bytes=2 * SPEC.page_bytes)) as store:
        spaces = [await store.create_namespace(NamespaceSettings(tenant, "same", "model", SPEC)) for tenant in ("alice", "bob")]
        alice, bob = spaces
        for space in spaces:
            await put(store, space, (1, 2, 3), bytes(16))
        hers = store.prefixes.pin(alice, tokens_of((1, 2)), {}, 60)
        with pytest.raises(Busy, match=r"pins on .* of `max_pinned`: some must be unpinned first"):
            store.prefixes.pin(alice, tokens_of((1,)), {}, 60)
        his = store.prefixes.pin(bob, tokens_of((1, 2)), {}, 60)
        for space, pin in ((bob, hers), (alice, his)):
            with pytest.raises(NotFound):
                store.prefixes.unpin(space, pin.id)
        store.prefixes.unpin(alice, hers.id)
        store.prefixes.unpin(bob, his.id)
        await store.settle()
        check(store)


async def test_namespaces_are_found_by_their_tenant_only(tmp_path: Path) -> None:
    async with Store(config(tmp_path)) as store:
        alice, bob = [await store.create_namespace(NamespaceSettings(tenant, "same", "model", SPEC)) for tenant in ("alice", "bob")]
        assert alice.id != bob.id
        assert store.space("alice", "same") is store.space("alice", alice.id) is alice
        said = []
        for name in (bob.id, "0" * 32):
            with pytest.raises(UnknownNamespace, match="no namespace") as raised:
                store.space("alice", name)
            said.append(str(raised.value).replace(name, "NAME"))
        assert said[0] == said[1]
        await store.drop_namespace(alice)
        assert store.namespaces("alice") == []
        assert store.namespaces("bob") == [bob]
        again = await store.create_namespace(NamespaceSettings("alice", "same", "model", SPEC))
        await store.drop_namespace(alice)  # a second drop of what is gone already must not hit its successor
        assert store.space("alice", "same") is again
