"""Exceptions that users of the library see.

Each message is one plain sentence that says what is wrong and what to do. A setting appears in it under its Python
name in backticks (`` `batch_size` ``); the command line shows that as its flag.
"""

from semaug.util.names import printable


class SemaugError(Exception):
    """A mistake or fault that one sentence explains.

    Args:
        message: The sentence. Names in it may come from anywhere: what a terminal would not print is escaped.
        on_all_ranks: Whether every process of a distributed run raises the same error, so that only rank 0 prints it.
    """

    def __init__(self, message: str = "", *, on_all_ranks: bool = False) -> None:
        super().__init__(printable(message))
        self.on_all_ranks = on_all_ranks


class SettingError(SemaugError):
    """A setting is out of range, or two settings cannot be combined."""


class DataError(SemaugError):
    """A data set, table, archive or image is missing, damaged or of the wrong form."""


class ModelError(SemaugError):
    """A network, its weights or an exported model is missing, damaged or of the wrong form."""


class RunError(SemaugError):
    """A run directory or checkpoint is missing, damaged or belongs to other settings."""


class TrainingError(SemaugError):
    """Training cannot continue: it has diverged, or another process has ended."""


class MissingPackageError(SemaugError):
    """An optional package is not installed."""


class FileError(SemaugError):
    """A file cannot be read or written."""


_NO_MEMORY = (
    "allocate memory",
    "out of memory",
    "start new thread",
    "failed to map segment",
    "without exception set",
    "create a primitive",
)


def lacks_memory(error: BaseException) -> bool:
    """Whether an error reports a lack of memory; libraries have no common class for it."""
    return isinstance(error, MemoryError) or any(text in str(error) for text in _NO_MEMORY)
