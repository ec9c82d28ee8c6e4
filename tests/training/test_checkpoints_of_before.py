"""A checkpoint that commit 66487c5 wrote restores, and its next step has the same bits.

The fixture has, for each way to keep weights, what `flax.serialization` makes of the
weights and the state of the optimizer after six steps, two of them skipped, and after
one step more. `write` made it there.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization

import jmp_amp as amp

FILE = Path(__file__).parent / "checkpoints_of_66487c5.msgpack"
WAYS = {
    "f32": (jnp.float32, lambda tx: tx),
    "masters": (jnp.bfloat16, amp.with_master_weights),
    "Kahan": (jnp.bfloat16, amp.with_kahan),
    "stochastic": (
        jnp.bfloat16,
        lambda tx: amp.with_stochastic_rounding(tx, jax.random.PRNGKey(3)),
    ),
}
STEPS, OVERFLOWS = 6, (1, 4)


def optimizer(way):
    scale = amp.dynamic_loss_scale(2.0**10, growth_interval=3)
    return amp.with_loss_scale(WAYS[way][1](optax.adam(0.03)), scale)


def first_params(way):
    rng = np.random.default_rng(0)
    shapes = {"kernel": (4, 3), "bias": (3,)}
    return {
        name: jnp.asarray(rng.normal(size=shape), WAYS[way][0])
        for name, shape in shapes.items()
    }


def stepped(way, params, state, number):
    rng = np.random.default_rng(number + 1)
    grads = {
        name: jnp.asarray(1024 * rng.normal(size=leaf.shape), leaf.dtype)
        for name, leaf in params.items()
    }
    if number in OVERFLOWS:
        grads["bias"] = jnp.full_like(grads["bias"], jnp.inf)
    loss_scale = amp.loss_scale_of(state)
    grads = jax.tree.map(lambda g: g / loss_scale.value.astype(g.dtype), grads)
    # One operation after the other: nothing that is fused is rounded in another way.
    with jax.disable_jit(), jax.numpy_dtype_promotion("standard"):
        updates, state = optimizer(way).update(grads, state, params)
        return optax.apply_updates(params, updates), state


def plain(params, state):
    tree = serialization.to_state_dict({"params": params, "state": state})
    is_array = lambda x: isinstance(x, jax.Array)  # noqa: E731
    return jax.tree.map(lambda x: np.asarray(x) if is_array(x) else x, tree)


@pytest.mark.parametrize("way", WAYS)
def test_its_next_step_has_the_same_bits(way):
    found = serialization.msgpack_restore(FILE.read_bytes())[way]
    params = first_params(way)
    target = {"params": params, "state": optimizer(way).init(params)}
    restored = serialization.from_state_dict(target, found["before"])
    restored = jax.tree.map(jnp.asarray, restored)
    after = plain(*stepped(way, restored["params"], restored["state"], STEPS))
    expected = found["after"]
    assert jax.tree.structure(after) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(expected), strict=True):
        assert type(a) is type(b)
        assert a.tobytes() == b.tobytes() if isinstance(a, np.ndarray) else a == b
    assert int(amp.metrics(restored["state"])["skipped_total"]) == len(OVERFLOWS)


def write():
    found = {}
    for way in WAYS:
        params = first_params(way)
        state = optimizer(way).init(params)
        for number in range(STEPS):
            params, state = stepped(way, params, state, number)
        before = plain(params, state)
        after = plain(*stepped(way, params, state, STEPS))
        found[way] = {"before": before, "after": after}
    FILE.write_bytes(serialization.msgpack_serialize(found))


if __name__ == "__main__":
    write()
