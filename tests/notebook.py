"""Run the cells of a notebook in this process, and store what they show, without Jupyter.

`python tests/notebook.py examples/own_photos.ipynb` runs it in a new folder and writes its outputs into the file.
"""

import ast
import base64
import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

Notebook = dict[str, Any]


def run(notebook: Notebook, **settings: Any) -> Notebook:
    """Run all code cells in the current folder; returns the notebook with their outputs.

    Args:
        notebook: The content of an .ipynb file.
        **settings: Values of variables, which replace those that the first code cell has set.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    cells, count = [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            cell = {**cell, "execution_count": count, "outputs": _outputs("".join(cell["source"]), names, count)}
            if count == 1:
                names.update(settings)
        cells.append(cell)
    return {**notebook, "cells": cells}


def _outputs(source: str, names: dict[str, Any], count: int) -> list[dict[str, Any]]:
    statements = ast.parse(source)
    last = statements.body.pop() if statements.body and isinstance(statements.body[-1], ast.Expr) else None
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        exec(compile(statements, f"cell {count}", "exec"), names)
        value = None if last is None else eval(compile(ast.Expression(last.value), f"cell {count}", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if text.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": text.getvalue().splitlines(keepends=True)})
    if value is not None:
        data: dict[str, Any] = {"text/plain": [repr(value)]}
        if hasattr(value, "_repr_png_"):
            data = {"image/png": base64.b64encode(value._repr_png_()).decode(), "text/plain": ["<a picture>"]}
        shown = {"output_type": "execute_result", "execution_count": count, "metadata": {}, "data": data}
        outputs.append(shown)
    return outputs


if __name__ == "__main__":
    file = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        result = run(json.loads(file.read_text()))
    file.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
