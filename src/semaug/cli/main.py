"""The entry point: dispatch to a command, exit codes, and how errors are printed."""

import os
import signal
import sys
from importlib import import_module
from typing import Annotated, Any, Union, cast

import tyro

from semaug import __version__
from semaug.cli.common import Command, say, with_flags
from semaug.util import distributed
from semaug.util.errors import SemaugError, SettingError
from semaug.util.signals import Stop

COMMANDS = (
    "demo", "train", "evaluate", "predict", "export", "serve", "report", "figures", "data", "bench", "compare",
    "reproduce",
)  # fmt: skip
"""Names of the commands, in the order of the help. Command NAME is the class Name of the module semaug.cli.NAME."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: The words after `semaug`; None for those of this process.

    Returns:
        The exit code: 0; 1 if the reader of the output closed it; 2 after an error of the user; 128 + the number of the
        signal that ended the command.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments == ["--version"]:
        print(f"semaug {__version__}")
        return 0
    command: Command | None = None
    try:
        command = _parse(arguments)
        if distributed.is_launched() and not command.distributed:
            raise SettingError("several processes under torchrun are for semaug train only", on_all_ranks=True)
        with Stop():
            command.run()
        sys.stdout.flush()
    except SemaugError as error:
        if distributed.is_rank_zero() or not error.on_all_ranks:
            say(f"semaug: {with_flags(str(error), command)}")
        return 2
    except BrokenPipeError:  # the reader has closed the output; the interpreter must not flush into it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt as interruption:
        if distributed.is_rank_zero():
            how = "; run the same command again to resume" if command is not None and command.resumable else ""
            say(f"semaug: {str(interruption) or 'interrupted'}{how}")
        return 128 + getattr(interruption, "number", signal.SIGINT)
    return 0


def _parse(arguments: list[str]) -> Command:
    """Read the options. Only the module of the named command is imported, all of them for the general help."""
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes)
    if arguments and arguments[0] in COMMANDS:
        name, *options = arguments
        return cast(Command, tyro.cli(_command(name), prog=f"semaug {name}", args=options, config=config))
    subcommands = tuple(Annotated[_command(name), tyro.conf.subcommand(name)] for name in COMMANDS)
    description = "Fine-grained image recognition with learnable semantic data augmentation."
    union: Any = Union[subcommands]  # noqa: UP007
    return cast(Command, tyro.cli(union, prog="semaug", description=description, args=arguments, config=config))


def _command(name: str) -> Any:
    return getattr(import_module(f"semaug.cli.{name}"), name.title())


if __name__ == "__main__":
    sys.exit(main())
