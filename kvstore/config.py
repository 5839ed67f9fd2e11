"""The daemon's configuration: defaults < TOML file < KVSTORE_* environment < flags, checked once at start."""

import difflib
import ipaddress
import os
import re
import socket
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator

from kvstore.api.auth import Tenants
from kvstore.api.event_settings import DEFAULT_TOPIC, EventSettings, HashForm, check_endpoint, check_topic
from kvstore.api.invalid import explain
from kvstore.errors import BadRequest
from kvstore.machine import read_disk, read_memory
from kvstore.sizes import MaybeSize, Size
from kvstore.store import StoreConfig
from kvstore.store.quotas import Quota
from kvstore.tiers.policies.make import NAMES, SSD_LOSS
from kvstore.tiers.watermarks import Watermarks

_MIN_TIER = 1 << 20
_ENVIRONMENT = "KVSTORE_"
CLIENT_VARIABLES = ("KVSTORE_HTTP", "KVSTORE_ENDPOINT", "KVSTORE_TOKEN", "KVSTORE_TLS_CA", "KVSTORE_TIMEOUT")
"""What the command line and the SDK read: no settings of the daemon, and no mistakes in its environment."""
_TESTS = "KVSTORE_TEST_"
_NAME = re.compile(r"(?=.*[A-Za-z])[A-Za-z0-9_.-]+")
_KUBERNETES = re.compile(r"KVSTORE_(SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
"""What Kubernetes sets in every container beside a service that is called kvstore."""


def default_data_dir() -> Path:
    """Where a daemon keeps its data if nobody says: the user's data directory."""
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "kvstore"


class Config(BaseModel):
    """Everything `kvstore serve` can be told. Sizes take units: `dram = "64GiB"`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    data_dir: Path = Field(default_factory=default_data_dir, description="journal and blobs")
    dram: MaybeSize = Field(None, description="DRAM tier; a quarter of the available memory if not given")
    ssd: MaybeSize = Field(None, description="SSD tier; half of the disk that is free or the store's own, at most 256 GiB, if not given")
    host: str = Field("127.0.0.1", description="address of the data plane and of HTTP")
    listen: tuple[str, ...] = Field(
        (), description="further addresses of the data plane, HOST or HOST:PORT, with commas: links that clients stripe over"
    )
    port: int = Field(7421, ge=0, le=65535, description="TCP port of the data plane; 0 takes a free one")
    http_port: int = Field(7420, ge=0, le=65535, description="port of the HTTP control plane; 0 takes a free one")
    unix_socket: Path | None = Field(None, description="Unix socket of the data plane; in the data directory if not given")
    unix_users: str = Field("", pattern=r"^(\d+(,\s*\d+)*)?$", description="other users (uids, with commas) that the Unix socket is for")
    shared_memory: bool = Field(True, description="give clients on this machine their tenant's segments to map, over the Unix socket")
    max_pages: int = Field(10_000_000, ge=1_000, le=200_000_000, description="most pages a namespace can hold")
    max_connections: int = Field(1024, ge=1, le=65536, description="most data-plane connections")
    client_in_flight: Size = Field(1 << 30, ge=1 << 20, description="most bytes of fetches that one client has under way")
    client_timeout: float = Field(
        30.0, gt=0, le=3600, description="seconds a client may take to send the rest of a frame, or to take one, before it is cut off"
    )
    high_watermark: float = Field(0.92, gt=0, le=1, description="share of DRAM at which the mover starts to demote")
    low_watermark: float = Field(0.85, gt=0, le=1, description="share of DRAM at which it stops")
    put_wait: float = Field(1.0, ge=0, le=60, description="seconds a put waits for room before it gets `busy`")
    put_idle: float = Field(60.0, gt=0, le=3600, description="seconds without a slice after which a put is given up")
    durable_wait: float = Field(20.0, gt=0, le=600, description="seconds a durable put waits for SSD before it gets `busy`")
    scrub_rate: Size = Field(32 << 20, ge=0, description="bytes a second that the scrubber verifies at rest; 0 turns it off")
    shutdown_timeout: float = Field(30.0, ge=0, le=3600, description="seconds a clean stop may spend on flushing")
    segment: Size = Field(64 << 20, ge=1 << 16, description="most bytes of a DRAM segment")
    dram_ahead: MaybeSize = Field(
        None, ge=0, description="most bytes of DRAM made before they are needed; an eighth of it, at most 1 GiB, if not given"
    )
    move_share: float = Field(0.5, ge=0, le=10, description="bytes moved within DRAM for each byte put, at most; 0 moves nothing")
    policy: str = Field("classifier", description=f"which pages leave a tier first: {', '.join(NAMES)}")
    ssd_admission: Literal["classifier", "all"] = Field(
        "classifier", description="which pages that leave DRAM are written: `all`, or by `policy`"
    )
    ssd_admission_loss: float = Field(SSD_LOSS, ge=0, le=1, description="share of the pages asked for that fewer writes to SSD may cost")
    max_ghosts: int = Field(200_000, ge=0, le=200_000_000, description="most evicted pages of a namespace whose label and history are kept")
    max_sessions: int = Field(65_536, ge=1, le=100_000_000, description="sessions of a namespace of which it is known where they were last")
    max_leased: Size = Field(0, ge=0, description="payload bytes that the leases of one client may hold; half of both tiers if 0")
    max_pinned: Size = Field(0, ge=0, description="payload bytes that the pins of one tenant may hold; half of both tiers if 0")
    recipe_bytes: Size = Field(0, ge=0, description="bytes of recipes; a sixteenth of the SSD tier, 64 MiB to 8 GiB, if 0")
    recipe_ttl: float = Field(
        0.0, ge=0, description="seconds that the recipe of a page that is gone is kept; as long as there is room if 0"
    )
    reader_threads: int = Field(4, ge=1, le=64, description="threads that read from SSD")
    tokens_file: Path | None = Field(None, description="TOML file of bearer tokens and quotas, for this user only; re-read when it changes")
    tokens: SecretStr | None = Field(None, description="bearer tokens, from the environment only: TENANT:ACCESS:SECRET, ...")
    tenants: Tenants = Field(default_factory=dict, description="quotas by tenant; `*` for those without their own")
    insecure: bool = Field(False, description="allow another address than loopback without tokens")
    tls_cert: Path | None = Field(None, description="certificate chain (PEM) for both planes; with it, TCP is TLS only")
    tls_key: Path | None = Field(None, description="its key (PEM), not encrypted")
    tls_client_ca: Path | None = Field(None, description="certificates (PEM) of who signs those of clients; with it, clients need one")
    record: Path | None = Field(None, description="file to record requests to, packed if it ends in .gz; see docs/operations.md")
    record_max_bytes: Size = Field(1 << 30, ge=1 << 12, description="bytes at which recording ends")
    record_keep: int = Field(8, ge=0, le=1000, description="older recordings of that name that stay beside it, numbered from the newest")
    record_tokens: bool = Field(False, description="record the tokens of prompts too: who reads the file reads the prompts")
    events: str = Field("", description="ZeroMQ address on which to publish what comes to the tiers and leaves them; see docs/events.md")
    events_replay: str = Field("", description="ZeroMQ address on which to repeat what was published")
    events_topic: str = Field(DEFAULT_TOPIC, max_length=200, description="their topic")
    events_hashes: HashForm = Field("int", description="page keys in them as numbers of 64 bits, or whole (`bytes`)")
    events_tokens: bool = Field(
        False, description="tell the token ids of namespaces with recipes in them: who subscribes reads the prompts"
    )
    events_insecure: bool = Field(False, description="allow another address than loopback for them")
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$", description="debug, info, warning or error")

    @field_validator("listen", mode="before")
    @classmethod
    def _with_commas(cls, value: Any) -> Any:
        return tuple(part for raw in value.split(",") if (part := raw.strip())) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        Watermarks(self.high_watermark, self.low_watermark)
        for name in ("dram", "ssd"):
            size = getattr(self, name)
            if size is not None and size < _MIN_TIER:
                raise ValueError(f"{name} is {size} bytes: give at least 1 MiB, or leave it out for the default")
        if self.port and self.port == self.http_port:
            raise ValueError(f"port and http_port are both {self.port}: the data plane and HTTP each need a port of their own")
        if self.policy not in NAMES:
            raise ValueError(f"policy is {self.policy!r}: one of {', '.join(NAMES)}")
        if self.tokens_file is not None and self.tokens is not None:
            raise ValueError("give tokens either by tokens_file or by KVSTORE_TOKENS, not both")
        if (self.tls_cert is None) != (self.tls_key is None) or (self.tls_client_ca is not None and self.tls_cert is None):
            raise ValueError("tls_cert and tls_key go together, and tls_client_ca with them")
        if self.record is None and self.record_tokens:
            raise ValueError("record_tokens goes with record")
        if not self.events and (self.events_replay or self.events_tokens):
            raise ValueError("events_replay and events_tokens go with events")
        for name in ("events", "events_replay"):
            if endpoint := getattr(self, name):
                check_endpoint(name, endpoint, insecure=self.events_insecure)
        check_topic(self.events_topic)
        for setting, host in [("host", self.host), *(("listen", host) for host, _ in self.more_addresses())]:
            _check_host(setting, host)
        if not (self.loopback or self.guarded or self.insecure):
            where = ", ".join(host for host in (self.host, *(host for host, _ in self.more_addresses())) if not _is_loopback(host))
            raise ValueError(
                f"it listens on {where}, which others can reach, and there are no tokens: give a tokens_file (docs/security.md), "
                "or say insecure = true to let everybody read and delete everything"
            )
        return self

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the daemon."""
        return all(_is_loopback(host) for host, _ in [(self.host, self.port), *self.more_addresses()])

    def more_addresses(self) -> list[tuple[str, int]]:
        """The further addresses of the data plane. Raises ValueError."""
        return [_address(text, self.port) for text in self.listen]

    @property
    def guarded(self) -> bool:
        """Whether tokens are needed."""
        return self.tokens_file is not None or self.tokens is not None

    def users(self) -> frozenset[int]:
        """The other users that the Unix socket is for."""
        return frozenset(int(user) for user in self.unix_users.split(",") if user.strip())

    def quotas(self) -> dict[str, Quota]:
        """The tenants' quotas, as the store takes them."""
        return {tenant: body.quota() for tenant, body in self.tenants.items()}

    def store_config(self) -> StoreConfig:
        """The store's part, with sizes that were left open chosen for this machine."""
        # Not of what is free alone: a store that has filled its tier would get a smaller one at each start.
        ssd_bytes = max(256 << 20, min(256 << 30, read_disk(self.data_dir).room // 2)) if self.ssd is None else self.ssd
        dram_bytes = max(256 << 20, read_memory().available // 4) if self.dram is None else self.dram
        return StoreConfig(
            data_dir=self.data_dir,
            dram_bytes=dram_bytes,
            ahead_bytes=min(1 << 30, dram_bytes // 8) if self.dram_ahead is None else self.dram_ahead,
            ssd_bytes=ssd_bytes,
            recipe_bytes=self.recipe_bytes or max(64 << 20, min(8 << 30, ssd_bytes // 16)),
            recipe_ttl_s=self.recipe_ttl,
            max_pages=self.max_pages,
            watermarks=Watermarks(self.high_watermark, self.low_watermark),
            put_wait_s=self.put_wait,
            put_idle_s=self.put_idle,
            shutdown_s=self.shutdown_timeout,
            segment_bytes=self.segment,
            move_share=self.move_share,
            reader_threads=self.reader_threads,
            policy=self.policy,
            ssd_loss=self.ssd_admission_loss if self.ssd_admission == "classifier" else None,
            max_ghosts=self.max_ghosts,
            max_sessions=self.max_sessions,
            lease_bytes=self.max_leased,
            pin_bytes=self.max_pinned,
            durable_wait_s=self.durable_wait,
            scrub_bytes_s=self.scrub_rate,
            serve_while_loading=True,
            note_faults=True,
            quotas=self.quotas(),
            events=bool(self.events),
            event_tokens=self.events_tokens,
        )

    def event_settings(self) -> EventSettings:
        """How KV events are published, if they are."""
        return EventSettings(self.events, self.events_replay, self.events_hashes, self.events_topic)


def _address(text: str, port: int) -> tuple[str, int]:
    """HOST, HOST:PORT, [v6] or [v6]:PORT; without a port, `port`."""
    host, colon, given = text.rpartition(":")
    if not colon or "]" in given or (":" in host and not host.startswith("[")):
        host, given = text, str(port)
    host = host.strip("[]")
    if not host or not given.isdigit() or int(given) > 65535:
        raise ValueError(f"listen: {text!r} is neither HOST nor HOST:PORT")
    return host, int(given)


def _check_host(setting: str, host: str) -> None:
    """Raise ValueError for what can't be an address, nor a name of one. What a name is of is asked where it is bound: it may take long."""
    try:
        if not _NAME.fullmatch(host):
            socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        raise ValueError(f"{setting}: {host!r} is no address, and no name of one") from None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.split("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def load_config(flags: Mapping[str, Any], file: Path | None = None, environment: Mapping[str, str] | None = None) -> Config:
    """The configuration from all its sources; flags that are None are not set. Raises BadRequest, saying what to mend."""
    merged: dict[str, Any] = {}
    if file is not None:
        try:
            merged |= tomllib.loads(file.read_text())
            if "tokens" in merged:
                raise BadRequest(f"the configuration file {file} has `tokens`: put them into a file of their own, named by tokens_file")
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise BadRequest(f"the configuration file {file} can't be read: {error}") from error
    merged |= _from_environment(os.environ if environment is None else environment)
    merged |= {name: value for name, value in flags.items() if value is not None}
    try:
        return Config(**merged)
    except ValidationError as error:
        seconds = [name for name, field in Config.model_fields.items() if (field.description or "").startswith("seconds")]
        wrong = explain(error, secret="tokens" in merged, seconds=seconds)
        raise BadRequest("the configuration is not valid: " + "; ".join(wrong)) from error


def _from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Settings by name. Raises BadRequest for a variable that nothing reads: it is a setting misspelt."""
    found = {}
    known = {_ENVIRONMENT + field.upper(): field for field in Config.model_fields}
    for name, value in environment.items():
        if name in known:
            found[known[name]] = value
        elif (
            name.startswith(_ENVIRONMENT)
            and not name.startswith(_TESTS)
            and name not in CLIENT_VARIABLES
            and not _KUBERNETES.fullmatch(name)
        ):
            bare = [full.removeprefix(_ENVIRONMENT) for full in (*known, *CLIENT_VARIABLES)]
            close = difflib.get_close_matches(name.removeprefix(_ENVIRONMENT), bare, 1)
            hint = f"did you mean {_ENVIRONMENT}{close[0]}?" if close else "see docs/configuration.md for the names"
            raise BadRequest(f"the environment has {name}, which is no setting: {hint}")
    return found
