"""What benchmarks found of each cell, in files that a later run goes on from."""

import json
import os
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
        path = self.folder / f"{result[self.cell._fields[0]]}.jsonl"
        with path.open("a", encoding="utf-8") as file:
            file.write(self._line(result))

    def replace(self, name, results):
        """Write the file of a name anew, with these results alone."""
        path, part = self.folder / f"{name}.jsonl", self.folder / f"{name}.part"
        part.write_text("".join(map(self._line, results)), encoding="utf-8")
        os.replace(part, path)  # all or nothing, should this process be stopped

    def _line(self, result):
        line = {key: value for key, value in result.items() if key != self.cell._fields[0]}
        return json.dumps(line, separators=(",", ":")) + "\n"
