"""Atomic writes and size-limited JSON reads."""

import io
import os
import subprocess
from pathlib import Path

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from semaug.util.errors import FileError
from semaug.util.files import leftovers, refuse_foreign, write_atomically, write_json, write_page, write_picture


def test_content_is_written_and_the_old_file_can_be_kept(tmp_path: Path) -> None:
    path, kept = tmp_path / "new" / "file", tmp_path / "new" / "kept"
    write_atomically(path, b"one", memoryview(b"two"), keep=kept)
    assert (path.read_bytes(), kept.exists()) == (b"onetwo", False)
    write_atomically(path, b"three", keep=kept)
    assert (path.read_bytes(), kept.read_bytes()) == (b"three", b"onetwo")
    assert sorted(os.listdir(path.parent)) == ["file", "kept"]


def test_a_failed_write_leaves_the_old_content_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileError, match=r"^cannot write .*file: No space left on device$"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_only_the_files_of_killed_writers_are_leftovers(tmp_path: Path) -> None:
    gone = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True).stdout.strip()
    for name in (f".a.json.{gone}.part", f".b.json.{os.getppid()}.part", ".c.json.part", f"d.{gone}.part"):
        (tmp_path / name).touch()
    assert [file.name for file in leftovers(tmp_path)] == [f".a.json.{gone}.part"]


def test_neither_devices_nor_files_of_another_kind_are_replaced(tmp_path: Path) -> None:
    pipe, photo = tmp_path / "pipe", tmp_path / "photo.png"
    os.mkfifo(pipe)
    with pytest.raises(FileError, match="pipe: it is not a regular file"):
        write_atomically(pipe, b"content")
    assert pipe.is_fifo()
    for folder in (Path(""), Path("/"), tmp_path):  # an empty variable of a script is the first
        with pytest.raises(FileError, match="cannot write .*: it is a folder"):
            write_atomically(folder, b"content")
    photo.write_bytes(b"\x89PNG")
    with pytest.raises(FileError, match="photo.png exists and is another kind of file, which would be lost"):
        refuse_foreign(photo, b"path,", b"{")
    for content in (b"", b"path,label", b"{}"):
        photo.write_bytes(content)
        refuse_foreign(photo, b"path,", b"{")
    refuse_foreign(tmp_path / "new", b"path,")
    with pytest.raises(FileError, match="photo.png exists and is another kind of file, which would be lost"):
        refuse_foreign(tmp_path / "new", b"path,", beside=[photo])
    (tmp_path / "new").write_bytes(b"path,label")
    refuse_foreign(tmp_path / "new", b"path,", beside=[photo])


def test_a_page_that_was_edited_is_not_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for text in ("# First", "# Second\n", "# Second\n"):
        write_page(page, text)
        assert page.read_text().startswith(f"{text}<!-- ")
    own = page.read_text()
    for edited in (own.replace("Second", "My"), f"{own}My notes.\n", f"{own}{own}", own[:-1], "# Second\n"):
        page.write_text(edited)
        with pytest.raises(FileError, match="page.md (was edited|exists and is another kind of file).* would be lost"):
            write_page(page, "# Third\n")
        assert page.read_text() == edited
    for fine in (own, ""):
        page.write_text(fine)
        write_page(page, "# Second\n")
        assert page.read_text() == own


def test_a_picture_that_was_edited_or_is_not_ours_is_not_replaced(tmp_path: Path) -> None:
    def drawn(colour: str) -> bytes:
        content = io.BytesIO()
        Image.new("RGB", (9, 9), colour).save(content, "png")
        return content.getvalue()

    picture = tmp_path / "cam.png"
    for colour in ("red", "blue", "blue"):
        write_picture(picture, drawn(colour))
        with Image.open(picture) as opened:  # which checks the checksums of all chunks
            assert opened.convert("RGB").getpixel((4, 4)) == {"red": (255, 0, 0), "blue": (0, 0, 255)}[colour]
    own = picture.read_bytes()
    with Image.open(picture) as opened:
        notes, saved_again = PngInfo(), io.BytesIO()
        for name, text in opened.text.items():
            notes.add_text(name, text)
        opened.transpose(Image.Transpose.ROTATE_90).convert("L").save(saved_again, "png", pnginfo=notes)
    for mine in (saved_again.getvalue(), drawn("green"), own + own, own + b"x", own[:-1], b"mine"):
        picture.write_bytes(mine)
        with pytest.raises(FileError, match="cam.png (was edited|exists and is another kind of file).* would be lost"):
            write_picture(picture, drawn("red"))
        assert picture.read_bytes() == mine
    for fine in (own, b""):
        picture.write_bytes(fine)
        write_picture(picture, drawn("blue"))
        assert picture.read_bytes() == own


def test_a_name_that_is_not_text_is_not_written_to_json(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="is not UTF-8"):
        write_json(tmp_path / "a.json", {"data": "photos\udcff"})
    assert not any(tmp_path.iterdir())
    write_json(tmp_path / "a.json", {"data": "\U0001f426 \\ud800"})  # a pair of surrogates, and a backslash
    assert (tmp_path / "a.json").is_file()
