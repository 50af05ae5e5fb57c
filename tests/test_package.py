"""The package as users install it: wheel, sdist, version, and the modules that `import semaug` loads."""

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
from semaug.report.figures import FIGURES

ROOT = Path(__file__).parents[1]


def python(*arguments: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **environment},
    )  # fmt: skip


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, built from the repository, and the wheel, built from the sdist, as `make dist` does."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    done = python("-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_wheel_contains_exactly_the_files_of_the_package(dist: Path) -> None:
    [wheel] = dist.glob("*.whl")
    assert wheel.name == f"semaug-{__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "src" / "semaug"
    files = (file for file in package.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    expected = {f"semaug/{file.relative_to(package).as_posix()}" for file in files}
    assert {Path(name).suffix for name in expected} >= {".py", ".typed", ".json", ".html", ".css", ".js"}
    assert {name for name in names if not name.startswith(f"semaug-{__version__}.dist-info/")} == expected
    assert f"semaug-{__version__}.dist-info/licenses/LICENSE" in names
    assert not any("test" in name for name in names)


def test_the_sdist_contains_what_is_needed_to_build_and_test(dist: Path) -> None:
    [archive] = dist.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile", "constraints.txt"} <= names
    assert {"src/semaug/__init__.py", "src/semaug/py.typed", "tests/test_package.py"} <= names
    assert not any(part in name for name in names for part in (".venv", "__pycache__", "runs/", "dist/"))


def test_the_version_is_written_in_one_place() -> None:
    stated = re.compile(rf"""version["']?\s*[:=]+\s*["']{re.escape(__version__)}["']""")
    files = [ROOT / "pyproject.toml", *(ROOT / "src").rglob("*.py")]
    assert [file.name for file in files if stated.search(file.read_text("utf-8"))] == []
    own = [file for file in files if f'__version__ = "{__version__}"' in file.read_text("utf-8")]
    assert own == [ROOT / "src" / "semaug" / "__init__.py"]


def test_the_wheel_trains_and_reports_outside_the_repository(dist: Path, tmp_path: Path) -> None:
    [wheel] = dist.glob("*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)  # an installation, without the script
    photos = photo_folder(tmp_path / "photos", species=2, train=4, test=1)
    program = "import runpy, semaug; print(semaug.__file__); runpy.run_module('semaug', run_name='__main__')"
    arguments = ("train", "--data", photos, "--output", "run", "--epochs", "1", *OPTIONS)
    done = python("-c", program, *arguments, cwd=tmp_path, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.splitlines()[0]).is_relative_to(site)
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000


def test_an_import_loads_no_library_that_only_some_commands_need() -> None:
    heavy = ["matplotlib", "plotly", "sklearn", "scipy", "pandas", "timm", "torchvision", "torchmetrics", "onnx"]
    heavy += ["onnxruntime", "starlette", "uvicorn", "jinja2", "torch._dynamo", "torch._inductor", "sympy"]
    steps = {
        "import semaug": heavy,
        "import semaug.training.trainer": ["timm", "torchvision"],
        "import semaug.cli.main; semaug.cli.main.main(['figures', '--help'])": ["matplotlib", "sklearn", "jinja2"],
    }
    program = "import sys\n" + "".join(
        f"{step}\nprint('loaded', [name for name in {names!r} if name in sys.modules])\n"
        for step, names in steps.items()
    )
    done = python("-c", program, cwd=ROOT, PYTHONPATH=str(ROOT / "src"))
    assert [line for line in done.stdout.splitlines() if line.startswith("loaded")] == ["loaded []"] * 3, done.stderr
    assert all(f"{name}: {kind.summary.split()[0]}" in done.stdout for name, kind in FIGURES.items())
