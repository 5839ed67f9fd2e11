"""The namespaces of a daemon, found by tenant: who asks for another tenant's finds what was never there, and as fast."""

from collections.abc import Iterator

from kvstore.store.space import Space


class Spaces:
    """All namespaces. Every look-up is by (tenant, id) or (tenant, name), one step each, whoever else has what."""

    def __init__(self) -> None:
        self._by_id: dict[tuple[str, str], Space] = {}
        self._by_name: dict[tuple[str, str], Space] = {}
        self._by_tenant: dict[str, dict[str, Space]] = {}

    def __iter__(self) -> Iterator[Space]:
        return iter(self._by_id.values())

    def add(self, space: Space) -> None:
        """Take in a namespace."""
        tenant = space.settings.tenant
        self._by_id[tenant, space.id] = space
        self._by_name[tenant, space.settings.name] = space
        self._by_tenant.setdefault(tenant, {})[space.id] = space

    def remove(self, space: Space) -> None:
        """Forget a namespace, if it is there."""
        tenant = space.settings.tenant
        if self._by_id.get((tenant, space.id)) is not space:
            return
        del self._by_id[tenant, space.id]
        del self._by_name[tenant, space.settings.name]
        del self._by_tenant[tenant][space.id]
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]

    def by_id(self, tenant: str, space_id: str) -> Space | None:
        """A tenant's namespace of this id."""
        return self._by_id.get((tenant, space_id))

    def by_name(self, tenant: str, name: str) -> Space | None:
        """A tenant's namespace of this name."""
        return self._by_name.get((tenant, name))

    def of(self, tenant: str) -> list[Space]:
        """A tenant's namespaces."""
        return list(self._by_tenant.get(tenant, {}).values())

    def ssd_bytes_of(self, tenant: str) -> int:
        """Bytes that a tenant's blobs take up on SSD. Looks at every one of them."""
        return sum(space.ssd_bytes() for space in self.of(tenant))
