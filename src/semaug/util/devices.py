"""The device to compute on, and its streams."""

import functools

import torch

from semaug.util.errors import SettingError
from semaug.util.names import shown


def choose_device(name: str | None) -> str:
    """Choose the device to compute on.

    Args:
        name: The device that the user asked for; None for cuda if available, else cpu.

    Returns:
        Name of the device.

    Raises:
        SettingError: There is no such device.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name is None:
        return "cuda" if count else "cpu"
    if name.startswith("cuda") and not count:
        raise SettingError("there is no CUDA device; set `device` to cpu, or leave it out")
    if name not in ("cpu", *["cuda"] * bool(count), *(f"cuda:{i}" for i in range(count))):
        gpus = "" if not count else ", cuda:0" if count == 1 else f", cuda:0 … cuda:{count - 1}"
        raise SettingError(f"`device` must be cpu{', cuda' if count else ''}{gpus}, not {shown(name)}")
    return name


def has_graphs(device: torch.device) -> bool:
    """Whether steps on a device are captured as graphs, so that the host does not wait for it within a step."""
    return device.type == "cuda"


def stream_for(purpose: str, device: torch.device) -> torch.cuda.Stream:
    """The CUDA stream for a purpose, the same for each call: torch has 32 streams, and gives out the 33rd one again."""
    return _stream(purpose, torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _stream(purpose: str, index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)
