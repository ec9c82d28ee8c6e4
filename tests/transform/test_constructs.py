"""What a program asks for, and `autocast` leaves: rules, kernels, options, devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import xla_metadata

import jmp_amp as amp
from tests.constructs import ROWS
from tests.constructs.calls import kernel_double
from tests.constructs.devices import (
    P,
    gathered_block,
    mesh,
    permuted_block,
    psum_block,
    scanning_block,
    sharded,
)
from tests.constructs.rules import quintupled, scaled_sine
from tests.programs import dtypes_of, equations, products, results_of, saved
from tests.rounding import (
    BF16,
    F16,
    POLICIES,
    ROUNDINGS,
    W,
    X,
    assert_only_rounded,
    eps,
    half_of,
    mean_square,
    relative_error,
)

# What stays as it was traced, and what does not


def primitives_of(fn, *args):
    return [e.primitive.name for e in equations(jax.make_jaxpr(fn)(*args))]


@pytest.fixture(params=[False, True], ids=["constants", "literals"])
def where_constants_are(request):
    name = "jax_use_simplified_jaxpr_constants"
    before = getattr(jax.config, name)
    jax.config.update(name, request.param)
    yield
    jax.config.update(name, before)


@pytest.mark.breadth(1)
@pytest.mark.usefixtures("where_constants_are")
def test_a_users_rule_can_do_with_a_constant_what_it_can_do_with_an_array():
    @jax.custom_vjp
    def scaled_by_first(x, table):
        return x * table[0]

    def backward(table, g):
        # Numpy refuses to be indexed by a traced number.
        at = lax.fori_loop(0, 1, lambda i, total: total + table[i], jnp.float32(0))
        return g * at, jnp.zeros_like(table)

    scaled_by_first.defvjp(lambda x, table: (x * table[0], table), backward)
    table = np.array([2.0, 3.0], np.float32)
    fn = amp.autocast(lambda x: jnp.sum(scaled_by_first(x @ jnp.eye(16), table)), F16)
    np.testing.assert_array_equal(jax.grad(fn)(X), 2.0)


@pytest.mark.parametrize(
    "name", ["custom_jvp_in_scan", "custom_jvp_in_cond", "custom_jvp_in_vmap"]
)
def test_a_custom_jvp_rule_is_f32_between_its_products_wherever_it_is(name):
    gradient = jax.grad(amp.autocast(ROWS[name].loss))
    assert set(results_of(gradient, W, primitive="cos")) == {"float32"}
    assert set(products(gradient, W)) == {"bfloat16"}


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    "policy_name",
    [
        "everything_saveable",
        "nothing_saveable",
        "dots_saveable",
        "dots_with_no_batch_dims_saveable",
    ],
)
def test_a_checkpoint_saves_what_its_policy_says(policy_name):
    rule = getattr(jax.checkpoint_policies, policy_name)

    def fn(w):
        def block(h):
            return jnp.tanh(jnp.tanh(jnp.tanh(h) @ w) @ w) @ w

        return mean_square(jax.checkpoint(block, policy=rule)(X @ w))

    mixed = saved(amp.autocast(fn), W, X.shape)
    assert len(mixed) == len(saved(fn, W, X.shape))
    # The last one is what the f32 mean square reads.
    assert mixed.count("float32") <= 1
    assert_only_rounded(lambda transform, w: jax.grad(transform(fn))(w))


def test_named_values_are_saved_in_half_inside_a_scan():
    rule = jax.checkpoint_policies.save_only_these_names("kept")

    def fn(w):
        def body(h, w):
            kept = checkpoint_name(jnp.tanh(h @ w), "kept")
            return h + jnp.tanh(jnp.tanh(kept @ w) @ w), None

        body = jax.checkpoint(body, policy=rule, prevent_cse=False)
        return mean_square(lax.scan(body, X @ w, jnp.stack([w] * 3))[0])

    assert saved(amp.autocast(fn), W, (3, 8, 16)) == ["bfloat16"] * 2
    assert_only_rounded(lambda transform, w: jax.grad(transform(fn))(w))


def test_an_offloading_checkpoint_stays_one():
    rule = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["kept"],
        names_which_can_be_offloaded=["moved"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def block(h, w):
        h = checkpoint_name(jnp.tanh(h @ w), "moved")
        h = checkpoint_name(jnp.tanh(h @ w), "kept")
        return jnp.tanh(h @ w)

    def fn(w):
        return mean_square(jax.checkpoint(block, policy=rule)(X @ w, w))

    plain = primitives_of(jax.grad(fn), W).count("device_put")
    assert (
        plain
        and primitives_of(jax.grad(amp.autocast(fn)), W).count("device_put") == plain
    )
    found = dtypes_of(jax.grad(amp.autocast(fn)), W, primitive="device_put")
    assert {dtype for row in found for dtype in row} == {"bfloat16"}


def test_a_checkpoint_keeps_its_option():
    def fn(w):
        return jnp.sum(jax.checkpoint(jnp.tanh, prevent_cse=False)(X @ w))

    marks = [
        e
        for e in equations(jax.make_jaxpr(amp.autocast(fn))(W))
        if "prevent_cse" in e.params
    ]
    assert [e.params["prevent_cse"] for e in marks] == [False]


def test_callbacks_run_once_and_see_the_dtypes_they_were_traced_with():
    seen = []

    def note(*arrays):
        seen.extend((x.dtype.name, x.shape) for x in arrays)
        return np.float32(1)

    def fn(w):
        h = X @ w
        one = jax.pure_callback(note, jax.ShapeDtypeStruct((), jnp.float32), h)
        two = jax.experimental.io_callback(
            note, jax.ShapeDtypeStruct((), jnp.float32), h, w, ordered=True
        )
        jax.debug.callback(note, h)
        jax.debug.print("{x}", x=h[0, 0])
        return (h * one * two) @ w

    for run in (amp.autocast(fn), jax.jit(amp.autocast(fn))):
        jax.block_until_ready(run(W))
        jax.effects_barrier()
        assert sorted(seen) == [("float32", (8, 16))] * 3 + [("float32", (16, 16))]
        seen.clear()


def test_a_kernel_sees_the_dtypes_it_was_traced_with():
    def fn(w):
        return kernel_double(X @ w) @ w

    (row,) = dtypes_of(amp.autocast(fn), W, primitive="pallas_call")
    assert row == ("float32", "float32")
    rows = dtypes_of(
        amp.autocast(lambda w: amp.cast_inputs(kernel_double)(X @ w) @ w),
        W,
        primitive="pallas_call",
    )
    assert rows == [("bfloat16", "bfloat16")]


def test_names_of_scopes_calls_and_functions_survive_in_bodies():
    def block(h, w):
        with jax.named_scope("inner_scope"):
            return jnp.tanh(h @ w)

    def jitted_block(x, w):
        return scaled_sine(x @ w, x)

    def turn(h, w):
        return jax.named_call(block, name="my_block")(h, w), None

    def fn(w):
        with jax.named_scope("outer_scope"):
            h = lax.scan(lambda h, _: turn(h, w), X @ w, None, length=2)[0]
        return jax.jit(jitted_block)(h, w)

    jaxpr = str(jax.make_jaxpr(amp.autocast(fn))(W))
    assert "name=jitted_block" in jaxpr and "name=scaled_sine" in jaxpr
    text = jax.jit(amp.autocast(fn)).lower(W).as_text(debug_info=True)
    for name in ("outer_scope", "my_block", "inner_scope", "jitted_block"):
        assert name in text


def test_a_mutable_array_that_is_closed_over_is_written():
    seen = jax.new_ref(jnp.zeros((8, 16)))

    def fn(w):
        seen[...] = X @ w
        return X @ w @ w

    found = amp.autocast(fn)(W)
    assert relative_error(found, X @ W @ W) < ROUNDINGS * eps(BF16)
    assert relative_error(seen[...], X @ W) < ROUNDINGS * eps(BF16)


def test_it_can_be_transposed():
    for policy in POLICIES:
        fn = amp.autocast(lambda x: (x @ W) * 2.0, policy)
        (found,) = jax.linear_transpose(fn, X)(X)
        assert found.dtype == jnp.float32
        assert relative_error(found, 2 * X @ W.T) < ROUNDINGS * eps(policy)


# Compiling ahead of time


def test_it_can_be_lowered_exported_and_evaluated_without_arrays():
    fn = amp.autocast(lambda w, *, n: {"y": X @ w * n}, F16)
    shape = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    assert jax.eval_shape(functools.partial(fn, n=2), shape)["y"].dtype == jnp.float32
    jitted = jax.jit(fn, static_argnames="n")
    compiled = jitted.lower(shape, n=2).compile()
    found = compiled(W)["y"]
    assert relative_error(found, 2 * X @ W) < ROUNDINGS * eps(F16)
    exported = jax.export.export(jitted)(shape, n=2)
    np.testing.assert_array_equal(exported.call(W)["y"], found)
    assert "f16" in exported.mlir_module()


def test_an_exported_function_can_be_called_under_autocast():
    shape = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    exported = jax.export.export(jax.jit(jnp.tanh))(shape)
    found = amp.autocast(lambda w: exported.call(X @ w) @ w, BF16)(W)
    assert relative_error(found, jnp.tanh(X @ W) @ W) < ROUNDINGS * eps(BF16)


def test_symbolic_shapes_can_be_exported():
    (rows,) = jax.export.symbolic_shape("rows")
    shape = jax.ShapeDtypeStruct((rows, 16), jnp.float32)
    fn = amp.autocast(lambda x: jax.nn.softmax(jnp.tanh(x @ W)) @ W, BF16)
    exported = jax.export.export(jax.jit(fn))(shape)
    for x in (X, X[:3]):
        expected = jax.nn.softmax(jnp.tanh(x @ W)) @ W
        found = exported.call(x)
        assert relative_error(found, expected) < ROUNDINGS * eps(BF16)


def test_arguments_can_be_donated():
    fn = jax.jit(amp.autocast(lambda x, w: jnp.tanh(x @ w)), donate_argnums=0)
    x = jnp.array(X)
    found = fn(x, W)
    assert x.is_deleted()
    assert relative_error(found, jnp.tanh(X @ W)) < ROUNDINGS * eps(BF16)


def test_static_arguments_of_an_inner_jit_stay_static():
    @functools.partial(jax.jit, static_argnums=1, static_argnames="mode")
    def block(h, n, *, mode):
        assert isinstance(n, int) and mode == "tanh"
        for _ in range(n):
            h = jnp.tanh(h @ W)
        return h

    found = amp.autocast(lambda x: block(x, 2, mode="tanh"))(X)
    expected = jnp.tanh(jnp.tanh(X @ W) @ W)
    assert relative_error(found, expected) < ROUNDINGS * eps(BF16)


def test_metadata_survives():
    def fn(w):
        with xla_metadata.set_xla_metadata(my_key="my_value"):
            h = jnp.tanh(X @ w)
        return h @ w

    text = jax.jit(amp.autocast(fn)).lower(W).as_text()
    assert "my_key" in text
    assert (
        "my_key"
        in jax.jit(jax.grad(lambda w: jnp.sum(amp.autocast(fn)(w)))).lower(W).as_text()
    )


@pytest.mark.skipif(
    not hasattr(xla_metadata, "xla_metadata_call2"), reason="new in JAX 0.11"
)
def test_a_call_that_is_tagged_runs_in_half_and_stays_tagged():
    def fn(w):
        @xla_metadata.xla_metadata_call2({"group": "g1"}, ad_metadata={"group": "g2"})
        def tagged(x):
            return jax.nn.softmax(x @ w) @ w

        return mean_square(tagged(X))

    assert_only_rounded(lambda transform, w: jax.grad(transform(fn))(w))
    gradient = jax.grad(amp.autocast(fn))
    assert set(products(gradient, W)) == {half_of(BF16)}
    text = jax.jit(gradient).lower(W).as_text()
    assert text.count('group = "g1"') == text.count('group = "g2"') == 1


def test_the_precision_of_a_product_survives():
    def fn(w):
        return jnp.dot(X, w, precision=lax.Precision.HIGHEST) @ w

    eqns = equations(jax.make_jaxpr(amp.autocast(fn))(W))
    precisions = [e.params["precision"] for e in eqns if "precision" in e.params]
    assert precisions[0] == (lax.Precision.HIGHEST,) * 2
    with jax.default_matmul_precision("highest"):
        eqns = list(equations(jax.make_jaxpr(amp.autocast(lambda w: X @ w))(W)))
    precisions = [e.params["precision"] for e in eqns if "precision" in e.params]
    assert precisions == [(lax.Precision.HIGHEST,) * 2]


@pytest.mark.slow
def test_checks_for_nan_and_leaks_pass():
    def fn(w):
        h = lax.scan(lambda h, _: (jnp.tanh(h @ w), None), X @ w, None, length=2)[0]
        return mean_square(jax.checkpoint(lambda h: quintupled(h, w))(h))

    with jax.checking_leaks(), jax.debug_nans(True):
        gradient = jax.grad(amp.autocast(fn))(W)
    assert relative_error(gradient, jax.jit(jax.grad(fn))(W)) < 2 * ROUNDINGS * eps(
        BF16
    )


def test_checkify_finds_what_it_finds_without():
    from jax.experimental import checkify

    def fn(w):
        h = X @ w
        checkify.check(jnp.all(h < 1e3), "too large: {m}", m=jnp.max(h))
        return h @ w

    checked = checkify.checkify(amp.autocast(fn))
    error, found = jax.jit(checked)(W)
    assert error.get() is None
    assert relative_error(found, X @ W @ W) < ROUNDINGS * eps(BF16)
    error, _ = jax.jit(checked)(1e6 * W)
    assert "too large" in error.get()


def test_without_jit_it_is_the_same():
    def fn(w):
        h = lax.scan(lambda h, _: (jnp.tanh(h @ w), None), X @ w, None, length=2)[0]
        return mean_square(lax.cond(h[0, 0] < 9, jnp.sin, jnp.cos, h))

    with jax.disable_jit():
        found = amp.autocast(fn)(W)
    assert relative_error(found, jax.jit(fn)(W)) < ROUNDINGS * eps(BF16)


# Several devices


def test_what_moves_between_devices_is_half_and_what_is_summed_is_f32():
    policy, half = BF16, half_of(BF16)
    fn = amp.autocast(sharded(gathered_block, False), policy)
    assert set(results_of(fn, X, W, primitive="all_gather")) == {half}
    fn = amp.autocast(sharded(permuted_block, False), policy)
    assert set(results_of(fn, X, W, primitive="ppermute")) == {half}
    for check_vma, primitive in ((False, "psum"), (True, "psum_invariant")):
        fn = amp.autocast(sharded(psum_block, check_vma), policy)
        assert results_of(fn, X, W, primitive=primitive) == ["float32"]


def test_autocast_inside_a_shard_map_is_that_of_f32():
    assert_only_rounded(
        lambda transform, w: jax.value_and_grad(
            lambda w: mean_square(sharded(transform(scanning_block))(X, w))
        )(w)
    )


def test_autocast_inside_a_vmap_with_an_axis_is_that_of_f32():
    def inside(transform, w):
        def loss(w):
            row = transform(lambda x: jnp.tanh(x @ w) - lax.pmean(x @ w, "batch"))
            return mean_square(jax.vmap(row, axis_name="batch")(X))

        return jax.value_and_grad(loss)(w)

    assert_only_rounded(inside)


def test_a_pmap_is_that_of_f32():
    def step(x, w):
        return lax.pmean(jnp.tanh(x @ w) @ w, "data")

    pmapped = functools.partial(jax.pmap, axis_name="data", in_axes=(0, None))
    expected = pmapped(step)(X[:, None], W)
    outside = amp.autocast(pmapped(step), F16)
    inside = pmapped(amp.autocast(step, F16))
    for fn in (outside, inside):
        found = fn(X[:, None], W)
        assert relative_error(found, expected) < ROUNDINGS * eps(F16)


def test_a_sharding_constraint_survives():
    sharding = jax.sharding.NamedSharding(mesh(), P("data"))

    def fn(w):
        h = lax.with_sharding_constraint(X @ w, sharding)
        return jnp.tanh(h) @ w

    mixed = amp.autocast(fn)
    eqns = [
        e
        for e in equations(jax.make_jaxpr(mixed)(W))
        if e.primitive.name == "sharding_constraint"
    ]
    assert [e.params["sharding"].spec for e in eqns] == [P("data")]
    assert results_of(mixed, W, primitive="sharding_constraint") == ["bfloat16"]
    gradient = jax.grad(lambda w: jnp.sum(mixed(w)))
    assert len(dtypes_of(gradient, W, primitive="sharding_constraint")) == 2


def test_shardings_of_arguments_and_results_survive():
    rows = jax.sharding.NamedSharding(mesh(), P("data"))
    whole = jax.sharding.NamedSharding(mesh(), P())
    inner = jax.jit(lambda x, w: jnp.tanh(x @ w), out_shardings=rows)
    fn = jax.jit(amp.autocast(lambda x, w: inner(x, w)), in_shardings=(rows, whole))
    found = fn(X, W)
    assert found.sharding.is_equivalent_to(rows, 2)
    assert relative_error(found, jnp.tanh(X @ W)) < ROUNDINGS * eps(BF16)
    placed = jax.device_put(X, rows)
    without_jit = amp.autocast(lambda x: jnp.tanh(x @ W) * 2)(placed)
    assert without_jit.sharding.is_equivalent_to(rows, 2)


def test_explicit_shardings_survive():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, P("data"))
        w = jax.device_put(W, P())

        def fn(w, x):
            h, _ = lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x @ w, None, length=2)
            h = lax.cond(w[0, 0] < 9, jnp.sin, jnp.cos, h)
            return h @ w

        found = jax.jit(amp.autocast(fn))(w, x)
        assert jax.typeof(found).sharding.spec == P("data", None)
        assert relative_error(found, jax.jit(fn)(w, x)) < ROUNDINGS * eps(BF16)
        gradient, expected = (
            jax.jit(jax.grad(lambda w, f=f: mean_square(f(w, x))))(w)
            for f in (amp.autocast(fn), fn)
        )
        assert relative_error(gradient, expected) < ROUNDINGS * eps(BF16)
        hidden = jax.reshard
        moved = jax.jit(amp.autocast(lambda x: hidden(x @ w, P()) @ w))(x)
        assert relative_error(moved, x @ w @ w) < ROUNDINGS * eps(BF16)


@pytest.mark.breadth(1)
@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: w.at[jnp.arange(8)].get(out_sharding=P("data", None)) @ w,
        lambda w, x: jax.sharding.auto_axes(
            lambda w, x: jax.nn.softmax(x @ w) @ w, out_sharding=P("data", None)
        )(w, x),
    ],
)
def test_explicit_axes_may_be_left_to_the_compiler_inside(fn):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x, w = jax.device_put(X, P("data")), jax.device_put(W, P())
        assert_only_rounded(
            lambda transform, w, x: jax.value_and_grad(
                lambda w: mean_square(transform(fn)(w, x))
            )(w),
            args=(w, x),
        )


def test_sharded_parameters_are_gathered_in_half():
    rows = jax.sharding.NamedSharding(mesh(), P("data"))

    def fn(w, x):
        w = lax.with_sharding_constraint(w, jax.sharding.NamedSharding(mesh(), P()))
        return jnp.tanh(x @ w)

    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=rows) for a in (W, X)]
    mixed = amp.autocast(fn)
    assert results_of(mixed, *shapes, primitive="sharding_constraint") == ["bfloat16"]
