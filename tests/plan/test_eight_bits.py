"""What is kept in 8 bits, and what that does to gradients, memory and forward mode."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import jmp_amp as amp
from jmp_amp.transform.stored_blocks import EightBits
from tests.plan.distances import apart, exact
from tests.plan.layers import (
    FORMS,
    LAYER,
    TRANSFORMED,
    autocast,
    differentiated,
    kept,
    policy,
    scanned,
    unrolled,
)
from tests.programs import equations

WORDS = ("int8", "e4m3")
# An activation has 2^13 elements: what is smaller is kept as it is.
ROWS, WIDTH, LAYERS = 64, 128, 3
X = jax.random.normal(jax.random.key(0), (ROWS, WIDTH))
W = jax.random.normal(jax.random.key(1), (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5


class TestFormat:
    @pytest.mark.breadth(1)
    @pytest.mark.parametrize("columns", [1, 100, 128, 300])
    def test_int8_has_a_scale_for_each_128_elements(self, columns):
        x = np.random.default_rng(columns).normal(size=(5, columns)).astype(np.float32)
        found = EightBits.of(jnp.asarray(x), "int8")
        assert found.q.dtype == jnp.int8 and found.scale.dtype == jnp.float32
        expected = np.empty_like(x)
        for start in range(0, columns, 128):
            block = x[:, start : start + 128]
            scale = np.abs(block).max(axis=1, keepdims=True) / np.float32(127)
            expected[:, start : start + 128] = np.rint(block / scale) * scale
        np.testing.assert_array_equal(found.restored(), expected)

    def test_e4m3_has_a_scale_for_each_row(self):
        x = np.random.default_rng(0).normal(size=(4, 3, 300)).astype(np.float32)
        found = EightBits.of(jnp.asarray(x), "e4m3")
        scale = np.abs(x).max(axis=-1, keepdims=True) / np.float32(448)
        expected = (x / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        # XLA multiplies by the reciprocal of 448.
        np.testing.assert_allclose(found.restored(), expected * scale, rtol=3e-7)

    @pytest.mark.breadth(1)
    @pytest.mark.parametrize("word", WORDS)
    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_a_block_with_a_number_that_is_not_finite_is_nan(self, word, value):
        x = np.ones((2, 256), np.float32)
        x[1, 3] = value
        found = np.asarray(EightBits.of(jnp.asarray(x), word).restored())
        assert np.isnan(found[1, :128]).all()
        np.testing.assert_array_equal(found[0], 1.0)
        assert np.isnan(found[1, 128:]).all() == (word == "e4m3")

    @pytest.mark.breadth(1)
    @pytest.mark.parametrize("word", WORDS)
    def test_zeros_stay_zeros(self, word):
        found = EightBits.of(jnp.zeros((2, 130), jnp.bfloat16), word).restored()
        assert found.dtype == jnp.bfloat16
        np.testing.assert_array_equal(found, jnp.zeros((2, 130)))


# What `looked_up` keeps is four times as large.
SQUARE = sorted(set(LAYER) - {"looked_up"})
# Half is far from f32 there: they are compared with half.
ILL_CONDITIONED = ("sorted_layer", "attention")
# A scan has a body, however many turns it has.
WEIGHTS = {"unrolled": W[:2], "scanned": W, "jitted": W[:2]}
PROGRAMS = [
    *((layer, form) for layer in SQUARE for form in ("unrolled", "scanned")),
    *((layer, "jitted") for layer in ("gelu_layer", "branches", "attention")),
]


@pytest.mark.breadth(3)
@pytest.mark.parametrize(("layer", "form"), PROGRAMS)
def test_gradients_are_rounded_and_not_wrong(layer, form):
    # The formats differ in what is rounded, and not in what is kept.
    words = WORDS if form == "scanned" else ("int8",)
    loss = functools.partial(FORMS[form], LAYER[layer])

    def run():
        f32 = exact(jax.value_and_grad(loss, argnums=(0, 1)), WEIGHTS[form], X)
        of_words = (differentiated(layer, form, word) for word in ("all", *words))
        return [f32, *(exact(fn, WEIGHTS[form], X) for fn in of_words)]

    found = run()
    (theirs, *beside_f32), beside_half = apart(found), apart(found[1:])
    for word, ours, half in zip(words, beside_f32, beside_half, strict=True):
        assert half[0][0] == 0  # the loss
        for i in (1, 2):
            (*_, error), (*_, of_half), (*_, off) = ours[i], theirs[i], half[i]
            if layer in ILL_CONDITIONED:
                assert 0 < off <= (0.05 if word == "int8" else 0.2)
            else:
                assert error <= (2.5 if word == "int8" else 6) * of_half + 1e-6


def beside(operation):
    """A layer in which an activation is read beside the result of an operation."""
    return lambda x, w: (operation(x, x @ w) * jnp.tanh(x @ w.T)) @ w


def around_a_loop(x, w):
    h = jnp.tanh(x @ w) * jnp.cos(x @ w.T)
    found, _ = lax.scan(lambda c, _: (jnp.tanh(c @ w), None), h, length=2)
    return (found * jnp.sin(h)) @ w


# What the derivative of each reads of the product is not a float, is found by the
# operation itself, or is nothing.
OPERATIONS = {
    "abs": beside(lambda x, h: jnp.abs(h)),
    "clamp": beside(lambda x, h: lax.clamp(-1.0, h, 1.0)),
    "rem": beside(lambda x, h: lax.rem(h, jnp.full_like(h, 1.7))),
    "choice": beside(lambda x, h: jnp.where(h > 0, h, jnp.sin(h))),
    "maximum": beside(lambda x, h: jnp.max(h, axis=1, keepdims=True)),
    "sort": beside(lambda x, h: jnp.sort(h, axis=1)),
    "sums": beside(lambda x, h: jnp.cumsum(h, axis=0)),
    "products": beside(lambda x, h: jnp.cumprod(1 + 0.01 * jnp.sin(h), axis=0)),
    "lookup": beside(lambda x, h: h[:, ::-1][:, jnp.arange(WIDTH)]),
    "update": beside(lambda x, h: lax.dynamic_update_slice(h, jnp.sin(h[:4]), (0, 0))),
    "pool": beside(
        lambda x, h: lax.reduce_window(h, -jnp.inf, lax.max, (2, 1), (1, 1), "SAME")
    ),
    "special": beside(lambda x, h: lax.lgamma(2 + jnp.sin(h))),
    "angle": beside(lambda x, h: jnp.arctan2(h, 2 + jnp.sin(x))),
    "loop": around_a_loop,
}


@pytest.mark.breadth(3)
@pytest.mark.parametrize(
    ("layer", "form"),
    [
        *((layer, "unrolled") for layer in SQUARE),
        *((layer, "scanned") for layer in ("attention", "branches", *OPERATIONS)),
    ],
)
def test_what_is_rounded_is_all_that_differs(layer, form, monkeypatch):
    """With 8 bits that lose nothing, gradients are those of all."""

    def lossless(x, format):
        x = lax.stop_gradient(x)
        return EightBits(x, jnp.ones((1,) * x.ndim), x.shape, x.dtype)

    monkeypatch.setattr(EightBits, "of", lossless)
    loss = functools.partial(FORMS[form], (LAYER | OPERATIONS)[layer])
    weights = WEIGHTS[form]

    def run():
        return [
            exact(jax.grad(autocast(loss, word), argnums=(0, 1)), weights, X)
            for word in ("all", "int8")
        ]

    (found,) = apart(run())
    assert len(found) == 2
    for difference, largest, relative in found:
        assert largest > 0
        if jax.__version_info__ < (0, 11):
            # XLA fuses f32 otherwise.
            assert difference <= 1e-6 * largest
        else:
            # It vectorises f32 otherwise, too: bf16 near the middle of two numbers is
            # rounded to the other one.
            assert relative <= 2**-9


@pytest.mark.breadth(1)
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformations_go_through(name, word):
    w = jnp.stack([W, 0.5 * W], axis=1)

    def loss(w):
        return scanned(LAYER["gelu_layer"], w if w.ndim == 3 else w[:, 0], X)

    argument = w if "vmap" in name else W

    def run():
        return [
            exact(TRANSFORMED[name](autocast(loss, each)), argument)
            for each in ("all", word)
        ]

    (found,) = apart(run())
    for difference, largest, relative in found:
        assert largest > 0
        if name in ("jvp", "linearize"):
            assert difference == 0  # forward mode rounds nothing
        else:
            assert 0 < relative < (0.02 if word == "int8" else 0.05)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("way", [jax.jacfwd, jax.jacrev])
def test_second_derivatives_are_rounded_and_not_wrong(way):
    direction = W[1:2]

    def slope(word):
        def loss(scale):
            return unrolled(LAYER["gelu_layer"], W[:1] + scale * direction, X)

        return exact(way(jax.grad(autocast(loss, word))), jnp.float32(0.1))

    def run():
        return [slope(word) for word in ("all", *WORDS)]

    for ((_, half, relative),) in apart(run()):
        assert half > 0 and relative < 0.05


def eight_bit_shapes(fn, *args):
    """Returns the shapes of what is kept in 8 bits, without the blocks of int8."""
    return [
        (*a.shape[:-2], a.shape[-2] * a.shape[-1]) if a.dtype == jnp.int8 else a.shape
        for a in kept(fn, *args)
        if a.dtype in (jnp.int8, jnp.float8_e4m3fn)
    ]


@pytest.mark.parametrize("word", WORDS)
def test_what_is_kept_in_half_is_kept_in_8_bits(word):
    def loss(w, x):
        return scanned(lambda x, w: x + jax.nn.gelu(x @ w) @ w.T, w, x)

    x = X.astype(jnp.bfloat16)
    # The stream and the product, of all turns.
    assert eight_bit_shapes(autocast(loss, word), W, x) == [(LAYERS, ROWS, WIDTH)] * 2
    assert eight_bit_shapes(autocast(loss, "least"), W, x) == []


SQUARED = {
    "a small array": lambda x, w: jnp.tanh(x[:8] @ w) ** 2,
    "of a softmax": lambda x, w: jax.nn.softmax(x @ w),
    "of a relu": lambda x, w: jax.nn.relu(x @ w),
    "of a leaky relu": lambda x, w: jax.nn.leaky_relu(x @ w),
    "of a limit": lambda x, w: jnp.clip(x @ w, -1, 1) ** 2,
}
ALIVE = {
    "the arguments": lambda x, w: jnp.sin(x) @ w,
    "a mask": lambda x, w: jnp.where(
        jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), x @ w, 0
    ),
}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", [*SQUARED, *ALIVE])
def test_what_stays_as_it_is(name):
    def loss(w, x):
        found = (SQUARED | ALIVE)[name](x, w[0]).astype(jnp.float32)
        return jnp.sum(found if name in ALIVE else found**2)

    assert eight_bit_shapes(autocast(loss, "int8"), W, X) == []

    def run():
        return [exact(jax.grad(autocast(loss, word)), W, X) for word in ("all", "int8")]

    (((*_, relative),),) = apart(run())
    assert relative < 0.02


def test_a_name_of_the_user_is_kept_as_it_is():
    def loss(w, x):
        h = jax.ad_checkpoint.checkpoint_name(x @ w[0], "mine")
        return jnp.sum((jax.nn.gelu(h) @ w[1]).astype(jnp.float32))

    def unnamed(w, x):
        return jnp.sum((jax.nn.gelu(x @ w[0]) @ w[1]).astype(jnp.float32))

    only = jax.checkpoint_policies.save_only_these_names("mine")
    assert eight_bit_shapes(autocast(unnamed, "int8"), W, X) == [X.shape]
    for fn in (loss, jax.checkpoint(loss, policy=only)):
        assert eight_bit_shapes(autocast(fn, "int8"), W, X) == []


def test_layers_of_two_formats_keep_each_in_its_own():
    def loss(w, x):
        for word, each in zip(WORDS, w[:2], strict=True):
            x = amp.with_policy(policy(word))(LAYER["gelu_layer"])(x, each)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    found = {a.dtype for a in kept(autocast(loss, "all"), W, X)}
    assert {np.dtype("int8"), np.dtype("float8_e4m3fn")} < found


def test_a_module_under_all_keeps_what_it_makes():
    def inner(x, w):
        return jax.nn.gelu(x @ w) @ w.T

    def loss(within, w, x):
        whole = amp.with_policy(policy(within))(inner)
        return jnp.sum(whole(jnp.tanh(x @ w[0]) @ w[1], w[2]).astype(jnp.float32) ** 2)

    def shapes(word, within):
        fn = functools.partial(loss, within)
        return len(eight_bit_shapes(autocast(fn, word), W, X))

    assert shapes("int8", "int8") > shapes("int8", "all") > 0
    assert shapes("all", "int8") > 0 == shapes("all", "all")


@pytest.mark.breadth(1)
@pytest.mark.parametrize("word", WORDS)
def test_a_gradient_shows_a_number_that_is_not_finite(word):
    def loss(w, x):
        h = jax.nn.gelu(x @ w[0])
        return jnp.sum(jnp.where(jnp.isfinite(h), h, 0).astype(jnp.float32) @ w[1])

    x = X.at[3, 5].set(jnp.inf)
    gradient = jax.jit(jax.grad(autocast(loss, word)))
    assert not np.isfinite(gradient(W, x)).all()
    assert np.isfinite(gradient(W, X)).all()


@pytest.mark.breadth(1)
@pytest.mark.parametrize("layer", ["gated", "attention"])
def test_no_product_runs_twice(layer):
    loss = functools.partial(unrolled, LAYER[layer])

    def products(word):
        gradient = jax.jit(jax.grad(autocast(loss, word)))
        return gradient.lower(W[:2], X).compile().as_text().count(" dot(")

    assert products("int8") == products("all") > 0


@pytest.mark.breadth(1)
@pytest.mark.parametrize("word", WORDS)
def test_data_parallel_adds_no_collective(word):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "d")
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    all_of = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    x = jax.ShapeDtypeStruct((2 * ROWS, WIDTH), jnp.float32, sharding=rows)
    w = jax.ShapeDtypeStruct(W.shape, jnp.float32, sharding=all_of)

    def collectives(word):
        loss = autocast(functools.partial(unrolled, LAYER["gelu_layer"]), word)
        text = jax.jit(jax.grad(loss), out_shardings=all_of).lower(w, x).compile()
        names = ("all-reduce(", "all-gather(", "all-to-all(", "collective-permute(")
        return {name: text.as_text().count(name) for name in names}

    assert collectives(word) == collectives("all")


@pytest.mark.slow
def test_a_sharded_program_has_near_the_same_gradients():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "d")
    specs = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("d")
    x = jnp.concatenate([X, -X])

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=specs[0])
    def loss(w, x):
        x, _ = lax.scan(lambda x, w: (LAYER["gelu_layer"](x, w), None), x, w)
        return lax.pmean(unrolled(LAYER["gated"], w, x), "d")

    def run():
        return [exact(jax.grad(autocast(loss, word)), W, x) for word in ("all", "int8")]

    (((*_, relative),),) = apart(run())
    assert 0 < relative < 0.02


def test_explain_says_what_is_kept_in_8_bits():
    def loss(w, x):
        return scanned(lambda x, w: x + jax.nn.gelu(x @ w) @ w.T, w, x)

    x = jnp.tile(X, (2, 1)).astype(jnp.bfloat16)
    reports = {w: amp.explain(loss, policy(w))(W, x) for w in ("least", "int8")}
    (_, *largest), size = reports["int8"].largest_kept[:3], LAYERS * 2 * ROWS * WIDTH
    assert {each.operation for each in largest} == {
        "convert_element_type",
        "dot_general",
    }
    assert all((each.dtype, each.size) == ("int8", size) for each in largest)
    # Half of it, and a scale for each 128 elements, besides what is no activation.
    least, eight = (each.total.saved for each in reports.values())
    assert least - eight == 2 * size - 2 * 4 * LAYERS * 2 * ROWS
    assert reports["int8"].total.recomputed == reports["least"].total.recomputed > 0


def test_blocks_that_are_alike_are_traced_once():
    w = jnp.concatenate([W] * 2)

    def traced(word, layers):
        loss = functools.partial(unrolled, LAYER["gelu_layer"])
        jaxpr = jax.make_jaxpr(jax.grad(autocast(loss, word)))(w[:layers], X)
        return len({id(e.params["jaxpr"]) for e in equations(jaxpr.jaxpr) if _is(e)})

    def _is(eqn):
        return eqn.params.get("name") == "linear"

    # The first layer reads an argument, and the last one is followed by no other.
    assert traced("int8", 6) == traced("int8", 4) > 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: amp.Policy(saved="int4"), 'Use "all", "auto", "least", "int8" or'),
        (
            lambda: amp.Policy(compute_dtype="float32", saved="int8"),
            "the compute dtype is float32, so nothing half is kept",
        ),
        (lambda: amp.get_policy("p=f32,c=f32,s=e4m3"), r'get_policy\("p=f32,c=f32'),
        (lambda: amp.recipe("O0", saved="int8"), r"recipe\('O0', saved='int8'\)"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_policy_that_is_derived_in_f32_keeps_all():
    eight = amp.Policy(saved=" INT8 ")
    assert (eight.saved, str(eight)) == ("int8", "p=f32,c=bf16,o=f32,s=int8")
    assert amp.get_policy(str(eight)) == eight
    derived = dataclasses.replace(eight, compute_dtype=jnp.float32)
    assert derived.saved == "all"
    assert amp.recipe("O1", enabled=False, saved="int8").policy.saved == "all"
    assert amp.recipe("O1", saved="int8").policy.saved == "int8"
