"""`diagnose`: errors, loss scales, effects, arguments, mistakes."""

import contextlib
import functools

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import AxisType, PartitionSpec

import jmp_amp as amp
from tests.numerics.counting import of, only

W, X = jnp.full((4, 4), 30.0), jnp.full((8, 4), 2.0)


# Errors


def test_errors_are_the_distances_to_the_reference():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 16)).astype(np.float32)
    w = rng.standard_normal((16, 16)).astype(np.float32)
    d = amp.diagnose(lambda w, x: jnp.sum(jnp.sin(x @ w)), "mixed_float16")(w, x)

    def distance(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return np.linalg.norm(a - b) / np.linalg.norm(b)

    casts = of(d.sites, "convert_element_type")
    half = [each.astype(np.float16) for each in (x, w)]
    assert [s.error for s in casts[:2]] == pytest.approx(
        [distance(half[0], x), distance(half[1], w)], rel=1e-4
    )
    product = only(d.sites, "dot_general")
    rounded = half[0].astype(np.float64) @ half[1].astype(np.float64)
    exact = x.astype(np.float64) @ w.astype(np.float64)
    assert product.error == pytest.approx(
        distance(rounded.astype(np.float16), exact), rel=0.02
    )
    assert product.amplification == pytest.approx(
        product.error / 2.0**-11  # a rounding itself is no amplification
    )
    assert all(s.error is None for s in d.reference)
    assert all(s.error is None for s in d.sites if s.direction == "backward")
    wanted = jax.grad(lambda w: jnp.sum(jnp.sin(x @ w)))(jnp.asarray(w))
    got = jax.grad(
        lambda w: amp.autocast(lambda w: jnp.sum(jnp.sin(x @ w)), "mixed_float16")(w)
    )
    assert d.gradients[""].error == pytest.approx(
        distance(got(jnp.asarray(w)), wanted), rel=0.05
    )


def in_scan(x):
    return jax.lax.scan(lambda c, row: (c, row * row), jnp.float32(0), x)[1]


def in_while(x):
    def turn(state):
        i, total = state
        row = jax.lax.dynamic_index_in_dim(x, i, keepdims=False)
        return i + 1, total + row * row

    return jax.lax.while_loop(lambda s: s[0] < len(x), turn, (0, jnp.zeros(64)))[1]


def test_the_error_of_a_loop_is_that_of_all_turns():
    # The rows are of different sizes: no turn has the error of all.
    x = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
    x *= np.float32([[1.0], [3.0], [0.01], [2.0], [0.5]])
    d = amp.diagnose(lambda x: (in_scan(x), in_while(x)), "p=f32,c=f16,o=f32,low=mul")(
        x
    )
    products = [s for s in of(d.sites, "mul") if s.shape == (64,)]
    assert [(s.times, s.dtype) for s in products] == [(5, "f16")] * 2
    exact = x.astype(np.float64) ** 2
    rounded = np.square(x.astype(np.float16))
    wanted = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
    assert [s.error for s in products] == pytest.approx([wanted] * 2, rel=1e-3)


def test_shards_that_talk_have_errors():
    mesh = jax.make_mesh((2, 4), ("d", "e"), axis_types=(AxisType.Auto,) * 2)

    # Values differ along the second axis only if it is mapped.
    def summed(axes):
        @functools.partial(
            jax.shard_map,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec(axes)),
            out_specs=PartitionSpec(),
        )
        def fn(w, x):
            return jax.lax.psum(x @ w, axes)

        return fn

    rng = np.random.default_rng(0)
    w, x = (rng.standard_normal(s).astype(np.float32) for s in ((4, 4), (8, 4)))
    both = [summed(axes) for axes in ("d", ("d", "e"))]
    d = amp.diagnose(lambda w, x: [fn(w, x) for fn in both], "mixed_float16")(w, x)
    exact = x.astype(np.float64) @ w.astype(np.float64)
    half = x.astype(np.float16).astype(np.float64) @ w.astype(np.float16)
    wanted = np.linalg.norm(half.astype(np.float16) - exact) / np.linalg.norm(exact)
    errors = [s.error for s in of(d.sites, "dot_general")]
    assert errors == pytest.approx([wanted] * 2, rel=0.02)
    assert not [s for s in d.sites if s.is_forward and s.error is None]


@pytest.mark.slow
def test_each_example_of_a_loop_ends_when_it_ends():
    def fn(w, x):
        def last(row):
            return jax.lax.while_loop(lambda c: jnp.sum(c) < 9.0, lambda c: c @ w, row)

        return jax.vmap(last)(x)

    w, x = jnp.eye(4) * 1.5, jnp.float32([[1.0] * 4, [2.0] * 4, [9.0] * 4])
    d = amp.diagnose(fn, "mixed_float16")(w, x)
    np.testing.assert_array_equal(d.value, fn(w, x))  # 1.5 ** 2 is exact in f16
    assert only(d.sites, "dot_general").times == 2
    assert not [s for s in d.sites if s.error != 0.0]


@pytest.mark.slow
def test_what_a_branch_casts_for_the_other_one_has_an_error():
    def rounded(x):
        return (x * 2.0).astype(jnp.bfloat16).astype(jnp.float32)

    # It returns bf16, which is cast because the other branch returns f32.
    def fn(x):
        y = jax.lax.cond(x[0] > 0, rounded, lambda x: x, x)
        return y, jax.lax.cond(x[0] < 0, rounded, lambda x: x, x)

    x = np.float32([1.0, 3.0, 1.001])
    for sign in (1, -1):
        d = amp.diagnose(fn, "mixed_bfloat16")(jnp.asarray(sign * x))
        casts = of(d.sites, "convert_element_type")
        assert [(s.dtype, s.error is None) for s in casts] == [
            ("bf16", False),
            ("f32", False),
        ]


def test_blame_names_the_operation_that_cancels():
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.standard_normal((16, 16)), jnp.float32) for _ in "ab")
    big = jnp.full((16, 16), 500.0)

    def fn(w, x, big):
        return jnp.sum(((x @ w + big) - big) @ w)

    policy = "p=f32,c=f16,o=f32,low=add+sub"
    d = amp.diagnose(fn, policy)(w, x, big)
    worst = d.blame[0]
    assert (worst.operation, worst.dtype) == ("sub", "f16")
    assert worst.amplification > 20 and worst.error > 0.01
    assert list(d.blame) == sorted(d.blame, key=lambda s: -s.amplification)


@pytest.mark.slow
def test_the_two_runs_may_go_different_ways():
    # 2049 in f16 is 2048: the other branch, and one more turn.
    def fn(x, one):
        y = x @ one
        z = jax.lax.cond(y[0, 0] > 2048.5, jnp.sin, jnp.cos, y)
        _, c = jax.lax.while_loop(
            lambda s: s[0] < 2050, lambda s: (s[0] + s[1][0, 0], s[1]), (y[0, 0], one)
        )
        return z + one, c

    d = amp.diagnose(fn, "mixed_float16")(jnp.full((1, 1), 2049.0), jnp.ones((1, 1)))
    assert of(d.sites, "cos") and not of(d.sites, "sin")
    assert of(d.reference, "sin") and not of(d.reference, "cos")
    # What comes after is compared with what comes after the other branch.
    other = np.sin(2049.0) + 1.0
    (after,) = [s for s in of(d.sites, "add") if s.shape == (1, 1)]
    assert after.error == pytest.approx(
        abs(np.cos(2048.0) + 1.0 - other) / other, rel=1e-3
    )


@pytest.mark.slow
def test_what_follows_another_branch_is_not_to_blame():
    def fn(w, x):
        h = x @ w
        far = (h * 1e5) @ w
        return abs(jax.lax.cond(jnp.isfinite(far).all(), jnp.sin, jnp.cos, h)).sum()

    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal((n, 8)).astype(np.float32) for n in (16, 8))
    d = amp.diagnose(fn, "mixed_float16")(w * 0.5, x)
    total = only(d.sites, "abs", "forward")
    assert of(d.reference, "sin") and not of(d.sites, "sin")
    assert total.error > 0.5 and total.amplification == pytest.approx(1, rel=0.01)


# What nobody reads


def unread(w, x, through):
    def layer(h):
        return jnp.tanh(h @ w), jnp.exp(h * 1e4)

    if through == "scan":
        return jax.lax.scan(lambda h, _: layer(h), x, None, length=3)[0].sum()
    if through == "fori_loop":
        return jax.lax.fori_loop(0, 3, lambda i, s: layer(s[0]), (x, x))[0].sum()
    if through == "while_loop":
        stop = lambda s: s[0] < 3  # noqa: E731
        return jax.lax.while_loop(stop, lambda s: (s[0] + 1, *layer(s[1])), (0, x, x))[
            1
        ].sum()
    if through == "cond":
        other = lambda h: (h, h)  # noqa: E731
        return jax.lax.cond(w[0, 0] > 0, layer, other, x)[0].sum()
    return getattr(jax, through)(layer)(x)[0].sum()


@pytest.mark.slow
def test_what_nobody_reads_is_no_site():
    w, x = np.eye(4, dtype=np.float32), np.ones((2, 4), np.float32)
    losses, others = ["scan", "checkpoint"], "fori_loop while_loop cond jit".split()
    # A while loop has no derivative.
    for diagnosed, count in (
        (amp.diagnose(lambda w, x: sum(unread(w, x, each) for each in losses)), 2),
        (amp.diagnose(lambda w, x: [unread(w, x, each) for each in others]), 4),
    ):
        d = diagnosed(w, x)
        assert len(of(d.sites, "tanh")) == count and not of(d.sites, "exp")
        assert d.first_nonfinite is None and d.advice == ()


@pytest.mark.slow
def test_what_the_next_turn_reads_and_what_chooses_a_branch_are_sites():
    # The exponential is read by the turn after the next one.
    def turn(state, _):
        a, b, c = state
        return (a + b, c, jnp.exp(c)), None

    def fn(x):
        chosen = jax.lax.cond(jnp.sum(x) > 0, jnp.sin, jnp.cos, x)
        return jax.lax.scan(turn, (x, x, x), None, length=4)[0][0], chosen

    d = amp.diagnose(fn, "float32")(np.full(2, -3.0, np.float32))
    assert only(d.sites, "exp").times == 4 and of(d.sites, "reduce_sum")


# Scales, effects, arguments


@pytest.mark.slow
def test_the_loss_scale_that_is_suggested_is_the_largest_that_leaves_room():
    w, x = jnp.full((4, 4), 2.0**-6), jnp.full((8, 4), 2.0**-4)

    def loss(w, x):
        return jnp.mean(x @ w) * 2.0**-9

    d = amp.diagnose(loss, "mixed_float16")(w, x)
    # Backward in f16: the cotangent 2**-9 / 32 = 2**-14, and x.T @ it, 2**-15.
    assert d.loss_scale == 2.0 ** (12 + 14) or d.loss_scale == 2.0**24
    scaled = amp.diagnose(
        lambda w, x: loss(w, x) * 2.0**9,
        "mixed_float16",
        loss_scale=amp.static_loss_scale(2.0**10),
    )(w, x)
    # 2**-6 now, and an eighth of f16's largest is a little less than 2**13.
    assert scaled.loss_scale == 2.0**18
    assert float(scaled.value) == pytest.approx(2.0**-8, rel=1e-3)
    gradient = jax.grad(lambda w: loss(w, x) * 2.0**9)(w)
    assert scaled.gradients[""].amax == pytest.approx(float(gradient.max()), rel=1e-3)
    casts = of(scaled.sites, "convert_element_type", "backward")
    assert max(s.amax for s in casts) == 2.0**5  # 1 / 32 as it ran, scaled
    assert amp.diagnose(loss, "mixed_bfloat16")(w, x).loss_scale == 1.0


def test_the_loss_scale_is_not_bound_by_factors_that_it_does_not_multiply():
    # The derivative of x**2 is 2 x, 200 in f16, and 200 * 64 leaves no room.
    def loss(w, x):
        return jnp.mean((jnp.square(x @ w) @ w) @ w) * 2.0**-24

    w, x = jnp.full((4, 4), 0.5), jnp.full((8, 4), 50.0)
    d = amp.diagnose(loss, "mixed_float16")(w, x)
    factors = [s for s in d.sites if s.direction == "backward" and s.amax == 200.0]
    assert factors and not any(s.scales for s in factors)
    assert d.loss_scale > 64.0 and jnp.isfinite(d.value)


def test_effects_happen_once_in_each_run_and_their_results_are_taken():
    seen: list[float] = []

    def read(w, x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        y = jax.experimental.io_callback(lambda x: seen.append(0.0) or x, shape, x)
        return jnp.mean(y @ w)

    d = amp.diagnose(read, "mixed_float16")(W, X)
    assert len(seen) == 2 and d.value == 240.0
    assert all(s.error is None for s in d.sites)


@pytest.mark.slow
def test_what_a_checkpoint_computes_again_has_no_effect_again():
    seen: list[float] = []

    def told(w, x):
        jax.debug.callback(lambda s: seen.append(float(s)), jnp.sum(x))
        return jnp.sin(x @ w)

    @jax.checkpoint
    def block(w, x):
        _, shown = jax.lax.scan(lambda _, x: (None, told(w, x)), None, x[None])
        return told(w, x) + jax.jit(told)(w, x) + shown[0]

    def loss(w, x):
        jax.debug.callback(lambda s: seen.append(float(s)), jnp.max(x))
        return jnp.mean(block(w, x))

    d = amp.diagnose(loss, "mixed_float16")(W, X)
    jax.effects_barrier()
    assert sorted(seen) == [2.0] * 2 + [64.0] * 6
    assert d.gradients[""].nonfinite == 0


@pytest.mark.slow
def test_aux_arguments_by_position_and_functions_without_a_gradient():
    def fn(x, w, flag=True):
        return jnp.mean(x @ w), {"product": x @ w, "flag": flag}

    d = amp.diagnose(fn, argnums=(1, 0), has_aux=True)(X, {"w": W}["w"], flag=False)
    assert d.value == 240.0 and list(d.gradients) == ["[0]", "[1]"]
    d = amp.diagnose(lambda w, x: {"y": x @ w})(W, X)
    assert d.gradients == {} and d.value["y"].shape == (8, 4)
    assert {s.direction for s in d.sites} == {"forward"} and d.loss_scale == 1.0
    d = amp.diagnose(lambda x: x**2)(3.0)
    assert d.value == 9.0 and d.gradients[""].amax == 6.0


def test_a_mask_of_minus_infinity_is_no_defect():
    mask = np.tri(4, dtype=bool)

    def fn(w, x):
        scores = jnp.where(mask, x @ w, -jnp.inf)
        return jnp.mean(jax.nn.softmax(scores) ** 2)

    d = amp.diagnose(fn, "mixed_float16")(W * 0.01, X[:4])
    assert any(s.nonfinite for s in d.sites) and d.first_nonfinite is None
    assert d.policy == amp.PolicyMap("mixed_float16")


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: amp.diagnose(3), TypeError, "function"),
        (lambda: amp.diagnose(nn.Dense(3)), TypeError, "model.apply"),
        (lambda: amp.diagnose(jnp.sin, 3), TypeError, "polic"),
        (lambda: amp.diagnose(jnp.sin, "mixed_float17"), ValueError, "float17"),
        (lambda: amp.diagnose(jnp.sin, argnums="x"), TypeError, "argnums"),
        (lambda: amp.diagnose(jnp.sin, argnums=1)(1.0), ValueError, "argnums"),
        (lambda: amp.diagnose(jnp.sin, has_aux=1), TypeError, "has_aux"),
        (lambda: amp.diagnose(jnp.sin, has_aux=True)(1.0), TypeError, "one array."),
        (lambda: amp.diagnose(jnp.sin, loss_scale=8.0), TypeError, "loss_scale"),
        (
            lambda: amp.diagnose(jnp.sin)(jax.ShapeDtypeStruct((), jnp.float32)),
            TypeError,
            "explain",
        ),
        (
            lambda: amp.diagnose(lambda i: jnp.float32(i))(jnp.int32(3)),
            TypeError,
            "argnums",
        ),
    ],
)
def test_mistakes_are_told_before_anything_runs(call, error, words):
    with pytest.raises(error, match=r"diagnose\(") as raised:
        call()
    assert words in str(raised.value)


@contextlib.contextmanager
def all_at_once():
    with jax.debug_nans(True), jax.debug_infs(True), jax.checking_leaks():
        with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
            yield


@pytest.mark.slow
@pytest.mark.parametrize(
    "around", [all_at_once, pytest.param(jax.disable_jit, marks=pytest.mark.slow)]
)
def test_it_works_under_what_jax_offers_to_debug(around):
    def fn(w):
        def turn(h):
            return h[0] + 1, jnp.tanh(h[1] @ w)

        _, h = jax.lax.while_loop(lambda h: h[0] < 2, turn, (0, w))
        h, _ = jax.lax.scan(lambda h, _: (h @ w, None), h, None, 2)
        return jax.lax.cond(h[0, 0] > 0, jnp.log, jnp.sqrt, -h)

    w = jnp.full((4, 4), 0.5)
    with around():
        d = amp.diagnose(fn, "mixed_float16")(w)
        tuning = amp.tune(lambda w: jnp.sum(w @ w), max_grad_error=0.1)(w)
    assert d.first_nonfinite is not None and d.first_nonfinite.operation == "log"
    assert (d.first_nonfinite.nonfinite, d.first_nonfinite.size) == (16, 16)
    assert tuning.error == 0.0


def test_a_function_that_raises_raises_its_own_error():
    def fn(x):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        amp.diagnose(fn)(1.0)


@pytest.mark.slow
def test_a_value_that_two_operations_read_is_the_same_in_both():
    # The derivative of a clip asks whether `x == max(x, low)`. XLA had computed `x`
    # twice, rounded otherwise: a third of the gradient was zero.
    def loss(x, w):
        h = x @ w
        drawn = jax.random.truncated_normal(jax.random.key(0), h - 1.0, h + 1.0)
        return jnp.square(jnp.mean(jnp.square(drawn)))

    x = jax.random.normal(jax.random.key(0), (8, 16))
    w = jax.random.normal(jax.random.key(1), (16, 16)) * 0.2
    d = amp.diagnose(loss, "mixed_float16", argnums=(0, 1))(x, w)
    real, wanted = (
        jax.jit(jax.grad(fn, argnums=(0, 1)))(x, w)
        for fn in (amp.autocast(loss, "mixed_float16"), loss)
    )
    for found, ours, exact in zip(d.gradients.values(), real, wanted, strict=True):
        assert found.amax == pytest.approx(float(abs(ours).max()), rel=1e-3)
        ours, exact = np.asarray(ours, np.float64), np.asarray(exact, np.float64)
        error = np.linalg.norm(ours - exact) / np.linalg.norm(exact)
        assert found.error == pytest.approx(error, rel=0.05)
    # Nothing of what is drawn inside its bounds is clipped.
    clipped = [s for s in of(d.sites, "mul", "backward") if s.shape == (8, 16)]
    assert sum(s.zeros for s in clipped) == 128


class Softmax(nn.Module):
    def __call__(self, x):
        weights = jnp.exp(x)
        return weights, weights / jnp.sum(weights, -1, keepdims=True)


class Readers(nn.Module):
    @nn.compact
    def __call__(self, x):
        weights, shares = Softmax(name="softmax")(nn.Dense(16, name="up")(x))
        both = nn.Dense(16, name="shares")(shares) + nn.Dense(16, name="weights")(
            weights
        )
        return jnp.sum(both)


@pytest.mark.slow
def test_a_cast_that_leaves_a_softmax_is_in_the_module_that_reads_it():
    model, x = Readers(), np.ones((16, 16), np.float32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), x)
    params = jax.tree.map(lambda like: np.zeros(like.shape, like.dtype), shapes)
    d = amp.diagnose(model.apply, "mixed_bfloat16")(params, x)
    made = [s for s in of(d.sites, "convert_element_type") if s.dtype == "bf16"]
    # Of the softmax, its two results are cast: each is the operand of a product.
    whole = [s.module for s in made if s.shape == (16, 16)]
    assert sorted(whole) == [
        *["Readers/shares"] * 2,
        *["Readers/up"] * 2,
        *["Readers/weights"] * 2,
    ]
