"""Images looked at in several processes, which stop when they are told to and do not outlive who asked."""

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

from semaug.util.errors import SemaugError
from semaug.util.signals import SIGNALS

Item = TypeVar("Item")
Result = TypeVar("Result")
CHUNK = 16  # images that a process is given at once
PATIENCE = 0.5  # seconds between two looks at whether all is to end


def each(function: Callable[[int], Result], count: int, workers: int) -> Generator[Result, None, None]:
    """``function(i)`` for all i below `count`, in order, made in so many processes (0: in this one)."""
    return in_turn(function, range(count), workers, 4 * workers)


def in_turn(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int, chunks: int, *, hear_signals: bool = True
) -> Generator[Result, None, None]:
    """``function(item)`` for all items, in order, made in so many processes (0: in this one).

    So many `chunks` of `CHUNK` items are given out at once, and another when all of the first was asked for. Whoever
    stops asking, by an exception or a signal, waits for the items that are in work and no further ones. A process that
    hears a signal ends at once; one that hears none goes on until it is told, or until who asked has ended, and its
    results should be small: it may be ended in the midst of handing one over.
    """
    if workers < 1:
        yield from map(function, items)
        return
    context = get_context()
    ended = context.Event()
    pool = ProcessPoolExecutor(workers, context, _start, (function, ended, hear_signals))
    left, given = iter(items), deque[Future[list[Result]]]()
    try:
        while True:
            while len(given) < chunks and (chunk := list(islice(left, CHUNK))):
                given.append(pool.submit(_call, chunk))
            if not given:
                return
            yield from given.popleft().result()
    except BrokenProcessPool as error:
        ended.set()  # for those that do not hear the signal by which the pool ends them
        raise SemaugError(
            "a process that reads images was ended, by a lack of memory perhaps; try --workers 1"
        ) from error
    except BaseException:  # also GeneratorExit
        ended.set()  # what a worker has been given cannot be taken back
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def is_running(process: int) -> bool:
    """Whether there is another process of this number on this machine."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return process != os.getpid()


# ------------------------------------------------------------------------------------------------ in the processes

_work: tuple[Callable[[Any], Any], Event]


def _start(function: Callable[[Any], Any], ended: Event, hear_signals: bool) -> None:
    global _work
    if not hear_signals:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    gc.freeze()  # what was there before is not looked through, which would copy it into every worker
    _work = function, ended
    threading.Thread(target=_end_with_parent, args=(None if hear_signals else ended,), daemon=True).start()


def _end_with_parent(ended: Event | None) -> None:
    """Workers wait for work for ever, even where nobody is left to give any; those without signals, until all ends."""
    parent = parent_process()
    assert parent is not None
    while not wait([parent.sentinel], None if ended is None else PATIENCE):
        if ended is not None and ended.is_set():
            break
    os._exit(1)


def _call(chunk: list[Any]) -> list[Any]:
    function, ended = _work
    return [None if ended.is_set() else function(item) for item in chunk]
