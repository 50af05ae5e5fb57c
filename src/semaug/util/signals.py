"""SIGINT and SIGTERM: the first asks to stop, at a good moment where one is near; the second ends at once."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """The process was asked to end; the message says what is saved."""

    def __init__(self, number: int, message: str = "") -> None:
        super().__init__(message or f"stopped by {signal.Signals(number).name}")
        self.number = number


class Stop:
    """Listens for the signals inside a `with`: raises :class:`Interrupted`, or, where `deferred`, only notes them.

    An ignored signal stays ignored. Outside the main thread, where Python hears no signals, this does nothing.
    """

    def __init__(self) -> None:
        self.asked: int | None = None
        self._deferred = False
        self._owner = os.getpid()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, a signal sets `asked`; whoever is inside looks at it when it can stop."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
        if self.asked is not None:
            raise Interrupted(self.asked)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:  # a worker forked from us; who started it will tell
            os._exit(128 + number)
        for other in self._before:
            signal.signal(other, signal.SIG_DFL)
        self.asked = number
        if not self._deferred:
            raise Interrupted(number)
