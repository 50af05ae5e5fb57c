"""Progress of a run, the schedule of learning rates, and settings as they are written."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from algorithm1 import Released
from semaug.training.optimization import cosine_schedule
from semaug.training.settings import TrainConfig, identifying
from semaug.training.state import EpochState, TrainingState


def test_a_state_survives_a_checkpoint() -> None:
    within = EpochState(18, step=2, seconds=1.5, lr=0.1, generator=torch.Generator().get_state())
    within.add([{"accuracy": 0.5, "train_loss": 1.0}])
    state = TrainingState(epoch=3, within=within, metrics=[{"epoch": 1}], best=0.5, best_epoch=2, warned=True)
    content = state.to_checkpoint()
    restored = TrainingState.from_checkpoint({**content, "model": {}})
    assert restored.within is not None
    assert torch.equal(restored.within.generator, within.generator)
    assert restored.to_checkpoint().keys() == content.keys()
    restored.within.generator = within.generator = None
    assert restored == state
    assert TrainingState.from_checkpoint(TrainingState().to_checkpoint()) == TrainingState()
    with pytest.raises(KeyError):
        TrainingState.from_checkpoint({"epoch": 1})


def test_means_leave_out_what_is_not_finite_and_the_gradient() -> None:
    within = EpochState(18)
    within.add([{"accuracy": 0.25, "train_loss": 1.0, "gradient_norm": 3.0}, {"accuracy": 0.5, "train_loss": math.inf}])
    within.add([{"accuracy": 0.75, "train_loss": 2.0, "meta_loss": 1 / 3}])
    assert within.means() == {"train_loss": 1.5, "meta_loss": 0.333333, "train_accuracy": 0.5}


def test_the_first_of_equally_good_epochs_is_the_best() -> None:
    state = TrainingState(within=EpochState(18))
    assert [
        state.complete_epoch({"epoch": i + 1, "val_top1": top1}) for i, top1 in enumerate((0.0, 0.5, 0.5, 0.4))
    ] == [
        True,
        True,
        False,
        False,
    ]
    assert (state.epoch, state.within, state.best, state.best_epoch) == (4, None, 0.5, 2)


def test_an_epoch_without_validation_or_with_one_that_is_not_finite_is_never_the_best() -> None:
    state = TrainingState(within=EpochState(18))
    assert not state.complete_epoch({"epoch": 1})
    assert not state.complete_epoch({"epoch": 2, "val_top1": 0.9, "val_not_finite": 1})
    assert state.complete_epoch({"epoch": 3, "val_top1": 0.0})
    assert (state.epoch, state.best, state.best_epoch) == (3, 0.0, 3)


def test_the_learning_rate_warms_up_and_decays_to_zero() -> None:
    assert cosine_schedule(0, 100, 5) == pytest.approx(0.0002)
    assert cosine_schedule(2.5, 100, 5) == pytest.approx(0.5, abs=1e-3)
    assert cosine_schedule(5, 100, 5) == 1
    assert cosine_schedule(52.5, 100, 5) == pytest.approx(0.5)
    assert cosine_schedule(100, 100, 5) == pytest.approx(0)
    assert cosine_schedule(0.1, 1, 5) == 1, "the warm-up takes at most a tenth"
    assert cosine_schedule(0, 10, 0) == 1
    assert cosine_schedule(0, 10, 1e-4) == cosine_schedule(0.0999, 1, 5) == 1, "the rate never exceeds the given one"


def test_settings_survive_json_and_say_which_of_them_identify_a_run() -> None:
    settings = TrainConfig(output=Path("runs") / "a", weights=Path("w.pth")).to_json()
    assert json.loads(json.dumps(settings)) == settings
    assert (settings["output"], settings["weights"], settings["augmentation"]["depth"]) == ("runs/a", "w.pth", 1)
    assert {"data", "model", "weights", "method", "augmentation", "seed", "precision"} <= identifying()
    assert not {"output", "workers", "device", "images_on", "track", "resume", "cache"} & identifying()


def test_the_schedule_is_the_released_one_but_for_the_first_steps() -> None:
    """The release counts one step more in the warm-up; after it both are the same."""
    released = Released(nn.Linear(1, 1), "", nn.Linear(1, 1), 1.0, 1.0, 1.0, epochs=100, warmup_epochs=5, batches=47)
    steps = [(epoch, batch) for epoch in range(100) for batch in range(47)]
    differences = [
        abs(cosine_schedule(epoch + batch / 47, 100, 5) - released.rate_factor(epoch, batch)) for epoch, batch in steps
    ]
    print(f"largest difference: in the warm-up {max(differences[:235]):.4f}, after it {max(differences[235:]):.0e}")
    assert max(differences[:235]) < 0.005
    assert max(differences[235:]) < 1e-12
    assert cosine_schedule(52.9, 100, 5, "epoch") == cosine_schedule(52, 100, 5)
    assert cosine_schedule(2.5, 100, 5, "epoch") == cosine_schedule(2.5, 100, 5)
