"""Several processes, one for each GPU, under torchrun: who they are, and sums over all of them.

With a single process, or where torch.distributed does not run, every function here is the identity. Sums are the same
to the bit on all ranks, so whatever is computed from them alone stays the same on all ranks.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from semaug.util.errors import SemaugError

Value = TypeVar("Value")
BUCKET = 32 * 2**20  # bytes that travel at once, at least, where there are as many


@dataclass
class Traffic:
    """Bytes that this process has handed to collective operations; what travels is in docs/distributed.md."""

    reduced: int = 0
    gathered: int = 0

    def reset(self) -> None:
        self.reduced = self.gathered = 0


traffic = Traffic()


# -- who is there -----------------------------------------------------------------------------------------------------


def is_running() -> bool:
    """Whether there are several processes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    return dist.get_rank() if is_running() else 0


def world_size() -> int:
    return dist.get_world_size() if is_running() else 1


def is_launched() -> bool:
    """Whether torchrun, or something that sets the same environment, has started several processes like this one."""
    there = all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    return there and int(os.environ["WORLD_SIZE"]) > 1


def is_rank_zero() -> bool:
    """Whether this process is the one that tells and writes; also before they have met, and after."""
    return not is_launched() or os.environ["RANK"] == "0"


def initialize(device: str, timeout: timedelta = timedelta(hours=2)) -> str:
    """Meet the other processes that torchrun has started; returns the device of this one.

    NCCL on GPUs, with gloo beside it for numbers that the host needs, so that it need not wait for the GPU; gloo alone
    on CPUs. `device` "cuda" becomes the GPU of torchrun's LOCAL_RANK.
    """
    on_gpu = device.startswith("cuda")
    if on_gpu:
        local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= count:
            raise SemaugError(
                f"process {local} of this machine has no GPU: there are {count}; give --nproc-per-node {count}"
            )
        device = f"cuda:{local}"
        torch.cuda.set_device(local)
    if not dist.is_initialized():
        from torch._C._distributed_c10d import PrefixStore  # which not every build of torch has
        from torch.distributed.rendezvous import rendezvous

        store, own, count = next(rendezvous("env://", timeout=timeout))
        # torchrun may keep its store when it starts all again: nobody is to find addresses of those who are gone.
        store = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, timeout=timeout, store=store, rank=own, world_size=count)
    return device


def shut_down() -> None:
    """Leave the others, where this process had met them."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


# -- what each process works on ---------------------------------------------------------------------------------------


def rank_slice(count: int) -> slice:
    """The part of `count` things that is this rank's: consecutive ones, and at most one more than on any other rank."""
    each, more = divmod(count, world_size())
    first = rank() * each + min(rank(), more)
    return slice(first, first + each + (rank() < more))


def shard(batch: Tensor, *, meta: bool = False) -> Tensor:
    """The rows of a global batch (N, …) that are this rank's: its part of the first half, then of the second.

    `LearnableAugmentation.step` cuts what it gets in two halves; those of all ranks together are then the halves of the
    global batch. The first half of an odd number is the larger one; with `meta`, of the images of the meta loss alone,
    it is the smaller one.
    """
    middle = len(batch) // 2 if meta else -(-len(batch) // 2)
    first, second = batch[:middle], batch[middle:]
    return torch.cat([first[rank_slice(len(first))], second[rank_slice(len(second))]])


# -- sums and copies --------------------------------------------------------------------------------------------------


@torch.no_grad()
def sum_over_ranks(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The sum of each tensor over all ranks, in the tensor's memory layout; many small ones travel together."""
    if not is_running():
        return list(tensors)
    total = _Sum(tensors)
    for place, tensor in enumerate(tensors):
        total.put(place, tensor)
    return list(total.finished().values())


def summed_gradients(
    compute: Callable[[], Sequence[Tensor]], parameters: Sequence[Tensor], so_far: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """The gradients of `parameters` that `compute` finds by torch.autograd.grad, plus those `so_far`, of all ranks.

    They are sent while the backward pass still runs: see :class:`_Sum`.
    """
    own = so_far if so_far is not None else [None] * len(parameters)
    if not is_running():
        return [_plus(a, b) for a, b in zip(own, compute(), strict=True)]
    total = _Sum(parameters)

    def watch(place: int, parameter: Tensor) -> Any:
        return parameter.register_hook(lambda gradient: total.put(place, _plus(own[place], gradient)))

    with _hooks(watch(place, parameter) for place, parameter in enumerate(parameters)):
        gradients = compute()
    for place, gradient in enumerate(gradients):  # those that no hook has seen: zeros of what is not in the graph
        if not total.has(place):
            total.put(place, _plus(own[place], gradient))
    sums = total.finished()
    return [sums[place] for place in range(len(parameters))]


def sum_gradients_(parameters: Sequence[Tensor]) -> None:
    """Sum the ``.grad`` of parameters over all ranks, in place; one that is None stays None."""
    if is_running():
        owners = [parameter for parameter in parameters if parameter.grad is not None]
        sums = sum_over_ranks([parameter.grad for parameter in owners if parameter.grad is not None])
        for parameter, total in zip(owners, sums, strict=True):
            parameter.grad = total


@contextmanager
def summing_(parameters: Sequence[Tensor]) -> Iterator[None]:
    """After a backward pass inside, the `.grad` of `parameters` are the sums of those of all ranks, or still None.

    They are sent while the backward pass still runs: see :class:`_Sum`.
    """
    if not is_running():
        yield
        return
    total = _Sum(parameters)

    def put(place: int) -> None:
        gradient = parameters[place].grad
        if gradient is not None and not total.has(place):
            total.put(place, gradient)

    def watch(place: int, parameter: Tensor) -> Any:
        return parameter.register_post_accumulate_grad_hook(lambda _: put(place))

    with _hooks(watch(place, parameter) for place, parameter in enumerate(parameters)):
        yield
    for place in range(len(parameters)):  # those that got nothing in this pass, but in another one before
        put(place)
    for place, gradient in total.finished().items():
        parameters[place].grad = gradient


class _Sum:
    """The sum over all ranks of tensors that come one by one, each bucket sent as soon as it and those before are full.

    `like` are tensors of the same sizes. Buckets are filled from the last tensor to the first, since that is how a
    backward pass finds gradients, and are the same on all ranks whatever order the tensors come in. One that never
    comes, here and on all other ranks, keeps those after it till the end.
    """

    def __init__(self, like: Sequence[Tensor]) -> None:
        last = len(like) - 1
        self._waiting = [[last - place for place in places] for places in _buckets(like[::-1])]
        self._found: dict[int, Tensor] = {}
        self._sent: list[tuple[list[int], Tensor, Any]] = []

    def has(self, place: int) -> bool:
        return place in self._found

    def put(self, place: int, tensor: Tensor) -> None:
        self._found[place] = tensor
        while self._waiting and all(map(self.has, self._waiting[0])):
            self._send(self._waiting.pop(0))

    @torch.no_grad()
    def finished(self) -> dict[int, Tensor]:
        """The sums by place, in the order of places, of what has come."""
        for places in self._waiting:
            self._send([place for place in places if self.has(place)])
        sums = {place: torch.empty_like(tensor) for place, tensor in sorted(self._found.items())}
        for places, flat, work in self._sent:
            if work is not None:
                work.wait()
            _put([sums[place] for place in places], flat)
        return sums

    @torch.no_grad()
    def _send(self, places: list[int]) -> None:
        if places:
            flat = torch.cat([self._found[place].reshape(-1) for place in places])
            traffic.reduced += flat.nbytes
            self._sent.append((places, flat, dist.all_reduce(flat, async_op=True)))


@contextmanager
def _hooks(handles: Iterable[Any]) -> Iterator[None]:
    """Remove hooks in the end."""
    handles = list(handles)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _plus(first: Tensor | None, second: Tensor) -> Tensor:
    return second if first is None else first + second


@torch.no_grad()
def broadcast_(tensors: Iterable[Tensor]) -> None:
    """Give each tensor the value that it has on rank 0, in place."""
    if not is_running():
        return
    tensors = list(tensors)
    for places in _buckets(tensors):
        flat = torch.cat([tensors[place].reshape(-1) for place in places])
        dist.broadcast(flat, 0)
        _put([tensors[place] for place in places], flat)


@torch.no_grad()
def average_buffers_(module: torch.nn.Module) -> None:
    """Make the buffers of a network the same on all ranks: running statistics their mean, whole numbers rank 0's.

    BatchNorm's running statistics differ between ranks where each has normalised by its own images.
    """
    if not is_running():
        return
    broadcast_([buffer for buffer in module.buffers() if not buffer.is_floating_point()])
    averaged = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
    for buffer, total in zip(averaged, sum_over_ranks(averaged), strict=True):
        buffer.copy_(total / world_size())


def gather_numbers(numbers: Sequence[int]) -> list[list[int]]:
    """The whole numbers of every rank, in the order of ranks; where gloo runs, the host waits for no GPU."""
    if not is_running():
        return [list(numbers)]
    own = torch.tensor(list(numbers), device=_host_device())
    found = [torch.empty_like(own) for _ in range(world_size())]
    dist.all_gather(found, own)
    return [part.tolist() for part in found]


@torch.no_grad()
def gather_rows(*tensors: Tensor) -> list[Tensor]:
    """The rows of every rank, in the order of ranks, of tensors (N, …), where N may differ between ranks."""
    if not is_running():
        return list(tensors)
    counts = [count for (count,) in gather_numbers([len(tensors[0])])]
    found = []
    for tensor in tensors:
        own = tensor.new_zeros(max(counts), *tensor.shape[1:])
        own[: len(tensor)] = tensor
        parts = [torch.empty_like(own) for _ in counts]
        traffic.gathered += own.nbytes
        dist.all_gather(parts, own)
        found.append(torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)]))
    return found


def gather_objects(value: Value) -> list[Value]:
    """A value of every rank, in the order of ranks: tensors on the CPU and what can be pickled; [] but on rank 0."""
    if not is_running():
        return [value]
    found: list[Any] = [None] * world_size() if rank() == 0 else []
    dist.gather_object(value, found or None)
    return found


def raise_on_all_ranks(make: Callable[[], Value]) -> Value:
    """What `make` returns; a :class:`SemaugError` of one rank is raised on all, so that nobody waits for those who left.

    On each machine the first rank goes ahead of the others, which find what it has left in a cache.
    """
    if not is_running():
        return make()
    ahead = os.environ.get("LOCAL_RANK", "0") == "0"
    made: list[Value] = []
    for turn in (True, False):
        fault: str | None = None
        try:
            if ahead == turn:
                made.append(make())
        except SemaugError as error:
            fault = str(error)
        faults: list[str | None] = [None] * world_size()
        dist.all_gather_object(faults, fault)
        for found in filter(None, faults):
            raise SemaugError(found, on_all_ranks=True)
    return made[0]


def lost(error: BaseException) -> bool:
    """Whether an error says that another process has ended."""
    told = ("closed by peer", "reset by peer", "connection refused", "broken pipe", "nccl", "socket", "timed out")
    return is_running() and isinstance(error, RuntimeError) and any(part in str(error).lower() for part in told)


def broadcast_object(value: Value) -> Value:
    """The value that rank 0 has."""
    values = [value]
    if is_running():
        dist.broadcast_object_list(values)
    return values[0]


def _host_device() -> str:
    """Where small numbers that the host needs are kept: on the CPU, unless NCCL is all there is."""
    return "cpu" if "cpu:" in dist.get_backend_config() else "cuda"


def _buckets(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The tensors' places in lists of one device and type each, closed when they have reached `BUCKET` bytes."""
    buckets: list[list[int]] = []
    unfilled: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(tensors):
        key = tensor.device, tensor.dtype
        if key not in unfilled:
            unfilled[key] = []
            buckets.append(unfilled[key])
        unfilled[key].append(place)
        if sum(tensors[member].nbytes for member in unfilled[key]) >= BUCKET:
            del unfilled[key]
    return buckets


def _put(tensors: list[Tensor], flat: Tensor) -> None:
    parts = flat.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view(tensor.shape))
