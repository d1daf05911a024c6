"""The server's step: an optimizer of torch that follows the clients' average change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from pfl_sklearn._typing import Floats
from pfl_sklearn.neural_network._engine._averaging import SERVER_MEMORY
from pfl_sklearn.neural_network._engine._recipe import first_line

_INSTEAD = "give a class of torch.optim, such as torch.optim.Adam, or a functools.partial of one"


class ServerStep(NamedTuple):
    """Steps of an optimizer that ``make(parameters)`` gives anew in each round.

    What it remembers is among the server's arrays, so that rounds can go on; `memory` maps the
    names there to those that the optimizer has.
    """

    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
    memory: dict[str, str]

    def __call__(self, server: Any, values: Floats, change: Floats) -> tuple[Floats, dict]:
        """Values after a step along minus a change, and what is to be remembered."""
        # One vector, as in the step that said what is remembered: some tell vectors from matrices.
        parameter = torch.nn.Parameter(torch.from_numpy(values.flatten()))
        optimizer = self.make([parameter])
        # Of an optimizer of another kind, or with other options, nothing is known to go on with.
        if self.memory.keys() <= server.keys():
            optimizer.state[parameter] |= {
                name: torch.from_numpy(np.array(server[key])) for key, name in self.memory.items()
            }
        parameter.grad = torch.from_numpy(-change.ravel())
        optimizer.step()
        state = optimizer.state[parameter]
        kept = {key: state[name].detach().numpy() for key, name in self.memory.items()}
        return parameter.detach().numpy().reshape(values.shape), kept


def server_step(make: Callable[..., Any]) -> ServerStep:
    """The server's step by an optimizer, which takes a step on numbers of no meaning first.

    Raises ValueError if the optimizer cannot follow a gradient, or remembers what is no tensor.
    """
    kind = getattr(make, "func", make)
    name = f"server_optimizer={getattr(kind, '__name__', kind)}"
    values = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    try:
        optimizer = make([values])
    except Exception as error:  # optimizers raise what they like
        raise ValueError(f"{name} takes no parameters: {first_line(error)}; {_INSTEAD}.") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"{name} gives {type(optimizer).__name__}, no optimizer; {_INSTEAD}.")
    values.grad = torch.ones_like(values)
    try:
        optimizer.step()
    except Exception as error:  # LBFGS, say, asks for a closure that computes a loss
        raise ValueError(
            f"{name} cannot step along a gradient alone, and the server has no loss: "
            f"{first_line(error)}; {_INSTEAD}."
        ) from error
    if (values > 0).any():
        raise ValueError(f"{name} steps against the clients' change; leave maximize out.")
    return ServerStep(make, _memory_of(optimizer, values, name))


def _memory_of(optimizer, values, name):
    """Names of what an optimizer remembers of a parameter, by those among the server's arrays."""
    state = {key: each for key, each in optimizer.state[values].items() if each is not None}
    other = [key for key, each in state.items() if not isinstance(each, torch.Tensor)]
    if other:
        raise ValueError(
            f"{name} remembers {other[0]!r}, which is no tensor, so that rounds could not go on "
            f"with it; {_INSTEAD}."
        )
    return {f"{SERVER_MEMORY}{type(optimizer).__name__}.{key}": key for key in state}
