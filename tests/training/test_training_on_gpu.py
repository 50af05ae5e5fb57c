"""What only a GPU can show of the trainer: batches prepared ahead without waiting, and checkpoints from a snapshot."""

from pathlib import Path
from typing import Any

import pytest
import torch

from photos import quick_config
from semaug.data.augmentation import PLAIN
from semaug.data.samples import embedded_birds
from semaug.inference.runs import read_metrics
from semaug.training import batches, checkpoints
from semaug.training.batches import Batches, PixelLoader
from semaug.training.methods import Augmentation
from semaug.training.state import EpochState
from semaug.training.trainer import train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
QUICK: dict[str, Any] = {"device": "cuda", "precision": "fp32", "epochs": 2, "method": "isda"}


@pytest.mark.parametrize("images_on", ["gpu", "ram", "stream"])
def test_batches_prepared_ahead_are_the_same(monkeypatch: pytest.MonkeyPatch, images_on: str) -> None:
    settings = quick_config(Path("photos"), Path("run"), **QUICK).resolve()
    samples = embedded_birds().splits["train"]
    preprocessing = settings.preprocessing
    pixels = torch.randint(256, (len(samples), preprocessing.resize, preprocessing.resize, 3), dtype=torch.uint8)
    images = {"gpu": pixels.cuda(), "ram": pixels, "stream": samples}[images_on]
    loader = PixelLoader(preprocessing, torch.device("cuda"), 0)
    made = Batches(images, samples, PLAIN, settings, loader)

    def inputs() -> list[tuple[torch.Tensor, torch.Tensor]]:
        collected = []
        with made.remaining(0, EpochState(len(samples))) as steps:
            for crops, labels, _ in steps:
                torch.cuda._sleep(3_000_000)  # the work of a step, behind which batches would be overwritten
                collected.append((crops.clone(), labels.clone()))
        return collected

    ahead = inputs()
    monkeypatch.setattr(batches, "prefetched", lambda inputs, device: inputs)
    for one, other in zip(ahead, inputs(), strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


@pytest.mark.parametrize("images_on", ["gpu", "ram"])
def test_the_host_does_not_wait_for_the_gpu_when_it_prepares_a_batch(images_on: str) -> None:
    settings = quick_config(Path("photos"), Path("run"), **QUICK).resolve()
    samples = embedded_birds().splits["train"]
    side = settings.preprocessing.resize
    pixels = torch.zeros(len(samples), side, side, 3, dtype=torch.uint8)
    loader = PixelLoader(settings.preprocessing, torch.device("cuda"), 0)
    made = Batches(pixels.cuda() if images_on == "gpu" else pixels, samples, PLAIN, settings, loader)
    with made.remaining(0, EpochState(len(samples))) as steps:
        next(steps)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                next(steps)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_snapshot_is_not_changed_by_work_that_follows() -> None:
    weight = torch.full((4096, 4096), 1.0, device="cuda")
    copy = checkpoints.snapshot({"weight": weight, "row": weight[3]})
    weight.zero_()
    torch.cuda.synchronize()
    assert copy["weight"].device.type == "cpu"
    assert bool((copy["weight"] == 1).all())
    assert copy["row"].data_ptr() == copy["weight"][3].data_ptr()


def test_a_run_is_the_same_with_images_on_the_gpu_and_in_ram(photos: Path, tmp_path: Path) -> None:
    runs = [train(quick_config(photos, tmp_path / place, images_on=place, **QUICK)) for place in ("gpu", "ram")]
    for one, other in zip(*map(read_metrics, runs), strict=True):
        for name in ("train_loss", "val_loss"):
            assert one[name] == pytest.approx(other[name], rel=1e-3)


def test_many_epochs_have_the_same_numbers_with_and_without_graphs(photos: Path, tmp_path: Path) -> None:
    """More epochs than torch has streams: none may be used for two purposes."""
    rows = []
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        for graphs in (False, True):
            options = {**QUICK, "epochs": 34, "graphs": graphs, "augmentation": Augmentation("auto")}
            rows.append(read_metrics(train(quick_config(photos, tmp_path / f"graphs-{graphs}", **options))))
    for one, other in zip(*rows, strict=True):
        numbers = [name for name in one if "second" not in name]
        assert {name: one[name] for name in numbers} == {name: other[name] for name in numbers}
