"""Blocks of clients on workers, who get the rows once, and in a round the numbers of its rows."""

from functools import partial
from typing import Any

import numpy as np

from pfl_sklearn._parallel import BatchMapper
from pfl_sklearn._rounds.rows import Block


class BlockRunner:
    """Updates of blocks by the workers of a mapper.

    Where these are other processes, they keep the rows, whole or in parts of whole clients. Then a
    block is cut where parts end: what a client computes does not depend on its block.
    """

    def __init__(self, rows: Any, run: BatchMapper):
        self.run, self.n_workers, self.parts = run, run.n_workers, []
        if run.keeps and hasattr(rows, "parts"):
            self.bounds, parts = rows.parts(run.n_parts)
            if len(parts) == 1:  # all rows, which stay where they are
                self.parts = [run.keep(parts[0])]
            else:  # here no more than one is gathered at a time
                self.parts = [run.keep(part, sent=part.gathered()) for part in parts]
        elif run.keeps:  # blocks of sparse rows would travel whole, in every round
            self.run, self.n_workers = BatchMapper(1, 1), 1

    def cut(self, blocks: list[Any]) -> list[Any]:
        """The blocks in the order of their clients, such that each has rows of one part."""
        if not self.parts:
            return blocks
        return [piece for block in blocks for piece in block.cut(self.bounds)]

    def __call__(self, update: Any, blocks: list[Any], *arrays: Any) -> list[Any]:
        """Updates of blocks that were cut, from their batches and their part of arrays."""
        states = ([block.states(each) for each in arrays] for block in blocks)
        if not self.parts:
            batches = (block.batch for block in blocks)
            return self.run(update, ((b, *s) for b, s in zip(batches, states, strict=True)))
        at = np.searchsorted(self.bounds, [block.chosen.flat[0] for block in blocks], "right") - 1
        tasks = (
            (self.parts[k], *block.numbers(self.bounds[k], self.bounds[k + 1]), *own)
            for k, block, own in zip(at, blocks, states, strict=True)
        )
        costs = [block.chosen.size for block in blocks]
        return self.run(partial(_update_from_rows, update), tasks, costs)


def _update_from_rows(update, rows, chosen, seeds, *states):
    """Update of a block of which a worker has the rows."""
    none = np.zeros(0, dtype=np.intp)
    return update(Block(none, none, rows, chosen, seeds).batch, *states)
