"""A digest of the code that a fit of nets runs: by it a stored result says which version it is of.

The digest covers every statement of the files of ``CODE``, apart from comments, docstrings and the
texts of parameters, and of net_regimes.py the functions and classes.
"""

import ast
import hashlib
import json
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
CODE = (
    "pfl_sklearn/_rounds",
    "pfl_sklearn/datasets/_images.py",
    "pfl_sklearn/datasets/_label_skew.py",
    "pfl_sklearn/neural_network",
    "pfl_sklearn/priors",
    "pfl_sklearn/privacy/_mechanisms",
    "benchmarks/net_fits.py",
    "benchmarks/net_regimes.py",
)
_DEFINITIONS = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef


@cache
def present_digest(root=ROOT):
    """Digest of the code as it is when this is first called."""
    code = hashlib.sha256()
    for part in CODE:
        path = root / part
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            tree = ast.parse(file.read_text(encoding="utf-8"))
            # A new regime or method leaves the results of all others as they are.
            if file.name == "net_regimes.py":
                tree.body = [node for node in tree.body if isinstance(node, _DEFINITIONS)]
            code.update(json.dumps([file.relative_to(root).as_posix(), plain_code(tree)]).encode())
    return code.hexdigest()[:16]


def plain_code(node):
    """Lists of what a syntax tree says to the interpreter, the same in all versions of Python."""
    if isinstance(node, list):
        return [plain_code(each) for each in node if not _is_text(each)]
    if not isinstance(node, ast.AST):
        return repr(node)
    # Versions of Python differ in the fields that they leave empty.
    fields = [(name, value) for name, value in ast.iter_fields(node) if value not in (None, [])]
    return [type(node).__name__, *((name, plain_code(value)) for name, value in fields)]


def _is_text(node):
    """Whether a node is a docstring, or the text of a parameter."""
    if isinstance(node, ast.keyword):
        return node.arg in ("text", "also") and _is_string(node.value)
    return isinstance(node, ast.Expr) and _is_string(node.value)


def _is_string(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
