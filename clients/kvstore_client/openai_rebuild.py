"""A rebuild function that has an engine do it: an OpenAI-compatible server is asked to complete the tokens by one.

To do so the engine computes the whole prompt, and its connector writes the pages to the store; the worker waits until they are
there. The request is made with the standard library in a thread: an SDK that needs no HTTP library stays so.
"""

import asyncio
import json
import urllib.error
import urllib.request
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.api.wire import BadRequest, ConnectionLost, KVStoreError
from kvstore_client.arguments import TEXT, TIMEOUT, checked
from kvstore_client.rebuild import ELSEWHERE, Elsewhere, Prefix, Wanted

_MAX_ANSWER = 1 << 20


class OpenAIRebuilder:
    """`worker.rebuild(OpenAIRebuilder("http://127.0.0.1:8000", "my-model"))`, with `fetch_prefix=False` for the worker.

    `url` is the server's, with or without `/v1`; `timeout` bounds one request, in seconds.
    """

    @checked(url=TEXT, model=TEXT, api_key=TEXT, timeout=TIMEOUT)
    def __init__(self, url: str, model: str, *, api_key: str = "", timeout: float = 120.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise BadRequest(f"{url!r} is not the http or https URL of a server")
        self._url = url.rstrip("/").removesuffix("/v1") + "/v1/completions"
        self._model = model
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._timeout = timeout

    async def __call__(self, tokens: npt.NDArray[np.uint32], prefix: Prefix, wanted: Wanted) -> Elsewhere:
        """Ask for one token after the pages wanted. The engine's connector puts them."""
        if wanted.bodies:
            raise BadRequest("the recipes of these pages are text or references: only token ids can be sent to a completions endpoint")
        prompt = tokens[: wanted.last_page * wanted.spec.page_tokens].tolist()
        await asyncio.to_thread(self._complete, {"model": self._model, "prompt": prompt, "max_tokens": 1, "temperature": 0})
        return ELSEWHERE

    def _complete(self, body: dict[str, Any]) -> None:
        request = urllib.request.Request(self._url, json.dumps(body).encode(), self._headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as response:
                answer = json.loads(response.read(_MAX_ANSWER))
        except urllib.error.HTTPError as error:
            raise KVStoreError(f"{self._url} answered {error.code}: {error.read(200).decode(errors='replace')}") from None
        except (OSError, ValueError) as error:
            raise ConnectionLost(f"no completion from {self._url}: {error}") from None
        if not isinstance(answer, dict) or "choices" not in answer:
            raise KVStoreError(f"{self._url} answered with something else than a completion")
