"""Types that annotations share."""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.integer[Any]]
Bools: TypeAlias = NDArray[np.bool_]
# Arrays, data frames of any library and sparse matrices: no protocol covers them all.
TableLike: TypeAlias = Any
# As in scikit-learn, whose checks refuse a numpy Generator.
RandomState: TypeAlias = int | np.random.RandomState | None
