"""What is told about recipes, in the blocking form."""

from typing import TYPE_CHECKING

from kvstore_client.text import RebuildState
from kvstore_client.tokens import Extras, Tokens

if TYPE_CHECKING:
    from kvstore_client.blocking import Client
    from kvstore_client.namespace import Namespace


class BlockingTextCalls:
    """The part of a blocking namespace that is about its recipes (see TextCalls)."""

    inner: "Namespace"
    _client: "Client"

    def recipes(self, timeout: float | None = None) -> tuple[int, int]:
        """How many recipes the namespace has, and the bytes that they are counted with."""
        return self._client.run(self.inner.recipes(timeout))

    def delete_recipes(
        self, tokens: Tokens | None = None, *, from_page: int = 0, from_token: int | None = None, extras: Extras | None = None,
        timeout: float | None = None,
    ) -> int:  # fmt: skip
        """Delete recipes of pages that are gone (see the asynchronous Namespace.delete_recipes)."""
        return self._client.run(
            self.inner.delete_recipes(tokens, from_page=from_page, from_token=from_token, extras=extras, timeout=timeout)
        )

    def drop_to_text(
        self, tokens: Tokens, *, from_page: int = 0, from_token: int | None = None, extras: Extras | None = None,
        timeout: float | None = None,
    ) -> int:  # fmt: skip
        """Give up pages and keep their recipes (see the asynchronous Namespace.drop_to_text)."""
        return self._client.run(self.inner.drop_to_text(tokens, from_page=from_page, from_token=from_token, extras=extras, timeout=timeout))

    def rebuild(self, tokens: Tokens, *, wait_s: float = 20.0, extras: Extras | None = None, timeout: float | None = None) -> RebuildState:
        """Have missing pages computed again (see the asynchronous Namespace.rebuild)."""
        return self._client.run(self.inner.rebuild(tokens, wait_s=wait_s, extras=extras, timeout=timeout))

    def rebuild_check(
        self, tokens: Tokens, *, from_page: int = 0, wait_s: float = 20.0, extras: Extras | None = None, timeout: float | None = None
    ) -> RebuildState:
        """Have pages that are there computed once more, and compared (see the asynchronous Namespace.rebuild_check)."""
        return self._client.run(self.inner.rebuild_check(tokens, from_page=from_page, wait_s=wait_s, extras=extras, timeout=timeout))
