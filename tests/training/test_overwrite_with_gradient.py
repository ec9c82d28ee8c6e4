"""Flax's fp8 layers, whose state is overwritten with its "gradient"."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.core import freeze
from flax.linen import fp8_ops
from flax.training.train_state import TrainState

import jmp_amp as amp

OWG = "_overwrite_with_gradient"
OPERATIONS = (
    fp8_ops.Fp8DirectDotGeneralOp,
    fp8_ops.Fp8DotGeneralOp,
    fp8_ops.NANOOFp8DotGeneralOp,
)
WRAPPERS = {
    "loss_scale": lambda inner: amp.with_loss_scale(inner, amp.dynamic_loss_scale()),
    "unscale": lambda inner: amp.with_loss_scale(
        inner, amp.static_loss_scale(8.0), unscale=True
    ),
    "masters": amp.with_master_weights,
    "kahan": amp.with_kahan,
    "random": lambda inner: amp.with_stochastic_rounding(inner, jax.random.key(0)),
    "both": lambda inner: amp.recipe("O2", half_dtype="float16").wrap(inner),
    "accumulation": lambda inner: amp.with_loss_scale(
        optax.MultiSteps(inner, 2), amp.no_loss_scale()
    ),
}

pytestmark = [
    pytest.mark.usefixtures("optax_promotion"),
    pytest.mark.filterwarnings("ignore:The Fp8DotGeneralOp is deprecated"),
]
each_wrapper = pytest.mark.parametrize("wrapper", WRAPPERS)


class Network(nn.Module):
    operation: type = OPERATIONS[0]

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(32, dot_general_cls=self.operation)(x))
        return nn.Dense(16, dot_general_cls=self.operation)(x)


apply_network = Network().apply


@functools.cache
def batch(seed=0):
    inputs = np.random.default_rng(seed).standard_normal((16, 16), np.float32)
    return inputs, np.sin(inputs)


@functools.cache
def first_variables(operation=OPERATIONS[0]):
    return jax.jit(Network(operation).init)(jax.random.key(1), batch()[0])


def loss_of(variables, inputs, labels, apply=apply_network):
    return jnp.mean((apply(variables, inputs) - labels) ** 2)


@functools.cache
def first_gradients(operation, policy=None):
    apply, grad = Network(operation).apply, jax.grad
    if policy is not None:
        apply = amp.autocast(apply, policy)
        unscaled = amp.no_loss_scale()
        grad = lambda fn: functools.partial(amp.grad(fn), loss_scale=unscaled)  # noqa: E731
    loss_fn = functools.partial(loss_of, apply=apply)
    return jax.jit(grad(loss_fn))(first_variables(operation), *batch())


def small_tree(dtype=jnp.float32):
    """Variables of two numbers and two states, and gradients and new states of them."""
    params = {"w": jnp.array([1.0, 2.0], dtype)}
    state = {"layer": {"history": jnp.array([3.0, 0.0]), "scale": jnp.array([1.0])}}
    new = {"layer": {"history": jnp.array([5e4, 3.0]), "scale": jnp.array([0.007])}}
    gradients = {"w": jnp.array([0.5, -0.5])}
    return {"params": params, OWG: state}, {"params": gradients, OWG: new}


def leaves_are_same_objects(a, b):
    return all(map(lambda x, y: x is y, jax.tree.leaves(a), jax.tree.leaves(b)))


# A loop as users write it


@functools.cache
def step_with(tx):
    @jax.jit
    def step(variables, opt_state, inputs, labels):
        loss, grads = amp.value_and_grad(loss_of)(
            variables, inputs, labels, loss_scale=opt_state
        )
        updates, opt_state = tx.update(grads, opt_state, variables)
        params = optax.apply_updates(variables["params"], updates["params"])
        state = amp.keep_if_finite(opt_state, updates[OWG], variables[OWG])
        return {"params": params, OWG: state}, opt_state, loss

    return step


def train(tx, batches, variables):
    opt_state = tx.init(variables)
    losses = []
    for inputs, labels in batches:
        variables, opt_state, loss = step_with(tx)(variables, opt_state, inputs, labels)
        losses.append(loss)
    return variables, opt_state, losses


def flax_train(batches, variables):
    @jax.jit
    def step(state, inputs, labels):
        loss, grads = jax.value_and_grad(loss_of)(state.params, inputs, labels)
        return state.apply_gradients(grads=grads), loss

    state = TrainState.create(
        apply_fn=None, params=variables, tx=optax.adam(0.01, eps_root=1e-12)
    )
    losses = []
    for inputs, labels in batches:
        state, loss = step(state, inputs, labels)
        losses.append(loss)
    return state.params, losses


@pytest.mark.slow
def test_without_loss_scale_a_run_is_that_of_flaxs_own_train_state():
    batches = [batch(seed) for seed in range(5)]
    wanted, wanted_losses = flax_train(batches, first_variables())
    tx = amp.with_loss_scale(optax.adam(0.01, eps_root=1e-12), amp.no_loss_scale())
    found, _, losses = train(tx, batches, first_variables())
    chex.assert_trees_all_close(found, wanted, rtol=1e-6, atol=1e-7)
    chex.assert_trees_all_close(losses, wanted_losses, rtol=1e-6)
    scales = [v for k, v in leaves_named(found[OWG]) if k.endswith("_scale']")]
    assert len(scales) == 6 and all(scale != 1.0 for scale in scales)


def leaves_named(tree):
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]


def test_a_skipped_step_leaves_the_run_as_if_it_had_not_been():
    # An infinite input would not do: an fp8 layer clips it.
    bad = (batch()[0], np.full((16, 16), np.inf, np.float32))
    batches = [batch(0), batch(1), batch(2)]
    tx = amp.with_loss_scale(
        optax.adam(0.01), amp.dynamic_loss_scale(4.0, min_scale=4.0)
    )
    wanted, _, _ = train(tx, batches, first_variables())
    found, opt_state, _ = train(tx, [*batches[:2], bad, batches[2]], first_variables())
    assert amp.metrics(opt_state)["skipped_total"] == 1
    chex.assert_trees_all_equal(found, wanted)


def test_flaxs_train_state_takes_a_wrapped_optimizer():
    tx = amp.with_loss_scale(optax.adam(0.01), amp.static_loss_scale(64.0))
    state = TrainState.create(apply_fn=None, params=first_variables(), tx=tx)

    @jax.jit
    def step(state, inputs, labels):
        gradient = amp.grad(loss_of)
        grads = gradient(state.params, inputs, labels, loss_scale=state.opt_state)
        return grads, state.apply_gradients(grads=grads)

    grads, after = step(state, *batch())
    chex.assert_trees_all_equal(after.params[OWG], grads[OWG])
    assert amp.last_step_finite(after.opt_state)


# Gradients


@pytest.mark.breadth(1)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_value_and_grad_returns_the_state_that_the_layers_return(operation):
    loss_fn = functools.partial(loss_of, apply=Network(operation).apply)
    variables, (inputs, labels) = first_variables(operation), batch()
    scaled = functools.partial(
        amp.value_and_grad(loss_fn), loss_scale=amp.static_loss_scale(1024.0)
    )
    _, found = jax.jit(scaled)(variables, inputs, labels)
    wanted = jax.jit(jax.grad(lambda *args: 1024.0 * loss_fn(*args)))(
        variables, inputs, labels
    )
    chex.assert_trees_all_equal(found[OWG], wanted[OWG])
    # The first number of a history is the maximum of the step, of x as of the kernel.
    (layer,) = found[OWG]["Dense_0"].values()
    kernel = np.asarray(variables["params"]["Dense_0"]["kernel"])
    assert layer["input_amax_history"][0] == np.abs(np.asarray(inputs)).max()
    assert layer["kernel_amax_history"][0] == np.abs(kernel).max()
    unscaled = jax.tree.map(lambda g: g / 1024.0, wanted["params"])
    chex.assert_trees_all_equal(found["params"], unscaled)


def test_states_of_layers_that_are_used_twice_keep_the_dtype_that_adds_by_maximum():
    variables, gradients = small_tree()

    @jax.jit
    def step(state):
        in_fm32 = functools.partial(
            jax.lax.convert_element_type, new_dtype=fp8_ops.fm32
        )
        old, new = jax.tree.map(in_fm32, (state, gradients[OWG]))
        tx = WRAPPERS["loss_scale"](optax.adam(0.1))
        trees = [v | {OWG: s} for v, s in ((variables, old), (gradients, new))]
        updates, opt_state = tx.update(trees[1], tx.init(trees[0]), trees[0])
        kept = amp.keep_if_finite(opt_state, updates[OWG], old)
        return jax.tree.map(
            lambda s: jax.lax.convert_element_type(s, jnp.float32), kept
        )

    chex.assert_trees_all_equal(step(variables[OWG]), gradients[OWG])


@pytest.mark.parametrize(
    "place",
    [
        lambda tree: tree,
        freeze,
        lambda tree: {"generator": tree, "discriminator": {"deep": [tree]}},
        lambda tree: (tree["params"], {OWG: tree[OWG]}),
    ],
    ids=["variables", "frozen", "nested", "tuple"],
)
def test_a_loss_scale_leaves_the_collection_wherever_it_lies(place):
    gradients = place(small_tree()[1])
    scale = amp.static_loss_scale(4.0)
    for factor, method in ((0.25, scale.unscale), (4.0, scale.scale)):
        found = method(gradients)
        for (path, leaf), (_, before) in zip(
            leaves_named(found), leaves_named(gradients), strict=True
        ):
            if OWG in path:
                assert leaf is before
            else:
                np.testing.assert_array_equal(leaf, factor * np.asarray(before))


@pytest.mark.filterwarnings("ignore:.*the loss is:UserWarning")
def test_a_collection_of_half_numbers_is_not_promoted():
    variables = amp.cast_to_half(small_tree()[0])
    found = amp.grad(lambda v: jnp.sum(v["params"]["w"] * v[OWG]["layer"]["scale"]))
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, jax.eval_shape(found, variables))
    assert dtypes["params"]["w"] == jnp.float32
    assert set(jax.tree.leaves(dtypes[OWG])) == {amp.half_dtype()}


# The finite check


def test_an_infinity_in_a_history_is_no_overflow_of_the_gradients():
    gradients = small_tree()[1]
    history = gradients[OWG]["layer"]["history"].at[0].set(jnp.inf)
    spoiled = gradients | {OWG: {"layer": {"history": history}}}
    assert amp.all_finite(spoiled)
    assert amp.all_finite(freeze(spoiled))
    assert not amp.all_finite({"params": history})
    assert not amp.all_finite({"history": spoiled[OWG]})


def test_a_step_with_an_infinity_in_a_history_is_applied():
    variables, gradients = small_tree()
    gradients[OWG]["layer"]["history"] = jnp.array([jnp.inf, jnp.nan])
    tx = WRAPPERS["loss_scale"](optax.sgd(1.0))
    updates, state = tx.update(gradients, tx.init(variables), variables)
    assert amp.last_step_finite(state)
    np.testing.assert_array_equal(updates["params"]["w"], [-0.5, 0.5])


# The wrappers of optimizers


@pytest.mark.breadth(2)
@each_wrapper
@pytest.mark.parametrize(
    ("dtype", "overflows"), [(jnp.float32, False), (jnp.bfloat16, True)]
)
def test_updates_of_the_collection_are_what_came_in(wrapper, dtype, overflows):
    variables, first = small_tree(dtype)
    second = jax.tree.map(lambda leaf: 2.0 * leaf, first)
    if overflows:
        first["params"]["w"] = second["params"]["w"] = jnp.array([jnp.nan, 1.0])
    tx = WRAPPERS[wrapper](optax.sgd(1.0))
    state = tx.init(variables)
    for gradients in (first, second):
        updates, state = tx.update(gradients, state, variables)
        assert leaves_are_same_objects(updates[OWG], gradients[OWG])
    if not overflows and wrapper == "accumulation":
        np.testing.assert_array_equal(updates["params"]["w"], [-0.75, 0.75])
    if overflows and wrapper in ("loss_scale", "unscale", "both", "accumulation"):
        assert not amp.last_step_finite(state)
        assert not updates["params"]["w"].any()
        kept = amp.keep_if_finite(state, updates[OWG], variables[OWG])
        chex.assert_trees_all_equal(kept, variables[OWG])


@pytest.mark.breadth(2)
@each_wrapper
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_inner_optimizer_sees_no_leaf_of_the_collection(wrapper, dtype):
    variables, gradients = small_tree(dtype)
    seen = []

    def update_fn(updates, state, params=None):
        seen.extend([updates, params])
        return updates, state

    spy = optax.GradientTransformation(lambda p: seen.append(p) or p, update_fn)
    tx = WRAPPERS[wrapper](spy)
    state = tx.init(variables)
    tx.update(gradients, state, variables)
    assert len(seen) >= 3
    assert all(
        [leaf.shape for leaf in jax.tree.leaves(tree)] == [(2,)] for tree in seen
    )


@pytest.mark.parametrize("wrapper", ["masters", "kahan", "random"])
def test_a_collection_of_half_numbers_has_no_digits_to_keep(wrapper):
    variables, gradients = jax.tree.map(
        lambda leaf: leaf.astype(jnp.bfloat16), small_tree()
    )
    tx = WRAPPERS[wrapper](optax.sgd(0.1))
    state = tx.init(variables)
    updates, state = tx.update(gradients, state, variables)
    assert leaves_are_same_objects(updates[OWG], gradients[OWG])
    if wrapper != "random":
        assert [leaf.shape for leaf in jax.tree.leaves(state[1])] == [(2,)]


def test_masters_begin_with_originals_that_have_no_collection():
    variables, _ = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), small_tree())
    originals = {"params": {"w": jnp.array([1.001, 2.0])}}
    tx = amp.with_master_weights(optax.sgd(0.1), init_from=originals)
    masters = tx.init(variables).masters["params"]["w"]
    np.testing.assert_array_equal(masters, originals["params"]["w"])


def test_a_clipped_norm_does_not_count_the_collection():
    variables, gradients = small_tree()
    clip = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    tx = WRAPPERS["loss_scale"](clip)
    updates, _ = tx.update(gradients, tx.init(variables), variables)
    # The norm of (0.5, -0.5) is below 1; a history of 5e4 would make the updates 1e-5.
    np.testing.assert_array_equal(updates["params"]["w"], [-0.5, 0.5])


# Casting and checkpoints


def test_parameters_are_cast_and_exported_without_the_collection():
    variables = first_variables()
    recipe = amp.recipe("O2", half_dtype="bfloat16")
    tx = recipe.wrap(optax.sgd(0.1))
    stored, opt_state = recipe.init(tx, variables)
    nested = amp.cast_params({"model": variables}, recipe.policy)["model"]
    exported = amp.export_params(stored, opt_state, "bfloat16")
    for tree in (stored, nested, exported):
        dtypes = jax.tree.map(lambda leaf: leaf.dtype.name, tree)
        assert set(jax.tree.leaves(dtypes["params"])) == {"bfloat16"}
        assert set(jax.tree.leaves(dtypes[OWG])) == {"float32"}
    back = amp.export_params(stored, opt_state)
    chex.assert_trees_all_close(back, variables, rtol=2.0**-22)


# Autocast


@pytest.mark.breadth(1)
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_a_direct_fp8_layer_under_autocast_is_as_traced(policy):
    found = first_gradients(OPERATIONS[0], policy)
    chex.assert_trees_all_equal(found, first_gradients(OPERATIONS[0]))


@pytest.mark.breadth(1)
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("operation", OPERATIONS[1:])
def test_a_layer_of_dequantised_products_has_them_in_half(operation, policy):
    report = amp.explain(amp.autocast(Network(operation).apply, policy))
    variables, (inputs, _) = first_variables(operation), batch()
    assert report(variables, inputs).total.matmuls_in_half == 2
    wanted, found = first_gradients(operation), first_gradients(operation, policy)
    chex.assert_trees_all_equal_dtypes(found, wanted)
    # The maxima of the first layer's input and of both kernels come before a product.
    # The others are maxima of results of half, and of gradients that were rounded to
    # e5m2: one that lies near the middle of two numbers moves by a quarter of itself.
    for (path, state), (_, f32_state) in zip(
        leaves_named(found[OWG]), leaves_named(wanted[OWG]), strict=True
    ):
        exact = "kernel" in path or ("Dense_0" in path and "input" in path)
        np.testing.assert_allclose(state, f32_state, rtol=0.0 if exact else 0.25)
