"""The checked-in stub of the extension is what its build says."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import kvpool

STUB = Path(__file__).parents[2] / "python" / "kvpool" / "_core.pyi"


def test_a_fresh_stub_is_the_one_checked_in(tmp_path):
    fresh = tmp_path / "_core.pyi"
    subprocess.run([sys.executable, "-m", "nanobind.stubgen", "-m", "kvpool._core", "-o", str(fresh)], check=True)
    assert fresh.read_text() == STUB.read_text(), "run `make stubs`"


def test_the_stub_is_python_and_names_mlx_arrays():
    tree = ast.parse(STUB.read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    assert {name for name in dir(kvpool._core) if isinstance(getattr(kvpool._core, name), type)} == set(classes)
    update = next(n for n in classes["PoolBackedKVCacheCore"].body if getattr(n, "name", "") == "update_and_fetch")
    assert ast.unparse(update.returns) == "tuple[mlx.core.array, mlx.core.array]"
    assert "nb::" not in STUB.read_text() and "std::" not in STUB.read_text()


def test_the_package_is_marked_as_typed():
    installed = Path(kvpool.__file__).parent
    assert (installed / "py.typed").exists()
    assert (installed / "_core.pyi").read_text() == STUB.read_text()


TYPES = {
    "int", "float", "bool", "str", "None", "object",
    "list", "dict", "tuple", "Sequence", "Iterable", "Callable", "collections.deque",
    "mlx.core.array", "mlx.core.Dtype", "mlx.core.Device",
}  # fmt: skip


def functions(tree):
    """(name within the module, function) of every function and method."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{n.name}", n) for n in node.body if isinstance(n, ast.FunctionDef))


def test_every_type_is_one_that_checkers_know_and_every_default_a_literal():
    tree = ast.parse(STUB.read_text())
    known = TYPES | {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    for name, function in functions(tree):
        types = {a.arg: a.annotation for a in function.args.posonlyargs + function.args.args if a.arg != "self"}
        types["returns"] = function.returns
        for where, annotation in types.items():
            names = set(re.findall(r"[A-Za-z_][\w.:]*", ast.unparse(annotation)))
            assert names <= known, f"{name}, {where}: {ast.unparse(annotation)}"
            if "object" in names:
                assert name.endswith(".__eq__") or name.startswith("PooledKVCache."), f"{name}, {where}"
        for default in function.args.defaults:
            ast.literal_eval(default)
