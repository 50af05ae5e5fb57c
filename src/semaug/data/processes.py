"""Images looked at in several processes, which stop when they are told to and do not outlive who asked."""

import gc
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from multiprocessing.synchronize import Event
from typing import Any, TypeVar

from semaug.errors import UserError

Result = TypeVar("Result")


def each(function: Callable[[int], Result], count: int, workers: int) -> Iterator[Result]:
    """``function(i)`` for all i below `count`, in order, made in so many processes (0: in this one).

    Whoever stops asking, by an exception or a signal, waits for the images that are in work and no further ones.
    """
    if workers < 1:
        yield from map(function, range(count))
        return
    context = get_context()
    ended = context.Event()
    pool = ProcessPoolExecutor(workers, context, _start, (function, ended))
    try:
        yield from pool.map(_call, range(count), chunksize=16)
    except BrokenProcessPool as error:
        raise UserError(
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

_work: tuple[Callable[[int], Any], Event]


def _start(function: Callable[[int], Any], ended: Event) -> None:
    global _work
    gc.freeze()  # what was there before is not looked through, which would copy it into every worker
    _work = function, ended
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Workers wait for work for ever, even where nobody is left to give any."""
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _call(i: int) -> Any:
    function, ended = _work
    return None if ended.is_set() else function(i)
