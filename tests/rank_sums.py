"""Every collective operation of `semaug.util.distributed` in one of several processes, the last of which then ends."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from semaug.util import distributed
from semaug.util.errors import DataError


def inputs(rank: int) -> list[Tensor]:
    """Tensors of several types and layouts, different on each rank."""
    generator = torch.Generator().manual_seed(rank)
    image = torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64)
    return [
        torch.randn(7, 3, generator=generator),
        image.to(memory_format=torch.channels_last),
        torch.tensor(rank + 1),
        torch.randn(50, generator=generator),
        torch.randn((), generator=generator, dtype=torch.float64),
    ]


def summed_gradients(rank: int) -> list[Tensor | None]:
    parameters = [nn.Parameter(torch.zeros_like(tensor)) for tensor in inputs(rank) if tensor.is_floating_point()]
    for parameter, tensor in zip(parameters[1:], [t for t in inputs(rank) if t.is_floating_point()][1:], strict=True):
        parameter.grad = tensor.clone()
    distributed.sum_gradients_(parameters)
    return [parameter.grad for parameter in parameters]


def averaged(rank: int) -> dict[str, Tensor]:
    norm = nn.BatchNorm1d(3)
    assert norm.running_mean is not None
    assert norm.num_batches_tracked is not None
    norm.running_mean.fill_(rank)
    norm.num_batches_tracked.fill_(rank + 5)
    distributed.average_buffers_(norm)
    return norm.state_dict()


def raised(function: Callable[[], object]) -> tuple[str, str, bool]:
    """Type, message and flag of the error that a function raises."""
    try:
        function()
    except DataError as error:
        return type(error).__name__, str(error), error.on_all_ranks
    except distributed.PeerLostError as error:
        return type(error).__name__, str(error), error.on_all_ranks
    raise AssertionError("nothing was raised")


def fail_on(own: int, failing: int) -> str:
    if own == failing:
        raise DataError("the disk of this rank is damaged")
    return "made"


def main(folder: Path) -> None:
    """In one of several processes: write the results to RANK.pt in the folder."""
    assert distributed.sum_over_ranks([torch.ones(2)])[0].tolist() == [1, 1], "one process is the identity"
    distributed.initialize("cpu", timedelta(seconds=60))
    rank, last = distributed.rank(), distributed.world_size() - 1
    sums = {}
    for bucket in (1, 200, 2**25):
        distributed.BUCKET = bucket
        sums[bucket] = distributed.sum_over_ranks(inputs(rank))
    copies = inputs(rank)
    distributed.broadcast_(copies)
    rows = torch.arange(2 * rank + 1)[:, None] + 10 * rank
    results: dict[str, Any] = {
        "sums": sums,
        "gradients": summed_gradients(rank),
        "copies": copies,
        "averaged": averaged(rank),
        "rows": distributed.gather_rows(rows, rows.double() / 2),
        "numbers": distributed.gather_numbers([rank, 7]),
        "objects": distributed.gather_objects({"rank": rank}),
        "object": distributed.broadcast_object(f"from {rank}"),
        "made": distributed.raise_on_all_ranks(lambda: fail_on(rank, -1)),
        "raised": raised(lambda: distributed.raise_on_all_ranks(lambda: fail_on(rank, last))),
    }
    distributed.gather_numbers([0])  # all have finished
    if rank == last:
        torch.save(results, folder / f"{rank}.pt")
        os._exit(0)
    results["lost"] = [
        raised(operation)
        for operation in (
            lambda: distributed.sum_over_ranks(inputs(rank)),
            lambda: distributed.gather_numbers([1]),
            lambda: distributed.gather_objects(1),
            lambda: distributed.broadcast_object(1),
            lambda: distributed.raise_on_all_ranks(lambda: 1),
        )
    ]
    torch.save(results, folder / f"{rank}.pt")
    os._exit(0)  # a clean end would wait for the other
