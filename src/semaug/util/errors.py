"""The one exception that users see, and names in its sentence."""


class SemaugError(Exception):
    """A mistake that a user can make, told in one sentence that says what to do; the command line exits with 2.

    Where there are several processes, one that was raised `on_all_ranks` is told by the first alone.
    """

    def __init__(self, message: str = "", *, on_all_ranks: bool = False) -> None:
        super().__init__(message)
        self.on_all_ranks = on_all_ranks


def printable(name: object) -> str:
    """The name of a file or class as it is; quoted where a terminal would not show it as it is."""
    text = str(name)
    return text if text.isprintable() else repr(text)
