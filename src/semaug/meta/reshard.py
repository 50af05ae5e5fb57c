"""The state of a learner of several ranks in one checkpoint, and taken up by any number of them.

All of it is the same on every rank but what the pipelined order keeps of the last half batch: each rank has its part.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from semaug.util import distributed

State = dict[str, Any]


def of_all_ranks(state: Mapping[str, Any]) -> State:
    """The state of a learner with the kept parts of all ranks, in their order; complete on rank 0 alone."""
    last = state["last_real"]
    if last is None or not distributed.is_running():
        return dict(state)
    kept = distributed.gather_objects([_on_cpu(part) for part in last["parts"]])
    parts = [part for parts in kept for part in parts]
    return {**state, "last_real": {**last, "parts": parts, "parts_of_rank": [len(parts) for parts in kept]}}


def of_this_rank(state: Mapping[str, Any], micro_batch: int | None) -> State:
    """What this rank takes up of a state with the kept parts of all.

    On the same number of ranks these are the very parts that it had. On another, the half batch is put together and cut
    anew, into micro-batches where there are such.
    """
    if state["last_real"] is None:
        return dict(state)
    last = dict(state["last_real"])
    counts = last.pop("parts_of_rank", [len(last["parts"])])
    if len(counts) == distributed.world_size():
        first = sum(counts[: distributed.rank()])
        last["parts"] = last["parts"][first : first + counts[distributed.rank()]]
    else:
        last["parts"] = _cut(_joined(last["parts"]), micro_batch)
    return {**state, "last_real": last}


def _on_cpu(part: State) -> State:
    moved: State = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), part)
    return moved


def _joined(parts: Sequence[State]) -> State:
    """One part of the images of several, in their order."""
    counts = [len(part["labels"]) for part in parts]

    def join(values: Sequence[Any]) -> Any:
        leaves, structures = zip(*(pytree.tree_flatten(value) for value in values), strict=True)
        joined = [_cat(list(leaf), counts) for leaf in zip(*leaves, strict=True)]
        return pytree.tree_unflatten(joined, structures[0])

    tape = dict(parts[0]["tape"])
    tape["images"] = join([part["tape"]["images"] for part in parts])
    tape["outputs"] = {
        name: [
            (join([part["tape"]["outputs"][name][call][0] for part in parts]), random)
            for call, (_, random) in enumerate(calls)
        ]
        for name, calls in tape["outputs"].items()
    }
    values = {name: join([part[name] for part in parts]) for name in ("images", "labels", "features")}
    return {**parts[0], **values, "tape": tape, "share": 1.0, "weight": 1.0}


def _cat(tensors: list[Any], counts: Sequence[int]) -> Any:
    """Tensors with a row for each image put together; of others the first."""
    if not all(_has_rows(tensor, count) for tensor, count in zip(tensors, counts, strict=True)):
        return tensors[0]
    if all(not any(tensor.stride()) for tensor in tensors):  # only its shape is kept
        return tensors[0].flatten()[:1].expand(sum(counts), *tensors[0].shape[1:])
    return torch.cat(tensors)


def _has_rows(value: Any, count: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == count


def _cut(part: State, micro_batch: int | None) -> list[State]:
    """What is this rank's of a half batch, in as many parts as every rank has."""
    total = len(part["labels"])
    own, ranks = distributed.rank_slice(total), distributed.world_size()
    pieces = 1 if micro_batch is None else min(-(-total // (ranks * micro_batch)), total // ranks)
    rows = torch.arange(total)[own]
    return [_rows(part, piece, len(piece) / len(rows), len(rows) / total) for piece in rows.tensor_split(pieces)]


def _rows(part: State, rows: Tensor, share: float, weight: float) -> State:
    total, window = len(part["labels"]), slice(int(rows[0]), int(rows[-1]) + 1)

    def cut(value: Any) -> Any:
        return pytree.tree_map(lambda leaf: leaf[window] if _has_rows(leaf, total) else leaf, value)

    tape = dict(part["tape"])
    tape["images"] = cut(tape["images"])
    tape["outputs"] = {
        name: [(cut(output), random) for output, random in calls] for name, calls in tape["outputs"].items()
    }
    values = {name: cut(part[name]) for name in ("images", "labels", "features")}
    return {**part, **values, "tape": tape, "share": share, "weight": weight}
