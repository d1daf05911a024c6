"""A run of the tests as if PyTorch and skorch were not installed."""

import os
import sys

WITHOUT_TORCH = "PFL_SKLEARN_WITHOUT_TORCH" in os.environ


class _Blocker:
    """Finder that finds none of the two."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "skorch"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def block_torch():
    """Let imports of torch and skorch fail from now on."""
    assert "torch" not in sys.modules
    sys.meta_path.insert(0, _Blocker)
