"""Every control request of the data plane: its message, who answers it, and what access it asks for."""

from kvstore.api import requests, same_host_requests
from kvstore.api.auth import Access
from kvstore.api.requests import Quick, Slow
from kvstore.api.wire.frames import FrameType
from kvstore.api.wire.messages import Message

QUICK: dict[FrameType, tuple[type[Message], Quick]] = requests.QUICK | same_host_requests.QUICK
"""Answered at once, in the order in which they came."""
SLOW: dict[FrameType, tuple[type[Message], Slow]] = requests.SLOW | same_host_requests.SLOW
"""Answered by a task each, in any order."""
ACCESS: dict[FrameType, Access] = requests.ACCESS | same_host_requests.ACCESS
"""What each frame of a client asks for. One that is not here is refused to everybody."""
