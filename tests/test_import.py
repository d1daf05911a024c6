"""What importing the package pulls in."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "skorch", "dp_accounting", "matplotlib", "statsmodels")


@pytest.mark.parametrize("module", ["pfl_sklearn", "pfl_sklearn.privacy.auditing"])
def test_import_leaves_heavy_packages_alone(module):
    code = f"import sys, {module}; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
    assert done.stderr == ""
