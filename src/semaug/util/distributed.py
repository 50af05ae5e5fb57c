"""Several processes under torchrun: ranks, sums and copies over all of them.

With one process every function is the identity. Sums are equal to the bit on all ranks, so whatever is computed from
sums only stays equal on all ranks. Every collective operation passes through :func:`_collective`, which turns the
errors of a lost connection into :class:`PeerLostError`.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from semaug.util.errors import SemaugError, SettingError, TrainingError
from semaug.util.names import shown

Value = TypeVar("Value")
START_SECONDS = 60
GRACE_SECONDS = 5
BUCKET = 32 * 2**20  # bytes: small tensors are sent together until they reach this size


class PeerLostError(TrainingError):
    """A collective operation failed, as a rule because another process has ended."""


@contextmanager
def _collective() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # NCCL raises subclasses, gloo the plain class
        reason = str(error).partition("\n")[0]
        raise PeerLostError(f"the connection to the other processes is lost ({reason})") from error


def is_running() -> bool:
    """Whether several processes are connected."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """The number of this process, from 0; 0 if it is the only one."""
    return dist.get_rank() if is_running() else 0


def world_size() -> int:
    """The number of processes."""
    return dist.get_world_size() if is_running() else 1


def is_launched() -> bool:
    """Whether torchrun, or a launcher that sets the same environment, has started several processes."""
    if not all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return False
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK"):
        value = os.environ.get(name, "0")
        if not (value.isascii() and value.isdigit() and len(value) < 10):
            raise SettingError(f"the environment variable {name} is {shown(value)} and not a number; use torchrun")
    if not 0 < int(os.environ["MASTER_PORT"]) < 2**16:
        raise SettingError("the environment variable MASTER_PORT is not from 1 to 65535; use torchrun")
    if int(os.environ["RANK"]) >= max(1, int(os.environ["WORLD_SIZE"])):
        raise SettingError("the environment variable RANK is not below WORLD_SIZE; use torchrun")
    return int(os.environ["WORLD_SIZE"]) > 1


def is_rank_zero() -> bool:
    """Whether this is rank 0, the only one that prints and writes (valid before initialisation too)."""
    return os.environ.get("RANK", "0") == "0" or not is_launched()


def initialize(device: str, timeout: timedelta = timedelta(hours=2)) -> str:
    """Connect the processes that torchrun has started: NCCL on GPUs, gloo on CPUs.

    On GPUs gloo runs as well, for numbers that the host needs, so that the host need not wait for the GPU.

    Args:
        device: "cuda" or "cpu".
        timeout: How long a collective operation may wait for the other processes. They must start within
            `START_SECONDS`.

    Returns:
        The device of this process; "cuda" becomes the GPU of torchrun's LOCAL_RANK.

    Raises:
        SettingError: There are more processes than GPUs.
        TrainingError: The other processes have not started.
        PeerLostError: The other processes cannot be reached.
    """
    on_gpu = device.startswith("cuda")
    if on_gpu:
        local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= count:
            raise SettingError(f"process {local} of this machine has no GPU: start {count} processes per machine")
        device = f"cuda:{local}"
        torch.cuda.set_device(local)
    if not dist.is_initialized():
        store = _meet()
        own, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store.set_timeout(timeout)
        with _collective():
            backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
            dist.init_process_group(backend, timeout=timeout, store=store, rank=own, world_size=count)
    return device


def _meet() -> Any:
    """Wait until all processes have started; returns the store through which they find each other."""
    from torch._C._distributed_c10d import PrefixStore  # missing in some builds of torch
    from torch.distributed.rendezvous import rendezvous

    limit, result = timedelta(seconds=START_SECONDS), list[Any]()

    def wait() -> None:
        try:
            store, own, count = next(rendezvous("env://", timeout=limit))
            # torchrun may reuse its store after a restart; the addresses of the old processes must not be seen.
            store = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
            store.set(f"started {own}", "")
            store.wait([f"started {rank}" for rank in range(count)], limit)
            result.append(store)
        except Exception as error:  # of several kinds in torch
            result.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    deadline = time.monotonic() + START_SECONDS + GRACE_SECONDS  # torch does not always keep its limit
    while waiting.is_alive() and time.monotonic() < deadline:  # in this thread Python would not see signals
        waiting.join(0.1)
    store = result[0] if result else TimeoutError()
    if isinstance(store, Exception):
        total, place = os.environ["WORLD_SIZE"], f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise TrainingError(
            f"not all of the {total} processes connected to {shown(place)} within {START_SECONDS} seconds; "
            "start all of them, by torchrun"
        ) from store
    return store


def shut_down() -> None:
    """Disconnect from the other processes, if connected."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def rank_slice(count: int) -> slice:
    """The consecutive part of `count` items that belongs to this rank; parts differ by one item at most."""
    size, larger = divmod(count, world_size())
    first = rank() * size + min(rank(), larger)
    return slice(first, first + size + (rank() < larger))


def shard(batch: Tensor) -> Tensor:
    """Select this rank's rows of a global batch: its part of the first half, then its part of the second half.

    `LearnableAugmentation.step` cuts its input in two halves; over all ranks these are the halves of the global batch.

    Args:
        batch: Shape (N, …), the same on all ranks; row numbers, as a rule. The first half may have one row more.

    Returns:
        This rank's rows, about N / world size of them.
    """
    first, second = batch.tensor_split(2)
    return torch.cat([first[rank_slice(len(first))], second[rank_slice(len(second))]])


def all_reduce_(tensor: Tensor) -> None:
    """Replace a contiguous tensor by its sum over all ranks, in place."""
    if is_running():
        with _collective():
            dist.all_reduce(tensor)


@torch.no_grad()
def sum_over_ranks(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The sum of each tensor over all ranks, in its memory layout; small tensors are sent together."""
    if not is_running():
        return list(tensors)
    sums = [torch.empty_like(tensor) for tensor in tensors]
    for members in _buckets(tensors):
        flat = torch.cat([tensors[i].reshape(-1) for i in members])
        all_reduce_(flat)
        _unpack(flat, [sums[i] for i in members])
    return sums


@torch.no_grad()
def sum_gradients_(parameters: Sequence[Tensor]) -> None:
    """Replace each `.grad` by its sum over all ranks, after the backward pass; None, on all ranks, stays None."""
    if is_running():
        trained = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        for (parameter, _), total in zip(trained, sum_over_ranks([grad for _, grad in trained]), strict=True):
            parameter.grad = total


def _buckets(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Group the tensors' indices by device and type; a group is closed once it has `BUCKET` bytes."""
    buckets: list[list[int]] = []
    open_buckets: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(tensors):
        key = tensor.device, tensor.dtype
        if key not in open_buckets:
            open_buckets[key] = []
            buckets.append(open_buckets[key])
        open_buckets[key].append(i)
        if sum(tensors[member].nbytes for member in open_buckets[key]) >= BUCKET:
            del open_buckets[key]
    return buckets


def _unpack(flat: Tensor, tensors: list[Tensor]) -> None:
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))


@torch.no_grad()
def broadcast_(tensors: Iterable[Tensor]) -> None:
    """Give each tensor the value it has on rank 0, in place."""
    if not is_running():
        return
    tensors = list(tensors)
    for members in _buckets(tensors):
        flat = torch.cat([tensors[i].reshape(-1) for i in members])
        with _collective():
            dist.broadcast(flat, 0)
        _unpack(flat, [tensors[i] for i in members])


@torch.no_grad()
def average_buffers_(module: torch.nn.Module) -> None:
    """Make the buffers of a network equal on all ranks, before it is evaluated or saved.

    BatchNorm's running statistics differ between ranks unless it normalises over all ranks.

    Args:
        module: The network. Floating-point buffers become their mean over ranks, other buffers those of rank 0.
    """
    if not is_running():
        return
    broadcast_([buffer for buffer in module.buffers() if not buffer.is_floating_point()])
    averaged = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
    for buffer, total in zip(averaged, sum_over_ranks(averaged), strict=True):
        buffer.copy_(total / world_size())


def gather_numbers(numbers: Sequence[int]) -> list[list[int]]:
    """The integers of every rank, in the order of ranks; equally many on each."""
    if not is_running():
        return [list(numbers)]
    device = "cpu" if "cpu:" in dist.get_backend_config() else "cuda"  # with gloo the host waits for no GPU
    return [part.tolist() for part in _all_gather(torch.tensor(list(numbers), device=device))]


@torch.no_grad()
def gather_rows(*tensors: Tensor) -> list[Tensor]:
    """Concatenate the rows of all ranks, in the order of ranks, of tensors (N, …); N may differ between ranks."""
    if not is_running():
        return list(tensors)
    counts = [count for (count,) in gather_numbers([len(tensors[0])])]
    gathered = []
    for tensor in tensors:
        own = tensor.new_zeros(max(counts), *tensor.shape[1:])
        own[: len(tensor)] = tensor
        gathered.append(torch.cat([part[:count] for part, count in zip(_all_gather(own), counts, strict=True)]))
    return gathered


def _all_gather(own: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(own) for _ in range(world_size())]
    with _collective():
        dist.all_gather(parts, own)
    return parts


def gather_objects(value: Value) -> list[Value]:
    """The values of all ranks (CPU tensors and whatever can be pickled), in the order of ranks, on rank 0; else []."""
    if not is_running():
        return [value]
    values: list[Any] = [None] * world_size() if rank() == 0 else []
    with _collective():
        dist.gather_object(value, values or None)
    return values


def broadcast_object(value: Value) -> Value:
    """The value of rank 0, on all ranks."""
    values = [value]
    if is_running():
        with _collective():
            dist.broadcast_object_list(values)
    return values[0]


def raise_on_all_ranks(make: Callable[[], Value]) -> Value:
    """Call a function on every rank; if it fails on one rank, all raise, so that no rank waits for one that has left.

    The first rank of each machine goes first, so that the others find what it has cached.

    Args:
        make: A function without arguments and collective operations.

    Returns:
        What `make` returns.

    Raises:
        SemaugError: `make` has raised it, on this rank or on another.
    """
    if not is_running():
        return make()
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    results: list[Value] = []
    for turn_of_first in (True, False):
        own: SemaugError | None = None
        try:
            if is_first == turn_of_first:
                results.append(make())
        except SemaugError as error:
            own = error
        errors: list[SemaugError | None] = [None] * world_size()
        with _collective():
            dist.all_gather_object(errors, own)
        for raised in filter(None, errors):
            raise type(raised)(str(raised), on_all_ranks=True)
    return results[0]
