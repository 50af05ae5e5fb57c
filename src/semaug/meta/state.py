"""The learner's state in checkpoints: of one rank, of all ranks together, and for another number of ranks.

All of the state is the same on every rank except what the pipelined order keeps of the last half batch: each rank has
its part of it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from semaug.meta.updates import MicroBatch, Update, is_shape
from semaug.network.network import Tape
from semaug.util import distributed

State = dict[str, Any]


def update_to_state(update: Update | None) -> State | None:
    """Convert an update into plain values and tensors."""
    if update is None:
        return None
    parts = [{**vars(part), "tape": {**vars(part.tape), "late": None}} for part in update.batch]
    values = {name: value for name, value in vars(update).items() if name != "batch"}
    return {"parts": parts, **values}


def update_from_state(state: State | None, device: torch.device) -> Update | None:
    """Restore an update."""
    if state is None:
        return None
    # Random-number states, which are bytes, stay where they are.
    values = pytree.tree_map_only(Tensor, lambda t: t if t.dtype == torch.uint8 else _copied(t, device), state)
    parts = [MicroBatch(**{**part, "tape": Tape(**part["tape"])}) for part in values.pop("parts")]
    return Update(parts, **values)


def _copied(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A copy on a device; of a tensor of which only the shape matters, without memory for that shape."""
    if is_shape(tensor):
        return tensor.new_zeros((), device=device).expand(tensor.shape)
    return tensor.detach().to(device, copy=True)


def gather_learner_state(state: Mapping[str, Any]) -> State:
    """Combine the states of all ranks."""
    last = state["last_real"]
    if last is None or not distributed.is_running():
        return dict(state)
    of_ranks = distributed.gather_objects([_on_cpu(part) for part in last["parts"]])
    parts = [part for own in of_ranks for part in own]
    return {**state, "last_real": {**last, "parts": parts, "parts_of_rank": [len(own) for own in of_ranks]}}


def take_rank_state(state: Mapping[str, Any], micro_batch: int | None) -> State:
    """Take this rank's part of a combined state.

    With the same number of ranks each gets back the very micro-batches that it had. With another number the half batch
    is put together and cut anew.
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
    moved: State = pytree.tree_map_only(Tensor, lambda tensor: _copied(tensor, "cpu"), part)
    return moved


def _joined(parts: Sequence[State]) -> State:
    """One micro-batch of the images of several, in their order."""
    counts = [len(part["labels"]) for part in parts]
    leaves, structures = zip(*(pytree.tree_flatten(part) for part in parts), strict=True)
    whole: State = pytree.tree_unflatten([_cat(leaf, counts) for leaf in zip(*leaves, strict=True)], structures[0])
    return {**whole, "share": 1.0, "weight": 1.0}


def _cat(values: Sequence[Any], counts: Sequence[int]) -> Any:
    """Tensors with a row for each image put together; of other values the first."""
    if not all(map(_has_rows, values, counts)):
        return values[0]
    if all(map(is_shape, values)):
        return values[0].flatten()[:1].expand(sum(counts), *values[0].shape[1:])
    return torch.cat(list(values))


def _has_rows(value: Any, count: int) -> bool:
    """Whether a value has a row for each of `count` images; random-number states, which are bytes, have none."""
    return isinstance(value, Tensor) and value.dtype != torch.uint8 and value.shape[:1] == (count,)


def _cut(part: State, micro_batch: int | None) -> list[State]:
    """This rank's rows of a half batch, in as many micro-batches as every rank has."""
    total = len(part["labels"])
    own, ranks = distributed.rank_slice(total), distributed.world_size()
    pieces = 1 if micro_batch is None else min(-(-total // (ranks * micro_batch)), total // ranks)
    positions = torch.arange(total)[own]
    parts = []
    for piece in positions.tensor_split(pieces):
        window = slice(int(piece[0]), int(piece[-1]) + 1)
        rows = pytree.tree_map(lambda leaf, w=window: leaf[w] if _has_rows(leaf, total) else leaf, part)
        parts.append({**rows, "share": len(piece) / len(positions), "weight": len(positions) / total})
    return parts
