"""The package as users get it: wheel and sdist, and what `import semaug` brings along."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from commands import OPTIONS
from photos import photo_folder
from semaug import __version__

ROOT = Path(__file__).parents[1]


def python(*arguments: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **environment},
    )  # fmt: skip


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make dist` builds: the sdist from the repository, the wheel from the sdist."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    done = python("-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_wheel_has_all_of_the_package_and_nothing_else(dist: Path) -> None:
    [wheel] = dist.glob("*.whl")
    assert wheel.name == f"semaug-{__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "src" / "semaug"
    files = (file for file in package.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    expected = {f"semaug/{file.relative_to(package).as_posix()}" for file in files}
    assert {"semaug/py.typed", "semaug/experiments/published.json", "semaug/report/templates/page.html"} <= expected
    assert {"semaug/serve/templates/serve.js", "semaug/figures/templates/fragment.css"} <= expected
    assert {name for name in names if not name.startswith(f"semaug-{__version__}.dist-info/")} == expected
    assert f"semaug-{__version__}.dist-info/licenses/LICENSE" in names
    assert not any("test" in name for name in names)


def test_the_sdist_has_what_is_needed_to_build_and_test_it(dist: Path) -> None:
    [archive] = dist.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile", "constraints.txt"} <= names
    assert {"src/semaug/__init__.py", "src/semaug/py.typed", "tests/test_package.py"} <= names
    assert not any(part in name for name in names for part in (".venv", "__pycache__", "runs/", "dist/"))


def test_the_version_is_written_in_one_place() -> None:
    stated = re.compile(rf"""version["']?\s*[:=]+\s*["']{re.escape(__version__)}["']""")
    files = [ROOT / "pyproject.toml", *(ROOT / "src").rglob("*.py")]
    found = [file.name for file in files if stated.search(file.read_text("utf-8"))]
    assert found == []
    own = [file for file in files if f'__version__ = "{__version__}"' in file.read_text("utf-8")]
    assert own == [ROOT / "src" / "semaug" / "__init__.py"]


def test_what_was_built_trains_and_reports_far_from_the_repository(dist: Path, tmp_path: Path) -> None:
    [wheel] = dist.glob("*.whl")
    place = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(place)  # which is what installing it does, but for the script
    where = python("-c", "import semaug; print(semaug.__file__)", cwd=tmp_path, PYTHONPATH=str(place))
    assert Path(where.stdout.strip()).is_relative_to(place), where.stderr
    photos = photo_folder(tmp_path / "photos")
    training = ("-m", "semaug", "train", "--data", photos, "--output", "run", "--epochs", "1", *OPTIONS)
    done = python(*training, cwd=tmp_path, PYTHONPATH=str(place))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
    assert "semaug" in python("-m", "semaug", "--help", cwd=tmp_path, PYTHONPATH=str(place)).stdout


def test_an_import_brings_no_library_that_only_some_commands_need() -> None:
    heavy = ["matplotlib", "plotly", "sklearn", "scipy", "pandas", "timm", "torchvision", "torchmetrics", "onnx"]
    heavy += ["onnxruntime", "starlette", "uvicorn", "jinja2", "torch._dynamo", "torch._inductor", "sympy"]
    program = f"import sys, semaug; print([name for name in {heavy!r} if name in sys.modules])"
    done = python("-c", program, cwd=ROOT, PYTHONPATH=str(ROOT / "src"))
    assert done.stdout.strip() == "[]", done.stderr
