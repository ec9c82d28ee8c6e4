"""`diagnose` of functions that write to mutable arrays, `jax.new_ref`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_amp as amp
from tests.numerics.counting import counted, counts, of, only

X = np.float32([0.5, 1.0, 1.5])


def written_and_read(x):
    ref = jax.new_ref(jnp.zeros(3))
    ref[...] = x * 2
    return jnp.sum(ref[...] * 3)


def in_scan(x):
    ref = jax.new_ref(jnp.zeros(3))

    def turn(carry, i):
        ref[i] = ref[i] + x[i] * 2
        return carry, None

    jax.lax.scan(turn, 0.0, jnp.arange(3))
    return jnp.sum(ref[...] * 3)


def in_branch(x):
    ref = jax.new_ref(jnp.zeros(3))

    def double():
        ref[...] = x * 2

    def nothing():
        ref[...] = x

    jax.lax.cond(x[0] > 0, double, nothing)
    return jnp.sum(ref[...] * 3)


@jax.jit
def double_into(ref, x):
    ref[...] = x * 2


def in_jitted(x):
    ref = jax.new_ref(jnp.zeros(3))
    double_into(ref, x)
    return jnp.sum(ref[...] * 3)


def frozen(x):
    ref = jax.new_ref(jnp.zeros(3))
    ref[...] += x * 2
    return jnp.sum(jax.freeze(ref) * 3)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("fn", [in_scan, in_branch, in_jitted, frozen])
def test_a_mutable_array_is_measured_where_it_is_read(fn):
    d = amp.diagnose(fn, "mixed_float16")(X)
    assert float(d.value) == 6 * X.sum() and d.advice == ()
    assert d.policy == amp.PolicyMap("mixed_float16")
    gradient = d.gradients[""]
    assert (gradient.amax, gradient.amin, gradient.error) == (6.0, 6.0, 0.0)
    read = [s for s in d.sites if s.operation in ("get", "freeze") and s.is_forward][-1]
    assert counted(read) == counts(2 * X)
    assert counted(of(d.sites, "mul")[-1]) == counts(6 * X)
    assert not any(s.makes_nonfinite for s in d.sites)


def in_while(x):
    ref = jax.new_ref(jnp.zeros(3))

    def turn(i):
        ref[...] = ref[...] + x
        return i + 1

    jax.lax.while_loop(lambda i: i < 4, turn, 0)
    return ref[...]


def made_in_every_turn(x):
    def turn(carry, each):
        ref = jax.new_ref(jnp.zeros(()))
        ref[...] = each * 4
        return carry, ref[...]

    return jax.lax.scan(turn, 0.0, x)[1]


def test_a_mutable_array_of_a_loop_is_measured():
    both = lambda x: (in_while(x), made_in_every_turn(x))  # noqa: E731
    d = amp.diagnose(both, "mixed_float16")(X)
    np.testing.assert_array_equal(d.value, [4 * X] * 2)
    # Of the first loop, the second one begins with the last site.
    reads = [s for s in of(d.sites, "get") if counted(s) == counts(4 * X)]
    assert [s.error for s in reads] == [0.0, 0.0]


def distance(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def write(ref, value):
    ref[...] = value


def write_in_a_turn(ref, value):
    jax.lax.fori_loop(0, 1, lambda _, carry: (write(ref, value), carry)[1], 0)


def write_in_a_branch(ref, value):
    jax.lax.cond(jnp.asarray(True), lambda: write(ref, value), lambda: None)


WRITES = write, jax.jit(write), write_in_a_turn, write_in_a_branch


def test_the_error_of_what_is_read_is_that_of_what_was_written():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 16)).astype(np.float32)
    # So much cancels that the error is larger than that of a rounding.
    w, x = np.ones((16, 16), np.float32), x + np.float32([1000.0, -1000.0] * 8)

    def fn(w, x):
        product, read = x @ w, []
        for write in WRITES:
            ref = jax.new_ref(jnp.zeros((8, 16)))
            write(ref, product)
            read.append(ref[...])
        return read

    d = amp.diagnose(fn, "mixed_float16")(w, x)
    half = [each.astype(np.float16).astype(np.float64) for each in (x, w)]
    wanted = distance((half[0] @ half[1]).astype(np.float16), x.astype(np.float64) @ w)
    product = only(d.sites, "dot_general")
    assert product.error > 2.0**-11
    reads = of(d.sites, "get")
    assert len(reads) == len(WRITES)
    for read in reads:
        assert read.error == pytest.approx(wanted, rel=0.02)
        # It makes no error: all of it is the product's.
        assert read.error == pytest.approx(product.error, rel=1e-6)
        assert read.amplification == pytest.approx(1.0, rel=0.01)


@pytest.mark.slow
def test_what_a_mutable_array_holds_is_made_where_it_was_computed():
    def fn(w, x):
        ref = jax.new_ref(jnp.zeros((4, 4)))
        ref[...] = x @ w
        return jnp.sum(ref[...]) * 1e-6

    # 4 * 300 * 300 is 360000, and f16 ends at 65504.
    w = jnp.full((4, 4), 300.0)
    d = amp.diagnose(fn, "mixed_float16")(w, w)
    assert [s.operation for s in d.sites if s.makes_nonfinite] == ["dot_general"]
    assert str(d.policy) == "p=f32,c=f16,o=f32,full=dot_general"
    d = amp.diagnose(written_and_read, "mixed_float16")(jnp.asarray(X) * jnp.inf)
    assert d.first_nonfinite is None and "argument x" in d.advice[0]


def test_of_a_mutable_array_of_the_caller_no_error_is_known():
    ref = jax.new_ref(jnp.zeros(3))

    def fn(x):
        ref[...] = x * 2
        return ref[...] * 3

    d = amp.diagnose(fn, "mixed_float16")(jnp.asarray(X))
    np.testing.assert_array_equal(d.value, 6 * X)
    assert counted(only(d.sites, "get")) == counts(2 * X)
    assert all(s.error is None for s in d.sites)
