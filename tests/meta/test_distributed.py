"""Several processes do what one does on the same global batch."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ranks
import semaug
from forks import run_ranks
from scripts import scaling
from semaug.meta.updates import MicroBatch
from semaug.network import Network
from semaug.util import distributed


@pytest.fixture(scope="module", params=[2, 4], ids=["2 processes", "4 processes"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of several processes found."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(request.param, folder, ranks.main, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(request.param)]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """The same cases in this process, on the whole batches."""
    return {name: ranks.trained(case) for name, case in ranks.cases_for(2).items()}


def assert_equal(first: dict[str, Tensor], second: dict[str, Tensor], name: str) -> None:
    assert all(torch.equal(value, second[key]) for key, value in first.items()), name


def test_several_processes_equal_one_on_the_same_global_batches(
    found: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    worst, worst_metric = 0.0, 0.0
    names = ranks.cases_for(len(found))
    for name in names:
        (state, metrics), (ours, our_metrics) = alone[name], found[0]["cases"][name]
        for other in found[1:]:
            assert_equal(ours, other["cases"][name][0], name)
            assert other["cases"][name][1] == our_metrics, name
        error = max(float((ours[key] - value).abs().max()) for key, value in state.items())
        assert error < 1e-9, f"{name}: parameters differ by {error:.1e}"
        assert our_metrics == pytest.approx(metrics, rel=1e-8, abs=1e-8), name
        worst, worst_metric = (
            max(worst, error),
            max(worst_metric, *(abs(our_metrics[k] - v) for k, v in metrics.items())),
        )
    print(
        f"{len(names)} cases, {len(found)} processes: parameters differ by {worst:.1e}, metrics by {worst_metric:.1e}"
    )


def test_covnet_moves_in_these_cases(found: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    for name, case in ranks.cases_for(len(found)).items():
        start = ranks.state_of(ranks.learner_of(case))
        learned = dict(ranks.SOURCES[case.source]().named_parameters())
        moved = [float((alone[name][0][f"g.{key}"] - start[f"g.{key}"]).abs().max()) for key in learned]
        assert not moved or max(moved) > 1e-4, name


def test_a_local_pseudo_update_is_that_of_each_rank_on_its_own_images(found: list[dict[str, Any]]) -> None:
    """One process makes the pseudo and meta updates of all ranks one after the other, and averages CovNet's steps."""
    ours, metrics = found[0]["local"]
    for other in found[1:]:
        assert_equal(ours, other["local"][0], "local")
    case = replace(ranks.LOCAL, options={})
    learner = ranks.learner_of(case)
    learned = list(learner.source.parameters())
    learner.executor.meta_optimizer = torch.optim.SGD(learned, lr=1.0)
    buffers = [torch.zeros_like(parameter) for parameter in learned]
    meta_loss = 0.0
    for images, labels in ranks.batches(case):
        learner.network.prepare(images)
        halves = list(zip(images.tensor_split(2), labels.tensor_split(2), strict=True))
        for (x, y), (meta_x, meta_y) in (halves, halves[::-1]):
            start = [parameter.detach().clone() for parameter in learned]
            steps = [torch.zeros_like(parameter) for parameter in learned]
            parts = zip(*(tensor.tensor_split(len(found)) for tensor in (x, y, meta_x, meta_y)), strict=True)
            for own_x, own_y, own_meta_x, own_meta_y in parts:
                point, pseudo = learner.algorithm.pseudo_update([MicroBatch(own_x, own_y)])
                loss = learner.executor.meta_loss_at(point, [MicroBatch(own_meta_x, own_meta_y)])
                seen = learner.algorithm.meta_update(pseudo, loss, detach=True)
                meta_loss += float(seen["meta_loss"]) * len(own_meta_x) / len(meta_x) / 2
                with torch.no_grad():
                    for parameter, before, step in zip(learned, start, steps, strict=True):
                        step += (parameter - before) * len(own_meta_x) / len(meta_x)
                        parameter.copy_(before)
            with torch.no_grad():  # momentum, as in the case
                for parameter, buffer, step in zip(learned, buffers, steps, strict=True):
                    buffer.mul_(0.9).add_(step)
                    parameter += buffer
            learner.optimizer.zero_grad()
            learner.algorithm.real_update([MicroBatch(x, y)])
    error = max(float((ours[key] - value).abs().max()) for key, value in ranks.state_of(learner).items())
    assert error < 1e-9
    assert metrics["meta_loss"] == pytest.approx(meta_loss, rel=1e-9)


def test_a_local_pseudo_update_is_refused_where_it_has_no_meaning() -> None:
    for options in ({"order": "pipelined"}, {"sync_batch_norm": True}):
        with pytest.raises(ValueError, match="pseudo='local' does not work with"):
            ranks.learner_of(ranks.Case(options={"pseudo": "local", **options}))
    model = ranks.Net(nn.BatchNorm2d)
    network, sgd = Network(model, sync_batch_norm=True), torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="pseudo='local' does not work with sync_batch_norm"):
        semaug.LearnableAugmentation(network, sgd, pseudo="local")
    with pytest.raises(ValueError, match="pseudo must be"):
        ranks.learner_of(ranks.Case(options={"pseudo": "both"}))


def test_batchnorm_of_each_rank_has_equal_parameters_and_its_statistics_are_averaged(
    found: list[dict[str, Any]],
) -> None:
    states = [rank["own statistics"] for rank in found]
    for other in states[1:]:
        assert_equal(states[0]["after"], other["after"], "after averaging")
        assert not torch.equal(states[0]["before"]["norms.1.running_mean"], other["before"]["norms.1.running_mean"])
    for name, value in states[0]["after"].items():
        mean = torch.stack([state["before"][name].double() for state in states]).mean(0)
        torch.testing.assert_close(value.double(), mean, rtol=1e-12, atol=1e-12, msg=name)


def test_an_overflow_on_one_rank_leaves_the_step_out_on_all(found: list[dict[str, Any]]) -> None:
    ours = found[0]["overflowing"]
    assert ours["scales"][-1] < 2.0**14, "nothing overflowed"
    assert ours["finite"][-1], "everything overflowed"
    assert all(value.isfinite().all() for value in ours["state"].values())
    for other in found[1:]:
        assert other["overflowing"]["scales"] == ours["scales"]
        assert_equal(ours["state"], other["overflowing"]["state"], "overflowing")


@pytest.mark.parametrize("order", ranks.P2P_ORDERS)
def test_a_p2p_net_of_two_processes_equals_that_of_one(found: list[dict[str, Any]], order: str) -> None:
    if len(found) > 2:
        pytest.skip("two processes show what there is to see")
    state, metrics = ranks.trained_p2p(order)
    ours, our_metrics = found[0]["p2p"][order]
    assert_equal(ours, found[1]["p2p"][order][0], order)
    error = max(float((ours[key] - value).abs().max()) for key, value in state.items())
    assert error < 1e-9
    assert our_metrics == pytest.approx(metrics, rel=1e-8, abs=1e-8)
    assert metrics["meta_gradient_norm"] > 0
    assert metrics["rest_loss"] > 0
    print(f"P2P-Net, {order}: differs by {error:.1e}")


def predicted_bytes(case: ranks.Case, processes: int) -> tuple[float, float]:
    """The model of docs/distributed.md, for all half steps of a case in fp64."""
    size = 8
    learner = ranks.learner_of(case)
    every = sum(p.numel() for p in learner.network.model.parameters())
    late = sum(p.numel() for p in learner.network.late_parameters().values())
    covnet = sum(p.numel() for p in learner.source.parameters())
    options, steps = case.options, case.half_steps
    order, local = options["order"], options["pseudo"] == "local"
    pipelined = order == "pipelined"
    meta_steps = steps // options["interval"] - pipelined  # the last real update has not been differentiated yet
    if not covnet:
        meta_steps = 0
    parts = [size * count for count in (every, late, covnet)]
    total = steps * scaling.half_step_bytes(*parts, ranks.WIDTH, order, math.inf)  # without a meta update
    total += meta_steps * scaling.half_step_bytes(0, *parts[1:], 0, order, 1, local)
    if options["sync_batch_norm"]:  # an early layer and a late one
        late_forward = size * 2 * ranks.WIDTH
        forward = 2 * late_forward
        # real: forward and backward; meta loss: backward; tangent pass: values and tangents
        total += steps * 2 * forward + meta_steps * 3 * late_forward
        if not pipelined:  # the pseudo gradient, and a forward pass on the meta batch
            total += meta_steps * (late_forward + forward)
    gathered = steps * 8  # the sizes of the halves
    if case.source == "class-wise":  # features and labels of each rank, as many as the largest part has; their number
        halves = [half for images, _ in ranks.batches(case) for half in images.tensor_split(2)]
        gathered += sum(-(-len(half) // processes) * (size * ranks.WIDTH + 8) + 8 for half in halves)
    return total, gathered


def test_what_is_sent_is_what_the_documented_model_says(found: list[dict[str, Any]]) -> None:
    worst = 0.0
    cases = ranks.traffic_cases()
    for name, case in cases.items():
        model = predicted_bytes(case, len(found))
        for rank in found:
            (summed, gathered), (predicted, predicted_gathered) = rank["traffic"][name], model
            assert summed == pytest.approx(predicted, rel=0.05), name
            assert gathered == predicted_gathered, name
            worst = max(worst, abs(summed - predicted) / predicted)
    print(f"{len(cases)} cases, {len(found)} processes: bytes differ from the model by at most {worst:.1%}")


def test_the_shards_of_all_ranks_make_up_the_halves_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, world in itertools.product(range(2, 40), range(1, 6)):
        monkeypatch.setattr(distributed, "world_size", lambda world=world: world)
        halves: list[list[int]] = [[], []]
        for rank in range(world):
            monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
            own = distributed.shard(torch.arange(count))
            for half, part in zip(halves, own.tensor_split(2), strict=True):  # as `step` does
                half += part.tolist()
        middle = (count + 1) // 2
        assert halves == [list(range(middle)), list(range(middle, count))]
