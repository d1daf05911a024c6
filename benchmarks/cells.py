"""What benchmarks found of each cell, in files that a later run goes on from."""

import json
from pathlib import Path
from typing import Any, NamedTuple


class Results(NamedTuple):
    """Folder with files of cells, one line each; a file has the name that a cell has first."""

    cell: Any  # a class of named tuples
    folder: Path

    def of(self, name):
        """What was found for the cells of a file, by cell."""
        path, found = self.folder / f"{name}.jsonl", {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                result = {self.cell._fields[0]: name, **json.loads(line)}
                found[str(self.cell(*(result[field] for field in self.cell._fields)))] = result
        return found

    def add(self, result):
        """Append a line, in one piece; the name of the file need not be in it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        first = self.cell._fields[0]
        line = {field: value for field, value in result.items() if field != first}
        with (self.folder / f"{result[first]}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
