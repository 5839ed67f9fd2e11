"""A client that holds views of all it can, and then does nothing more: to be killed, or stopped. Says when it is ready.

`python -m tests.faults.near_victim ENDPOINT LEASE_S SEED...`
"""

import asyncio
import sys
import time

from kvstore_client import AsyncClient
from kvstore_client.view import LocalView
from tests.integration.pages import SPEC, context


async def main(endpoint: str, lease_s: float, seeds: list[int]) -> None:
    """Hold views; the loop then stands still, so that nothing is ever let go."""
    async with AsyncClient(endpoint) as client:
        namespace = await client.namespace("pages", "rev-1", SPEC)
        views: list[LocalView] = []
        for seed in seeds:
            match = await namespace.match(context(seed, 32), lease_s=lease_s)
            views.append(await namespace.view(match))
        assert all(view.valid for view in views)
        print("holding", sum(len(view.parts) for view in views), flush=True)
        time.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2]), [int(seed) for seed in sys.argv[3:]]))
