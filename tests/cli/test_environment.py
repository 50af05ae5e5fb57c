"""The command line where a shell, a terminal or a system is odd: a result or one sentence, and never a traceback."""

import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import forks
from forks import Fork
from photos import photo_folder
from semaug import __version__
from semaug.cli.main import main
from semaug.cli.train import Train
from semaug.util import distributed
from semaug.util.errors import SettingError, TrainingError
from several import free_port


def semaug(*arguments: object, stdout: Any = subprocess.PIPE, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **options.pop("env", {})}
    command = [sys.executable, "-m", "semaug", *map(str, arguments)]
    return subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=300, env=environment, **options
    )


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos; the name of a class is not ASCII, and that of another one would clear a terminal."""
    folder = photo_folder(tmp_path_factory.mktemp("photos"), train=2, test=1)
    for split in ("train", "test"):
        first, second, *_ = sorted((folder / split).iterdir())
        first.rename(folder / split / "Blåhake")
        second.rename(folder / split / "\x1b[2JWren")
    return folder


def test_a_full_disk_behind_standard_output_is_one_sentence(photos: Path, tmp_path: Path) -> None:
    process = Fork(tmp_path / "log", forks.semaug, ["data", "check", str(photos)], "/dev/full")
    code, errors = process.wait()
    assert code == 2
    assert re.fullmatch(r"semaug: .+: No space left on device\n", errors)


def test_standard_output_may_be_closed(photos: Path) -> None:
    result = semaug("data", "check", photos, "--workers", 0, preexec_fn=lambda: os.close(1))
    assert (result.returncode, result.stderr) == (0, "")


def test_names_are_read_and_cannot_control_the_terminal_in_an_ascii_locale(photos: Path) -> None:
    ascii_locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    result = semaug("data", "check", photos, "--workers", 0, env=ascii_locale, encoding="utf-8")
    assert (result.returncode, result.stderr) == (0, "")
    assert "Blåhake (2)" in result.stdout
    assert r"\x1b[2JWren (2)" in result.stdout
    assert "\x1b" not in result.stdout


def test_any_encoding_of_standard_output_will_do(photos: Path) -> None:
    result = semaug("data", "check", photos, "--workers", 0, env={"PYTHONIOENCODING": "ascii", "MPLBACKEND": "none"})
    assert result.returncode == 0, result.stderr
    assert "\\xd7" in result.stdout  # as in 2 × 2 px
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("columns", [1, 4])
def test_the_help_fits_any_terminal(columns: int, tmp_path: Path) -> None:
    process = Fork(tmp_path / "log", forks.semaug, ["report", "--help"], environment={"COLUMNS": str(columns)})
    code, shown = process.wait()
    assert code == 0
    assert "usage: semaug report" in shown


def test_too_few_open_files_are_one_sentence(photos: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (12, 12))

    result = semaug("data", "check", photos, preexec_fn=limit)
    assert result.returncode == 2
    assert result.stderr == "semaug: the system refuses an operation: Too many open files\n"


def test_a_current_folder_that_was_deleted_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    result = semaug("--version", cwd=tmp_path / "gone", preexec_fn=(tmp_path / "gone").rmdir)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "semaug: the current folder was deleted or replaced; change to one that exists\n"


@pytest.mark.parametrize("gigabytes", [1, 2])
def test_too_little_memory_for_pytorch_is_one_sentence(gigabytes: int) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (gigabytes * 10**9,) * 2)

    result = semaug("--version", preexec_fn=limit)
    assert (result.returncode, result.stdout) in ((2, ""), (0, f"semaug {__version__}\n"))
    pattern = r"(semaug: PyTorch cannot be loaded \([^\n]+\); is memory limited \(ulimit -v\)\?\n)?"
    assert re.fullmatch(pattern, result.stderr)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("can't start new thread"),
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        RuntimeError("could not create a primitive"),
        ImportError("libscipy.so: failed to map segment from shared object"),
    ],
)
def test_too_little_memory_for_a_command_is_one_sentence(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: Train) -> None:
        raise error

    monkeypatch.setattr(Train, "run", fail)
    assert main(["train"]) == 2
    assert re.fullmatch(r"semaug: there is not enough memory( on the GPU)?\n", capsys.readouterr().err)


def test_a_cache_that_cannot_be_written_is_one_sentence(photos: Path, tmp_path: Path) -> None:
    options = ["--model", "small", "--pretrained", "False", "--resize", "40", "--crop", "32"]
    command = ["train", "--data", str(photos), "--output", str(tmp_path / "run"), *options]
    code, errors = Fork(tmp_path / "log", forks.semaug, command, environment={"HOME": "/proc"}).wait()
    assert code == 2
    *_, last = errors.splitlines()
    assert last.startswith("semaug: cannot write to /proc/.cache/semaug: No such file or directory; choose")


@pytest.mark.parametrize(
    "command",
    [
        "cache --folder PATH",
        "train --model small --pretrained False --data DATA --cache PATH",
        "train --config PATH",
        "train --dry-run --cache PATH",
    ],
)
def test_a_home_folder_that_nobody_knows_is_one_sentence(
    command: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # for the output of train
    path = "~no-such-user/semaug"
    assert main([{"PATH": path, "DATA": str(photos)}.get(word, word) for word in command.split()]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line == f"semaug: the home folder of {path} is unknown: set HOME, or write the whole path"
    assert not list(tmp_path.glob("~*"))


def test_paths_that_are_too_long_are_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for path in ("x" * 300, "/".join(["x" * 200] * 30)):
        for command in (["data", "check", path], ["evaluate", path], ["report", path]):
            assert main(command) == 2
            [line] = capsys.readouterr().err.splitlines()
            assert line.startswith("semaug: ")


def test_folders_deeper_than_paths_reach_are_one_sentence(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(photos, tmp_path / "photos")
    (tmp_path / "photos" / "train" / "deep").mkdir()
    here = os.open(tmp_path / "photos" / "train" / "deep", os.O_RDONLY)
    for _ in range(700):
        os.mkdir("abcdef", dir_fd=here)
        inner = os.open("abcdef", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    output = str(tmp_path / "output")
    for command in (["data", "check"], ["data", "shards"], ["train", "--output", output, "--data"]):
        words = [*command, str(tmp_path / "photos"), *([output] if command[1] == "shards" else [])]
        assert main(words) == 2
        *_, line = capsys.readouterr().err.splitlines()
        assert re.fullmatch(r"semaug: cannot read the data '.*': File name too long \('.{99}…'\)", line)
    subprocess.run(["rm", "-rf", tmp_path / "photos"], check=True)  # pytest cannot


ESCAPE = "\x1b[2J"


@pytest.mark.parametrize(
    "command",
    [
        "ESC", "train --model ESC", "train --model torchvision/ESC", "train --data ESC", "train --epochs ESC",
        "train --ESC", "train --device ESC", "evaluate ESC", "predict ESC ESC", "report ESC", "export ESC ESC",
        "serve ESC", "soup ESC ESC --output ESC", "figures ESC", "figures tsne ESC", "bench --model ESC",
        "compare --method ESC", "reproduce ESC", "weights ESC", "completion ESC", "cache --folder ESC",
        "data check ESC", "data check table.csv", "data split ESC --output ESC.csv", "data check --json ESC/ESC ESC",
    ],
)  # fmt: skip
def test_what_a_user_names_cannot_control_the_terminal(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("table.csv").write_text(f"path,label,split\nx.png,a,{ESCAPE}\n")
    assert main(command.replace("ESC", ESCAPE).split()) == (0 if command.startswith("cache") else 2)
    shown = capsys.readouterr()
    assert r"\x1b[2J" in shown.out + shown.err
    assert "\x1b" not in shown.out + shown.err


# ---------------------------------------------------------------------------------------------------- several processes


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"RANK": "x"}, "the environment variable RANK is 'x' and not a number; use torchrun"),
        ({"WORLD_SIZE": "-2"}, "the environment variable WORLD_SIZE is '-2' and not a number; use torchrun"),
        ({"LOCAL_RANK": "x"}, "the environment variable LOCAL_RANK is 'x' and not a number; use torchrun"),
        ({"MASTER_PORT": "0"}, "the environment variable MASTER_PORT is not from 1 to 65535; use torchrun"),
        ({"MASTER_PORT": "65536"}, "the environment variable MASTER_PORT is not from 1 to 65535; use torchrun"),
        ({"RANK": "2"}, "the environment variable RANK is not below WORLD_SIZE; use torchrun"),
    ],
)
def test_a_wrong_environment_is_one_sentence(
    changes: dict[str, str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launched(monkeypatch, **changes)
    with pytest.raises(SettingError):
        distributed.is_launched()
    assert main(["train"]) == 2
    assert capsys.readouterr().err == f"semaug: {sentence}\n"


def launched(monkeypatch: pytest.MonkeyPatch, **changes: str) -> dict[str, str]:
    """Set the environment of the first of two processes, and return it."""
    port = str(free_port())
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **changes}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return environment


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_process_that_is_alone_ends_in_one_sentence(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, RANK=rank)
    assert distributed.START_SECONDS <= 60
    monkeypatch.setattr(distributed, "START_SECONDS", 1)
    with pytest.raises(TrainingError, match="not all of the 2 processes connected to '127.0.0.1:.*' within 1 seconds"):
        distributed.initialize("cpu")


def test_a_rendezvous_that_keeps_no_limit_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's does not, if it cannot resolve the name of the machine."""
    launched(monkeypatch)
    ended = threading.Event()
    monkeypatch.setattr(
        sys.modules["torch.distributed.rendezvous"], "rendezvous", lambda *_, **__: iter(ended.wait, None)
    )
    monkeypatch.setattr(distributed, "START_SECONDS", 0)
    monkeypatch.setattr(distributed, "GRACE_SECONDS", 0.1)
    try:
        with pytest.raises(TrainingError, match="not all of the 2 processes connected to"):
            distributed.initialize("cpu")
    finally:
        ended.set()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_waits_for_others_obeys_signals(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment = launched(monkeypatch)

    def is_waiting() -> bool:
        try:
            socket.create_connection(("127.0.0.1", int(environment["MASTER_PORT"]))).close()
        except OSError:
            return False
        return True

    command = ["train", "--output", str(tmp_path / "run")]
    process = Fork(tmp_path / "log", forks.semaug, command, environment=environment)
    process.wait_until(is_waiting)
    process.send(number)
    code, errors = process.wait()
    assert code == 128 + number
    assert errors.splitlines()[-1].startswith(f"semaug: stopped by {number.name}")


@pytest.mark.parametrize(("rank", "prints"), [("0", True), ("1", True), ("2", False)])
def test_if_the_first_process_is_killed_the_second_says_so(
    rank: str, prints: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lose(self: Any) -> None:
        raise TrainingError("another process has ended", on_all_ranks=True) from distributed.PeerLostError("gone")

    launched(monkeypatch, RANK=rank, WORLD_SIZE="3")
    monkeypatch.setattr(Train, "run", lose)
    assert main(["train"]) == 2
    assert capsys.readouterr().err == ("semaug: another process has ended\n" if prints else "")
