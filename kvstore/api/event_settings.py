"""What an operator says of the KV events: where they are published, and in which form. Knows nothing of ZeroMQ."""

import ipaddress
import re
from dataclasses import dataclass
from typing import Literal

HASH_FORMS = ("int", "bytes")
HashForm = Literal["int", "bytes"]
_FIELDS = re.compile(r"\{(.*?)\}")
_TCP = re.compile(r"tcp://(?:\[(?P<six>[^]]+)\]|(?P<four>[^:\[\]]+)):\d+")
DEFAULT_TOPIC = "kv@{tenant}@{namespace}"


@dataclass(frozen=True, slots=True)
class EventSettings:
    """`endpoint` and `replay` are ZeroMQ addresses to listen on, `replay` empty for none.

    `hashes`: page keys as vLLM gives its block hashes by default, the last 8 bytes as a number, or whole. `topic` may have `{tenant}`
    and `{namespace}` in it.
    """

    endpoint: str
    replay: str = ""
    hashes: HashForm = "int"
    topic: str = DEFAULT_TOPIC

    @property
    def common_topic(self) -> bytes:
        """What all topics begin with: the topic of what is about the whole daemon."""
        return self.topic.partition("{")[0].encode()

    def topic_of(self, tenant: str, namespace: str) -> bytes:
        """The topic of a namespace's events. An @ in a name becomes %40, so that topics can be cut at theirs."""
        return self.topic.format(tenant=tenant.replace("@", "%40"), namespace=namespace.replace("@", "%40")).encode()


def check_endpoint(name: str, endpoint: str, *, insecure: bool) -> None:
    """Raise ValueError unless this is an address that only this machine reaches, or any that ZeroMQ can listen on, with `insecure`."""
    if endpoint.startswith("ipc://") and len(endpoint) > len("ipc://"):
        return
    found = _TCP.fullmatch(endpoint)
    if found is None:
        raise ValueError(f"{name} is {endpoint!r}: give tcp://ADDRESS:PORT, such as tcp://127.0.0.1:5557, or ipc://PATH")
    if not insecure and not _is_loopback(found["six"] or found["four"]):
        raise ValueError(
            f"{name} is {endpoint}, which others can reach, and events know no tokens: who connects is told of all tenants' pages. Give a "
            "loopback address, or say events_insecure = true (docs/security.md)"
        )


def check_topic(topic: str) -> None:
    """Raise ValueError unless the topic is one that can be filled in."""
    try:
        topic.format(tenant="", namespace="")
    except (LookupError, ValueError, AttributeError) as error:
        raise ValueError(f"events_topic is {topic!r}: only {{tenant}} and {{namespace}} can stand in it ({error})") from error
    if unknown := [field for field in _FIELDS.findall(topic) if field not in ("tenant", "namespace")]:
        raise ValueError(f"events_topic is {topic!r}: {unknown[0]!r} is neither tenant nor namespace")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
