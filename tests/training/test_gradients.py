import functools
import inspect

import chex
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmp_amp as amp

HALF = (jnp.float16, jnp.bfloat16)
SCALE = amp.static_loss_scale(2.0**16)

half_loss = pytest.mark.filterwarnings("ignore:.* the loss is b?float16")


def square(w):
    return jnp.sum(w.astype(jnp.float32) ** 2)


# The loss and the gradients


@pytest.mark.breadth(1)
@pytest.mark.parametrize("jit", [True, False])
def test_a_power_of_two_changes_neither_loss_nor_gradients(jit):
    model, x = nn.Sequential([nn.Dense(4), jnp.tanh, nn.Dense(3)]), jnp.ones((8, 4))
    variables = jax.jit(model.init)(jax.random.key(0), x)
    loss_fn = lambda v: jnp.mean(model.apply(v, x) ** 2)  # noqa: E731
    mine, plain = amp.value_and_grad(loss_fn), jax.value_and_grad(loss_fn)
    if jit:
        mine, plain = jax.jit(mine), jax.jit(plain)
    expected = plain(variables)
    chex.assert_trees_all_equal(mine(variables, loss_scale=SCALE), expected)
    chex.assert_trees_all_equal(mine(variables), expected)


# All transforms by default, and each kind of parameter.
@pytest.mark.breadth(6)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    # Half kernels alone are given a memory layout.
    [((1, 2, 3), "float16"), ((2, 1, 2, 3), "float16"), ((1, 2, 3), "float32")],
)
@pytest.mark.parametrize(
    "transform",
    [
        lambda gradient: gradient,
        lambda gradient: (
            lambda w: jax.vmap(gradient, 2, 1)(jnp.stack([w, w], 2)).mean(1)
        ),
        lambda gradient: lambda w: jax.jvp(gradient, (w,), (w,))[1],
        lambda gradient: jax.grad(lambda w: jnp.sum(gradient(w) ** 2) / 4),
        lambda gradient: lambda w: jax.lax.map(gradient, w[None])[0],
        jax.checkpoint,
    ],
    ids=["", "vmap", "jvp", "grad", "map", "checkpoint"],
)
def test_gradients_inside_of_transforms_are_those_outside(transform, shape, dtype):
    w = jnp.arange(np.prod(shape)).reshape(shape).astype(dtype)
    for loss_scale in (None, amp.static_loss_scale(2.0**8)):
        gradient = functools.partial(amp.grad(square), loss_scale=loss_scale)
        found = jax.jit(transform(gradient))(w)
        np.testing.assert_array_equal(found, 2.0 * np.float32(w))


def test_a_step_of_half_kernels_is_exported_as_the_docstring_says():
    def convolved(w):
        return jnp.sum(
            jax.lax.conv(jnp.ones((1, 2, 3, 4), w.dtype), w, (1, 1), "VALID")
        )

    gradient = jax.jit(amp.grad(lambda w: convolved(w).astype(jnp.float32)))
    full, half = jnp.ones((2, 2, 3, 4)), jnp.ones((2, 2, 3, 4), jnp.float16)
    assert jax.export.export(gradient)(full)
    with pytest.raises(ValueError, match="LayoutConstraint"):
        jax.export.export(gradient)(half)
    check = jax.export.DisabledSafetyCheck.custom_call("LayoutConstraint")
    exported = jax.export.export(gradient, disabled_checks=[check])(half)
    np.testing.assert_array_equal(exported.call(half), full)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("loss_scale", [amp.static_loss_scale(2.0**10), None])
def test_gradients_of_half_parameters_are_float32(dtype, loss_scale):
    w = jnp.array([1.0, -2.0], dtype)
    loss, gradient = amp.value_and_grad(square)(w, loss_scale=loss_scale)
    assert (loss, loss.dtype) == (5.0, jnp.float32)
    assert gradient.dtype == jnp.float32
    np.testing.assert_array_equal(gradient, [2.0, -4.0])


@half_loss
@pytest.mark.parametrize("dtype", HALF)
def test_the_loss_comes_back_as_the_function_returned_it(dtype):
    # Scaled in its own dtype a loss of 4 is inf in f16 and coarse in bf16.
    loss_fn = lambda w: (w * w).astype(dtype)  # noqa: E731
    loss, _ = amp.value_and_grad(loss_fn)(jnp.float32(2.03125), loss_scale=SCALE)
    assert loss.dtype == dtype
    assert loss == dtype(2.03125**2)


@half_loss
def test_a_loss_computed_in_float16_is_reported_though_its_gradient_overflows():
    loss_fn = lambda w: w * w  # noqa: E731
    loss, gradient = amp.value_and_grad(loss_fn)(jnp.float16(2.0), loss_scale=SCALE)
    assert loss == 4.0
    assert not amp.all_finite(gradient)
    scale = amp.static_loss_scale(2.0**10)
    assert amp.grad(loss_fn)(jnp.float16(2.0), loss_scale=scale) == 4.0


# The names that torch, Lightning and Accelerate have for mixed precision.
@pytest.mark.breadth(2)
@pytest.mark.parametrize("transform", [amp.value_and_grad, amp.grad])
@pytest.mark.parametrize(
    "policy, name",
    [
        ("fp16", "float16"),
        ("float16", "float16"),
        ("bf16", "bfloat16"),
        ("half", amp.half_dtype().name),
    ],
)
def test_a_half_loss_warns_once_for_a_trace_and_names_the_mixed_policy(
    policy, name, transform
):
    def step(w, x):
        loss_fn = amp.autocast(lambda w: jnp.mean((x @ w) ** 2), policy)
        return transform(loss_fn)(w, loss_scale=SCALE)

    w, x = jnp.ones((4, 4)), jnp.ones((2, 4))
    with pytest.warns(UserWarning, match=f'is {name}, .*"mixed_{name}"') as caught:
        jax.eval_shape(step, w, x)
    assert len(caught) == 1 and caught[0].filename == __file__


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float32"])
def test_a_float32_loss_does_not_warn(policy):
    loss_fn = amp.autocast(lambda w: jnp.mean((w @ w) ** 2), policy)
    step = functools.partial(amp.value_and_grad(loss_fn), loss_scale=SCALE)
    jax.eval_shape(step, jnp.ones((4, 4)))


@pytest.mark.parametrize("transform", [amp.value_and_grad, amp.grad])
def test_a_float16_autocast_without_a_loss_scale_warns_once_for_a_trace(transform):
    def loss_fn(w):
        inner = amp.autocast(lambda w: w @ w, "mixed_float16")
        return jnp.mean(inner(inner(w)))

    step, w = jax.jit(transform(loss_fn)), jnp.ones((4, 4))
    with pytest.warns(UserWarning, match=r"loss_scale=opt_state; .*no_loss_scale\(\)"):
        step(w)
    step(w)
    transform(loss_fn)(w, loss_scale=amp.no_loss_scale())
    transform(amp.autocast(jnp.sum, "mixed_bfloat16"))(w)


def test_a_gradient_too_small_for_float16_survives_only_with_a_scale():
    def loss_fn(w):
        activation = w.astype(jnp.float16) * jnp.float16(2.0)
        return activation.astype(jnp.float32) * 2.0**-30

    assert amp.grad(loss_fn)(jnp.float32(1.0)) == 0.0
    assert amp.grad(loss_fn)(jnp.float32(1.0), loss_scale=SCALE) == 2.0**-29


def test_gradients_are_unscaled_with_the_scale_that_was_given_not_the_next_one():
    loss_scale = amp.dynamic_loss_scale(64.0, growth_interval=1)
    assert amp.grad(square)(jnp.float32(3.0), loss_scale=loss_scale) == 6.0


def test_an_overflow_reaches_the_caller_as_a_gradient_that_is_not_finite():
    def loss_fn(w):
        return w.astype(jnp.float16).astype(jnp.float32) * 2.0

    loss, gradient = amp.value_and_grad(loss_fn)(jnp.float32(1.0), loss_scale=SCALE)
    assert loss == 2.0
    assert gradient == jnp.inf


@pytest.mark.parametrize("scale", [2.0**16, 1000.0])
def test_float64_gradients_have_all_their_digits_at_any_scale(scale):
    with jax.enable_x64(True):
        scale = amp.static_loss_scale(scale)
        found = amp.value_and_grad(jnp.sin)(jnp.float64(0.3), loss_scale=scale)
        assert [each.dtype for each in found] == [jnp.float64] * 2
        rtol = 4 * float(jnp.finfo(jnp.float64).eps)
        np.testing.assert_allclose(found, [np.sin(0.3), np.cos(0.3)], rtol=rtol)


def test_complex_gradients_keep_their_imaginary_part():
    z = jnp.complex64(1.0 + 2.0j)
    gradient = amp.grad(lambda z: jnp.abs(z) ** 2)(z, loss_scale=SCALE)
    np.testing.assert_allclose(gradient, 2.0 - 4.0j, rtol=1e-6)
    found = amp.grad(lambda z: z**2, holomorphic=True)(z, loss_scale=SCALE)
    np.testing.assert_allclose(found, 2.0 + 4.0j, rtol=1e-6)


# Arguments


def three(a, b, c, *, power=1):
    return (a * b**2 * c**3) ** power


@pytest.mark.breadth(2)
@pytest.mark.parametrize("argnums", [0, 2, -1, -3, (0, 2), (2, 0), (-1,), (0, -2)])
def test_argnums_mean_what_they_mean_in_jax(argnums):
    args = [jnp.float32(2.0), jnp.float32(3.0), jnp.float32(-1.0)]
    found = amp.grad(three, argnums)(*args, power=2, loss_scale=SCALE)
    chex.assert_trees_all_close(found, jax.grad(three, argnums)(*args, power=2))


def test_has_aux_returns_the_rest_untouched():
    aux = {"half": jnp.float16(3.0), "int": jnp.arange(2), "none": None}

    def loss_fn(w):
        return w * 2.0, aux | {"activation": w * 3.0}

    w = jnp.float32(5.0)
    (loss, found), gradient = amp.value_and_grad(loss_fn, has_aux=True)(
        w, loss_scale=SCALE
    )
    assert (loss, gradient) == (10.0, 2.0)
    chex.assert_trees_all_equal(found, aux | {"activation": jnp.float32(15.0)})
    assert found["half"].dtype == jnp.float16
    gradient, found = amp.grad(loss_fn, has_aux=True)(w, loss_scale=SCALE)
    assert (gradient, found["activation"]) == (2.0, 15.0)


def test_a_nan_in_aux_does_not_make_a_step_bad():
    loss_fn = lambda w: (w * 2.0, {"seen": w * jnp.nan})  # noqa: E731
    gradient, aux = amp.grad(loss_fn, has_aux=True)(1.0, loss_scale=SCALE)
    assert jnp.isnan(aux["seen"])
    assert amp.all_finite(gradient)


def test_integer_arguments_get_float0_gradients_if_allowed():
    tree = {"w": jnp.float32(2.0), "n": jnp.int32(3)}
    loss_fn = lambda t: t["w"] ** 2 * t["n"].astype(jnp.float32)  # noqa: E731
    gradient = amp.grad(loss_fn, allow_int=True)(tree, loss_scale=SCALE)
    assert gradient["w"] == 12.0
    assert gradient["n"].dtype == jax.dtypes.float0
    with pytest.raises(TypeError, match="inexact"):
        amp.grad(loss_fn)(tree, loss_scale=SCALE)


def holders():
    tx = amp.with_loss_scale(optax.sgd(0.1), SCALE)
    state = tx.init(jnp.ones(2))
    train_state = TrainState.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=tx)
    return {
        "loss_scale": SCALE,
        "state": state,
        "chain": optax.chain(optax.clip(1.0), tx).init(jnp.ones(2)),
        "train_state": train_state,
        "dict": {"params": jnp.ones(2), "scaler": [3, SCALE]},
    }


@pytest.mark.parametrize("holder", holders())
def test_the_scale_is_found_in_whatever_holds_it(holder):
    # What the function sees of the scale: cotangents are multiplied by it.
    seen = []

    @jax.custom_vjp
    def spy(x):
        return x

    def backward(_, cotangent):
        jax.debug.callback(lambda c: seen.append(float(c)), cotangent)
        return (cotangent,)

    spy.defvjp(lambda x: (x, None), backward)
    found = amp.grad(spy)(jnp.float32(1.0), loss_scale=holders()[holder])
    jax.effects_barrier()
    assert (found, seen) == (1.0, [2.0**16])


# Inside other transforms


def test_it_works_under_vmap():
    batch = jnp.arange(6.0).reshape(3, 2)
    scale = jax.vmap(amp.static_loss_scale)(jnp.array([1.0, 2.0, 4.0]))
    f = jax.vmap(lambda w, s: amp.value_and_grad(square)(w, loss_scale=s))
    losses, gradients = f(batch, scale)
    np.testing.assert_array_equal(losses, [1.0, 13.0, 41.0])
    np.testing.assert_array_equal(gradients, 2.0 * batch)


def test_it_works_inside_shard_map():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    x = jnp.arange(8.0)

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
    def run(w, x):
        loss_fn = lambda w: jnp.sum(jax.lax.pmean(w * x, "d"))  # noqa: E731
        return amp.value_and_grad(loss_fn)(w, loss_scale=SCALE)

    loss, gradient = run(jnp.float32(2.0), x)
    assert (loss, gradient) == (7.0, 3.5)


def test_a_step_is_traced_once_while_the_scale_moves():
    traces = []

    @jax.jit
    def step(w, loss_scale):
        traces.append(None)
        gradient = amp.grad(square)(w, loss_scale=loss_scale)
        return gradient, loss_scale.adjust(amp.all_finite(gradient))

    loss_scale = amp.dynamic_loss_scale(growth_interval=1)
    for w in (1.0, jnp.nan, 2.0, 3.0):
        _, loss_scale = step(jnp.asarray(w, jnp.float32), loss_scale)
    assert loss_scale.value == 2.0**18
    assert len(traces) == 1


# What the function looks like


def test_it_keeps_name_docstring_and_signature_and_adds_the_keyword():
    def loss_fn(params, batch, *, train: bool = True, **kwargs):
        """How wrong."""

    for transform in (amp.value_and_grad, amp.grad):
        f = transform(loss_fn)
        assert (f.__name__, f.__doc__) == ("loss_fn", "How wrong.")
        parameters = inspect.signature(f).parameters
        assert list(parameters) == ["params", "batch", "train", "loss_scale", "kwargs"]


def test_jit_can_make_a_keyword_static():
    def loss_fn(w, *, train):
        return square(w) if train else 0.0 * square(w)

    f = jax.jit(amp.grad(loss_fn), static_argnames="train")
    assert f(jnp.float32(3.0), train=True, loss_scale=SCALE) == 6.0
    assert f(jnp.float32(3.0), train=False, loss_scale=SCALE) == 0.0


def test_functions_without_a_signature_work():
    f = amp.grad(functools.partial(three, power=1), argnums=1)
    assert f(1.0, 3.0, 1.0, loss_scale=SCALE) == 6.0
    assert amp.grad(jax.jit(square))(jnp.float32(3.0), loss_scale=SCALE) == 6.0


# Errors


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda w: w,
        lambda w: jnp.sum(w > 0),
        lambda w: jax.lax.complex(jnp.sum(w), 0.0),
        lambda w: {"loss": jnp.sum(w)},
        lambda w: None,
    ],
)
@pytest.mark.parametrize("name", ["value_and_grad", "grad"])
def test_a_loss_that_is_no_floating_scalar_is_refused_as_jax_does(name, loss_fn):
    f = getattr(amp, name)(loss_fn)
    with pytest.raises(TypeError) as raised:
        f(jnp.ones(3), loss_scale=amp.no_loss_scale())
    with pytest.raises(TypeError) as expected:
        getattr(jax, name)(loss_fn)(jnp.ones(3))
    texts = [str(each.value) for each in (raised, expected)]
    assert texts[0].replace("value_and_grad", name) == texts[1]


@pytest.mark.parametrize("returned", [lambda w: w[0], lambda w: (w[0], w, w)])
def test_an_output_that_is_no_pair_of_loss_and_aux_is_refused(returned):
    with pytest.raises(
        TypeError, match=r"^grad\(<lambda>\).*Return a pair \(loss, aux\)"
    ):
        amp.grad(returned, has_aux=True)(jnp.ones(3))


@pytest.mark.parametrize("loss_scale", [2.0**16, 65536, "dynamic", jnp.ones(())])
def test_a_scale_that_is_a_bare_number_is_refused(loss_scale):
    with pytest.raises(TypeError, match=r"grad\(square\).*static_loss_scale"):
        amp.grad(square)(jnp.ones(3), loss_scale=loss_scale)


def test_a_state_without_a_loss_scale_is_refused():
    state = optax.adam(1e-3).init(jnp.ones(3))
    with pytest.raises(ValueError, match=r"^grad\(square\).*with_loss_scale"):
        amp.grad(square)(jnp.ones(3), loss_scale=state)


def test_a_tree_with_two_loss_scales_is_refused():
    with pytest.raises(ValueError, match=r"2 loss scales, at \['a'\] and \['b'\]"):
        amp.grad(square)(jnp.ones(3), loss_scale={"a": SCALE, "b": SCALE})


def test_a_function_with_a_loss_scale_parameter_of_its_own_is_refused():
    def loss_fn(w, loss_scale):
        return w * loss_scale

    for transform in (amp.value_and_grad, amp.grad):
        with pytest.raises(ValueError, match="parameter `loss_scale` of its own"):
            transform(loss_fn)


def test_something_that_is_no_function_is_refused():
    with pytest.raises(TypeError, match=r"^value_and_grad\(3\): not a function"):
        amp.value_and_grad(3)


# Flax


class Net(nnx.Module):
    def __init__(self, dtype=jnp.float32):
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(4, 3, dtype=jnp.float32, param_dtype=dtype, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.linear(x))


def net_loss(net, x):
    return jnp.mean((net(x).astype(jnp.float32) - 1.0) ** 2)


X = jnp.arange(8.0).reshape(2, 4) / 8.0


def test_an_nnx_module_is_differentiated_and_keeps_what_it_wrote():
    mine, plain = Net(), Net()
    found = amp.value_and_grad(net_loss)(mine, X, loss_scale=SCALE)
    expected = nnx.value_and_grad(net_loss)(plain, X)
    chex.assert_trees_all_equal(found, expected)
    assert jnp.any(mine.norm.mean[...] != 0.0)
    chex.assert_trees_all_equal(mine.norm.mean[...], plain.norm.mean[...])


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    ("argnums", "arguments"),
    [
        (-2, lambda net: (net, X)),
        ((0, 1), lambda net: (net, X)),
        (0, lambda net: ({"net": net}, X)),
    ],
    ids=["negative", "two", "nested"],
)
def test_an_nnx_module_is_found_among_the_arguments(argnums, arguments):
    def loss_fn(net, x):
        return net_loss(net["net"] if isinstance(net, dict) else net, x)

    net = Net()
    found = amp.grad(loss_fn, argnums)(*arguments(net), loss_scale=SCALE)
    plain_argnums = 0 if argnums == -2 else argnums
    expected = nnx.grad(loss_fn, argnums=plain_argnums)(*arguments(Net()))
    chex.assert_trees_all_equal(found, expected)
    assert jnp.any(net.norm.mean[...] != 0.0)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16))
def test_arguments_beside_an_nnx_module_may_be_given_by_name(dtype):
    def loss_fn(net, x, train=False, *, weight=1.0):
        return (weight if train else 0.0) * net_loss(net, x)

    gradient_of = amp.grad(loss_fn)
    expected = gradient_of(Net(dtype), X, True, loss_scale=SCALE)
    assert any(np.any(leaf) for leaf in jax.tree.leaves(expected))
    found = gradient_of(Net(dtype), x=X, train=True, weight=2.0, loss_scale=SCALE)
    chex.assert_trees_all_equal(jax.tree.map(lambda leaf: leaf / 2, found), expected)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        gradient_of(Net(dtype), train=True)


def test_sums_of_gradients_are_float32_with_arguments_by_name_too():
    class Offset(nnx.Module):
        def __init__(self):
            self.b = nnx.Param(jnp.ones(1, jnp.bfloat16))

    # 513 is no bfloat16: sums of ones stay at 256.
    found = amp.grad(lambda net, x: jnp.sum(x + net.b[...].astype(jnp.float32)))
    gradient = found(Offset(), x=jnp.zeros(513))
    assert jax.tree.leaves(gradient)[0].tolist() == [513.0]


def test_other_objects_of_nnx_are_differentiated_as_modules_are():
    class Sum(nnx.Variable):
        pass

    class Counted(nnx.Pytree):
        def __init__(self):
            self.w, self.total = nnx.Param(jnp.ones(4)), Sum(jnp.zeros(()))

        def __call__(self, x):
            self.total[...] += jnp.sum(x)
            return x * self.w[...][None]

    def loss_fn(net):
        return jnp.mean(net(X))

    mine, plain = Counted(), Counted()
    found, expected = amp.grad(loss_fn)(mine), nnx.grad(loss_fn)(plain)
    chex.assert_trees_all_equal(found, expected)
    assert mine.total[...] == plain.total[...] == jnp.sum(X)


def test_objects_of_nnx_without_variables_are_ordinary_trees():
    @nnx.dataclass
    class Plain(nnx.Pytree):
        w: jax.Array = nnx.data()

    found = amp.grad(lambda plain: jnp.sum(X @ plain.w))(Plain(jnp.ones((4, 4))))
    np.testing.assert_array_equal(found.w, jnp.broadcast_to(X.sum(0)[:, None], (4, 4)))


def test_a_negative_position_counts_what_is_given_by_position():
    def loss_fn(w, net=None):
        return jnp.sum(w) + jnp.sum(net(X))

    net = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    found = amp.grad(loss_fn, -1)(jnp.ones(3), net=net)
    np.testing.assert_array_equal(found, jnp.ones(3))


def test_gradients_of_a_half_nnx_module_are_float32():
    gradient_of = nnx.jit(lambda net: amp.grad(net_loss)(net, X, loss_scale=SCALE))
    gradient = gradient_of(Net(jnp.float16))
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jnp.dtype("float32")}


def test_an_nnx_diff_state_chooses_what_to_differentiate():
    wrt = nnx.DiffState(0, nnx.PathContains("linear"))
    gradient = amp.grad(net_loss, wrt)(Net(), X, loss_scale=SCALE)
    assert list(gradient) == ["linear"]


def test_an_nnx_state_is_an_ordinary_tree():
    graphdef, params = nnx.split(nnx.Linear(4, 3, rngs=nnx.Rngs(0)))

    def loss_fn(params):
        return jnp.mean(nnx.merge(graphdef, params)(X) ** 2)

    found = amp.grad(loss_fn)(params, loss_scale=SCALE)
    chex.assert_trees_all_equal(found, jax.grad(loss_fn)(params))


def test_objects_of_nnx_that_are_given_by_name_are_written_to():
    def loss_fn(net, x, rngs):
        return jnp.mean(net(x) * jax.random.normal(rngs(), (3, 2)))

    x, losses = jnp.ones((3, 2)), []
    for dtype in (jnp.float32, jnp.bfloat16):
        net = nnx.Linear(2, 2, param_dtype=dtype, dtype=jnp.float32, rngs=nnx.Rngs(0))
        for transform in (nnx.value_and_grad, amp.value_and_grad):
            rngs = nnx.Rngs(1)
            loss, _ = transform(loss_fn)(net, x, rngs=rngs)
            losses.append(float(loss))
            assert rngs.default.count[...] == 1
    assert losses[0] == losses[1] != 0.0
    assert losses[2] == losses[3] != 0.0


def test_a_float16_entry_of_a_map_warns_too():
    policies = amp.PolicyMap("float32", {"**/head": "mixed_float16"})
    loss_fn = amp.autocast(lambda w: jnp.sum(w * w), policies)
    with pytest.warns(UserWarning) as caught:
        amp.grad(loss_fn)(jnp.ones(3))
    assert any("without a loss scale" in str(each.message) for each in caught)
