"""What a run of the factory is made of; processes get it as a JSON file."""

from pathlib import Path

import msgspec

from kvstore.api.wire import BadRequest
from kvstore_workers.factory.controls import Admission, DirectAdmission, Reconfiguration, SmoothedAdmission
from kvstore_workers.factory.cost import CostModel, OutputLengths
from kvstore_workers.factory.floor import Floor, FloorSettings
from kvstore_workers.factory.load import TurnRules


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run. Sizes in bytes, times in seconds; `traces` are files, each with how many times as fast it is replayed."""

    endpoint: str
    unix_endpoint: str
    namespace: str
    socket: str
    journal: str
    traces: list[tuple[str, float]]
    seconds: float = 40.0
    """Turns that arrive within this time are replayed."""
    turns: int = 100_000
    """So many at most."""
    aggregated: bool = False
    control: str = "smoothed"
    reuse: bool = True
    seed: int = 1
    ready_target: float = 4.0
    slots: int = 8
    accelerators: int = 2
    hbm_bytes: int = 192 << 20
    """Of each accelerator."""
    hbm_bandwidth: float = 60e6
    hbm_latency_s: float = 0.002
    grace_s: float = 0.5
    deadline_s: float = 60.0
    probes: int = 0
    """Pairs of long-prefix midfills after the trace, in turns with and without layer streaming."""
    change_s: float = 1.0
    """What becoming another kind takes."""
    settle_s: float = 2.0
    """How long an orchestrator that was started again waits for workers to come back."""
    start_s: float = 0.01
    token_s: float = 20e-6
    attention_s: float = 0.15e-9
    step_s: float = 4e-3
    sequence_s: float = 0.1e-3
    context_s: float = 1e-9
    output_median: float = 120.0

    def cost(self) -> CostModel:
        """The cost model."""
        return CostModel(self.start_s, self.token_s, self.attention_s, self.step_s, self.sequence_s, self.context_s)

    def rules(self) -> TurnRules:
        """What becomes of requests."""
        lengths = OutputLengths(self.seed, self.output_median, most=1000)
        return TurnRules(self.cost(), lengths, deadline_s=self.deadline_s)

    def floor(self) -> Floor:
        """A floor with its controls."""
        admission: Admission = SmoothedAdmission(self.ready_target) if self.control == "smoothed" else DirectAdmission()
        reconfiguration = None if self.aggregated else Reconfiguration()
        return Floor(admission, FloorSettings(), reconfiguration=reconfiguration, decode_s=2.0, fill_s=0.3)


def write_settings(settings: Settings, path: Path) -> None:
    """Leave settings for other processes."""
    path.write_bytes(msgspec.json.encode(settings))


def read_settings(path: Path) -> Settings:
    """Settings from a file. Raises BadRequest."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Settings)
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise BadRequest(f"the settings in {path} can't be read: {error}") from None
