"""The programming interface of the server: the images of a request, their predictions, and the OpenAPI description.

A form (``multipart/form-data``) is parsed here: its size is limited before, so no streaming parser is needed.
"""

import re
from email.message import Message
from typing import Any
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import torch

from semaug import __version__
from semaug.inference.classifier import Classifier
from semaug.util.errors import DataError

MAX_IMAGES = 32
TOP = 5
_MAX_HEADER_BYTES = 8192


def images_in(content: bytes, content_type: str) -> list[tuple[str | None, bytes]]:
    """Take name and bytes of each image out of the body of a request: one image without a name, or a form with files.

    Raises:
        DataError: If the form is damaged, has no file, or has more than `MAX_IMAGES` fields.
    """
    header = Message()
    header["Content-Type"] = content_type
    if header.get_content_type() != "multipart/form-data":
        return [(None, content)]
    boundary = header.get_param("boundary")
    if not isinstance(boundary, str) or not re.fullmatch(r"[ -~]{1,70}", boundary):
        raise DataError("the form has no boundary")
    _, *parts = (b"\r\n" + content).split(b"\r\n--" + boundary.encode(), MAX_IMAGES + 2)
    if len(parts) > MAX_IMAGES + 1:
        raise DataError(f"the form has more than {MAX_IMAGES} files")
    images: list[tuple[str | None, bytes]] = []
    for part in parts[:-1]:
        head, blank, body = part.partition(b"\r\n\r\n")
        if not blank or len(head) > _MAX_HEADER_BYTES or not re.match(rb"[ \t]*\r\n", part):
            raise DataError("the form is damaged")
        name = _file_name(head.decode(errors="replace"))
        if name is not None:  # other fields are no files
            images.append((name, body))
    if not parts or not parts[-1].startswith(b"--"):
        raise DataError("the form is incomplete")
    if not images:
        raise DataError("the form has no file")
    return images


def _file_name(head: str) -> str | None:
    """The name of a file in the headers of a part, which browsers write in UTF-8; None for other fields."""
    line = re.search(r"(?im)^content-disposition:(.*)", head)
    pairs = re.findall(r';\s*([^=;\s]+)\s*=\s*("(?:\\.|[^"\\])*"|[^;]*)', line[1] if line else "")
    values = {key.lower(): value.strip() for key, value in pairs}
    if "filename" in values:
        value = values["filename"]
        if value.startswith('"') != value.endswith('"') or value == '"':
            raise DataError("the form is damaged")
        return re.sub(r'\\(["\\])', r"\1", value[1:-1]) if value.startswith('"') else value
    if "filename*" in values:  # CHARSET'LANGUAGE'NAME, by older programs
        return unquote(values["filename*"].rpartition("'")[2])
    return None


def ranked(classifier: Classifier, top: int, pixels: npt.NDArray[np.uint8]) -> list[dict[str, Any]]:
    """Classify an image that was resized by the preprocessing: the most probable classes with their probabilities."""
    [(indices, values)] = classifier.ranked(torch.tensor(pixels)[None], top)
    best = zip(indices, values, strict=True)
    return [{"label": classifier.classes[i], "probability": value} for i, value in best]


def openapi(title: str, max_bytes: int) -> dict[str, Any]:
    """Describe the interface in OpenAPI 3.1; `title` names the model, `max_bytes` limits the body of a request."""
    text, number = {"type": "string"}, {"type": "number"}
    binary = {"type": "string", "format": "binary"}
    prediction = _object(label=text, probability={**number, "minimum": 0, "maximum": 1})
    result = _object(
        file={"type": ["string", "null"], "description": "name of the file; null for a body that is an image"},
        predictions={"type": "array", "items": prediction, "description": "the most probable class first"},
        error={"type": ["string", "null"], "description": "why this image has no predictions"},
    )
    results = _object(results={"type": "array", "items": result})
    about = _object(status=text, model=text, network=text, classes={"type": "integer"}, version=text)
    top = {"type": "integer", "minimum": 1, "default": TOP}
    refusals = {
        "400": "the form or the number of classes cannot be used, or the body is incomplete",
        "403": "the request comes from a page of another site",
        "408": "the body arrives too slowly",
        "413": f"the body has more than {max_bytes // 1_000_000} MB",
        "421": "the request addresses the server by a name that it does not know",
    }
    example = {"file": "first.jpg", "predictions": [{"label": "Cardinal", "probability": 0.99}], "error": None}
    predict = {
        "summary": "Classify one image or several",
        "description": f"The body is an image, or a form with up to {MAX_IMAGES} files. A file that is no image gets "
        "an error in its own result; the others are still classified.",
        "parameters": [
            {"name": "top", "in": "query", "required": False, "description": "number of classes", "schema": top}
        ],
        "requestBody": {
            "required": True,
            "content": {
                "image/*": {"schema": binary},
                "multipart/form-data": {"schema": _object(image={"type": "array", "items": binary})},
            },
        },
        "responses": {
            "200": _response("at least one image was classified", results, {"results": [example]}),
            "415": _response("none of the files is an image that can be read", results),
            **{code: {"description": description} for code, description in refusals.items()},
        },
    }
    alive = {
        "summary": "Whether the server answers, and with which model",
        "responses": {"200": _response("the server answers", about)},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": f"Predictions of {title}", "version": __version__},
        "paths": {"/predict": {"post": predict}, "/health": {"get": alive}},
    }


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _response(description: str, schema: dict[str, Any], example: dict[str, Any] | None = None) -> dict[str, Any]:
    content = {"schema": schema} if example is None else {"schema": schema, "example": example}
    return {"description": description, "content": {"application/json": content}}
