"""Personalized federated estimation and learning with differential privacy.

One model per client, help from the other clients, and privacy that can be stated: scikit-learn
estimators for tables whose rows belong to clients (hospitals, counties, phones, players).
"""

import ast
import importlib
import pkgutil
from functools import cache
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:  # what __getattr__ finds at run time; "as" makes it public to type checkers
    from pfl_sklearn import (
        compose as compose,
        datasets as datasets,
        estimation as estimation,
        inspection as inspection,
        linear_model as linear_model,
        metrics as metrics,
        model_selection as model_selection,
        neural_network as neural_network,
        online as online,
        priors as priors,
        privacy as privacy,
        statistics as statistics,
        theory as theory,
    )
    from pfl_sklearn.base import (
        SingleClientWarning as SingleClientWarning,
        UnseenClientsWarning as UnseenClientsWarning,
    )
    from pfl_sklearn.compose import *  # noqa: F403
    from pfl_sklearn.estimation import *  # noqa: F403
    from pfl_sklearn.inspection import *  # noqa: F403
    from pfl_sklearn.linear_model import *  # noqa: F403
    from pfl_sklearn.metrics import *  # noqa: F403
    from pfl_sklearn.model_selection import *  # noqa: F403
    from pfl_sklearn.neural_network import *  # noqa: F403
    from pfl_sklearn.online import *  # noqa: F403
    from pfl_sklearn.priors import *  # noqa: F403
    from pfl_sklearn.privacy import (
        PrivacyLedger as PrivacyLedger,
        PrivacyReport as PrivacyReport,
        PrivacyWarning as PrivacyWarning,
        privacy_of as privacy_of,
    )
    from pfl_sklearn.statistics import *  # noqa: F403

# Packages whose classes and functions are public here, too: a new one is named there alone.
_WHOLE = (
    *("compose", "estimation", "inspection", "linear_model", "metrics", "model_selection"),
    *("neural_network", "online", "priors", "statistics"),
)
_SUBMODULES = (*_WHOLE, "datasets", "privacy", "theory")
_CHOSEN = {
    "base": ("SingleClientWarning", "UnseenClientsWarning"),
    "privacy": ("PrivacyLedger", "PrivacyReport", "PrivacyWarning", "privacy_of"),
}
# For few users, or (MLP) only there with torch.
_LEFT_OUT = {"DivergenceError", "MLP", "NotEstimableWarning", "SeparationWarning", "known_clients"}


@cache
def _module_of() -> dict[str, str]:
    """Module of every public class and function, by name; from sources, which imports nothing."""
    names = {name: module for module, chosen in _CHOSEN.items() for name in chosen}
    for package in _WHOLE:
        try:
            source = pkgutil.get_data(__name__, f"{package}/__init__.py") or b""
            body = ast.parse(source).body
            (exported,) = [
                ast.literal_eval(node.value)
                for node in body
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
            ]
        except OSError:  # an installation without sources: importing says it, too
            exported = importlib.import_module(f"{__name__}.{package}").__all__
        names |= dict.fromkeys(set(exported) - _LEFT_OUT, package)
    return names


if not TYPE_CHECKING:  # which would take any name for one of ours

    def __getattr__(name: str) -> Any:
        """Import a submodule, or the module of a class, when it is first asked for."""
        if name == "__all__":
            return sorted([*_SUBMODULES, *_module_of(), "__version__"])
        if name in _SUBMODULES:
            return importlib.import_module(f"{__name__}.{name}")
        # Imports of submodules ask for names with underscores, which are none of these.
        if not name.startswith("_") and name in _module_of():
            return getattr(importlib.import_module(f"{__name__}.{_module_of()[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*_SUBMODULES, *_module_of(), "__version__"])
