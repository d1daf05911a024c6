"""Public tables that do not ship with the package: where to look for them."""

import hashlib
import os
import warnings
from pathlib import Path
from typing import Any, NamedTuple

VARIABLE = "PFL_SKLEARN_DATA"


class PublicTable(NamedTuple):
    """A file, its checksum, what it holds, and a clause that says where its data are published."""

    file: str
    sha256: str
    contents: str
    source: str


def find_table(table: PublicTable, data_home: Any) -> Path:
    """Path of a table's file; a public function's caller is warned if its checksum differs."""
    folder = data_home or os.environ.get(VARIABLE)
    path = Path(folder or ".") / table.file
    if not folder or not path.is_file():
        raise FileNotFoundError(
            f"no {table.file} in {folder or f'data_home or {VARIABLE}'}: give the folder of "
            f"{table.contents} as data_home or in {VARIABLE}; {table.source}."
        )
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != table.sha256:  # a table of one's own is fine, but its figures will differ
        warnings.warn(
            f"{path} is not the table that the documentation's figures were made with.",
            UserWarning,
            stacklevel=3,  # the caller of the public function that looks for the table
        )
    return path
