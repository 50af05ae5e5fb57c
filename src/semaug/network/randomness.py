"""States of the random generators: read, set and restored, also inside a CUDA graph.

A repeated pass draws the masks of the pass that it repeats, so it starts from the same random state. While a CUDA graph
is captured, no state of a GPU's generator can be read or set. An eager step is therefore logged first
(:class:`Rehearsal`): which states it reads, how far its own draws have moved the generator by then, and to which state
it returns where. In the graph (:class:`GraphRandomness`) each return to an earlier state switches to a generator of its
own, and before each replay these generators are set to the states that the replay will return to.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

RandomState = tuple[Tensor, Tensor | None]
"""States of the CPU's random generator and of a CUDA device's (two 64-bit numbers: seed and offset)."""

_step: "Rehearsal | GraphRandomness | None" = None  # what handles random states at present, instead of torch


def random_state(device: torch.device) -> RandomState:
    """The states of the random generators that a pass on `device` draws from."""
    return _read(device) if _step is None else _step.read()


def set_random_state(state: RandomState, device: torch.device) -> None:
    """Return to an earlier state of the random generators."""
    if _step is None:
        _set(state, device)
    else:
        _step.set(state)


@contextmanager
def restored_random_state(device: torch.device, start: RandomState | None = None) -> Iterator[None]:
    """Restore the random generators of `device` at the end; begin with the state `start` if it is not None."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []) if _step is None else _step.restored():
        if start is not None:
            set_random_state(start, device)
        yield


def _read(device: torch.device) -> RandomState:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _set(state: RandomState, device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


@contextmanager
def _handled_by(step: "Rehearsal | GraphRandomness") -> Iterator[None]:
    global _step
    assert _step is None
    _step = step
    try:
        yield
    finally:
        _step = None


def default_generator(device: torch.device) -> Generator:
    """The random generator of a CUDA device."""
    index = torch.cuda.current_device() if device.index is None else device.index
    generator: Generator = torch.cuda.default_generators[index]
    return generator


def _seed_and_offset(state: RandomState) -> tuple[int, int]:
    assert state[1] is not None
    seed, offset = state[1].view(torch.int64).tolist()
    return seed, offset


class Return(NamedTuple):
    """A return to an earlier random state."""

    origin: int  # number of the state: those carried into the step come first, then those that it reads
    draws: bool  # whether random numbers are drawn after it


class Rehearsal:
    """Logs how an eager step on a GPU uses random states.

    Args:
        device: The GPU.
        carried: The states that come from an earlier step.

    Attributes:
        offsets: For each state that the step reads, how far the generator had moved since the start of the step.
        returns: The step's returns to earlier states, in order.
        obstacle: Why a CUDA graph cannot repeat the step's random numbers; None if it can.
    """

    def __init__(self, device: torch.device, carried: Sequence[RandomState]) -> None:
        self.device = device
        self.offsets: list[int] = []
        self.returns: list[Return] = []
        self.obstacle: str | None = None
        self._known = list(carried)
        self._returned = False  # and not yet restored

    @contextmanager
    def running(self) -> Iterator[None]:
        """Log the step that runs inside."""
        on_host = torch.get_rng_state(), random.getstate()
        self._start = _seed_and_offset(_read(self.device))
        with _handled_by(self):
            yield
        if not torch.equal(on_host[0], torch.get_rng_state()) or on_host[1] != random.getstate():
            self.obstacle = "the network draws random numbers on the host"

    def read(self) -> RandomState:
        """Read the present state."""
        state = _read(self.device)
        seed, offset = _seed_and_offset(state)
        if seed != self._start[0]:
            self.obstacle = "the network seeds the random generator"
        self.offsets.append(offset - self._start[1])
        self._known.append(state)
        return state

    def set(self, state: RandomState) -> None:
        """Return to a state."""
        self._finish_return()
        origin = next(number for number, known in enumerate(self._known) if known is state)
        self.returns.append(Return(origin, draws=False))
        self._returned = True
        _set(state, self.device)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the present state at the end."""
        before = _read(self.device)
        try:
            yield
        finally:
            self._finish_return()
            _set(before, self.device)

    def _finish_return(self) -> None:
        """Note whether random numbers were drawn since the last return."""
        if self._returned:
            origin = self.returns[-1].origin
            draws = _seed_and_offset(self._known[origin]) != _seed_and_offset(_read(self.device))
            self.returns[-1] = Return(origin, draws)
            self._returned = False


class GraphRandomness:
    """The random states of a CUDA graph.

    Args:
        rehearsal: Log of an eager step of the same kind.
        carried: Stands for the states that come from an earlier step.
    """

    def __init__(self, rehearsal: Rehearsal, carried: Sequence[RandomState]) -> None:
        self._rehearsal = rehearsal
        self._default = default_generator(rehearsal.device)
        self._generators = [self._default.clone_state() if entry.draws else None for entry in rehearsal.returns]
        self._known = list(carried)
        self._carried = len(self._known)
        self._returns = 0

    @contextmanager
    def capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Register the generators with the graph; enter this before the capture."""
        for generator in filter(None, self._generators):
            graph.register_generator_state(generator)
        before = self._default.clone_state()
        try:
            with _handled_by(self):
                yield
        except BaseException:
            # After a failed capture torch takes the generator for one that is still captured.
            self._default.graphsafe_set_state(before)
            raise

    def read(self) -> RandomState:
        """A token for the present state."""
        self._known.append((torch.empty(0, dtype=torch.uint8), None))
        return self._known[-1]

    def set(self, state: RandomState) -> None:
        """Return to the state of a token."""
        entry, generator = self._rehearsal.returns[self._returns], self._generators[self._returns]
        if self._known[entry.origin] is not state:
            raise RuntimeError("the step does not use random states as the step before it did")
        self._returns += 1
        if generator is not None:
            self._default.graphsafe_set_state(generator)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the present state at the end."""
        before = self._default.graphsafe_get_state()
        try:
            yield
        finally:
            self._default.graphsafe_set_state(before)

    def prepare_replay(self, carried: Sequence[RandomState]) -> "States":
        """Set the generators for a replay that starts now; `carried` are the states from the step before.

        Returns the states that the replayed step reads, for the tokens that it has for them.
        """
        states = States(carried, _read(self._rehearsal.device), self._rehearsal.offsets, self._known)
        for entry, generator in zip(self._rehearsal.returns, self._generators, strict=True):
            if generator is not None:
                on_device = states.number(entry.origin)[1]
                assert on_device is not None
                generator.set_state(on_device)
        return states


class States:
    """The random states of one replay, made on demand.

    Args:
        carried: Those from an earlier step.
        start: The state at the start of the replay.
        offsets: How far the generator has moved since then at each state that the step reads.
        tokens: The tokens of all of them.
    """

    def __init__(
        self, carried: Sequence[RandomState], start: RandomState, offsets: Sequence[int], tokens: Sequence[Any]
    ) -> None:
        self._carried, self._start, self._offsets, self._tokens = carried, start, offsets, tokens
        self._moved: dict[int, Tensor] = {}

    def number(self, number: int) -> RandomState:
        """The state of a number: the carried ones come first."""
        if number < len(self._carried):
            return self._carried[number]
        offset = self._offsets[number - len(self._carried)]
        if offset not in self._moved:
            assert self._start[1] is not None
            self._moved[offset] = self._start[1].clone()
            self._moved[offset].view(torch.int64)[1] += offset
        return self._start[0], self._moved[offset]  # a pair of its own, by which the state is recognised

    def of(self, token: RandomState) -> RandomState:
        """The state for which a token stands."""
        return self.number(next(number for number, known in enumerate(self._tokens) if known is token))
