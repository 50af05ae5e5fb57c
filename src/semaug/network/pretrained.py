"""Pretrained weights, downloaded once: timm's as safetensors files from the Hugging Face hub, and torchvision's.

torchvision's files are pickles. Their checksum is compared with that of torchvision, and they are read by
:func:`torch.load` with ``weights_only=True``, which runs no code.
"""

import hashlib
import threading
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from semaug.util.errors import ModelError, SettingError

FILE = "model.safetensors"
ANSWER_SECONDS = 4.0  # within which the hub must answer


def pretrained_file(name: str) -> Path:
    """Find the pretrained weights of a network in the cache of the Hugging Face hub, or download them into it.

    Args:
        name: Name of the network in timm, with or without the name of its weights, as in resnet50.a1_in1k.

    Returns:
        The file.

    Raises:
        SettingError: There are no such weights, or not as a safetensors file.
        ModelError: They are not in the cache and cannot be downloaded.
    """
    import timm
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache  # timm depends on it
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    from huggingface_hub.file_download import repo_folder_name

    config = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
    repository = None if config is None else config.hf_hub_id
    missing = SettingError(
        f"{name} has no pretrained weights as a safetensors file, and other formats can hold code; choose a "
        "`model` of timm that has them, give a file as `weights`, or train from scratch with `pretrained` False"
    )
    if repository is None:
        raise missing
    cached = try_to_load_from_cache(repository, FILE)
    if isinstance(cached, str):
        return _intact(Path(cached))
    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model")
    reason = f"{constants.ENDPOINT} does not answer"
    if not constants.HF_HUB_OFFLINE and _answers(constants.ENDPOINT):
        try:
            return _intact(Path(hf_hub_download(repository, FILE)))
        except LocalEntryNotFoundError:  # the connection broke
            pass
        except EntryNotFoundError:
            raise missing from None
        except ModelError:
            raise
        except Exception as error:  # of the hub or of its HTTP library
            reason = f"{constants.ENDPOINT} answers with {type(error).__name__}"
    raise ModelError(
        f"{reason}, and {FILE} of {repository} is not in {folder}; copy that folder from a machine where "
        f"semaug weights {name} has run, give a file as `weights`, or train from scratch with `pretrained` False"
    )


RGB = tuple[float, float, float]


def pixel_statistics(name: str) -> tuple[RGB, RGB] | None:
    """Mean and deviation of the channels by which the inputs of a network's pretrained weights are normalised.

    Args:
        name: Name of the network, with or without its library and the name of its weights.

    Returns:
        Both as timm states them, for pixels from 0 to 1; None if the network is not from timm.
    """
    library, _, short = name.rpartition("/")
    if library == "torchvision" or name == "small":
        return None
    import timm

    config = timm.get_pretrained_cfg(short) if timm.is_model(short) else None
    return None if config is None else (config.mean, config.std)


def torchvision_file(name: str) -> Path:
    """Find torchvision's default weights of a network in torch's cache, or download them into it.

    Args:
        name: Name of the network in torchvision.

    Returns:
        The file, which has the checksum that torchvision states.

    Raises:
        ModelError: The file is not in the cache and cannot be downloaded, or is damaged.
    """
    import torchvision
    from torch import hub

    url: str = torchvision.models.get_model_weights(name).DEFAULT.url
    file = Path(hub.get_dir()) / "checkpoints" / url.rpartition("/")[2]
    checksum = file.stem.rpartition("-")[2]
    if not file.is_file():
        server = url.removesuffix(urlsplit(url).path)
        reason = f"{server} does not answer"
        if _answers(server):
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                hub.download_url_to_file(url, str(file), checksum, progress=False)
            except (OSError, RuntimeError) as error:  # RuntimeError: another checksum
                reason = f"{server} answers with {type(error).__name__}"
        if not file.is_file():
            raise ModelError(
                f"{reason}, and {file} is missing; copy it from a machine where semaug weights torchvision/{name} has "
                "run, give a file as `weights`, or train from scratch with `pretrained` False"
            )
    with file.open("rb") as opened:
        if not hashlib.file_digest(opened, "sha256").hexdigest().startswith(checksum):
            raise ModelError(f"the pretrained weights {file} are damaged; delete the file")
    return file


def _intact(file: Path) -> Path:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt"):
            return file
    except (SafetensorError, OSError) as error:
        raise ModelError(f"the pretrained weights {file} are damaged ({error}); delete the file") from error


def _answers(url: str) -> bool:
    """Whether a server answers in time. Name resolution has no time limit of its own, hence the thread."""
    answers: list[bool] = []

    def ask() -> None:
        with suppress(OSError, ValueError):
            with suppress(urllib.error.HTTPError):  # an answer too
                urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=ANSWER_SECONDS).close()
            answers.append(True)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    return bool(answers)
