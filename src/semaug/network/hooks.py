"""Read or replace the outputs of a network's modules during a pass."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


def hooked(module: nn.Module, change: Callable[[Any], Any]) -> RemovableHandle:
    """In a `with` block, call a function on a module's outputs, also in views of the model.

    What the function returns, unless None, takes the place of the output.
    """
    return module.register_forward_hook(lambda _module, _inputs, output: change(output))


@contextmanager
def recorded_outputs(
    modules: Mapping[str, nn.Module], read: Callable[[Any], Any] = lambda output: output
) -> Iterator[list[tuple[str, Any]]]:
    """In a `with` block, list name and output (or `read` of the output) of every call of some modules."""
    calls: list[tuple[str, Any]] = []

    def record(name: str, output: Any) -> None:
        calls.append((name, read(output)))

    with ExitStack() as stack:
        for name, module in modules.items():
            stack.enter_context(hooked(module, partial(record, name)))
        yield calls
