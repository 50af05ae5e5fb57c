"""Training runs of studies in this process: the tests of the workers themselves are in studies/test_workers.py."""

from concurrent.futures import Future
from pathlib import Path

from semaug.studies import workers
from semaug.training.settings import TrainConfig
from semaug.training.trainer import train


class InlineWorker:
    """Stands in for a worker process."""

    def __init__(self, number: int, threads: int, logs: Path) -> None:
        self.logs = logs

    def submit(self, config: TrainConfig) -> "Future[str | None]":
        future: Future[str | None] = Future()
        try:
            train(config)
            future.set_result(None)
        except Exception as error:
            future.set_result(workers.reason_of(error))
        return future

    def outcome(self, future: "Future[str | None]") -> str | None:
        return future.result()

    def close(self) -> None:
        pass
