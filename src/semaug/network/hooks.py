"""Read or replace the outputs of a network's modules during a pass."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


def hooked(module: nn.Module, change: Callable[[Any], Any]) -> RemovableHandle:
    """Inside, call a function on the module's outputs; what it returns, unless None, takes their place. Views follow.

    Outside, no hook is left, which would also run in a copy of the module.
    """
    return module.register_forward_hook(lambda _module, _inputs, output: change(output))


@contextmanager
def recorded_outputs(
    modules: Mapping[str, nn.Module], read: Callable[[Any], Any] = lambda output: output
) -> Iterator[list[tuple[str, Any]]]:
    """List name and output of every call of the modules inside, in order; of the output only what `read` returns."""
    calls: list[tuple[str, Any]] = []

    def record(name: str, output: Any) -> None:
        calls.append((name, read(output)))

    with ExitStack() as stack:
        for name, module in modules.items():
            stack.enter_context(hooked(module, partial(record, name)))
        yield calls
