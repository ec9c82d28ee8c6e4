"""What several tests of training need."""

import jax
import pytest


@pytest.fixture
def optax_promotion():
    """optax.adam (`decay**count`) and optax.MultiSteps need JAX's usual promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield
