"""The ratios of a run, from its rows. Pure: no peer is needed to compute them."""

from dataclasses import dataclass

from bench.report import Report
from bench.ssd_fetch import CASES

STORES = ("valkey", "redis", "mooncake", "lmcache")
"""The peers over TCP, as rows name them."""
_BEST_OF = ("valkey", "redis", "mooncake")
"""Those that the best peer is taken of: stores that somebody would keep caches in."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What a ratio should be: at least, or at most, so much."""

    name: str
    bound: float
    at_most: bool = False

    def met(self, value: float) -> bool:
        """Whether it is."""
        return value <= self.bound if self.at_most else value >= self.bound

    @property
    def text(self) -> str:
        """In words."""
        return f"{'at most' if self.at_most else 'at least'} {self.bound:g}"


GOALS = (
    Goal("get_16MiB_vs_iperf3", 0.85),
    Goal("get_16MiB_2conn_vs_iperf3", 0.85),
    Goal("get_16MiB_4conn_vs_iperf3", 0.85),
    Goal("put_16MiB_vs_iperf3", 0.75),
    Goal("get_16MiB_vs_best_peer", 1.5),
    Goal("batch_32x1.5MiB_vs_64MiB", 0.9),
    Goal("mget_64x4KiB_vs_redis", 2, at_most=True),
    Goal("get_4KiB_p50_vs_redis", 3, at_most=True),
    Goal("same_host_view_us", 150, at_most=True),
    Goal("fetch_into_vs_numpy", 0.65),
    Goal("put_vs_numpy", 0.5),
    Goal("fetch_into_vs_mooncake", 0.85),
    Goal("put_vs_mooncake", 0.7),
    *(Goal(f"ssd_cold_{case}_vs_fio", 0.6) for case in CASES),
)


def all_of(report: Report) -> None:
    """All ratios that there are rows for, in place of what the parts of the run have noted."""
    report.ratios = {}
    cells = [row["what"][4:-5] for row in report.rows if row["what"].startswith("get_") and row["what"].endswith("_ours")]
    transfers(report, list(dict.fromkeys(cells)))
    small(report)
    same_host(report)
    ssd(report)


def transfers(report: Report, cells: list[str]) -> None:
    """Ratios of gets and puts to iperf3 and to the best peer, for cells named as in the rows (16MiB, 16MiB_4conn, …)."""
    for cell in cells:
        for what in ("get", "put"):
            ours = f"{what}_{cell}_ours"
            for limit in ("iperf3", "iperf3_unpaced"):
                _ratio(report, f"{what}_{cell}_vs_{limit}", ours, f"{limit}_{cell}")
            if (peer := best_peer(report, f"{what}_{cell}")) is not None:
                _ratio(report, f"{what}_{cell}_vs_best_peer", ours, f"{what}_{cell}_{peer}")
            for store in (*STORES, "valkey_py"):
                _ratio(report, f"{what}_{cell}_vs_{store}", ours, f"{what}_{cell}_{store}")
    _ratio(report, "batch_32x1.5MiB_vs_64MiB", "get_32x1.5MiB_ours", "get_64MiB_ours")


def best_peer(report: Report, prefix: str) -> str | None:
    """The store with the highest median, if there is any."""
    speeds = {name: report.median(f"{prefix}_{name}") for name in _BEST_OF if report.values(f"{prefix}_{name}")}
    return max(speeds, key=speeds.__getitem__) if speeds else None


def small(report: Report) -> None:
    """Ratios of times: ours to those of Redis (or of Valkey, where there is no Redis), by its faster client and by redis-py."""
    peer = "redis" if report.values("get_4KiB_redis_p50") else "valkey"
    for theirs in (peer, f"{peer}_py"):
        _ratio(report, f"mget_64x4KiB_vs_{theirs}", "get_64x4KiB_ours_p50", f"get_64x4KiB_{theirs}_p50")
        _ratio(report, f"get_4KiB_p50_vs_{theirs}", "get_4KiB_ours_p50", f"get_4KiB_{theirs}_p50")
        _ratio(report, f"get_4KiB_p50_blocking_vs_{theirs}", "get_4KiB_ours_blocking_p50", f"get_4KiB_{theirs}_p50")
        _ratio(report, f"match_and_get_4KiB_p50_vs_{theirs}", "match_and_get_4KiB_ours_p50", f"get_4KiB_{theirs}_p50")


def same_host(report: Report, size: str = "16MiB") -> None:
    """Ratios through shared memory, from the rows of bench.same_host. The view is a time, in µs."""
    for which in ("", "_blocking"):
        if report.values(name := f"lease_and_view_{size}{which}"):
            report.ratios[f"same_host_view{which}_us"] = round(report.median(name), 1)
    for name, ours, theirs in (
        ("fetch_into_vs_numpy", "fetch", "numpy_copy"),
        ("put_vs_numpy", "put", "numpy_copy"),
        ("put_any_memory_vs_numpy", "put_any_memory", "numpy_copy"),
        ("fetch_into_vs_mooncake", "fetch", "mooncake_get"),
        ("put_vs_mooncake", "put", "mooncake_put"),
    ):
        _ratio(report, name, f"{ours}_{size}", f"{theirs}_{size}")


def ssd(report: Report) -> None:
    """Cold fetches to what fio reads."""
    for case in CASES:
        _ratio(report, f"ssd_cold_{case}_vs_fio", f"ssd_cold_{case}_16MiB", "fio_16MiB")


def _ratio(report: Report, name: str, ours: str, theirs: str) -> None:
    """Of repetitions that both have: a peer that failed on the way counts with those before."""
    if len(report.values(ours)) == len(report.values(theirs)) > 0:
        report.ratio(name, ours, theirs)
