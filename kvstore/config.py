"""The daemon's configuration: defaults < TOML file < KVSTORE_* environment < flags, checked once at start."""

import os
import re
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from kvstore.errors import BadRequest
from kvstore.store import StoreConfig
from kvstore.tiers.ssd import DEFAULT_EXTENT_BYTES
from kvstore.tiers.watermarks import Watermarks

_UNITS = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "k": 1 << 10,
    "m": 1 << 20,
    "g": 1 << 30,
    "t": 1 << 40,
}
_MIN_TIER = 1 << 20
_ENVIRONMENT = "KVSTORE_"


def parse_size(value: object) -> int:
    """Bytes from an int, or from text such as `4GiB`, `512 MiB` or `1.5g` (units are powers of 1024)."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(value))
    if not found or found[2].lower() not in _UNITS:
        raise ValueError(f"{value!r} is not a size; write 4GiB, 512MiB or a number of bytes")
    return int(float(found[1]) * _UNITS[found[2].lower()])


Size = Annotated[int, BeforeValidator(parse_size)]


def default_data_dir() -> Path:
    """Where a daemon keeps its data if nobody says: the user's data directory."""
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "kvstore"


def _available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 1 << 30


class Config(BaseModel):
    """Everything `kvstore serve` can be told. Sizes take units: `dram = "64GiB"`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    data_dir: Path = Field(default_factory=default_data_dir, description="journal and blobs")
    dram: Size = Field(0, description="DRAM tier; a quarter of the available memory if 0")
    ssd: Size = Field(0, description="SSD tier; half of the free disk, at most 256 GiB, if 0")
    host: str = Field("127.0.0.1", description="address of the data plane and of HTTP")
    port: int = Field(7421, ge=0, le=65535, description="TCP port of the data plane; 0 takes a free one")
    http_port: int = Field(7420, ge=0, le=65535, description="port of the HTTP control plane; 0 takes a free one")
    unix_socket: Path | None = Field(None, description="Unix socket of the data plane; in the data directory if not given")
    max_pages: int = Field(10_000_000, ge=1_000, le=200_000_000, description="most pages a namespace can hold")
    max_connections: int = Field(1024, ge=1, le=65536, description="most data-plane connections")
    high_watermark: float = Field(0.92, gt=0, le=1, description="share of DRAM at which the mover starts to demote")
    low_watermark: float = Field(0.85, gt=0, le=1, description="share of DRAM at which it stops")
    put_wait: float = Field(1.0, ge=0, le=60, description="seconds a put waits for room before it gets `busy`")
    put_idle: float = Field(60.0, gt=0, le=3600, description="seconds without a slice after which a put is dropped")
    durable_wait: float = Field(20.0, gt=0, le=600, description="seconds a durable put waits for SSD before it gets `busy`")
    scrub_rate: Size = Field(32 << 20, ge=0, description="bytes a second that the scrubber verifies at rest; 0 turns it off")
    shutdown_timeout: float = Field(30.0, ge=0, le=3600, description="seconds a clean stop may spend on flushing")
    segment: Size = Field(64 << 20, ge=1 << 16, description="size of a DRAM segment")
    extent: int = Field(DEFAULT_EXTENT_BYTES, ge=2032, le=(1 << 20) - 16, description="bytes of an SSD extent; 16 under a multiple of 4096")
    reader_threads: int = Field(4, ge=1, le=64, description="threads that read from SSD")
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$", description="debug, info, warning or error")

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        Watermarks(self.high_watermark, self.low_watermark)
        for name in ("dram", "ssd"):
            size = getattr(self, name)
            if size and size < _MIN_TIER:
                raise ValueError(f"{name} is {size} bytes, less than 1 MiB")
        if (self.extent + 16) % 4096:
            raise ValueError(f"extent is {self.extent}: choose 16 less than a multiple of 4096, such as 69616, so that LMDB wastes nothing")
        return self

    def store_config(self) -> StoreConfig:
        """The store's part, with sizes that were left open chosen for this machine."""
        parent = self.data_dir
        while not parent.exists():
            parent = parent.parent
        return StoreConfig(
            data_dir=self.data_dir,
            dram_bytes=self.dram or max(256 << 20, _available_memory() // 4),
            ssd_bytes=self.ssd or max(256 << 20, min(256 << 30, shutil.disk_usage(parent).free // 2)),
            max_pages=self.max_pages,
            watermarks=Watermarks(self.high_watermark, self.low_watermark),
            put_wait_s=self.put_wait,
            put_idle_s=self.put_idle,
            shutdown_s=self.shutdown_timeout,
            segment_bytes=self.segment,
            extent_bytes=self.extent,
            reader_threads=self.reader_threads,
            durable_wait_s=self.durable_wait,
            scrub_bytes_s=self.scrub_rate,
            serve_while_loading=True,
        )


def load_config(flags: Mapping[str, Any], file: Path | None = None, environment: Mapping[str, str] | None = None) -> Config:
    """The configuration from all its sources; flags that are None are not set. Raises BadRequest, saying what to mend."""
    merged: dict[str, Any] = {}
    if file is not None:
        try:
            merged |= tomllib.loads(file.read_text())
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise BadRequest(f"the configuration file {file} can't be read: {error}") from error
    known = Config.model_fields
    for name, value in (os.environ if environment is None else environment).items():
        field = name.removeprefix(_ENVIRONMENT).lower()
        if name.startswith(_ENVIRONMENT) and field in known:
            merged[field] = value
    merged |= {name: value for name, value in flags.items() if value is not None}
    try:
        return Config(**merged)
    except ValidationError as error:
        lines = [f"{'.'.join(str(p) for p in e['loc']) or 'configuration'}: {e['msg']}" for e in error.errors()]
        raise BadRequest("the configuration is not valid: " + "; ".join(lines)) from error
