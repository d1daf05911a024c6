"""Tests of nets need torch and skorch; without them only their absence is tested."""

try:
    import skorch  # noqa: F401
    import torch  # noqa: F401
except ModuleNotFoundError:
    collect_ignore_glob = ["test_[!w]*.py", "test_workers.py"]
