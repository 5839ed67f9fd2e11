"""vLLM's own OpenAI server in a process of its own."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from types import TracebackType
from typing import Any

from tests.engines.vllm.engine_process import ENVIRONMENT, MODEL, ROOT, START_S

NAME = "smollm2"


class ServerProcess:
    """A context manager. `url` is where it listens."""

    def __init__(self, kv_transfer_config: dict[str, Any], *arguments: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the server
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVSTORE_")} | ENVIRONMENT
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL), "--served-model-name", NAME]
        command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "4096", "--enforce-eager"]
        command += ["--kv-transfer-config", json.dumps(kv_transfer_config), *arguments]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment)

    @property
    def log(self) -> str:
        """What the server has written so far."""
        with open(f"/proc/self/fd/{self._log.fileno()}", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            return file.read()

    def complete(self, tokens: list[int], max_tokens: int = 8) -> str:
        """The greedy completion of a prompt."""
        body = json.dumps({"model": NAME, "prompt": tokens, "max_tokens": max_tokens, "temperature": 0}).encode()
        request = urllib.request.Request(f"{self.url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            text: str = json.load(answer)["choices"][0]["text"]
        return text

    def __enter__(self) -> "ServerProcess":
        end = time.monotonic() + START_S
        while time.monotonic() < end and self._process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
            else:
                return self
        self._process.kill()
        raise AssertionError("the server did not start: " + self.log[-6000:])

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if kind is not None:
            print(self.log[-6000:])
        self._log.close()
