"""One idiom: a function, what it is given, and what it must keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

# A generator of random numbers -> a pytree of arrays. `jax.random` would compile longer
# than the idioms.
Sampler = Callable[[np.random.Generator], Any]


@dataclasses.dataclass(frozen=True)
class Idiom:
    """A row of the table.

    Attributes:
      name: the name of its function.
      field: the name of its file.
      fn: (params, inputs) -> a pytree of arrays; f32 `jnp` code. With `turns`,
        (params, inputs) -> (inputs, outputs).
      params: sampler of the params.
      inputs: sampler of the inputs.
      grad: the arguments that the gradient is taken of; none where JAX has none.
      turns: how often the transformed function is called, each time with the inputs
        that it returned. 0: once, and everything that it returns is compared.
      f32: whether every operation must be f32, so that nothing is rounded to half at
        all. Then the error of products in half is no excuse.
      kept: (inputs, outputs) -> (array, array) that must have the same bits.
      optimised: whether XLA must compile as for a user. The tests do not optimise: then
        XLA on the CPU may compute one value twice, with two results.
    """

    name: str
    field: str
    fn: Callable[[Any, Any], Any]
    params: Sampler
    inputs: Sampler
    grad: tuple[int, ...]
    turns: int
    f32: bool
    kept: Callable[[Any, Any], tuple[Any, Any]] | None
    optimised: bool


def row(
    params: Sampler,
    inputs: Sampler,
    *,
    grad: tuple[int, ...] = (0,),
    turns: int = 0,
    f32: bool = False,
    kept: Callable[[Any, Any], tuple[Any, Any]] | None = None,
    optimised: bool = False,
) -> Callable[[Callable[[Any, Any], Any]], Idiom]:
    """Returns a decorator that makes a row of a function, see `Idiom`."""

    def of(fn: Callable[[Any, Any], Any]) -> Idiom:
        field = fn.__module__.rpartition(".")[2]
        of_row = (params, inputs, grad, turns, f32, kept, optimised)
        return Idiom(fn.__name__, field, fn, *of_row)

    return of


def drawn(draw: Callable[[np.random.Generator, tuple[int, ...]], Any]) -> Any:
    """Returns a function of shapes by name that makes the sampler of `draw`."""

    def sampler(**shapes: tuple[int, ...]) -> Sampler:
        return lambda rng: {
            name: np.asarray(draw(rng, shape)) for name, shape in shapes.items()
        }

    return sampler


def weights(scale: float = 1.0, **shapes: tuple[int, ...]) -> Sampler:
    """Returns a sampler of normal matrices that keep the size of what they multiply."""
    return drawn(
        lambda rng, shape: np.float32(
            rng.normal(scale=scale / shape[-2] ** 0.5, size=shape)
        )
    )(**shapes)


def normals(scale: float = 1.0, **shapes: tuple[int, ...]) -> Sampler:
    """Returns a sampler of normal arrays."""
    return drawn(lambda rng, shape: np.float32(rng.normal(scale=scale, size=shape)))(
        **shapes
    )


def uniform(low: float, high: float, **shapes: tuple[int, ...]) -> Sampler:
    """Returns a sampler of arrays that are uniform between two bounds."""
    return drawn(lambda rng, shape: np.float32(rng.uniform(low, high, shape)))(**shapes)


def integers(below: int, **shapes: tuple[int, ...]) -> Sampler:
    """Returns a sampler of int32 arrays from 0 to `below - 1`."""
    return drawn(lambda rng, shape: np.int32(rng.integers(below, size=shape)))(**shapes)


def constants(**values: Any) -> Sampler:
    """Returns a sampler that always gives the same f32 arrays."""
    return lambda rng: {name: np.float32(value) for name, value in values.items()}


def both(*samplers: Sampler) -> Sampler:
    """Returns the sampler of what several samplers give together."""

    def sample(rng: np.random.Generator) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = {}
        for sampler in samplers:
            found |= sampler(rng)
        return found

    return sample
