"""The type of integer arrays."""

from typing import Any

import numpy as np

IntArray = np.ndarray[Any, np.dtype[np.int64]]
