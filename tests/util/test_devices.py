"""CUDA streams, without a GPU."""

import pytest
import torch

from semaug.util import devices


def test_a_purpose_has_one_stream_on_each_gpu_also_if_the_present_gpu_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    present = [0]
    monkeypatch.setattr(torch.cuda, "Stream", lambda index: (index, object()))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: present[0])
    devices._stream.cache_clear()
    try:
        first = devices.stream_for("batches", torch.device("cuda"))
        assert first is devices.stream_for("batches", torch.device("cuda:0"))
        assert first is not devices.stream_for("diagnostics", torch.device("cuda"))
        present[0] = 1
        assert devices.stream_for("batches", torch.device("cuda"))[0] == 1
    finally:
        devices._stream.cache_clear()
