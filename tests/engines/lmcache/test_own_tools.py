"""LMCache's own tools, over our adapter: `lmcache bench l2` with verification, and its check of L2 adapters."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore_workers.daemon_process import DaemonProcess
from tests.engines.lmcache.objects import plugin

SCRIPTS = Path(sys.executable).parent


def test_bench_l2_verifies_what_it_loads(either_daemon: DaemonProcess) -> None:
    spec = json.dumps(plugin(either_daemon.endpoint, revision="bench-1"))
    command = [str(SCRIPTS / "lmcache"), "bench", "l2", "--l2-adapter", spec, "--no-skip-verify", "--num-keys", "16", "--rounds", "2"]
    done = subprocess.run([*command, "--lookup-max-hit-rate", "0.5"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All 16 keys data verified OK" in done.stdout
    assert len(re.findall(r"\[(?:Store|Load)\] Round \d+: .*=16/16", done.stdout)) == 6
    looked_up = re.findall(r"\[Lookup\] Round \d+: .*found=(\d+)/16", done.stdout)
    assert (len(looked_up), sum(map(int, looked_up))) == (3, 24)  # half of all keys were stored


async def test_its_check_of_l2_adapters(either_daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> None:
    from lmcache.v1.check.check_mode_test_l2_adapter import run_test_mode

    spec = json.dumps(plugin(either_daemon.endpoint, revision="check-1", min_hash_bytes=4))
    await run_test_mode("org/model", l2_adapter=[spec], num_keys=5, obj_size=4096)
    said = capsys.readouterr().out
    assert "FAIL" not in said.upper(), said
    for line in ("5/5 correctly absent", "5/5 found", "Validation (loaded): 5/5", "Validation (content): 5/5"):
        assert line in said
