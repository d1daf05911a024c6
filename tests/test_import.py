"""What importing the package pulls in, and what tests may import."""

import re
import subprocess
import sys
from pathlib import Path

HEAVY = ("torch", "skorch", "dp_accounting", "matplotlib", "statsmodels")


def test_import_leaves_heavy_packages_alone():
    modules = "pfl_sklearn, pfl_sklearn.privacy.auditing"
    code = f"import sys, {modules}; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
    assert done.stderr == ""


def test_no_test_imports_another_test():
    for path in Path(__file__).parent.rglob("*.py"):
        assert not re.search(r"^\s*(from|import) (\S+\.)?test_", path.read_text(), re.M), path
