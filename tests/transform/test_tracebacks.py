"""Tracebacks of the user's own errors: frames of the user, and none of the library."""

import contextlib
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import jmp_amp as amp

LIBRARY = str(Path(amp.__file__).parent)


class Inner(nn.Module):
    @nn.compact
    def __call__(self, x):
        return wrong(x)


class Outer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Inner(name="inner")(x)


class InnerNNX(nnx.Module):
    def __call__(self, x):
        return wrong(x)


def wrong(x):
    try:
        raise KeyError("first")
    except KeyError as error:
        mine = ValueError("mine")
        mine.add_note("a note")
        raise mine from error


def plain(x):
    return wrong(x)


def linen(x):
    return Outer().apply({}, x)


def of_nnx(x):
    return InnerNNX()(x)


def frames(call):
    """The files and functions of the traceback of the user's error, from this file."""
    with pytest.raises(ValueError, match="mine") as raised:
        call()
    assert isinstance(raised.value.__cause__, KeyError)
    assert raised.value.__notes__[0] == "a note"
    found = traceback.extract_tb(raised.value.__traceback__)
    return [(each.filename, each.name) for each in found]


X = jnp.ones((2, 2))
TRANSFORMS = {
    "autocast": lambda fn: amp.autocast(fn),
    "value_and_grad": lambda fn: amp.value_and_grad(fn),
    "grad of autocast": lambda fn: amp.grad(amp.autocast(fn)),
    "autocast in jit": lambda fn: jax.jit(amp.autocast(fn)),
    "explain": lambda fn: amp.explain(fn),
    "diagnose": lambda fn: amp.diagnose(fn),
    "tune": lambda fn: amp.tune(fn, max_grad_error=0.1),
}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("fn", [plain, linen, of_nnx])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_an_error_of_the_user_has_the_frames_that_it_has_without_the_library(name, fn):
    # One caller for both, so that both begin with the same frames.
    without, with_it = (
        frames(lambda f=f: f(X)) for f in (jax.jit(fn), TRANSFORMS[name](fn))
    )
    assert with_it == without
    assert with_it[-1] == (__file__, "wrong")


@contextlib.contextmanager
def filtering(value):
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", value)
    try:
        yield
    finally:
        jax.config.update("jax_traceback_filtering", before)


@pytest.mark.parametrize("value", ["off", "tracebackhide"])
def test_all_frames_are_there_where_jax_shows_its_own(value):
    with filtering(value):
        found = frames(lambda: amp.autocast(plain)(X))
    assert any(file.startswith(LIBRARY) for file, _ in found)


def test_an_error_of_the_library_keeps_its_frames():
    with pytest.raises(TypeError, match="ShapeDtypeStruct") as raised:
        amp.autocast(jnp.sin)(jax.ShapeDtypeStruct((), jnp.float32))
    found = traceback.extract_tb(raised.value.__traceback__)
    assert found[-1].filename.startswith(LIBRARY)


def test_an_error_of_jax_that_no_code_of_the_user_called_keeps_the_frames():
    with pytest.raises(TypeError) as raised:
        amp.autocast(jnp.matmul)(X, jnp.ones(3))
    found = traceback.extract_tb(raised.value.__traceback__)
    assert any(each.filename.startswith(LIBRARY) for each in found)


def test_an_error_of_jax_in_the_users_code_leads_there():
    def product(x):
        return x @ jnp.ones(3)

    with pytest.raises(TypeError) as raised:
        amp.autocast(product)(X)
    found = traceback.extract_tb(raised.value.__traceback__)
    assert "product" in [each.name for each in found]
    assert not any(each.filename.startswith(LIBRARY) for each in found)


def test_what_is_no_error_passes_as_it_is():
    def interrupted(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as raised:
        amp.autocast(interrupted)(X)
    found = traceback.extract_tb(raised.value.__traceback__)
    assert any(each.filename.startswith(LIBRARY) for each in found)
