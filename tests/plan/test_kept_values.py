"""What differentiation keeps under each word of `Policy.saved`; what it computes."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax

import jmp_amp as amp
from jmp_amp.plan.plan import Result
from tests.plan.distances import apart, exact
from tests.plan.layers import (
    LAYER,
    TRANSFORMED,
    autocast,
    counted,
    differentiated,
    gated,
    gelu_layer,
    kept,
    norm,
    policy,
    scanned,
    unrolled,
)
from tests.programs import equations

WORDS = ("all", "auto", "least")
ROWS, WIDTH, LAYERS = 8, 16, 3
X = jax.random.normal(jax.random.key(0), (ROWS, WIDTH))
W = jax.random.normal(jax.random.key(1), (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5


# A scan has a body, however many turns it has.
WEIGHTS = {"unrolled": W[:2], "scanned": W, "jitted": W[:2]}
PROGRAMS = [
    *((layer, form) for layer in LAYER for form in ("unrolled", "scanned")),
    *((layer, "jitted") for layer in ("attention", "shared", "branches")),
]


@pytest.mark.breadth(3)
@pytest.mark.parametrize(("layer", "form"), PROGRAMS)
def test_values_and_gradients_are_those_of_all_bit_for_bit(layer, form):
    def run():
        return [
            exact(differentiated(layer, form, word), WEIGHTS[form], X) for word in WORDS
        ]

    # XLA fuses an `exp` in f32 with other operations there, and vectorises it in other
    # ways: its last bits differ.
    rounding = 1e-6 if (layer, form) == ("shared", "scanned") else 0.0
    are_near(apart(run()), rounding)


def are_near(found, rounding=0.0):
    assert len(found) == len(WORDS[1:])
    for difference, largest, _ in np.reshape(found, (-1, 3)):
        assert difference <= rounding * largest and largest > 0


@pytest.mark.breadth(8)
# What a checkpoint of the user runs twice is the user's word.
@pytest.mark.parametrize(
    ("layer", "form"), [each for each in PROGRAMS if each[0] != "checkpointed"]
)
def test_nothing_dear_runs_twice(layer, form):
    counts = [
        counted(differentiated(layer, form, word), WEIGHTS[form], X) for word in WORDS
    ]
    assert counts[0]["dot_general"] > 0
    assert counts[1] == counts[2] == counts[0]


def phases(x, w):
    angles = jax.jit(lambda h, unit: h * unit)((x @ w).astype("complex64"), 1j)
    turned = jnp.exp(angles)
    return jnp.angle(turned[1:] * jnp.conj(turned[:-1])) @ w


def filtered(x, w):
    return jnp.fft.irfft(jnp.fft.rfft(jnp.sin(x @ w)) * jnp.fft.rfft(w[:1])) @ w


@pytest.mark.parametrize("layer", (phases, filtered))
def test_complex_values_are_kept_as_all_keeps_them(layer):
    def loss(w):
        return jnp.sum(jnp.tanh(layer(X, w)) @ w[0])

    def run():
        return [exact(jax.grad(autocast(loss, word)), W[0]) for word in WORDS]

    are_near(apart(run()))


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    ("name", "layer"),
    [*zip(TRANSFORMED, 3 * ["gelu_layer", "attention"], strict=True)],
)
def test_transformations_give_what_they_give_of_all(name, layer):
    # A dimension in front, for vmap.
    w = jnp.stack([W, 0.5 * W], axis=1)[:, :2]

    def loss(w):
        each = w if w.ndim == 3 else w[:, 0]
        return scanned(LAYER[layer], each[..., :WIDTH, :], X)

    argument = w if "vmap" in name else W

    def run():
        return [
            exact(TRANSFORMED[name](autocast(loss, word)), argument) for word in WORDS
        ]

    found = apart(run())
    assert len(found) == len(WORDS[1:])
    assert all(difference == 0 for difference, *_ in np.reshape(found, (-1, 3)))


@pytest.mark.parametrize("way", [jax.jacfwd, jax.jacrev])
def test_second_derivatives_are_those_of_all(way):
    def loss(w):
        return unrolled(gelu_layer, w[None], X)

    def run():
        return [exact(way(jax.grad(autocast(loss, word))), W[0]) for word in WORDS]

    found = apart(run())
    assert [relative < 0.01 for ((_, _, relative),) in found] == [True] * 2


def kept_bytes(fn, *args):
    return sum(a.size * a.dtype.itemsize for a in kept(fn, *args))


@pytest.mark.breadth(2)
@pytest.mark.parametrize("layer", ["gelu_layer", "attention", "gated", "dropout"])
def test_each_word_keeps_no_more_than_the_one_before(layer):
    # Weights are arguments, not slices of one.
    def by_layer(*w_and_x):
        *w, x = w_and_x
        return unrolled(LAYER[layer], w, x)

    def in_loop(w, x):
        return scanned(LAYER[layer], w, x)

    for loss, args in ((by_layer, (*W, X)), (in_loop, (W, X))):
        sizes = [kept_bytes(autocast(loss, word), *args) for word in WORDS]
        assert sizes[2] <= sizes[1] < sizes[0]


def activations(fn, *args):
    """Returns how many arrays of the shape of the activations are kept."""
    return sum(a.shape[-2:] == (ROWS, WIDTH) for a in kept(fn, *args))


def test_of_a_gelu_what_it_reads_is_kept():
    def loss(w, x):
        return jnp.sum((jax.nn.gelu(x @ w[0]) @ w[1]).astype(jnp.float32))

    # The argument in half is one: auto keeps it, z and h; least makes h again.
    counts = [activations(autocast(loss, word), W, X) for word in WORDS]
    assert counts[0] > 3
    assert counts[1:] == [3, 2]


def test_of_a_tanh_its_result_is_kept():
    def loss(w, x):
        return jnp.sum((jnp.tanh(x @ w[0]) @ w[1]).astype(jnp.float32))

    # The argument in half, and the result: the next product reads it.
    assert activations(autocast(loss, "auto"), W, X) == 2


def test_a_result_is_told_from_that_of_an_operation_that_reads_nothing():
    tanh = Result("tanh", np.dtype("bfloat16"), (ROWS, WIDTH))
    half = jax.core.ShapedArray((2, ROWS, WIDTH), jnp.bfloat16)
    assert tanh.matches("tanh", [half])
    assert not tanh.matches("tanh", [half.update(dtype=jnp.dtype("float32"))])
    assert not tanh.matches("exp", [half])
    assert not tanh.matches("iota", [])


def test_of_a_scanned_layer_the_least_is_kept_by_default():
    def loss(w, x):
        return scanned(lambda x, w: x + jax.nn.gelu(x @ w) @ w.T, w, x)

    stacked = {
        word: [a for a in kept(autocast(loss, word), W, X) if a.shape[0] == LAYERS]
        for word in WORDS
    }
    # The stream and the product; its weights are slices of an argument.
    assert [a.shape for a in stacked["auto"]] == [(LAYERS, ROWS, WIDTH)] * 2
    assert len(stacked["least"]) == 2 and len(stacked["all"]) > 4


def test_what_a_checkpoint_of_the_user_keeps_it_keeps():
    def layer(x, w):
        names = jax.ad_checkpoint.checkpoint_name(jnp.sin(x @ w), "mine")
        return jnp.tanh(names) @ w

    only = jax.checkpoint_policies.save_only_these_names("mine")

    def loss(w, x):
        return unrolled(jax.checkpoint(layer, policy=only), w, x)

    sizes = {kept_bytes(autocast(loss, word), W, X) for word in WORDS[:2]}
    everything = kept_bytes(autocast(functools.partial(unrolled, layer), "all"), W, X)
    assert all(size < everything for size in sizes)
    named = [
        e
        for e in equations(jax.make_jaxpr(autocast(loss, "auto"))(W, X).jaxpr)
        if e.primitive.name == "name"
    ]
    assert [e.params["name"] for e in named] == ["mine"] * LAYERS


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH)(jax.nn.gelu(nn.Dense(WIDTH)(x)))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Block(name="second")(Block(name="first")(x))


def test_under_all_nothing_of_a_module_is_made_again():
    model = Model()
    params = jax.eval_shape(model.init, jax.random.key(0), X)

    def loss(params, x):
        return jnp.mean(model.apply(params, x).astype(jnp.float32) ** 2)

    # Of a whole program, and of one module.
    reports = [
        amp.explain(loss, policies)(params, X)
        for policies in (
            policy("all"),
            amp.PolicyMap(policy("auto"), {"first": policy("all")}),
            policy("auto"),
        )
    ]
    # Of the last layer a bias is added again too, for the loss.
    again = [
        [
            sum(
                e.recomputed
                for e in each.equations
                if name in e.module and "Dense" not in e.module
            )
            for name in ("first", "second")
        ]
        for each in reports
    ]
    assert again == [[0, 0], [0, 7], [7, 7]]
    saved = [each.total.saved - each.total.copies for each in reports]
    assert saved[0] > saved[1] > saved[2]


def test_under_all_a_value_is_kept_for_the_readers_outside_too():
    whole = amp.with_policy(policy("all"))(jnp.sin)

    def recomputed(function):
        report = amp.explain(lambda x, w: function(x @ w) ** 2 @ w, "mixed_bfloat16")
        rows = report(X, W[0]).equations
        return [e.operation for e in rows if e.recomputed]

    assert "sin" in recomputed(jnp.sin)
    assert "sin" not in recomputed(whole)


def test_a_norm_keeps_what_the_policy_around_it_says():
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(WIDTH)(nn.LayerNorm()(nn.Dense(WIDTH)(x)))

    model = Normed()
    params = jax.eval_shape(model.init, jax.random.key(0), X)

    def loss(params, x):
        return jnp.mean(model.apply(params, x).astype(jnp.float32) ** 2)

    for word in WORDS:
        report = amp.explain(loss, policy(word))(params, X)
        again = report.modules["Normed/LayerNorm_0"].recomputed
        assert (again > 0) == (word != "all")


def test_explain_says_what_is_kept_and_made_again():
    def loss(w, x):
        return scanned(gelu_layer, w, x)

    reports = {word: amp.explain(loss, policy(word))(W, X) for word in WORDS}
    report = reports["auto"]
    again = [e for e in report.equations if e.recomputed]
    assert report.total.recomputed == len(again) > 0
    # A scan runs its body once a turn.
    assert {e.times for e in again if e.operation == "tanh"} == {LAYERS}
    assert report.total.recomputed_elements == sum(e.elements for e in again)
    for figure in ("recomputed", "recomputed_elements"):
        of_modules = sum(getattr(c, figure) for c in report.modules.values())
        assert of_modules == getattr(report.total, figure)
    assert reports["all"].total.recomputed == 0
    assert not any(e.operation == "dot_general" for e in again)
    largest = report.largest_kept
    assert [row.size for row in largest] == sorted(
        (row.size for row in largest), reverse=True
    )
    assert largest[0].shape == (LAYERS, ROWS, WIDTH) and largest[0].dtype == "bf16"
    assert sum(row.size for row in largest) == report.total.saved
    assert report.summary.endswith(f"; {len(again)} equations made again")
    text = str(report)
    assert "The largest kept for the backward pass" in text
    assert amp.Report.from_json(report.to_json()) == report


def test_f32_keeps_all_by_default_and_the_least_if_asked():
    loss = functools.partial(unrolled, gelu_layer)
    plain = kept_bytes(loss, W, X)
    assert kept_bytes(amp.autocast(loss, "float32"), W, X) == plain
    assert kept_bytes(amp.autocast(loss, "p=f32,c=f32,o=f32,s=least"), W, X) < plain
    found = [
        exact(jax.grad(amp.autocast(loss, f"p=f32,c=f32,o=f32,s={word}")), W, X)
        for word in ("all", "least")
    ]
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6)


def test_a_cpu_keeps_all_by_default_and_the_least_if_asked():
    loss = functools.partial(unrolled, gelu_layer)
    sizes = {
        word: kept_bytes(
            amp.autocast(loss, f"p=f32,c=bf16,o=f32{word}", target="cpu"), W, X
        )
        for word in ("", ",s=all", ",s=least")
    }
    assert sizes[""] == sizes[",s=all"] > sizes[",s=least"]


def barriers(fn, *args):
    """Returns whether XLA is kept from merging each checkpoint with the first pass."""
    return [
        bool(np.any(e.params["prevent_cse"]))
        for e in equations(jax.make_jaxpr(fn)(*args).jaxpr)
        if e.primitive.name in ("checkpoint", "remat2")
    ]


def test_xla_is_kept_from_merging_where_it_pays():
    wide = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)

    def loss(function, x, w):
        return jnp.sum((function(x @ w) @ w).astype(jnp.float32))

    def of(function, word="auto", shape=wide):
        return any(
            barriers(autocast(functools.partial(loss, function), word), shape, wide)
        )

    assert of(jax.nn.gelu) and of(lambda z: z * jnp.sin(z))
    # XLA makes these again by itself, or has the result in memory anyway.
    assert not of(jax.nn.silu) and not of(jax.nn.relu) and not of(jnp.tanh)
    # Launches would take longer than the memory is worth.
    assert not of(jax.nn.gelu, shape=jax.ShapeDtypeStruct((8, 1024), jnp.float32))
    assert of(jax.nn.silu, "least")
    in_loop = functools.partial(scanned, gelu_layer)
    assert not any(barriers(autocast(in_loop, "least"), W, X)[:1])


def test_a_block_ends_where_the_fewest_elements_leave_it():
    wide = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)

    def leaving(loss):
        found = jax.make_jaxpr(autocast(loss, "auto"))(wide, wide)
        return [
            {v.aval.shape for v in e.outvars}
            for e in equations(found.jaxpr)
            if e.primitive.name in ("checkpoint", "remat2")
        ]

    def mean(x, w):
        return jnp.mean(jax.nn.gelu(x @ w), dtype=jnp.float32)

    def product(x, w):
        return jnp.sum(jax.nn.gelu(x @ w) @ w, dtype=jnp.float32)

    def both(x, w):
        y = jax.nn.gelu(x @ w)
        return jnp.sum(y, dtype=jnp.float32) + jnp.sum(y @ w, dtype=jnp.float32)

    # Else its cotangent, one number, would be written out for each term of the sum.
    assert leaving(mean) == [{()}]
    assert leaving(product) == leaving(both) == [{(1024, 1024)}]


@pytest.mark.parametrize("word", ["auto", "least"])
def test_a_deep_network_is_cut_between_layers(word):
    def layer(x, w):
        return x + jax.nn.gelu(norm(x) @ w) @ w.T

    ws, residuals = [w for w in W for _ in range(12)], functools.partial(run, layer)
    lengths = [
        len(e.params["jaxpr"].eqns)
        for e in equations(jax.make_jaxpr(autocast(residuals, word))(ws, X).jaxpr)
        if e.primitive.name in ("checkpoint", "remat2")
    ]
    # The casts of the plan are equations too. As one block, tracing is quadratic.
    assert len(lengths) > 3 and max(lengths) < 500
    # What crosses is the stream between two layers, of which either is kept.
    few, many = (
        sum(each.size for each in kept(autocast(residuals, word), ws[:n], X))
        for n in (12, 36)
    )
    assert many <= 3 * few
    made = [
        exact(jax.value_and_grad(autocast(residuals, each)), ws, X)
        for each in ("all", word)
    ]
    chex.assert_trees_all_equal(*made)


def run(layer, ws, x):
    return jnp.mean(functools.reduce(layer, ws, x) ** 2)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("inside", [True, False])
def test_a_sharded_program_has_the_gradients_of_all(inside):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "d")

    def loss(w, x):
        x, _ = lax.scan(lambda x, each: (gelu_layer(x, each), None), x, w)
        x = unrolled(gated, w, lax.psum(x, "d") * jnp.tanh(x))
        return lax.pmean(x, "d")

    specs = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("d")
    sharded = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=specs, out_specs=specs[0]
    )

    def gradient(word):
        if inside:
            return jax.grad(autocast(sharded(loss), word))
        return jax.grad(sharded(autocast(loss, word)))

    def run():
        return [exact(gradient(word), W, X) for word in WORDS]

    are_near(apart(run()))
