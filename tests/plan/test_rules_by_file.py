"""Which functions of JAX are float32 whole because of the file that they stand in.

A JAX that moves a function to another file would change its precision without a word.
"""

import inspect

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import jax.scipy.signal
import jax.scipy.special
import pytest

from jmp_amp.plan.tables.rules import _RULE_OF_FILE

# `funm` is Python around `schur`.
WHOLE = {jnp.linalg: set(), jax.scipy.linalg: {"funm"}, jax.random: set()}
IN_PARTS = (
    *(jnp, jax.nn, jax.lax, jax.lax.linalg, jnp.fft, jax.image),
    *(jax.scipy.special, jax.scipy.signal),
)


def files(module):
    """The file of each public function of a module."""
    found = {}
    for name, function in vars(module).items():
        code = getattr(inspect.unwrap(function), "__code__", None)
        if code is not None and not name.startswith("_"):
            found[name] = code.co_filename
    assert found
    return found


@pytest.mark.parametrize("module", WHOLE, ids=lambda module: module.__name__)
def test_functions_of_a_module_are_float32_whole(module):
    elsewhere = {n for n, file in files(module).items() if file not in _RULE_OF_FILE}
    assert elsewhere == WHOLE[module]


@pytest.mark.parametrize("module", IN_PARTS, ids=lambda module: module.__name__)
def test_no_function_of_another_module_is(module):
    assert not {n for n, file in files(module).items() if file in _RULE_OF_FILE}
