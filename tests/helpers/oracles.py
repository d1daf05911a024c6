"""Reference numbers in `tests/oracles`."""

import json
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "oracles"


def read_oracle(name):
    return json.loads((FOLDER / f"{name}.json").read_text())
