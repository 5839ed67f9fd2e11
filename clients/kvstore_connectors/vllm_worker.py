"""The workers' side of the vLLM connector: moves KV between the store and the blocks of one tensor-parallel rank."""

import logging

import torch

from kvstore_connectors.vllm_layout import LayerBlocks, Layout
from kvstore_connectors.vllm_link import StoreLink
from kvstore_connectors.vllm_loads import Finished, Loader
from kvstore_connectors.vllm_metadata import Step
from kvstore_connectors.vllm_saves import Saver
from kvstore_connectors.vllm_settings import Settings

log = logging.getLogger("vllm.kvstore_connectors")

_IDLE_WAIT_S = 0.005
"""How long a step without a forward pass waits for a load: the engine's loop would turn without rest meanwhile, on the loader's core."""


class WorkerSide:
    """Used from the engine's thread, once a step: `begin`, `load`, for each layer `wait_layer` and `save_layer`, `end`, `finished`."""

    def __init__(self, settings: Settings, layout: Layout, *, rank: int, ranks: int) -> None:
        self._settings = settings
        self._layout = layout
        self._rank = rank
        parts = {group.component: group.part(rank, ranks) for group in layout.groups}
        self._parts = {component: part for component, (part, _) in parts.items()}
        self._writes = settings.write and all(writes for _, writes in parts.values())
        self._layers: dict[str, LayerBlocks] = {}
        self._link: StoreLink | None = None
        self._loader: Loader
        self._saver: Saver
        self._step: Step | None = None
        self._lost: dict[str, int] = {}

    def register(self, tensors: dict[str, torch.Tensor], blocks: int) -> None:
        """The engine's KV tensors, by layer. Raises ValueError if they are not laid out as expected."""
        wanted = {name: group.block_bytes for group in self._layout.groups for name in group.layers}
        if missing := sorted(set(wanted) - set(tensors)):
            raise ValueError(f"kvstore: the engine has no KV tensors for {', '.join(missing[:3])}")
        self._layers = {name: LayerBlocks(tensors[name], blocks, nbytes) for name, nbytes in wanted.items()}
        device = next(iter(tensors.values())).device.type
        if device != "cpu":
            log.warning("kvstore: the paths to and from the memory of a %s device have not been tested on one", device)

    def begin(self, step: Step) -> None:
        """A step begins."""
        if self._link is None:
            self._link = StoreLink(
                self._settings, name=step.namespace, fingerprint=step.fingerprint, spec=self._layout.spec, who=f"worker {self._rank}"
            )
            self._loader = Loader(self._link, self._layout, self._parts, self._layers)
            self._saver = Saver(self._link, self._layout, self._parts, self._layers)
        self._step = step
        if self._writes:
            self._saver.begin(step.saves)

    def load(self) -> None:
        """Begin the step's loads."""
        assert self._step is not None
        for load in self._step.loads:
            self._loader.start(load)

    def wait_layer(self, name: str) -> None:
        """Wait until a layer is loaded for the requests that are being computed."""
        if self._step is not None and any(load.layerwise for load in self._step.loads):
            self._loader.wait_layer(name)

    def save_layer(self, name: str) -> None:
        """A layer's KV of this step is in the blocks."""
        if self._step is not None and self._step.saves and self._writes:
            self._saver.layer(name)

    def end(self) -> None:
        """The forward pass is over."""
        assert self._step is not None
        tainted = False
        if any(load.layerwise for load in self._step.loads):
            self._loader.wait_layerwise()
            tainted = self._loader.any_short()
        if self._writes:
            self._saver.end(tainted=tainted)

    def finished(self) -> Finished:
        """Loads that have ended since the last step."""
        assert self._step is not None
        done = self._loader.take_finished(_IDLE_WAIT_S if self._step.idle else 0.0)
        self._lost |= done.lost
        return done

    def not_in_store(self) -> dict[str, int]:
        """Requests whose pages from one on turned out not to be in the store, or were not saved."""
        lost, self._lost = self._lost, {}
        for name, page in self._saver.take_not_saved().items():
            lost[name] = min(page, lost.get(name, page))
        return lost

    def close(self) -> None:
        """Put what waits, for as long as one save may take, and close the connections."""
        if self._link is not None:
            self._loader.close()
            self._link.close(self._saver.drain(), self._settings.save_timeout_s)
            self._link = None
