"""`tune`: exactly the modules that need more precision, measured with real programs.

Every model here has a planted fault: a cancellation, `(h + 400) @ eye - 400`, or
products that overflow f16. The product rounds what it reads, which is large.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec

import jmp_amp as amp
from tests.zoo.language import gpt

F32 = amp.get_policy("float32")
BF16 = amp.get_policy("mixed_bfloat16")
OFFSET = jnp.full((1, 8), 400.0)
X = jax.random.normal(jax.random.key(1), (8, 8))


def gradient(fn, *args):
    program = jax.jit(jax.grad(fn)).lower(*args)
    compiled = program.compile(compiler_options={"xla_allow_excess_precision": False})
    leaves = jax.tree.leaves(compiled(*args))
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in leaves])


def error_of(fn, policy, *args, reference=None):
    """The gradient error, measured without the library's help."""
    reference = gradient(fn, *args) if reference is None else reference
    found = gradient(amp.autocast(fn, policy), *args)
    if not np.all(np.isfinite(found)):
        return np.inf
    return np.linalg.norm(found - reference) / np.linalg.norm(reference)


def cancelled(h, offset):
    return (h + offset) @ jnp.eye(8) - offset


def patterns(tuning):
    return {pattern: policy for pattern, policy in tuning.policy.entries}


def assert_meets_its_bound_and_needs_every_entry(tuning, fn, *args):
    policies, bound = tuning.policy, tuning.max_grad_error
    reference = gradient(fn, *args)
    found = error_of(fn, policies, *args, reference=reference)
    assert found <= bound
    np.testing.assert_allclose(tuning.error, found, rtol=1e-6)
    for entry in policies.entries:
        less = [each for each in policies.entries if each != entry]
        less = amp.PolicyMap(policies.default, less)
        assert error_of(fn, less, *args, reference=reference) > bound
    for name in policies.default.full:
        names = policies.default.full - {name}
        default = dataclasses.replace(policies.default, full=names)
        less = amp.PolicyMap(default, policies.entries)
        assert error_of(fn, less, *args, reference=reference) > bound


# Flax linen


class Layer(nn.Module):
    fault: bool = False

    @nn.compact
    def __call__(self, x, offset):
        init = nn.initializers.orthogonal(1.0)
        up, down = (self.param(name, init, (8, 8)) for name in ("up", "down"))
        h = x @ up
        if self.fault:
            h = cancelled(h, offset)
        return jnp.tanh(h) @ down


class Block(nn.Module):
    fault: bool = False

    @nn.compact
    def __call__(self, x, offset):
        return x + Layer(self.fault, name="layer")(nn.LayerNorm()(x), offset)


class Stack(nn.Module):
    faults: tuple[int, ...]
    layers: int = 4

    @nn.compact
    def __call__(self, x, offset):
        for i in range(self.layers):
            x = Block(i in self.faults, name=f"block_{i}")(x, offset)
        return x


def linen_loss(model):
    params = jax.jit(model.init)(jax.random.key(0), X, OFFSET)
    return params, lambda params, x, offset: jnp.mean(model.apply(params, x, offset))


@pytest.fixture(scope="module")
def stack():
    params, loss = linen_loss(Stack((2,)))
    args = params, X, OFFSET
    return loss, args, amp.tune(loss, max_grad_error=4e-3)(*args)


@pytest.mark.slow
def test_of_four_blocks_the_faulty_one_alone_gets_f32(stack):
    loss, args, tuning = stack
    assert patterns(tuning) == {"block_2/layer": F32}
    assert_meets_its_bound_and_needs_every_entry(tuning, loss, *args)


def test_a_tuning_tells_what_each_module_got_and_how_much_error_it_made(stack):
    loss, args, tuning = stack
    paths = set(amp.explain(loss, "mixed_float16")(*args).modules)
    assert set(tuning.modules) <= paths
    fault = tuning.modules["Stack/block_2/layer"]
    assert fault.policy == F32 and fault.flops == 3 * 2 * 8**3
    others = [each for each in tuning.modules.values() if each is not fault]
    assert all(fault.sensitivity > 20 * each.sensitivity for each in others)
    # Of four layers of equal cost one left half precision, forward and backward.
    assert tuning.cost_before == 1.0
    assert tuning.cost == pytest.approx(9 / 13)
    assert tuning.compilations <= 6 and tuning.is_minimal
    first, last = tuning.steps[0], tuning.steps[-1]
    assert (first.error, first.cost) == (tuning.error_before, 1.0)
    assert last.error == tuning.error


def test_a_tuning_comes_back_from_json_and_reads_as_a_table(stack):
    *_, tuning = stack
    assert amp.Tuning.from_json(tuning.to_json()) == tuning
    assert json.loads(tuning.to_json())["policy"]["policies"] == {
        "block_2/layer": "p=f32,c=f32,o=f32"
    }
    assert "block_2/layer" in str(tuning) and "<table>" in tuning._repr_html_()


def test_its_plot_has_a_point_for_each_step_with_the_number_of_the_map(stack):
    pytest.importorskip("matplotlib")
    *_, tuning = stack
    figure = amp.plots.tune(tuning)
    axes, _ = figure.axes
    points = {tuple(p) for line in axes.collections for p in line.get_offsets()}
    finite = [s for s in tuning.steps if np.isfinite(s.error) and s.error > 0]
    assert {(100 * s.cost, s.error) for s in finite} <= points
    numbers = [n for each in axes.texts for n in each.get_text().split(", ")]
    assert sorted(map(int, numbers)) == list(range(len(tuning.steps)))
    for each in axes.texts:
        for number in map(int, each.get_text().split(", ")):
            step = tuning.steps[number]
            assert each.xy == pytest.approx((100 * step.cost, step.error))
    lines = figure.get_supxlabel().split("\n")
    assert lines[0] == "0: the start"
    number = tuning.steps.index(next(s for s in tuning.steps if "block_2" in s.policy))
    assert lines[number].startswith(f"{number}: block_2/layer: p=f32,c=f32,o=f32")


def test_its_plot_has_a_bar_for_each_module_in_the_colour_of_its_policy(stack):
    pytest.importorskip("matplotlib")
    *_, tuning = stack
    modules = dict(tuning.modules)
    modules["a"] = dataclasses.replace(modules.popitem()[1], sensitivity=np.inf)
    modules["b"] = dataclasses.replace(modules["a"], sensitivity=0.0)
    _, axes = amp.plots.tune(dataclasses.replace(tuning, modules=modules)).axes
    labels = [each.get_text() for each in axes.get_yticklabels()]
    order = sorted(modules, key=lambda path: -modules[path].sensitivity)
    assert labels == [path or "(top level)" for path in order]
    assert labels[0] == "a" and labels[-1] == "b"
    bars = {}
    for container in axes.containers:
        for bar in container:
            row = round(bar.get_y() + bar.get_height() / 2)
            bars[order[row]] = container.get_label(), bar.get_facecolor(), bar
    assert {path: each[0] for path, each in bars.items()} == {
        path: str(each.policy) for path, each in modules.items()
    }
    assert len({each[:2] for each in bars.values()}) == len(axes.containers) == 2
    for path, (*_, bar) in bars.items():
        if path not in ("a", "b"):
            assert bar.get_width() == modules[path].sensitivity
    longest = max(each.sensitivity for p, each in modules.items() if p != "a")
    assert longest < bars["a"][2].get_width() < np.inf
    assert (
        0
        < bars["b"][2].get_width()
        < min(each.sensitivity for p, each in modules.items() if p != "b")
    )


def test_a_loose_bound_needs_no_entry():
    params, loss = linen_loss(Stack((0,), layers=1))
    tuning = amp.tune(loss, max_grad_error=1.0)(params, X, OFFSET)
    assert tuning.policy == amp.PolicyMap("mixed_float16")
    assert tuning.error == tuning.error_before > 1e-3
    found = error_of(loss, "mixed_float16", params, X, OFFSET)
    np.testing.assert_allclose(tuning.error, found, rtol=1e-6)


@pytest.mark.slow
def test_the_entries_of_the_map_at_the_start_stay():
    params, loss = linen_loss(Stack((0, 2), layers=3))
    start = amp.PolicyMap("mixed_float16", {"block_0/layer": "float32"})
    tuning = amp.tune(loss, start, max_grad_error=4e-3)(params, X, OFFSET)
    assert [pattern for pattern, _ in tuning.policy.entries] == [
        "block_0/layer",
        "block_2/layer",
    ]


@pytest.mark.slow
def test_siblings_that_agree_share_a_glob():
    model = Stack((0, 1, 2), layers=3)
    params, loss = linen_loss(model)
    tuning = amp.tune(loss, max_grad_error=1e-3)(params, X, OFFSET)
    assert patterns(tuning) == {"block_*/layer": F32}
    assert_meets_its_bound_and_needs_every_entry(tuning, loss, params, X, OFFSET)


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x, offset):
        def turn(block, x, _):
            return block(x, offset), None

        layers = nn.scan(
            turn, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
        )
        x, _ = layers(Block(name="good"), x, None)
        x, _ = layers(Block(True, name="bad"), x, None)
        return x


@pytest.mark.slow
def test_a_module_in_a_scan_over_layers_is_found():
    params, loss = linen_loss(Scanned())
    tuning = amp.tune(loss, max_grad_error=4e-3)(params, X, OFFSET)
    assert patterns(tuning) == {"bad/layer": F32}
    assert_meets_its_bound_and_needs_every_entry(tuning, loss, params, X, OFFSET)


# Flax nnx


class Cell(nnx.Module):
    def __init__(self, fault, rngs):
        self.fault = fault
        self.up = nnx.Param(nnx.initializers.orthogonal()(rngs(), (8, 8)))
        self.down = nnx.Param(nnx.initializers.orthogonal()(rngs(), (8, 8)))
        self.calls = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x, offset):
        self.calls[...] += 1.0
        h = x @ self.up[...]
        h = cancelled(h, offset) if self.fault else h
        return jnp.tanh(h) @ self.down[...]


class Cells(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Cell(i == 1, rngs) for i in range(3)])

    def __call__(self, x, offset):
        for block in self.blocks:
            x = x + block(x, offset)
        return x


@pytest.mark.slow
def test_an_nnx_module_is_tuned_and_left_as_it_was():
    model = Cells(nnx.Rngs(0))

    def loss(model, x, offset):
        return jnp.mean(model(x, offset)), {"x": x}

    tuning = amp.tune(loss, max_grad_error=3e-3, has_aux=True)(model, X, OFFSET)
    assert patterns(tuning) == {"blocks/1": F32}
    assert model.blocks[1].calls[...] == 0
    assert tuning.modules["Cells/blocks/1"].policy == F32


# Functions


@jax.jit
def clean(h, offset):
    return jnp.tanh(h)


@jax.jit
def cancel(h, offset):
    return jnp.tanh(cancelled(h, offset))


@pytest.mark.slow
def test_without_modules_the_faulty_function_is_named():
    def loss(w, x, offset):
        for i, fn in enumerate((clean, cancel, clean)):
            x = fn(x @ w[i], offset)
        return jnp.mean(x @ w[3])

    w = jax.random.orthogonal(jax.random.key(0), 8, (4,))
    tuning = amp.tune(loss, max_grad_error=5e-3)(w, X, OFFSET)
    assert tuning.policy.default.full == {"cancel"} and not tuning.policy.entries
    assert tuning.cost < tuning.cost_before == 1.0
    assert "0 entries and 1 name in f32 in the map" in tuning.summary
    assert_meets_its_bound_and_needs_every_entry(tuning, loss, w, X, OFFSET)


@pytest.mark.slow
def test_without_modules_products_are_named_if_it_takes_them():
    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w[0]) @ w[1])

    w = jax.random.orthogonal(jax.random.key(0), 8, (2,))
    tuning = amp.tune(loss, max_grad_error=1e-6)(w, X)
    assert "dot_general" in tuning.policy.default.full and tuning.cost == 0.0
    assert_meets_its_bound_and_needs_every_entry(tuning, loss, w, X)


def test_what_a_product_reads_is_rounded_in_the_flagged_program():
    # The gradient is the sum of a column, 3 * 2**-12; f16 reads it as 2**-10.
    x = jnp.stack([jnp.full(4, 1.0 + 3 * 2.0**-12), jnp.full(4, -1.0)])
    tuning = amp.tune(lambda w, x: jnp.sum(x @ w), max_grad_error=0.5)(jnp.eye(4), x)
    assert tuning.error_before == pytest.approx(1 / 3, rel=1e-6)
    assert tuning.modules[""].sensitivity == pytest.approx(1 / 3, rel=1e-6)


def test_a_mask_that_saturates_is_measured_as_it_runs():
    """Zeros times the largest f16 are zeros; times infinity they are NaN."""
    rng = np.random.default_rng(0)
    x, w, v = (rng.normal(size=(16, 16)).astype(np.float32) for _ in "xwv")
    mask = np.arange(16) < 14
    w, v = w / 4, v / 4 * mask[:, None]

    def loss(w, x):
        return jnp.mean(jnp.tanh(jnp.where(mask, x @ w, -1e9) @ v))

    before = error_of(loss, "mixed_float16", w, x)
    tuning = amp.tune(loss, "mixed_float16", max_grad_error=before / 2)(w, x)
    assert tuning.modules[""].sensitivity == pytest.approx(before, rel=0.1)


@jax.custom_jvp
def shrink(x):
    return x * 0.5


shrink.defjvps(lambda t, out, x: t * 0.5)


@pytest.mark.slow
def test_every_construct_rounds_by_its_flag():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def body(w, x):
        x = jax.lax.cond(jnp.sum(x) > 0, lambda x: x @ w, lambda x: x @ w.T, x)
        x = jax.checkpoint(lambda x: shrink(jnp.tanh(x @ w)))(x)
        return jax.lax.fori_loop(0, 2, lambda _, x: x + jax.nn.relu(x @ w), x)

    def loss(w, x):
        mapped = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec("d")),
            out_specs=PartitionSpec("d"),
        )
        return jnp.mean(mapped(w, x))

    w = jax.random.orthogonal(jax.random.key(0), 8)
    tuning = amp.tune(loss, max_grad_error=1e-5)(w, X)
    assert tuning.error <= 1e-5 < tuning.error_before
    # What rounds everything is as far off as the real program.
    (only,) = [each for path, each in tuning.modules.items() if path == ""]
    assert tuning.error_before / 3 < only.sensitivity < 3 * tuning.error_before


# Candidates


class Scaled(nn.Module):
    """A layer whose values may overflow f16, or cancel."""

    by: float = 1.0
    fault: bool = False

    @nn.compact
    def __call__(self, x, offset):
        w = self.param("w", nn.initializers.orthogonal(1.0), (8, 8))
        h = ((x * self.by) @ w) * self.by
        h = cancelled(h, offset) if self.fault else h
        return (h @ w) / self.by / self.by


class TwoFaults(nn.Module):
    @nn.compact
    def __call__(self, x, offset):
        x = Scaled(name="fine")(x, offset)
        x = Scaled(300.0, name="overflows")(x, offset)
        return Scaled(fault=True, name="cancels")(x, offset)


@pytest.mark.slow
def test_bf16_cures_an_overflow_and_only_f32_a_cancellation():
    params, loss = linen_loss(TwoFaults())
    offset = OFFSET * 5
    tuning = amp.tune(
        loss, max_grad_error=2e-2, candidates=("mixed_bfloat16", "float32")
    )(params, X, offset)
    assert patterns(tuning) == {"overflows": BF16, "cancels": F32}
    assert tuning.error_before == np.inf
    assert tuning.modules["TwoFaults/overflows"].sensitivity == np.inf
    assert amp.Tuning.from_json(tuning.to_json()) == tuning
    assert_meets_its_bound_and_needs_every_entry(tuning, loss, params, X, offset)


class Cancels(nn.Module):
    """A linear layer, spelled as the difference of two products that nearly cancel."""

    @nn.compact
    def __call__(self, x):
        large = self.param("large", lambda key: 50 * jax.random.normal(key, (16, 16)))
        small = self.param("small", nn.initializers.lecun_normal(), (16, 16))
        return x @ large - x @ (large - small)


class TwoThatCancel(nn.Module):
    @nn.compact
    def __call__(self, x):
        for name in ("first", "second"):
            x = x + 0.5 * nn.tanh(Cancels(name=name)(x))
        return x


def test_of_two_modules_that_would_do_the_cheaper_one_gets_f32():
    """Nobody asks for the gradient of the input: the first has 4 products of 10."""
    model = TwoThatCancel()
    x = jax.random.normal(jax.random.key(102), (32, 16))
    params = jax.jit(model.init)(jax.random.key(2), x)

    def loss(params, x):
        return jnp.mean(jnp.square(model.apply(params, x)))

    bound = 0.04
    for name in ("first", "second"):
        alone = amp.PolicyMap("mixed_float16", {name: F32})
        assert error_of(loss, alone, params, x) <= bound
    assert error_of(loss, "mixed_float16", params, x) > bound
    tuning = amp.tune(loss, max_grad_error=bound)(params, x)
    assert patterns(tuning) == {"first": F32}
    np.testing.assert_allclose(tuning.cost, 6 / 10)


# A large model, and what cannot be


class Twelve(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(12):
            x = x + nn.tanh(nn.Dense(8, use_bias=False, name=f"layer_{i}")(x))
        return x


@pytest.mark.slow
def test_twelve_layers_that_are_alike_take_few_compilations():
    model = Twelve()
    params = jax.jit(model.init)(jax.random.key(0), X)

    def loss(params, x):
        return jnp.mean(model.apply(params, x) ** 2)

    tuning = amp.tune(loss, max_grad_error=8e-4)(params, X)
    # One for each layer, and some more: not one for each map that could be.
    assert 4 <= len(tuning.policy.entries) and tuning.compilations <= 16
    assert_meets_its_bound_and_needs_every_entry(tuning, loss, params, X)


@pytest.mark.slow
def test_a_gpt_is_tuned():
    case = gpt(64, 32, 4, 1, 2, 16, scanned=False)
    params, batch = jax.jit(case.sample)(jax.random.key(0))
    tuning = amp.tune(case.loss, max_grad_error=6e-4)(params, batch)
    assert tuning.error_before > 6e-4 and tuning.policy.entries
    assert_meets_its_bound_and_needs_every_entry(tuning, case.loss, params, batch)


def square(w, x):
    return jnp.sum((x @ w) ** 2)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, TypeError, "max_grad_error"),
        ({"max_grad_error": "0.1"}, TypeError, "the bound is a number"),
        ({"max_grad_error": True}, TypeError, "the bound is a number"),
        ({"max_grad_error": 0}, ValueError, "a positive number"),
        ({"max_grad_error": -1.0}, ValueError, "a positive number"),
        ({"max_grad_error": float("nan")}, ValueError, "a positive number"),
        ({"max_grad_error": 1, "policy": "fp17"}, ValueError, "unknown policy"),
        ({"max_grad_error": 1, "policy": None}, TypeError, "Policy"),
        ({"max_grad_error": 1, "candidates": ()}, ValueError, "no policy to give"),
        ({"max_grad_error": 1, "candidates": "bf16"}, TypeError, "a tuple of"),
        (
            {"max_grad_error": 1, "candidates": ("float32", "mixed_bfloat16")},
            ValueError,
            "from cheap to dear",
        ),
        ({"max_grad_error": 1, "candidates": ("x",)}, ValueError, "unknown policy"),
        ({"max_grad_error": 1, "has_aux": 1}, TypeError, "neither True nor False"),
        ({"max_grad_error": 1, "progress": "no"}, TypeError, "neither True nor False"),
    ],
)
def test_a_mistake_in_the_options_is_told_at_once(options, error, message):
    with pytest.raises(error, match=message):
        amp.tune(square, **options)


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="the function to tune"):
        amp.tune("mixed_float16", max_grad_error=0.1)


@pytest.mark.parametrize(
    ("fn", "args", "error", "message"),
    [
        (square, (jax.ShapeDtypeStruct((8, 8), jnp.float32), X), TypeError, "values"),
        (lambda w, x: jnp.sum(x), (jnp.arange(2), X), TypeError, "differentiate"),
        (lambda w, x: x @ w, (X, X), TypeError, "one real floating-point scalar"),
        (lambda w, x: (jnp.sum(w), x), (X, X), TypeError, "has_aux"),
        (lambda w, x: jnp.sum(jnp.sqrt(w * 0)), (X, X), ValueError, "not finite"),
    ],
)
def test_a_call_without_a_finite_gradient_is_refused(fn, args, error, message):
    with pytest.raises(error, match=message):
        amp.tune(fn, max_grad_error=0.1)(*args)


def test_the_reference_of_what_cast_inputs_marks_is_f32():
    kernel = amp.cast_inputs(lambda w, x: x @ w)

    def loss(w, x):
        return jnp.mean(jnp.tanh(kernel(w, x)) ** 2)

    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.standard_normal((n, 8)), jnp.float32) for n in (8, 16))
    tuning = amp.tune(loss, max_grad_error=1e-4)(w, x)
    exact = np.asarray(jax.jit(jax.grad(loss))(w, x), np.float64)

    def error(policy):
        found = jax.jit(jax.grad(amp.autocast(loss, policy)))(w, x)
        return np.linalg.norm(found - exact) / np.linalg.norm(exact)

    assert error(tuning.policy) <= 1e-4 < error("mixed_float16")
    assert tuning.error_before == pytest.approx(error("mixed_float16"), rel=0.1)


@pytest.mark.parametrize("jitted", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_reference_is_f32_where_cast_inputs_names_a_dtype(jitted):
    half = amp.cast_inputs(lambda h: jnp.tanh(h @ h), jnp.bfloat16)
    half = jax.jit(half) if jitted else half

    def loss(w, x):
        return jnp.mean(half(x @ w) ** 2)

    w, x = (jax.random.normal(jax.random.key(i), (16, 16)) / 4 for i in (0, 2))
    # Outside of autocast cast_inputs does nothing, and under every policy it is bf16.
    best = error_of(loss, "float32", w, x)
    assert best > 1e-3
    with pytest.raises(ValueError, match="cast_inputs"):
        amp.tune(loss, max_grad_error=1e-4)(w, x)
    tuning = amp.tune(loss, max_grad_error=2 * best)(w, x)
    assert tuning.error == pytest.approx(error_of(loss, tuning.policy, w, x), rel=1e-3)


def test_the_reference_is_f32_where_an_autocast_inside_casts_inputs():
    half = amp.cast_inputs(lambda x: jnp.tanh(x @ x), jnp.bfloat16)
    inner = amp.autocast(half, "float32")

    def loss(w, x):
        return jnp.mean(half(inner(x @ w)) ** 2)

    w, x = (jax.random.normal(jax.random.key(i), (16, 16)) / 4 for i in (0, 2))

    def twice(x):
        return jnp.tanh(x @ x)

    exact = gradient(lambda w, x: jnp.mean(twice(twice(x @ w)) ** 2), w, x)
    tuning = amp.tune(loss, max_grad_error=0.1)(w, x)
    found = gradient(amp.autocast(loss, tuning.policy), w, x)
    error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    assert tuning.error == pytest.approx(error, rel=1e-3)


def test_the_reference_of_half_parameters_computes_in_f32():
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.standard_normal((n, 8)), jnp.bfloat16) for n in (8, 16))

    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    policy = "p=bf16,c=bf16,o=f32"
    tuning = amp.tune(loss, policy, max_grad_error=0.5)(w, x)
    wide = [np.float32(each) for each in (w, x)]
    exact = np.asarray(jax.jit(jax.grad(loss))(*wide), np.float64)
    found = jax.jit(jax.grad(amp.autocast(loss, policy)))(w, x).astype(jnp.float32)
    # The gradient is bf16 as its parameter is, that of the reference too.
    error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    assert tuning.error_before == pytest.approx(error, rel=0.25)


def test_what_a_mark_keeps_in_half_is_told():
    marked = amp.with_policy("mixed_float16")(lambda x: x @ x)
    with pytest.raises(ValueError, match=r"with_policy, .* keep in half"):
        amp.tune(lambda x: jnp.sum(marked(x) ** 2), max_grad_error=1e-9)(X)


def test_a_bound_that_the_candidates_cannot_meet_is_told_with_the_smallest_error():
    with pytest.raises(ValueError, match=r"error is 0\.000\d+, with 'p=f32,c=f16"):
        amp.tune(square, max_grad_error=1e-6, candidates=("mixed_bfloat16",))(X, X)


@pytest.mark.slow
def test_progress_is_shown_only_if_asked_for(capsys):
    amp.tune(square, max_grad_error=0.1)(X, X)
    assert capsys.readouterr() == ("", "")
    amp.tune(square, max_grad_error=0.1, progress=True)(X, X)
    assert "tune:" in capsys.readouterr().err
