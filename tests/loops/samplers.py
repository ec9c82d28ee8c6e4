"""Samplers of matrices that a numerical method is given: well conditioned ones."""

import numpy as np

from tests.idioms.row import Sampler, drawn


def orthogonal(rng: np.random.Generator, size: int) -> np.ndarray:
    """Returns a random orthogonal matrix of `size` rows."""
    return np.linalg.qr(rng.normal(size=(size, size)))[0]


def positive(low: float, high: float, **shapes: tuple[int, int]) -> Sampler:
    """Returns a sampler of symmetric matrices with eigenvalues from `low` to `high`."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        q = orthogonal(rng, shape[-1])
        return ((q * np.geomspace(low, high, shape[-1])) @ q.T).astype(np.float32)

    return drawn(draw)(**shapes)


def spread(low: float, high: float, **shapes: tuple[int, int]) -> Sampler:
    """Returns a sampler of matrices with singular values from `low` to `high`."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        u, _, v = np.linalg.svd(rng.normal(size=shape), full_matrices=False)
        return ((u * np.geomspace(high, low, len(v))) @ v).astype(np.float32)

    return drawn(draw)(**shapes)


def turning(radius: float, **shapes: tuple[int, int]) -> Sampler:
    """Returns a sampler of orthogonal matrices times `radius`: systems that turn."""
    return drawn(lambda rng, shape: np.float32(radius * orthogonal(rng, shape[-1])))(
        **shapes
    )


def stochastic(**shapes: tuple[int, ...]) -> Sampler:
    """Returns a sampler of positive arrays whose rows sum to 1."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        rows = rng.gamma(0.7, size=shape) + 0.02
        return (rows / rows.sum(-1, keepdims=True)).astype(np.float32)

    return drawn(draw)(**shapes)


def graph(**shapes: tuple[int, int]) -> Sampler:
    """Returns a sampler of adjacency matrices: a ring and random edges."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        size = shape[-1]
        chords = rng.uniform(size=shape) < 2 / size
        ring = np.roll(np.eye(size, dtype=bool), 1, axis=1)
        edges = (chords | ring) & ~np.eye(size, dtype=bool)
        return (edges | edges.T).astype(np.float32)

    return drawn(draw)(**shapes)


def laplacian(size: int) -> np.ndarray:
    """Returns the second difference of `size` points, zero at both ends."""
    matrix = np.eye(size, k=1) + np.eye(size, k=-1) - 2 * np.eye(size)
    return matrix.astype(np.float32)
