"""A function and its plan side by side: where values come from, and what is traced."""

import collections
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jmp_amp.numerics.measure.lockstep import Lockstep, errors
from jmp_amp.policies.policy_map import as_policy_map
from jmp_amp.transform.planned import planned_call

X = jnp.full((2, 2), 0.5)


def errors_of(fn, *args):
    def compile_(run, *args, options):
        compiled = Future()
        compiled.set_result(jax.jit(run))
        return compiled

    policies = as_policy_map("mixed_bfloat16", "{}")
    with planned_call(fn, policies, args, {}, "{}", None) as call:
        return errors(compile_, call.plan, call.traced.arrays, call.traced.arrays)()


def repeated(step, x, times=6):
    for _ in range(times):
        x = step(x)
    return x


def key(x):
    return jax.random.key(x[0, 0].astype(jnp.int32))


@jax.jit
def helper(both):
    i, j = both
    return i * 31 + j, j ^ i


def body(both, _):
    i, j = repeated(helper, both)
    return (i + j, j), i.reshape(-1, 1)


CHAINS = {
    "integers": lambda x: repeated(lambda i: i * 31 + i, x.astype(jnp.int32)),
    "booleans": lambda x: repeated(lambda b: (b & ~b) | b, x > 0),
    "choices": lambda x: repeated(
        lambda i: jnp.where(i > 0, i, -i) + i, x.astype(jnp.int32)
    ),
    "keys": lambda x: repeated(lambda k: jax.random.split(k)[1], key(x)),
    "helpers": lambda x: repeated(helper, (x.astype(jnp.int32), x.astype(jnp.int32))),
    "scan": lambda x: lax.scan(body, (x.astype(jnp.int32),) * 2, None, length=2),
    "while": lambda x: lax.fori_loop(
        0, 2, lambda i, both: body(both, i)[0], (x.astype(jnp.int32),) * 2
    ),
    "branch": lambda x: lax.cond(
        x[0, 0] > 0, lambda i: repeated(helper, (i, i)), lambda i: (i, i), key_bits(x)
    ),
    "two products": lambda x: repeated(
        lambda i: i * 31 + i, (x > 0).astype(jnp.int32) + (x @ x).astype(jnp.int32)
    ),
}


def key_bits(x):
    return jax.random.key_data(key(x)).astype(jnp.int32)


def test_what_is_no_float_comes_from_each_site_once():
    def fn(x):
        made = jax.tree.leaves([chain(x @ x) for chain in CHAINS.values()])
        # Of a move is told what it comes from, as it is known.
        return [leaf.reshape(-1, 1) for leaf in made]

    operands = errors_of(fn, X).operands
    moved = [keys for (_, cast), keys in operands.items() if cast is None and keys]
    assert len(moved) >= len(jax.tree.leaves(jax.eval_shape(fn, X)))
    for keys in operands.values():
        assert max(collections.Counter(keys).values(), default=1) == 1


def test_the_operands_of_a_chain_of_integers_have_the_error_of_its_floats():
    def fn(x):
        i = repeated(lambda i: i * 31 + i, (x @ x * 3e4).astype(jnp.int32))
        return i.astype(jnp.float32)

    found = errors_of(fn, X + 0.001)
    # A product and its factor, a cast, 6 times 2 operations, a cast.
    first, last = ((1,), None), ((15,), None)
    assert {first, last} <= found.of.keys()
    assert found.of_operands(last) == found.of[first] > 0


def nested(depth, around):
    if depth == 0:
        return jnp.sin
    inner = nested(depth - 1, around)
    return lambda x: around(inner, x @ x)


def branch(inner, x):
    return lax.cond(x[0, 0] > 0, inner, lambda x: x, x)


def loop(inner, x):
    return lax.while_loop(lambda x: x[0, 0] > 2, inner, x)


def turns(inner, x):
    return lax.scan(lambda x, _: (inner(x), None), x, length=2)[0]


@pytest.mark.breadth(1)
@pytest.mark.parametrize("around", [branch, loop, turns])
def test_a_body_in_bodies_is_traced_once(around, monkeypatch):
    ran, run = [], Lockstep.run

    def noted(self, plan, pairs, path, *times):
        ran.extend(path[-1:])
        return run(self, plan, pairs, path, *times)

    monkeypatch.setattr(Lockstep, "run", noted)
    errors_of(nested(2, around), X)
    # Two branches, or a condition and a body, at each depth; a scan has one.
    assert sorted(ran) == [0, 0] + [1, 1] * (around is not turns)


def test_errors_count_in_the_turns_that_both_make():
    def fn(x, w):
        y = (x @ w)[0, 0]

        def goes_on(both):
            return both[0].astype(jnp.float32) * 0.5 + 2040.0 < y

        # Powers of two have no error in any dtype.
        step = lambda both: (both[0] + 1, both[1] * 2)  # noqa: E731
        return lax.while_loop(goes_on, step, (jnp.int32(0), jnp.float32(1)))[1]

    # 2049 in bf16 is 2048: the function makes 18 turns, and the plan at most 16.
    found = errors_of(fn, jnp.full((1, 1), 2049.0), jnp.ones((1, 1)))
    bodies = [(of[1], error) for (of, _), error in found.of.items() if len(of) == 3]
    assert [error for number, error in bodies if number == 1] == [0.0]
