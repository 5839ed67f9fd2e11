"""What a client may say of a request, to help guessing whether its pages are used again."""

import msgspec


class Hints(msgspec.Struct, frozen=True, omit_defaults=True):
    """Each is optional. Never needed, and not to be trusted beyond the client's own namespace."""

    session: int | None = None
    """A number for the conversation, or the branch of it that a sub-agent is."""
    role: str | None = None
    """Who speaks last in the prompt: `user`, `tool`, `system` or `subagent`."""
    end: str | None = None
    """How the turn ended: `tool_use`, `end_turn`, `subagent_done` or `max_tokens`."""
    ttl_s: float | None = None
    """The pages are not wanted after so many seconds."""
    hot: bool = False
