"""Recorded steps: they take the place of CUDA graphs on a CPU, so that what is built around the graphs is tested there.

As a CUDA graph does, a recording runs the same operators on the same tensors, whatever the host does in the meantime. A
value that the host computed from step to step, or a tensor that is not where it was, therefore gives other numbers than
an ordinary step. Random numbers, streams and the memory of graphs need a GPU; ``test_cuda_graphs.py`` tests those.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from semaug.meta import graphs
from semaug.network import randomness
from semaug.util import devices

aten = torch.ops.aten
READ_BY_HOST = {aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default}


class Recording(TorchDispatchMode):
    """The operators of a step. Recording them changes no tensor that existed before."""

    replays = 0  # of all recordings

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, list[tuple[int, Tensor]]]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # by address: tensors that the step changes, and copies
        self._made: dict[int, Any] = {}  # storages that the step made; held, so that no address is used twice

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs inside."""
        try:
            with self:
                yield
        finally:
            for whole, copy in self._before.values():
                whole.copy_(copy)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in READ_BY_HOST:
            raise RuntimeError("operation not permitted when stream is capturing")
        given = _tensors((args, kwargs))
        # BatchNorm changes its running statistics, which its schema does not say.
        if func._schema.is_mutable or func is aten.native_batch_norm.default:
            for tensor in given:
                self._keep(tensor)
        result = func(*args, **kwargs)
        addresses = {tensor.untyped_storage().data_ptr() for tensor in given}
        results = enumerate(_tensors(result))
        made = [(place, tensor) for place, tensor in results if tensor.untyped_storage().data_ptr() not in addresses]
        for _, tensor in made:
            self._made[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        if made or func._schema.is_mutable:
            self._calls.append((func, args, kwargs, made))
        return result

    def _keep(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._made and storage.data_ptr() not in self._before:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._before[storage.data_ptr()] = whole, whole.clone()

    @torch.no_grad()
    def replay(self) -> None:
        """Run the operators again, with results where they were."""
        Recording.replays += 1
        for func, args, kwargs, made in self._calls:
            result = func(*args, **kwargs)
            results = _tensors(result) if made else []
            for place, tensor in made:
                tensor.copy_(results[place])


def _tensors(tree: Any) -> list[Tensor]:
    """The tensors of a structure that have a memory of their own."""
    leaves = pytree.tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf._is_zerotensor()]


class _Noting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READ_BY_HOST:
            self.waits.append(str(func))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _noting_waits() -> Iterator[list[str]]:
    with _Noting() as mode:
        yield mode.waits


class _Generator:
    """A random generator that nobody draws from."""

    def clone_state(self) -> "_Generator":
        return self

    graphsafe_get_state = clone_state

    def graphsafe_set_state(self, state: "_Generator") -> None:
        pass


def patch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let recordings take the place of CUDA graphs."""
    none = contextlib.nullcontext
    monkeypatch.setattr(devices, "has_graphs", lambda device: True)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **_: graph.recording())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "device", lambda device: none())
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda device, pool: None)
    monkeypatch.setattr(graphs, "_empty_like", torch.zeros_like)  # a recording computes with what is there
    monkeypatch.setattr(graphs, "stream_for", lambda purpose, device: None)
    monkeypatch.setattr(graphs, "_noting_waits", _noting_waits)
    monkeypatch.setattr(randomness, "_read", lambda device: (torch.get_rng_state(), torch.zeros(16, dtype=torch.uint8)))
    monkeypatch.setattr(randomness, "_set", lambda state, device: torch.set_rng_state(state[0]))
    monkeypatch.setattr(randomness, "default_generator", lambda device: _Generator())
