"""The base class of ops, and what every op brings for its tests."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar

from attrs import frozen

from ninfer.errors import ShapeError
from ninfer.ir.types import Array, Arrays, Env, TensorType, Types


@frozen
class Work:
    """What an op must move and do at least: bytes through memory, floating-point operations."""

    nbytes: int
    flops: int


@frozen
class Case:
    """A small test input of an op, with arrays in the argument order. Routes must match `op.reference` on it.

    types: of the arguments (weights with their format); env: the real counts; rtol/atol: with the reason in
    the op's `cases`. header_flags: see step.py.
    """

    op: Op
    name: str
    types: Types
    arrays: Arrays
    env: Env
    rtol: float = 2e-5
    atol: float = 2e-5
    header_flags: int = 0


class Op(ABC):
    """A frozen value of static attributes. Tensors are arguments, never fields.

    The first symbolic dimension of an output is the row dimension. A reference gets exactly the rows of the
    step (no padding) and writes into the arrays of `mutates` in place.
    """

    mutates: ClassVar[tuple[int, ...]] = ()

    @abstractmethod
    def infer(self, args: Types) -> Types:
        """Output types. Raises ShapeError naming the op and the argument."""

    @abstractmethod
    def reference(self, args: Arrays) -> Arrays:
        """The op in numpy, float32, from the represented inputs."""

    @classmethod
    @abstractmethod
    def cases(cls) -> Iterable[Case]:
        """Small inputs that reach every branch; the formats and widths are varied here too."""

    def work(self, args: Types, env: Env) -> Work:
        """The default counts every argument and output once and two flops per weight and row."""
        outs = self.infer(args)
        nbytes = sum(t.nbytes(env) for t in (*args, *outs))
        return Work(nbytes, 0)

    @property
    def key(self) -> str:
        """`gated_rms_norm`: the name in plans and messages."""
        return snake(type(self).__name__)

    @property
    def profile_key(self) -> str:
        """The name in profiles, with what operands do not tell and measurements depend on."""
        return self.key


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def require(op: Op, condition: bool, message: str) -> None:
    if not condition:
        raise ShapeError(f"{op.key}: {message}")


def same_shape(op: Op, *types: TensorType) -> None:
    first = types[0]
    for t in types[1:]:
        require(op, t.shape == first.shape, f"{t} differs from {first}")


@frozen
class OpTable:
    """All ops of the engine, in one visible tuple."""

    ops: tuple[type[Op], ...]

    def by_key(self, key: str) -> type[Op]:
        for op in self.ops:
            if snake(op.__name__) == key:
                return op
        raise ShapeError(f"no op is called {key!r}; there are {', '.join(snake(o.__name__) for o in self.ops)}")


__all__ = ["Array", "Arrays", "Case", "Op", "OpTable", "Types", "Work", "require", "same_shape", "snake"]
