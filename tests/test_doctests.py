"""The examples in the docstrings of all public names run, and every public name has one."""

import doctest
import inspect

import pytest
import torch

import semaug


@pytest.mark.parametrize("name", semaug.__all__)
def test_examples_of_a_public_name_run(name: str) -> None:
    item = getattr(semaug, name)
    examples = [test for test in doctest.DocTestFinder().find(item, name) if test.examples]
    assert examples, f"semaug.{name} has no example"
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    messages: list[str] = []
    with torch.random.fork_rng():
        for test in examples:
            runner.run(test, out=messages.append)
    assert runner.failures == 0, "".join(messages)


@pytest.mark.parametrize("name", semaug.__all__)
def test_arguments_of_a_public_name_are_documented(name: str) -> None:
    item = getattr(semaug, name)
    if getattr(item, "_is_protocol", False):
        pytest.skip("a protocol is not constructed")
    parameters = inspect.signature(item).parameters.values()
    arguments = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    owners = item.__mro__ if inspect.isclass(item) else [item]  # a subclass may leave arguments to its base class
    text = "\n".join(inspect.cleandoc(owner.__doc__ or "") for owner in owners)
    missing = [argument for argument in arguments if f"\n    {argument}: " not in text]
    assert not missing, f"semaug.{name} does not document {missing}"
