"""Ordered maps over worker processes that end with their parent."""

import gc
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from multiprocessing.synchronize import Event
from typing import Any, TypeVar

from semaug.util.errors import DataError
from semaug.util.signals import SIGNALS

Item = TypeVar("Item")
Result = TypeVar("Result")
TASK_SIZE = 16  # items that a worker receives at a time
_POLL_SECONDS = 0.5


def ordered_map(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    workers: int,
    *,
    tasks_ahead: int | None = None,
    ignore_signals: bool = False,
) -> Generator[Result, None, None]:
    """Apply a function to items in worker processes, and yield the results in order.

    A consumer that stops early, by closing the generator or by an exception, waits for the items in progress only.

    Args:
        function: Called with one item, in a worker.
        items: Read lazily, `tasks_ahead` tasks of `TASK_SIZE` items ahead of the consumer.
        workers: Number of processes; 0 computes in this process.
        tasks_ahead: Default: four per worker.
        ignore_signals: Whether workers ignore SIGINT and SIGTERM and run until this process has finished with them.
            Their results should be small, as they may be killed while they return one.

    Yields:
        The result for each item.

    Raises:
        DataError: A worker was killed.
    """
    if workers < 1:
        yield from map(function, items)
        return
    context = get_context()
    stopped = context.Event()
    pool = ProcessPoolExecutor(workers, context, _initialize, (function, stopped, ignore_signals))
    remaining, pending = iter(items), deque[Future[list[Result]]]()
    try:
        while True:
            while len(pending) < (tasks_ahead or 4 * workers) and (task := list(islice(remaining, TASK_SIZE))):
                pending.append(pool.submit(_run_task, task))
            if not pending:
                return
            yield from pending.popleft().result()
    except BrokenProcessPool as error:
        stopped.set()  # for workers that ignore the signal by which the pool ends them
        raise DataError(
            "a process that reads images was killed, perhaps for lack of memory; set `workers` to 1"
        ) from error
    except BaseException:  # GeneratorExit too
        stopped.set()  # tasks that a worker has received cannot be cancelled
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def is_other_process(number: int) -> bool:
    """Whether a process with this number, other than this one, runs on this machine."""
    try:
        os.kill(number, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return number != os.getpid()


# ---------------------------------------------------------------------------------------------------- in the workers

_state: tuple[Callable[[Any], Any], Event]


def _initialize(function: Callable[[Any], Any], stopped: Event, ignore_signals: bool) -> None:
    global _state
    if ignore_signals:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    gc.freeze()  # a collection would touch, and so copy, the memory shared with the parent
    _state = function, stopped
    threading.Thread(target=_exit_with_parent, args=(stopped if ignore_signals else None,), daemon=True).start()


def _exit_with_parent(stopped: Event | None) -> None:
    """End this worker when its parent has ended or the event, if any, is set; otherwise it waits for work forever."""
    parent = parent_process()
    assert parent is not None
    while not wait([parent.sentinel], None if stopped is None else _POLL_SECONDS):
        if stopped is not None and stopped.is_set():
            break
    os._exit(1)


def _run_task(task: list[Any]) -> list[Any]:
    function, stopped = _state
    return [None if stopped.is_set() else function(item) for item in task]
