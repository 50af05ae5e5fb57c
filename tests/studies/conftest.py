"""Training runs of the studies in this process."""

from collections.abc import Iterator

import pytest

from inline_workers import InlineWorker
from semaug.studies import workers


@pytest.fixture(scope="module")
def inline_workers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "_Worker", InlineWorker)
        yield
