"""The pure parts of bench.peers, and its client of RESP against a server that sends in awkward pieces."""

import os
import socket
import threading

import numpy as np
import pytest

from bench.peers import alone, markdown, ratios, tcp
from bench.peers.peer import MIB, ROTATION, Meter, Shape, cpu_seconds
from bench.peers.resp import RespLink
from bench.report import Report
from bench.ssd_fetch import CASES


def report_of(**rows: list[float]) -> Report:
    report = Report("peers", {})
    for what, values in rows.items():
        for repetition, value in enumerate(values):
            report.add(what, repetition, value, "GiB/s")
    return report


def test_ratios_are_medians_over_pairs_and_the_best_peer_is_by_median() -> None:
    report = report_of(
        get_16MiB_ours=[4.0, 2.0, 3.0],
        iperf3_16MiB=[4.0, 4.0, 4.0],
        get_16MiB_valkey=[1.0, 1.0, 9.0],
        get_16MiB_mooncake=[2.0, 2.0, 1.5],
    )
    ratios.transfers(report, ["16MiB"])
    assert ratios.best_peer(report, "get_16MiB") == "mooncake"
    assert report.ratios == {
        "get_16MiB_vs_iperf3": 0.75,
        "get_16MiB_vs_best_peer": 2.0,
        "get_16MiB_vs_valkey": 2.0,
        "get_16MiB_vs_mooncake": 2.0,
    }


def test_what_was_not_measured_as_often_has_no_ratio() -> None:
    report = report_of(get_16MiB_ours=[4.0, 2.0], iperf3_16MiB=[4.0])
    ratios.transfers(report, ["16MiB"])
    assert report.ratios == {}


def test_small_transfers_are_compared_with_redis_or_else_with_valkey() -> None:
    report = report_of(get_4KiB_ours_p50=[200.0], get_4KiB_valkey_p50=[100.0])
    ratios.small(report)
    assert report.ratios == {"get_4KiB_p50_vs_valkey": 2.0}
    report = report_of(get_4KiB_ours_p50=[200.0], get_4KiB_valkey_p50=[100.0], get_4KiB_redis_p50=[50.0])
    ratios.small(report)
    assert report.ratios == {"get_4KiB_p50_vs_redis": 4.0}


def test_every_goal_is_of_a_ratio_that_a_run_can_have() -> None:
    rows: dict[str, list[float]] = {}
    for cell in ("16MiB", "16MiB_2conn", "16MiB_4conn", "64MiB", "32x1.5MiB"):
        rows |= {f"{what}_{cell}_{store}": [1.0] for what in ("get", "put") for store in ("ours", "redis")}
        rows[f"iperf3_{cell}"] = [1.0]
    rows |= {f"get_{shape}_{store}_p50": [1.0] for shape in ("4KiB", "64x4KiB") for store in ("ours", "redis")}
    names = (
        "numpy_copy",
        "fetch",
        "put",
        "put_any_memory",
        "mooncake_get",
        "mooncake_put",
        "lease_and_view",
        "fio",
        *(f"ssd_cold_{case}" for case in CASES),
    )
    rows |= {f"{name}_16MiB": [1.0] for name in names}
    report = report_of(**rows)
    ratios.all_of(report)
    assert {goal.name for goal in ratios.GOALS} <= set(report.ratios)
    assert markdown.goals(report).count("\n") == 2 + len(ratios.GOALS)


@pytest.mark.parametrize(("value", "met"), [(0.84, False), (0.85, True)])
def test_the_table_says_which_goals_are_missed(value: float, met: bool) -> None:
    report = report_of()
    report.ratios["get_16MiB_vs_iperf3"] = value
    assert ("**missed**" not in markdown.goals(report)) == met


def test_the_tables_show_medians_and_spread_of_what_was_measured() -> None:
    report = report_of(get_16MiB_ours=[4.0, 2.0, 3.0], iperf3_16MiB=[5.0, 5.0, 6.0], fetch_16MiB=[7.0])
    text = markdown.tables(report)
    assert "| 16MiB | 1 | 3.00 (2.00-4.00) | 5.00 (5.00-6.00) |" in text
    assert "| fetch_16MiB | 7.00 (7.00-7.00) | GiB/s |" in text
    assert "valkey" not in text


def test_shapes_are_named_as_the_ratios_are() -> None:
    assert [tcp.cell(tcp.BATCH, 1), tcp.cell(tcp.large(16), 4), tcp.MANY.label, tcp.ONE.label] == [
        "32x1.5MiB", "16MiB_4conn", "64x4KiB", "4KiB",
    ]  # fmt: skip
    assert all(shape.count * shape.nbytes >= 512 * MIB for shape in (tcp.BATCH, *map(tcp.large, (1, 4, 16, 64))))
    assert ROTATION % tcp.BATCH.nbytes == 0


def test_a_meter_adds_up_cpu_time_of_this_process() -> None:
    meter = Meter([])
    began = cpu_seconds([os.getpid()])
    with meter:
        while cpu_seconds([os.getpid()]) < began + 0.04:
            pass
    meter.times, meter.nbytes = [0.001, 0.003], 1 << 30
    moved = meter.moved("by hand")
    assert round(moved.client_cpu, 6) >= 0.03
    assert (moved.server_cpu, moved.p50_us) == (0, 2000)


def test_loopback_alone_is_told_from_other_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo")])
    assert alone.only_loopback()
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    assert not alone.only_loopback()


@pytest.mark.parametrize("piece", [1, 7, 4096, 100_000])
def test_values_come_whole_out_of_any_pieces(piece: int) -> None:
    source = np.random.default_rng(1).integers(0, 256, 200_000, dtype=np.uint8)
    target = np.zeros_like(source)
    one = b"$70000\r\n" + source[:70_000].tobytes() + b"\r\n"
    many = b"*3\r\n" + b"".join(b"$1000\r\n" + source[at : at + 1000].tobytes() + b"\r\n" for at in (100_000, 101_000, 102_000))
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            taken, _ = server.accept()
            with taken:
                taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for reply in (one, many, b"+OK\r\n"):
                    taken.recv(1 << 20)
                    for at in range(0, len(reply), piece):
                        taken.sendall(reply[at : at + piece])
                taken.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        link = RespLink(server.getsockname()[1], source, target)
        link.get("k", 0, 70_000)
        link.get_batch(["a", "b", "c"], 100_000, 1000)
        link.put("k", 0, 10)
        link.close()
        thread.join()
    assert np.array_equal(target[:70_000], source[:70_000])
    assert np.array_equal(target[100_000:103_000], source[100_000:103_000])


def test_a_value_of_another_size_is_refused() -> None:
    source = np.zeros(100, np.uint8)
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = RespLink(server.getsockname()[1], source, source)
        taken, _ = server.accept()
        with taken:
            taken.sendall(b"$5\r\nhello\r\n")
            with pytest.raises(ValueError, match="10 bytes"):
                link.get("k", 0, 10)
        link.close()


def test_a_shape_counts_whole_transfers() -> None:
    assert Shape(3, 2, 20).count == 3
