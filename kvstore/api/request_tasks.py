"""The requests of a connection that have a task each: at most `MAX_REQUESTS` at a time, and any of them can be stopped."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from kvstore.api.outbox import Outbox
from kvstore.api.request_stats import RequestStats
from kvstore.api.wire import FrameType, Header
from kvstore.api.wire.eager import Begun, begin
from kvstore.errors import Cancelled, ConnectionLost, KVStoreError, ProtocolError

_log = logging.getLogger("kvstore.connection")

MAX_REQUESTS = 64

Work = Callable[[], Coroutine[None, None, None]]


@dataclass(slots=True)
class UnderWay:
    """A request that has a task."""

    interruptible: bool
    since_ns: int
    urgent: bool = False
    """Whether it is sent before what is bulk."""
    task: asyncio.Task[None] | None = None
    begun: bool = False
    cancelled: bool = False
    answering: bool = False


class RequestTasks:
    """Runs them; whatever ends one is told by the outbox. `client` is what the log calls who asks."""

    def __init__(self, outbox: Outbox, stats: RequestStats, client: str) -> None:
        self.under_way: dict[int, UnderWay] = {}
        """By the request's number."""
        self._outbox = outbox
        self._stats = stats
        self._client = client
        self._slots = asyncio.Semaphore(MAX_REQUESTS)

    async def start(self, group: asyncio.TaskGroup, header: Header, began: int, work: Work, *, here: bool = False) -> bool:
        """Do the work of a request in a task of its own, once there are not too many. Raises ProtocolError if it is under way.

        Or begin it `here`, so that it needs a task only if it has to wait: then it waits for a bare turn of the loop before anything
        that asks for its task, as a timeout does. Returns whether it has ended.
        """
        if header.request in self.under_way:
            raise ProtocolError(f"request {header.request} is still under way")
        await self._slots.acquire()
        self.under_way[header.request] = running = UnderWay(interruptible=header.type is not FrameType.FETCH, since_ns=began)
        doing, rest = self._guarded(header, running, work), None
        if here:
            if (rest := begin(doing)) is None:
                return True
            doing = _to_its_end(rest)
        running.task = group.create_task(doing, name=f"kvstore-{header.type.name}")
        if rest is not None:
            running.task.add_done_callback(partial(_abandon, rest))
        return False

    async def _guarded(self, header: Header, running: UnderWay, work: Work) -> None:
        running.begun = True
        try:
            if running.cancelled:
                raise Cancelled("the request was cancelled")
            await work()
            self._stats.answered(header.type.name, running.since_ns)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or (task.cancelling() and not running.cancelled):
                raise  # the connection ends, and nobody asked for that: what is not answered the client asks for again
            task.uncancel()
            await self._outbox.error(header.request, Cancelled("the request was cancelled"))
        except KVStoreError as error:
            fatal_if_protocol(error)
            await self._outbox.error(header.request, error)
        except Exception:  # noqa: BLE001 - a bug in one request must not end the others
            _log.exception("request %d (%s) of session %s failed", header.request, header.type.name, self._client)
            await self._outbox.error(header.request, KVStoreError("the daemon failed at this request; its log says how"))
        finally:
            self.under_way.pop(header.request, None)
            self._slots.release()

    def cancel(self, request: int) -> None:
        """Stop a request, once. One that is being answered is done; one that has not begun stops as it begins.

        A fetch that is sending stops before its next frame: half a frame would spoil the connection.
        """
        running = self.under_way.get(request)
        if running is None or running.cancelled or running.answering:
            return
        running.cancelled = True
        if running.begun and running.interruptible and running.task is not None:
            running.task.cancel()

    @contextmanager
    def interruptible(self, request: int) -> Iterator[None]:
        """While a fetch waits for something that is not its own frame, it can be stopped at once."""
        running = self.under_way[request]
        if running.cancelled:
            raise Cancelled("the request was cancelled")
        running.interruptible = True
        try:
            yield
        finally:
            running.interruptible = False

    def stop(self) -> None:
        """The connection ends: stop all of them."""
        for running in self.under_way.values():
            if running.task is not None:
                running.task.cancel()


async def _to_its_end(rest: Begun[None]) -> None:
    await rest


def _abandon(rest: Begun[None], _: "asyncio.Task[None]") -> None:
    """Its task has ended, maybe before it had begun."""
    rest.abandon()


def fatal_if_protocol(error: KVStoreError) -> None:
    """Raise what ends not only the request but the connection."""
    if isinstance(error, ConnectionLost | ProtocolError):
        raise error
