"""Starts engines for the tests, and talks to them."""

import json
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[3]
MODEL = Path(sys.prefix) / "smollm2"
START_S = 240.0
ANSWER_S = 240.0

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "PYTHONPATH": f"{ROOT}:{ROOT / 'clients'}",
}


def connector(endpoint: str, **extra: Any) -> dict[str, Any]:
    """What a user gives vLLM to have KV kept in the store."""
    return {
        "kv_connector": "KVStoreConnector", "kv_connector_module_path": "kvstore_connectors.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"endpoint": endpoint, **extra},
    }  # fmt: skip


class EngineProcess:
    """A context manager; the end is a clean stop unless `kill` came before. `log` is what the engine wrote."""

    def __init__(self, kv_transfer_config: dict[str, Any] | None = None, **arguments: Any) -> None:
        defaults = {"model": str(MODEL), "enforce_eager": True, "max_model_len": 4096, "dtype": "bfloat16", "enable_prefix_caching": True}
        read, write = os.pipe()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the engine
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVSTORE_")} | ENVIRONMENT | {"ENGINE_REPLIES": str(write)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.engines.vllm.engine"], stdin=subprocess.PIPE, stdout=self._log, stderr=subprocess.STDOUT,
            text=True, bufsize=1, cwd=ROOT, env=environment, pass_fds=[write],
        )  # fmt: skip
        os.close(write)
        self._replies = os.fdopen(read)
        self._tell(defaults | arguments | ({"kv_transfer_config": kv_transfer_config} if kv_transfer_config else {}))

    def _tell(self, message: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")

    def _answer(self, timeout: float) -> Any:
        ready, _, _ = select.select([self._replies], [], [], timeout)
        line = self._replies.readline() if ready else ""
        if not line:
            raise AssertionError(("the engine ended: " if ready else f"no answer within {timeout:g} s: ") + self.log[-6000:])
        return json.loads(line)

    @property
    def log(self) -> str:
        """What the engine has written so far."""
        self._log.flush()
        with open(f"/proc/self/fd/{self._log.fileno()}", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            return file.read()

    def call(self, name: str, timeout: float = ANSWER_S, **arguments: Any) -> Any:
        """Call a method of the engine."""
        self._tell([name, arguments])
        return self._answer(timeout)

    def ask(self, tokens: list[int], max_tokens: int = 8, *, salt: str = "", dump: Path | None = None) -> dict[str, Any]:
        """The greedy answer to one prompt."""
        prompts = [{"tokens": tokens, "salt": salt}]
        answers: list[dict[str, Any]] = self.call("ask", prompts=prompts, max_tokens=max_tokens, dump=str(dump) if dump else None)
        return answers[0]

    def kill(self) -> None:
        """Kill it at once."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> "EngineProcess":
        try:
            self._answer(START_S)
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()
        if kind is not None:
            print(self.log[-8000:])
        self._log.close()
        self._replies.close()
