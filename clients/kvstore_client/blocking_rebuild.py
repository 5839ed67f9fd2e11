"""The blocking form of a rebuild worker."""

from kvstore_client.arguments import checked, instance
from kvstore_client.blocking import Client
from kvstore_client.rebuild import AsyncRebuildWorker, RebuildFunction


class RebuildWorker:
    """As AsyncRebuildWorker, but `run` and `run_once` block. The function, if plain, runs in a thread all the same."""

    @checked(client=instance(Client, optional=False))
    def __init__(
        self, client: Client, namespace: str = "", *, lease_s: float = 30.0, wait_s: float = 20.0, fetch_prefix: bool = True,
        put_timeout: float = 120.0,
    ) -> None:  # fmt: skip
        self._client = client
        self.inner = AsyncRebuildWorker(
            client.inner, namespace, lease_s=lease_s, wait_s=wait_s, fetch_prefix=fetch_prefix, put_timeout=put_timeout
        )

    def rebuild(self, function: RebuildFunction) -> RebuildFunction:
        """Have this function compute the pages. A decorator."""
        return self.inner.rebuild(function)

    def run(self) -> None:
        """Work until interrupted."""
        self._client.run(self.inner.run())

    def run_once(self, wait_s: float | None = None) -> bool:
        """Wait for a job and do it. False if there was none."""
        return self._client.run(self.inner.run_once(wait_s))
