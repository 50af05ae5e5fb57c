"""The entry point: dispatch to a command, exit codes, and how errors are printed."""

import inspect
import io
import os
import re
import shutil
import signal
import sys
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from difflib import get_close_matches
from importlib import import_module
from typing import Annotated, Any, Union, cast

import tyro

from semaug import __version__
from semaug.cli.common import Command, say, with_flags
from semaug.cli.options import CONFIG, grouped, parse
from semaug.util import distributed
from semaug.util.errors import SemaugError, SettingError, lacks_memory
from semaug.util.names import printable, shown
from semaug.util.ranges import check_ranges
from semaug.util.signals import Stop

MIN_COLUMNS = 40
COMMANDS = (
    "demo", "data", "train", "compare", "evaluate", "predict", "export", "serve", "soup", "report", "figures", "bench",
    "reproduce", "cache", "weights", "completion",
)  # fmt: skip
"""Names of the commands, in the order of the help. Command NAME is the class Name of the module semaug.cli.NAME."""

DESCRIPTION = (
    "Fine-grained image recognition with semantic data augmentation. semaug COMMAND --help lists the options of a "
    "command, semaug --version prints the version."
)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line on the words after `semaug`; None for those of this process.

    Returns:
        The exit code: 0; 1 if the reader of the output closed it; 2 after an error of the user or the system; 128 + the
        number of the signal that ended the command.
    """
    if arguments is None:
        _prepare_process()
        arguments = sys.argv[1:]
    try:
        code = _run(arguments)
    except SystemExit as ended:  # by tyro: after the help, or a mistake in the options
        code = ended.code if isinstance(ended.code, int) else 0
    except BrokenPipeError:
        code = 1
    except (ImportError, MemoryError, RuntimeError, SystemError) as error:
        if not lacks_memory(error):
            raise
        say(f"semaug: there is not enough memory{' on the GPU' if 'CUDA' in str(error) else ''}")
        code = 2
    except OSError as error:
        place = "" if error.filename is None else f" for {error.filename}"
        say(f"semaug: the system refuses an operation{place}: {error.strerror or error}")
        code = 2
    try:
        sys.stdout.flush()
    except OSError as error:
        # the interpreter must not try again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return code or 1
        if code == 0:
            say(f"semaug: cannot write to standard output: {error.strerror}")
        return code or 2
    return code


def _prepare_process() -> None:
    """Set up what a shell may lack: UTF-8, standard streams, and a terminal wide enough for the help."""
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"  # otherwise names that are not ASCII could be neither read nor printed
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed: the next file to be opened would take its place
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # what PYTHONIOENCODING cannot write is printed as codes
        sys.stdout.reconfigure(errors="backslashreplace")
    if shutil.get_terminal_size().columns < MIN_COLUMNS:  # tyro and rich never end in a terminal of four columns
        os.environ["COLUMNS"] = str(MIN_COLUMNS)
    os.environ["MPLBACKEND"] = "agg"  # charts are files; with an unknown backend Matplotlib cannot be imported
    warnings.filterwarnings("ignore", module=r"PIL\.")  # an image is read, or a sentence says why not
    plain = warnings.formatwarning

    def format_warning(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if str(message).startswith("semaug: "):  # ours need no line of source code
            return f"{printable(message)}\n"
        return plain(message, category, filename, lineno, line)

    warnings.formatwarning = format_warning


def _run(arguments: list[str]) -> int:
    if arguments == ["--version"]:
        print(f"semaug {__version__}")
        return 0
    command: Command | None = None
    try:
        command = _parse(arguments)
        check_ranges(command)
        if distributed.is_launched() and not command.distributed:
            raise SettingError("only semaug train runs in several processes under torchrun", on_all_ranks=True)
        with Stop():
            command.run()
    except SemaugError as error:
        # rank 0 may be the process that has ended
        lost = isinstance(error.__cause__, distributed.PeerLostError) and os.environ.get("RANK") == "1"
        if not error.on_all_ranks or distributed.is_rank_zero() or lost:
            say(f"semaug: {with_flags(str(error), command)}")
        return 2
    except KeyboardInterrupt as interruption:
        if distributed.is_rank_zero():
            how = "; run the same command again to resume" if command is not None and command.resumable else ""
            say(f"semaug: {str(interruption) or 'interrupted'}{how}")
        code = 128 + getattr(interruption, "number", signal.SIGINT)
        if command is not None and command.ends_at_once:
            os._exit(code)  # the interpreter would wait for threads, and take seconds on a busy machine
        return code
    return 0


def _parse(arguments: list[str]) -> Command:
    """Read the options. Only the module of the named command is imported, all of them for the general help."""
    if arguments and arguments[0] in COMMANDS:
        name, *options = arguments
        kind = find_command(name)
        words = kind.expand(options)
        with _wrapped_help(), nullcontext() if "".join(words).isprintable() else _printable_errors():
            return cast(Command, parse(kind, f"semaug {name}", words))
    first = arguments[0] if arguments else "--help"
    if first not in ("-h", "--help"):
        if first.startswith("-"):
            raise SettingError(f"options follow the command, as in semaug train {first}; see semaug --help")
        similar = get_close_matches(first, COMMANDS, n=1)
        hint = f"did you mean semaug {similar[0]}? " if similar else ""
        raise SettingError(f"there is no command {shown(first)}; {hint}semaug --help lists all commands")
    with _wrapped_help():
        return cast(Command, general("--help"))


@contextmanager
def _wrapped_help() -> Iterator[None]:
    """Wrap the lines that tyro prints outside of its boxes, as a terminal does, also in a pipe or file."""
    if sys.stdout.isatty():
        yield
        return
    # with an encoding, by which tyro chooses the characters of its boxes
    text = io.TextIOWrapper(io.BytesIO(), sys.stdout.encoding or "utf-8", "backslashreplace")
    try:
        with redirect_stdout(text):
            yield
    finally:
        width = shutil.get_terminal_size().columns
        text.seek(0)
        for line in text.read().splitlines():
            if len(line) <= width:
                print(line)
            else:
                indent = "    " if line.startswith("usage: ") else ""
                words = re.sub(r",(?=\w)", ", ", line)  # the list of commands
                print(textwrap.fill(words, width, subsequent_indent=indent, break_on_hyphens=False))


@contextmanager
def _printable_errors() -> Iterator[None]:
    """Remove escape sequences from the messages of tyro, which could control the terminal."""
    errors = io.StringIO()
    try:
        with redirect_stderr(errors):
            yield
    finally:
        for line in errors.getvalue().splitlines():
            say(line)


def general(*arguments: str) -> Any:
    """Let tyro answer for all commands together, with the help or a script for a shell; it ends by SystemExit."""
    commands = {name: find_command(name) for name in COMMANDS}
    lines = {name: str(inspect.getdoc(kind)).split("\n\n")[0] for name, kind in commands.items()}
    union: Any = Union[  # noqa: UP007
        tuple(
            Annotated[grouped(kind), tyro.conf.subcommand(name, description=lines[name])]
            for name, kind in commands.items()
        )
    ]
    return tyro.cli(union, prog="semaug", description=DESCRIPTION, args=arguments, config=CONFIG)


def find_command(name: str) -> Any:
    return getattr(import_module(f"semaug.cli.{name}"), name.title())


if __name__ == "__main__":
    sys.exit(main())
