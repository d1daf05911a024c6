"""What importing the package pulls in."""

import subprocess
import sys

HEAVY = ("torch", "skorch", "dp_accounting", "matplotlib", "statsmodels")


def test_import_leaves_heavy_packages_alone():
    modules = "pfl_sklearn, pfl_sklearn.privacy.auditing"
    code = f"import sys, {modules}; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
    assert done.stderr == ""
