"""Sessions: one client over several connections. When its last connection is gone, so is all it held."""

import itertools
import secrets
from dataclasses import dataclass

from kvstore.errors import NotFound
from kvstore.store import Store

SESSION_BYTES = 16
DEFAULT_TENANT = "default"


@dataclass(slots=True)
class Session:
    """`owner` is what the store knows it by; `id` (16 random bytes) is the secret by which connections join."""

    id: bytes
    owner: int
    tenant: str
    client: str
    connections: int = 0


class Sessions:
    """All sessions of a daemon."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._by_id: dict[bytes, Session] = {}
        self._owners = itertools.count(1)

    def __len__(self) -> int:
        return len(self._by_id)

    def join(self, session_id: bytes, tenant: str, client: str) -> Session:
        """The session to which a new connection belongs; a fresh one for an empty id. Follow with `leave`."""
        if session_id:
            session = self._by_id.get(session_id)
            if session is None or session.tenant != tenant:
                raise NotFound("this session is over: all its connections were closed, or the daemon was restarted")
        else:
            session = Session(secrets.token_bytes(SESSION_BYTES), next(self._owners), tenant, client)
            self._by_id[session.id] = session
        session.connections += 1
        return session

    def leave(self, session: Session) -> None:
        """A connection of the session was closed."""
        session.connections -= 1
        if session.connections == 0:
            del self._by_id[session.id]
            self._store.release_owner(session.owner)
