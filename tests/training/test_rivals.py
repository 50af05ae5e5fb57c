"""The rivals that need the network, and ISDA on top of rivals, in whole runs."""

from dataclasses import replace
from pathlib import Path

import pytest

from commands import OPTIONS
from photos import quick_config
from semaug.cli.main import main
from semaug.inference.runs import read_metrics
from semaug.studies.grid import Candidate, CompareConfig
from semaug.training.methods import Augmentation
from semaug.training.trainer import train
from semaug.util.errors import SettingError
from semaug.util.untrusted import read_json


@pytest.mark.parametrize("method", ["snapmix", "manifold-mixup"])
def test_an_epoch_by_the_command_line(photos: Path, tmp_path: Path, method: str) -> None:
    assert (
        main(
            [
                "train",
                *OPTIONS,
                "--method",
                method,
                "--data",
                str(photos),
                "--output",
                str(tmp_path / "run"),
                "--epochs",
                "1",
            ]
        )
        == 0
    )
    (row,) = read_metrics(tmp_path / "run")
    assert row["strength"] == 0
    assert row["augmentation_share"] == pytest.approx(0, abs=1e-6)
    assert read_json(tmp_path / "run" / "config.json")["method"] == method
    assert not (tmp_path / "run" / "source.safetensors").exists()


def test_compare_knows_them(photos: Path, tmp_path: Path) -> None:
    methods = (Candidate("snapmix"), Candidate("isda+manifold-mixup", {"strength": 4.0}))
    shared = quick_config(photos, tmp_path, epochs=1)
    config = CompareConfig(methods, ("small",), seeds=(0,), output=tmp_path, training=shared)
    config.check()
    snapmix, combined = (read_metrics(train(replace(run, epochs=1)))[0] for run in config.runs())
    assert "variance_mean" in snapmix
    assert combined["variance_mean"] > 0


@pytest.mark.parametrize("rival", ["cutmix", "randaugment", "snapmix"])
def test_isda_on_top_of_a_rival_augments(photos: Path, tmp_path: Path, rival: str) -> None:
    run = train(
        quick_config(
            photos, tmp_path / "run", method=f"isda+{rival}", epochs=2, augmentation=Augmentation(strength=20.0)
        )
    )
    rows = read_metrics(run)
    assert rows[1]["strength"] == 10.0
    assert rows[1]["variance_mean"] > 0
    assert rows[1]["augmentation_share"] > 0
    assert (run / "source.safetensors").is_file()


def test_settings_that_do_not_fit_are_one_sentence(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="`micro_batch` must be at least 2"):
        train(quick_config(photos, tmp_path / "run", method="snapmix", micro_batch=1))
