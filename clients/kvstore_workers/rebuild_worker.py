"""A rebuild worker as a process of its own, with a simulated model: `python -m kvstore_workers.rebuild_worker --endpoint … --namespace …`.

The model `generator` gives the bytes of `generator.py`, a function of the whole prefix. `sum` adds up eight vectors drawn from the
prefix, and `sum-reversed` the same ones the other way round, as another kernel would: nearly the same numbers. What `generator` fetches
of the prefix is checked. `--fault` makes it a bad one.
"""

import argparse
import asyncio
import os
import signal
import sys
import time
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from kvstore.api.wire import KVSpec, KVStoreError
from kvstore_client import AsyncClient, AsyncRebuildWorker
from kvstore_client.rebuild import Prefix, Wanted
from kvstore_workers.generator import PageGenerator

MODELS = ("generator", "sum", "sum-reversed")
FAULTS = ("none", "shape", "raise", "hang", "die")
_TERMS = 8

Tokens = npt.NDArray[np.uint32]


def summed_page(spec: KVSpec, tokens: Tokens, page: int, *, backwards: bool = False) -> npt.NDArray[np.uint8]:
    """The bytes of a page of component 0: a sum of vectors drawn from its whole prefix, in one order or the other."""
    kind = spec.components[0]
    width = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2}[kind.dtype]
    seed = blake2b(tokens[: (page + 1) * spec.page_tokens].tobytes(), digest_size=8).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(seed, "little")))
    terms = generator.standard_normal((_TERMS, spec.part_bytes(spec.whole(0)) // width), dtype=np.float32)
    total = np.zeros(terms.shape[1], np.float32)
    for term in terms[::-1] if backwards else terms:
        total += term
    if kind.dtype == "bf16":
        return (total.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    return total.astype({"f64": "<f8", "f32": "<f4", "f16": "<f2"}[kind.dtype]).view(np.uint8)


class SimulatedModel:
    """Computes pages of component 0 from their prefix."""

    def __init__(self, spec: KVSpec, model: str, compute_s: float = 0.0) -> None:
        self._spec = spec
        self._model = model
        self._compute_s = compute_s
        self._generator = PageGenerator(spec.page_bytes, spec.page_tokens)

    def pages(self, tokens: Tokens, first: int, last: int) -> npt.NDArray[np.uint8]:
        """The pages [first, last), a row each."""
        out = np.empty((last - first, self._spec.page_bytes), np.uint8)
        if self._model == "generator":
            for page, seed in enumerate(self._generator.seeds(tokens)[first:last]):
                self._generator.fill(seed, out[page].view(np.uint64))
        else:
            for page in range(first, last):
                out[page - first] = summed_page(self._spec, tokens, page, backwards=self._model == "sum-reversed")
        return out

    def compute(self, tokens: Tokens, prefix: Prefix, wanted: Wanted) -> npt.NDArray[np.uint8]:
        """A rebuild function."""
        if self._model == "generator" and wanted.first_page:
            seeds = self._generator.seeds(tokens)
            wrong = sum(self._generator.wrong_bytes(seeds[page], row.view(np.uint64)) for page, row in enumerate(prefix[0]))
            if wrong:
                raise ValueError(f"{wrong} bytes of the prefix are wrong")
        time.sleep(self._compute_s * wanted.pages)
        return self.pages(tokens, wanted.first_page, wanted.last_page)


class Faulty:
    """A model that goes wrong in one way."""

    def __init__(self, model: SimulatedModel, fault: str) -> None:
        self._model = model
        self._fault = fault

    def compute(self, tokens: Tokens, prefix: Prefix, wanted: Wanted) -> npt.NDArray[np.uint8]:
        """A rebuild function."""
        right = self._model.compute(tokens, prefix, wanted)
        if self._fault == "raise":
            raise RuntimeError("out of memory")
        if self._fault == "shape":
            return right[:, :-2]
        if self._fault == "hang":
            time.sleep(3600)
        if self._fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return right


async def _main(arguments: argparse.Namespace) -> None:
    async with AsyncClient(arguments.endpoint, name=f"rebuild worker {os.getpid()}") as client:
        spec = (await client.namespace(arguments.namespace)).spec
        model = SimulatedModel(spec, arguments.model, arguments.compute_s)
        worker = AsyncRebuildWorker(client, arguments.namespace, lease_s=arguments.lease_s)
        worker.rebuild(model.compute if arguments.fault == "none" else Faulty(model, arguments.fault).compute)
        print("working", flush=True)
        await worker.run()


def main() -> None:
    """Work until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--model", choices=MODELS, default="generator")
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--lease-s", type=float, default=10.0)
    parser.add_argument("--compute-s", type=float, default=0.0, help="modelled seconds a page")
    try:
        asyncio.run(_main(parser.parse_args()))
    except KeyboardInterrupt:
        sys.exit(130)
    except KVStoreError as error:
        sys.exit(f"{error.code}: {error.message}")


if __name__ == "__main__":
    main()
