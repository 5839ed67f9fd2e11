"""What a client may say of a request. Hints sharpen what the store decides; nothing depends on them, and none has to be true."""

from dataclasses import dataclass
from enum import StrEnum

from xxhash import xxh3_64_intdigest

from kvstore.errors import BadRequest

MAX_SESSION_BYTES = 64
MAX_TTL_S = 10 * 365 * 86_400.0


class Turn(StrEnum):
    """Whose turn it is."""

    MAIN = "main"
    SUB_AGENT = "sub_agent"


class Ended(StrEnum):
    """How the turn ended: it waits for a tool, for its user, or for nobody."""

    TOOL_CALL = "tool_call"
    END_TURN = "end_turn"
    SUBAGENT_DONE = "subagent_done"


@dataclass(frozen=True, slots=True)
class Hints:
    """`session` names the conversation (an opaque id of at most 64 bytes; text is taken as UTF-8), `ttl_s` is how long it may pause.

    Raises BadRequest for what is out of range.
    """

    session: str | bytes = b""
    turn: Turn | None = None
    ended: Ended | None = None
    ttl_s: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.session, str | bytes):
            raise BadRequest(f"the hint session is {self.session!r}, not text or bytes")
        for name, kind in (("turn", Turn), ("ended", Ended)):
            value = getattr(self, name)
            if value is not None and value not in list(kind):
                raise BadRequest(f"the hint {name} is {value!r}, not one of {', '.join(kind)}")
        if isinstance(self.ttl_s, bool) or not isinstance(self.ttl_s, int | float):
            raise BadRequest(f"the hint ttl_s is {self.ttl_s!r}, not a number of seconds")
        if len(self.session_id) > MAX_SESSION_BYTES:
            raise BadRequest(f"the session id has {len(self.session_id)} bytes, more than {MAX_SESSION_BYTES}")
        if not 0 <= self.ttl_s <= MAX_TTL_S:
            raise BadRequest(f"the hint ttl_s is {self.ttl_s}, not 0 to ten years")

    @property
    def session_id(self) -> bytes:
        """The session's id as bytes; empty for none."""
        return self.session.encode(errors="surrogatepass") if isinstance(self.session, str) else self.session

    @property
    def session_hash(self) -> int:
        """The 64 bits by which a store knows the session; 0 for none."""
        return (xxh3_64_intdigest(self.session_id) or 1) if self.session_id else 0


NO_HINTS = Hints()
