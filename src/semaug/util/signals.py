"""SIGINT and SIGTERM: the first signal asks for a clean stop, the second ends the process immediately."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """Signal `number` has stopped the work; the message says what is saved."""

    def __init__(self, number: int, message: str = "") -> None:
        super().__init__(message or f"stopped by {signal.Signals(number).name}")
        self.number = number


class Stop:
    """A context that turns the first signal into :class:`Interrupted`, or only notes it inside :meth:`deferred`.

    Ignored signals stay ignored. Outside the main thread, where Python receives no signals, the context does nothing.
    `asked` is the number of the signal received, or None.
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
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, a signal only sets `asked`; the block checks it and leaves when it can stop."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
        if self.asked is not None:
            raise Interrupted(self.asked)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:  # a forked worker; its parent reports the signal
            os._exit(128 + number)
        for other in self._before:
            signal.signal(other, signal.SIG_DFL)
        self.asked = number
        if not self._deferred:
            raise Interrupted(number)
