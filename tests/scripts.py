"""Scripts of the repository, loaded as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


def load() -> ModuleType:
    """The script, as a module."""
    spec = importlib.util.spec_from_file_location("scaling", ROOT / "benchmarks" / "scaling.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["scaling"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


scaling = load()
