"""Images that look the same in two splits: a leak that comparing files or pixels does not show.

Images are compared by the cosine of their features, block by block: features are on disk, and memory holds two blocks.
"""

import heapq
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import combinations_with_replacement

import numpy as np
import numpy.typing as npt
from PIL import Image

from semaug.data.check import NearDuplicate, image_name
from semaug.data.samples import DataSet, Samples
from semaug.util.processes import ordered_map

SIDE = 16  # of the grey thumbnails that are compared without a network
LISTED = 1000
_BLOCK = 2048

Vectors = npt.NDArray[np.float32]
Embed = Callable[[Samples], Iterable[Vectors]]
"""Features of each image of a split, in order: (V, D) of V versions of the image, of length 1; 0 if unreadable."""


def grey_thumbnails(samples: Samples, workers: int = 0) -> Iterator[Vectors]:
    """Compute grey thumbnails (2, 256) of images and of their mirror images, of mean 0 and length 1.

    Their cosine is the correlation of the pixels. It finds copies in other sizes, formats and brightness.
    """
    return ordered_map(partial(_thumbnail, samples), range(len(samples)), workers)


def _thumbnail(samples: Samples, i: int) -> Vectors:
    try:
        small = samples.load(i).convert("L").resize((SIDE, SIDE), Image.Resampling.BOX)
    except Exception:  # of whatever kind; the check reports it
        return np.zeros((2, SIDE * SIDE), dtype=np.float32)
    grey = np.asarray(small, dtype=np.float32)
    both = np.stack([grey, grey[:, ::-1]]).reshape(2, -1)
    both = both - both.mean()
    vectors: Vectors = both / max(float(np.linalg.norm(both[0])), 1e-6)
    return vectors


def near_duplicates(data: DataSet, embed: Embed, similarity: float) -> tuple[NearDuplicate, ...]:
    """Find images of different splits that look the same; of a single split, any two.

    Args:
        data: The data set.
        embed: Computes the features of a split.
        similarity: Least cosine, from -1 to 1.

    Returns:
        The pairs, the most similar first, at most `LISTED`.
    """
    with tempfile.TemporaryFile() as file:
        shapes: dict[str, tuple[int, ...]] = {}
        for split, samples in data.splits.items():
            for vectors in embed(samples):
                file.write(vectors.astype(np.float32).tobytes())
                shapes[split] = (len(samples), *vectors.shape)
        file.flush()
        stored: dict[str, Vectors] = {}
        start = 0
        for split, shape in shapes.items():
            stored[split] = np.memmap(file, np.float32, "r", start, shape)
            start += stored[split].nbytes
        best: list[tuple[float, str, int, str, int]] = []
        for first, second in combinations_with_replacement(shapes, 2):
            if first != second or len(shapes) == 1:
                for value, i, j in _similar(stored[first], stored[second], similarity, first == second):
                    push = heapq.heappushpop if len(best) == LISTED else heapq.heappush
                    push(best, (value, first, i, second, j))
    return tuple(
        NearDuplicate(image_name(data, first, i), image_name(data, second, j), round(value, 4))
        for value, first, i, second, j in sorted(best, reverse=True)
    )


def _similar(first: Vectors, second: Vectors, least: float, same: bool) -> Iterator[tuple[float, int, int]]:
    """Cosine and indices of similar images; `same`: both are one split, and each pair counts once."""
    for top in range(0, len(first), _BLOCK):
        rows = np.array(first[top : top + _BLOCK, 0])
        for left in range(0, len(second), _BLOCK):
            block = np.array(second[left : left + _BLOCK])
            values = np.max([rows @ block[:, k].T for k in range(block.shape[1])], axis=0)
            for i, j in np.argwhere(values >= least).tolist():
                if not same or top + i < left + j:
                    yield float(values[i, j]), top + i, left + j
