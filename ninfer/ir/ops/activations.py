"""Pointwise functions that several references share."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def sigmoid(x: NDArray[np.float32]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # exp of a large number is infinity, and 1 / infinity the right 0
        y: NDArray[np.float32] = np.float32(1) / (np.float32(1) + np.exp(-x))
    return y


def silu(x: NDArray[np.float32]) -> NDArray[np.float32]:
    return x * sigmoid(x)


def gelu_tanh(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The approximation by tanh (Hendrycks & Gimpel 2016), written with a sigmoid: 0.5 (1 + tanh u) = sigmoid(2 u)."""
    return x * sigmoid(np.float32(2 * 0.7978845608028654) * (x + np.float32(0.044715) * x * x * x))
