"""The layout of the package: rooms that import downwards only, and what every module must have."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "semaug"
ROOMS = ["util", "isda", "network", "meta", "p2p", "data", "inference", "training", "report", "studies", "cli"]
MODULES = sorted(PACKAGE.rglob("*.py"))
LIBRARY = [file for file in MODULES if file.relative_to(PACKAGE).parts[0] != "cli"]


def name_of(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imported_rooms(source: str) -> set[str]:
    """The rooms that a module imports from, anywhere in it."""
    rooms = set()
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("semaug.")}
    return rooms & set(ROOMS)


def upward_imports(room: str, source: str) -> set[str]:
    return {other for other in imported_rooms(source) if ROOMS.index(other) > ROOMS.index(room)}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_from_the_rooms_below_it(room: str) -> None:
    files = list((PACKAGE / room).rglob("*.py"))
    assert files
    upward = {name_of(file): found for file in files if (found := upward_imports(room, file.read_text("utf-8")))}
    assert not upward


def test_an_upward_import_would_be_noticed() -> None:
    assert upward_imports("isda", "from semaug.meta.learner import LearnableAugmentation") == {"meta"}
    assert upward_imports("data", "def f():\n    from semaug import training") == {"training"}
    assert upward_imports("cli", "import semaug.util.files") == set()


def test_every_module_lies_in_a_room() -> None:
    outside = {file.name for file in PACKAGE.glob("*.py")}
    assert outside == {"__init__.py", "__main__.py"}
    assert {folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").exists()} == set(ROOMS)


def test_the_algorithm_is_short_and_free_of_machinery() -> None:
    source = (PACKAGE / "meta" / "algorithm.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 200
    assert imported_rooms(source) == {"isda", "meta"}
    code = ast.unparse(ast.parse(source))
    for word in ("autocast(", "scaler", "distributed", "state_dict", "micro_batch"):
        assert word not in code


def public_functions(body: list[ast.stmt]) -> Iterator[ast.FunctionDef]:
    for node in body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node.body)


@pytest.mark.parametrize("file", MODULES, ids=name_of)
def test_public_functions_document_their_arguments(file: Path) -> None:
    tree = tree_of(file)
    assert ast.get_docstring(tree), "the module has no docstring"
    undocumented = []
    for function in public_functions(tree.body):
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        names = [argument.arg for argument in arguments if argument.arg not in ("self", "cls")]
        if len(names) >= 4 and "Args:" not in (ast.get_docstring(function) or ""):
            undocumented.append(function.name)
    assert not undocumented


def strings_of(tree: ast.Module) -> Iterator[str]:
    """The string constants of a module, docstrings aside."""
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.value


@pytest.mark.parametrize("file", LIBRARY, ids=name_of)
def test_library_code_names_no_flags(file: Path) -> None:
    flags = [text for text in strings_of(tree_of(file)) if re.search(r"(?<![\w-])--[a-z]", text)]
    assert not flags


READERS = (
    r"open|safe_open|.*\.(open|read_bytes|read_text|fromfile|memmap|open_memmap|memory_map|loadtxt|genfromtxt)"
    r"|(np|numpy|torch|json|onnx|yaml|pickle|tomllib)\.load|.*\.(load_file|loadmat|ZipFile|InferenceSession|ParquetFile)"
)
ALLOWED = {  # calls outside of util/untrusted.py that could read a file of unknown origin, and why they are harmless
    "data/downloads.py": {"tarfile.open(fileobj=file, tarinfo=TarHeader)"},  # an open file
    "data/webdataset.py": {"tarfile.open(fileobj=opened, mode='r:', tarinfo=TarHeader)"},  # likewise
    "data/huggingface.py": {
        "arrow.memory_map(str(file))",  # a regular file, which has just been opened as one
        "parquet.ParquetFile(opened)",  # an open file
    },
    "data/near_duplicates.py": {"np.memmap(file, np.float32, 'r', start, shape)"},  # our own temporary file
    "data/samples.py": {"Image.open(file, formats=_formats())"},  # an open file
    "inference/onnx_model.py": {  # its content has been checked
        "runtime.InferenceSession(str(file), options, providers=['CPUExecutionProvider'], "
        "disabled_optimizers=['ConstantFolding'])"
    },
    "network/models.py": {
        "safe_open(file, 'pt')",  # a regular file, mapped into memory
        "torch.load(weights, map_location='cpu', weights_only=True)",  # torchvision's own, with its checksum
    },
    "network/pretrained.py": {"file.open('rb')", "safe_open(file, 'pt')"},  # regular files in a cache
    "studies/bench/result.py": {"Path('/proc/cpuinfo').read_text()"},
    "studies/presets/table_sota_p2p.py": {
        "files('semaug.studies').joinpath('published.json').read_text(encoding='utf-8')"  # our own
    },
    "training/checkpoints.py": {  # bytes whose checksum is right, and nothing but numbers is read from them
        "torch.load(io.BytesIO(payload), map_location='cpu', weights_only=True)"
    },
}


def path_readers(source: str) -> set[str]:
    """Calls that read a file by its path, except those with a mode that writes."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    readers = (call for call in calls if re.fullmatch(READERS, ast.unparse(call.func)))
    return {text for text in map(ast.unparse, readers) if not re.search(r"'(rb\+|w|wb|w\+|a|ab)'", text)}


@pytest.mark.parametrize("room", ["data", "inference", "training", "network", "report", "studies"])
def test_files_of_unknown_origin_are_read_by_one_module(room: str) -> None:
    for file in (PACKAGE / room).rglob("*.py"):
        assert path_readers(file.read_text(encoding="utf-8")) == ALLOWED.get(name_of(file), set()), name_of(file)


def test_a_file_that_is_read_elsewhere_would_be_noticed() -> None:
    for call in (
        "open(path)",
        "open(path, 'rb')",
        "path.open()",
        "path.read_bytes()",
        "np.load(path)",
        "json.load(f)",
        "safe_open(path)",
    ):
        assert path_readers(call) == {call}
    for call in ("open(path, 'wb')", "path.open('ab')", "open(path, 'rb+')", "samples.load(3)", "read_bytes(path, 9)"):
        assert path_readers(call) == set()
