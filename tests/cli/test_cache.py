"""`semaug cache`: what training has decoded, for which data, and how to delete it."""

import os
import signal
from pathlib import Path

import pytest

from commands import OPTIONS, semaug_process
from forks import Fork, hold_lock
from photos import photo_folder
from semaug.cli.main import main
from semaug.util import locks


def test_the_cache_is_listed_and_cleared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos, cache = photo_folder(tmp_path / "photos", species=2, train=4, test=1), tmp_path / "cache"
    assert main(["cache", "--folder", str(cache)]) == 0
    assert capsys.readouterr().out == f"{cache}: 0 splits of data sets, 0.0 MB\n"
    command = ["train", "--data", str(photos), *OPTIONS, "--epochs", "1", "--output", str(tmp_path / "run")]
    assert main([*command, "--cache", str(cache)]) == 0
    capsys.readouterr()

    def listed(*options: str) -> list[str]:
        assert main(["cache", "--folder", str(cache), *options]) == 0
        return capsys.readouterr().out.splitlines()

    *lines, total = listed()
    assert {line.rpartition("  ")[2] for line in lines} >= {f"{photos}, train", f"{photos}, val"}
    assert all(line.strip().startswith("0.0 MB  last used 20") for line in lines)
    assert total.startswith(f"{cache}: ")
    for file in cache.iterdir():
        os.utime(file, (0, 0))
    assert all("19" in line for line in listed()[:-1])
    kept = next(cache.glob("*.npy"))
    os.utime(kept)
    assert "were deleted" in listed("--clear", "--unused-days", "1")[-1]
    assert list(cache.glob("*.npy")) == [kept]
    assert listed("--clear")[-1].endswith("were deleted")
    assert not [file for file in cache.iterdir() if file.suffix != ".lock"]
    assert main(["cache", "--unused-days", "-1"]) == 2
    assert "--unused-days must be from 0 to 1e+09" in capsys.readouterr().err


def test_a_damaged_cache_does_not_change_what_is_trained(tmp_path: Path) -> None:
    photos, cache = photo_folder(tmp_path / "photos", species=2, train=4, test=1), tmp_path / "cache"
    results = []
    for name in ("sound", "damaged"):
        files = sorted(cache.glob("*.npy"))
        for file in files:
            content = file.read_bytes()
            file.write_bytes(content[:5000] + bytes(byte ^ 0x80 for byte in content[5000:]))
        command = ["train", "--data", photos, *OPTIONS, "--epochs", "1", "--output", tmp_path / name, "--cache", cache]
        ended = semaug_process(*command)
        assert ended.returncode == 0, ended.stderr
        lines = [line for line in ended.stderr.splitlines() if "damaged" in line]
        assert sorted(lines) == [f"semaug: {file} was damaged; writing it again" for file in files]
        results.append((tmp_path / name / "model.safetensors").read_bytes())
    assert len(files) == 2
    assert results[0] == results[1]


def test_what_another_process_is_writing_is_not_deleted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    for letter in "ab":
        (cache / f"{letter * 32}.npy").write_bytes(b"0" * 2_000_000)
    monkeypatch.setattr(locks, "GRACE_SECONDS", 0.3)
    other = Fork(tmp_path / "log", hold_lock, cache, f"{'a' * 32}.lock", 300.0)
    try:
        other.wait_until(lambda: other.log.exists() and other.log.read_text() == "locked\n")
        assert main(["cache", "--folder", str(cache), "--clear"]) == 0
    finally:
        other.send(signal.SIGKILL)
        other.wait()
    assert [file.name for file in cache.glob("*.npy")] == [f"{'a' * 32}.npy"]
    assert "2.0 MB" in capsys.readouterr().out
