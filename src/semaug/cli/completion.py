"""`semaug completion`: shell completion of commands, options and their values."""

import io
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from semaug.cli.common import Command


@dataclass(frozen=True)
class Completion(Command):
    """Print a shell script that completes commands, options and their values.

    bash: semaug completion bash > ~/.local/share/bash-completion/completions/semaug

    zsh: semaug completion zsh > DIR/_semaug, where DIR is in $fpath

    fish: semaug completion fish > ~/.config/fish/completions/semaug.fish
    """

    shell: Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional]
    """bash, zsh or fish."""

    def run(self) -> None:
        from semaug.cli.main import general

        script = io.StringIO()
        with redirect_stdout(script), suppress(SystemExit):
            general("--tyro-print-completion", self.shell)
        # bash completes names of files itself, where there is nothing else to complete
        print(script.getvalue().replace("complete -F", "complete -o default -F"), end="")
