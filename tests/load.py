"""Memory of the command line on many images of many classes, and of many half steps; many uploads at once.

`python tests/load.py` uses 50 000 images of 2 000 classes and prints a table; a shorter form is in test_load.py.
"""

import gc
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from semaug.meta.learner import LearnableAugmentation, Order
from semaug.report.serve.app import CONNECTIONS
from tiny import TinyNet

MB = 1e6
RESIZE, CROP = 36, 32
PER_NAME = 1_000  # bytes that an image may cost besides its pixels: its path, label and digest
PROCESSES = 3  # that hold the names: the command and its two workers
STREAMED = 30 * MB  # that `predict` may need more for many files than for a tenth of them
UPLOADS = 200  # at once, all of which are answered
GROWTH = 4 * MB  # of a process between 500 and 2000 half steps
TRAINING = ["--model", "small", "--pretrained", "False", "--epochs", "1", "--batch-size", "64"]
TRAINING += ["--resize", str(RESIZE), "--crop", str(CROP), "--lr", "0.01"]


@dataclass(frozen=True)
class Size:
    """Numbers of images."""

    classes: int
    train: int  # images of each class
    test: int

    @property
    def images(self) -> int:
        return self.classes * (self.train + self.test)


@dataclass(frozen=True)
class Used:
    """Time and memory of a command."""

    seconds: float
    own: int  # most bytes of it and its workers together, without file pages, which the kernel may drop
    largest: int  # most bytes of one of its processes, those of libraries and of the cache of images included


WHOLE, LITTLE = Size(2_000, 20, 5), Size(20, 20, 5)  # enough for all processes to start


def image_folder(root: Path, size: Size) -> Path:
    """root/train/CLASS/N.png and root/test/CLASS/N.jpg: noise of 32 to 40 pixels around a colour for each class."""
    chance = np.random.default_rng(0)
    for label in range(size.classes):
        colour = chance.integers(40, 216, 3)
        for split, count, suffix in (("train", size.train, "png"), ("test", size.test, "jpg")):
            folder = root / split / f"class_{label:04}"
            folder.mkdir(parents=True)
            for i in range(count):
                height, width = chance.integers(32, 41, 2)
                pixels = (colour + chance.integers(-40, 40, (height, width, 3))).astype(np.uint8)
                image = Image.fromarray(pixels)
                image.save(folder / f"{i}.{suffix}", **({"compress_level": 1} if suffix == "png" else {}))
    return root


def flat_folder(root: Path, images: Path, count: int) -> Path:
    """A folder of links to so many of the images."""
    root.mkdir()
    for i, file in zip(range(count), sorted(images.rglob("*.*")), strict=False):
        os.link(file, root / f"{i:05}{file.suffix}")
    return root


def run(*command: str | Path) -> Used:
    """Run the command line in a process of its own to its end."""
    started, own = time.monotonic(), 0
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "semaug", *map(str, command)], stdout=said, stderr=said, env=environment
        )
        while True:
            ended, status, used = os.wait4(process.pid, os.WNOHANG)
            if ended:
                break
            own = max(own, sum(_own(pid) for pid in _family(process.pid)))
            time.sleep(0.05)
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        assert process.returncode == 0, said.read()
    return Used(time.monotonic() - started, own, used.ru_maxrss * 1024)


def _family(pid: int) -> Iterator[int]:
    """A process and all that descend from it."""
    yield pid
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return
    for child in children:
        yield from _family(child)


def _own(pid: int) -> int:
    """Memory of a process that is not backed by files; of shared memory, its part."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


# ------------------------------------------------------------------------------------------------------- the commands


def check_used(images: Path) -> Used:
    return run("data", "check", images)


def train_used(images: Path, output: Path, method: str) -> Used:
    cache = output.with_suffix(".cache")
    return run("train", "--data", images, "--output", output, "--cache", cache, "--method", method, *TRAINING)


def predict_used(model: Path, images: Path, output: Path) -> Used:
    return run("predict", model, images, "--output", output)


def names_bound(size: Size) -> float:
    return PER_NAME * size.images


def training_bound(size: Size) -> float:
    """All decoded pixels, and the names."""
    return size.images * RESIZE * RESIZE * 3 + PROCESSES * names_bound(size)


# ------------------------------------------------------------------------------------------------------------ uploads


def uploads(model: Path, photo: bytes, count: int) -> None:
    """Send so many uploads to `semaug serve` at once; all that it accepts are answered, and only the rest refused."""
    command = [sys.executable, "-m", "semaug", "serve", str(model), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert server.stdout is not None
    address = re.match(r"http://127\.0\.0\.1:(\d+)/", server.stdout.readline())
    assert address is not None
    started, connections = time.monotonic(), list[socket.socket]()
    request = f"POST /answer HTTP/1.1\r\nhost: 127.0.0.1:{address[1]}\r\ncontent-length: {len(photo)}\r\n\r\n".encode()
    for _ in range(count):
        connections.append(socket.create_connection(("127.0.0.1", int(address[1])), timeout=600))
        connections[-1].sendall(request + photo)
    statuses = Counter(connection.recv(1 << 16).decode(errors="replace")[9:12] for connection in connections)
    seconds, largest = time.monotonic() - started, _peak(server.pid)
    for connection in connections:
        connection.close()
    server.send_signal(signal.SIGINT)
    asked = time.monotonic()
    server.wait(60)
    print(
        f"{count} uploads at once: {dict(statuses)} in {seconds:.1f} s, server {largest / MB:.0f} MB, "
        f"ended after {time.monotonic() - asked:.1f} s",
        flush=True,
    )
    assert statuses["200"] >= min(count, CONNECTIONS)
    assert statuses["200"] + statuses["503"] == count


def _peak(pid: int) -> int:
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


# --------------------------------------------------------------------------------------------------------- half steps


def resident() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def live_tensors() -> int:
    """Number of tensors."""
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def half_steps(order: Order, marks: tuple[int, ...]) -> list[tuple[int, int]]:
    """Tensors and memory of this process after so many half steps of the meta loop."""
    torch.manual_seed(0)
    model = TinyNet(classes=10, width=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    learner = LearnableAugmentation(model, optimizer, order=order, frozen_blocks=1, strength=10.0)
    marked = []
    for done in range(2, marks[-1] + 1, 2):
        learner.step(torch.randn(16, 3, 32, 32), torch.randint(10, (16,)))
        if done in marks:
            marked.append((live_tensors(), resident()))
    return marked


# --------------------------------------------------------------------------------------------------------- everything


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        commands(Path(name), WHOLE)
    for order in ("paper", "pipelined"):
        (tensors, memory), (tensors_after, memory_after) = half_steps(order, (500, 2000))
        grown = memory_after - memory
        print(
            f"half steps, {order}: {tensors} tensors and {memory / MB:.0f} MB after 500, {grown / MB:+.1f} MB by 2000"
        )
        assert tensors_after == tensors
        assert grown < GROWTH


def commands(folder: Path, size: Size) -> None:
    """Each command on so many images, and on a hundredth; the difference must be within the bound."""
    images, few = image_folder(folder / "images", size), image_folder(folder / "few", LITTLE)
    print(f"{size.images} images of {size.classes} classes", flush=True)
    hold("data check", check_used(images), check_used(few), PROCESSES * names_bound(size))
    for method in ("isda", "learnable"):
        output = folder / method
        used, base = train_used(images, output, method), train_used(few, folder / f"few-{method}", method)
        hold(f"train, {method}", used, base, training_bound(size))
        for file in ("report.html", "evaluation.json", "samples.json"):
            print(f"    {file} {(output / file).stat().st_size / MB:.2f} MB")
    many, tenth = size.images // 5, size.images // 50
    several = {count: flat_folder(folder / f"flat-{count}", images, count) for count in (many, tenth)}
    used = {count: predict_used(folder / "isda", several[count], folder / f"{count}.csv") for count in several}
    hold(f"predict {many} instead of {tenth} files", used[many], used[tenth], STREAMED)
    assert len((folder / f"{many}.csv").read_text().splitlines()) == 1 + many
    photo = next((images / "test").rglob("*.jpg")).read_bytes()
    for count in (UPLOADS, CONNECTIONS + 100):
        uploads(folder / "few-isda", photo, count)


def hold(what: str, used: Used, base: Used, bound: float) -> None:
    """Print what a command used, and fail if it is too much."""
    grown = max(used.own - base.own, used.largest - base.largest)
    print(
        f"{what}: {used.seconds:.0f} s, {used.own / MB:.0f} MB of its own (few: {base.own / MB:.0f}), "
        f"largest process {used.largest / MB:.0f} MB (few: {base.largest / MB:.0f}): "
        f"grown by {grown / MB:.0f} of at most {bound / MB:.0f} MB",
        flush=True,
    )
    assert grown < bound, what


if __name__ == "__main__":
    # A shell ignores it for what it runs in the background, and the servers that are started here would too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
