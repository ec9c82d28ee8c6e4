"""linen alone: its names, methods, scopes and caches, and what its modules write.

What is asked of linen and nnx alike is in `test_modules.py` and `test_norms.py`.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

import jmp_amp as amp
from tests.programs import products, results_of
from tests.rounding import ROUNDINGS, eps, half_of, relative_error
from tests.transform.flax_models import (
    F32,
    KEY,
    WIDTHS,
    Block,
    Compact,
    Setup,
    X,
    by_width,
    dtypes_in,
    in_linen,
    with_values,
)

BF16, HALF = "mixed_bfloat16", "bfloat16"


def forward(net, policies, **options):
    """A model under autocast, as a function of variables and inputs."""
    apply = amp.autocast(net.apply, policies)
    return lambda variables, *args: apply(variables, *args, **options)


def shapes_of(net, *args, **options):
    return in_linen(net, *args, **options).variables


def at(widths, all_of):
    return {width: F32 if width in widths else HALF for width in all_of}


def assert_full(net, pattern, widths, all_of=WIDTHS, x=X):
    """An entry of f32 reaches the products of these widths, of all that there are."""
    apply = forward(net, amp.PolicyMap(BF16, {pattern: F32}))
    assert by_width(apply, shapes_of(net, x), x) == at(widths, all_of), pattern


# Names and methods


def test_a_name_does_not_hide_the_class():
    class Named(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = Block(24, 16, name="LayerNorm_0")(x)
            x = nn.LayerNorm(name="Dense_7")(x)
            return nn.Dense(5, name="Block_3")(x)

    net = Named()
    for pattern, reached in (
        (Block, {24, 16}),
        ("Block_3", {5}),
        ("LayerNorm_0", {24, 16}),
        (nn.LayerNorm, set()),
    ):
        assert_full(net, pattern, reached, {24, 16, 5})
    # What is named like a norm is none, and the norm is one under any name.
    plain, variables = forward(net, BF16), shapes_of(net, X)
    assert set(by_width(plain, variables, X).values()) == {HALF}
    assert results_of(plain, variables, X, primitive="rsqrt") == [F32]


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    "method",
    [Setup.encode, lambda net, x: net.encode(x), lambda net, x: net.first(x)],
    ids=["function", "lambda of a method", "lambda of a module"],
)
def test_any_method_can_be_applied(method):
    net = Setup()
    for entries, wanted in (
        ({"first": F32}, {24: F32, 16: F32}),
        ({lambda info: info.name == "down": F32}, {24: HALF, 16: F32}),
    ):
        apply = forward(net, amp.PolicyMap(BF16, entries), method=method)
        assert by_width(apply, shapes_of(net, X), X) == wanted


def test_methods_of_a_bound_module_have_its_policy():
    net = Setup()

    def apply(variables, x):
        bound = net.bind(variables)
        return bound.head(bound.second(bound.encode(x)))

    fn = amp.autocast(apply, amp.PolicyMap(BF16, {"second": F32}))
    assert by_width(fn, shapes_of(net, X), X) == at({32, 20}, WIDTHS)


# Shared modules


def test_modules_that_share_a_scope_have_one_path():
    class Sharing(nn.Module):
        def setup(self):
            self.inner = Block(24, 16)
            nn.share_scope(self, self.inner)
            self.head = nn.Dense(5)

        def __call__(self, x):
            return self.head(self.inner(x))

    net = Sharing()
    assert set(shapes_of(net, X)["params"]) == {"up", "down", "head"}
    for pattern, reached in (
        (Block, {24, 16}),
        ("up", {24}),
        ("down", {16}),
        ("head", {5}),
        ("", {24, 16, 5}),
    ):
        assert_full(net, pattern, reached, {24, 16, 5})


class User(nn.Module):
    shared: nn.Module

    @nn.compact
    def __call__(self, x):
        return self.shared(x)


class Users(nn.Module):
    def setup(self):
        self.shared = nn.Dense(16)
        self.a, self.b = User(self.shared), User(self.shared)

    def __call__(self, x):
        return self.b(nn.relu(self.a(x)))


def test_a_module_shared_by_two_parents_has_the_policy_of_who_calls_it():
    net = Users()
    variables = shapes_of(net, X)
    assert set(variables["params"]) == {"shared"}
    for entries, wanted in (
        ({"a": F32}, [F32, HALF]),
        ({"b": F32}, [HALF, F32]),
        ({User: F32}, [F32, F32]),
        ({"shared": F32}, [F32, F32]),
        ({"shared": F32, "a": BF16}, [F32, F32]),
        ({"a": F32, "shared": BF16}, [HALF, HALF]),
    ):
        apply = forward(net, amp.PolicyMap(BF16, entries))
        assert products(apply, variables, X) == wanted, entries


# Recurrent networks and caches


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.RNN(nn.LSTMCell(12), name="rnn")(nn.Dense(16, name="in")(x))
        return nn.Dense(5, name="head")(x)


def test_the_cell_of_a_recurrent_network_is_a_module():
    net, x = Recurrent(), jax.random.normal(KEY, (2, 3, 8))
    variables = shapes_of(net, x)
    # linen gives a cell that is made in the call of a model to the model.
    assert "LSTMCell_0" in variables["params"]
    for default, inside, patterns in (
        (BF16, F32, ("rnn", "LSTMCell_0", nn.LSTMCell, re.compile(".*Cell_0"))),
        (F32, BF16, (lambda info: "Cell" in info.cls.__name__,)),
    ):
        for pattern in patterns:
            apply = forward(net, amp.PolicyMap(default, {pattern: inside}))
            found = by_width(apply, variables, x)
            assert found.pop(16) == found.pop(5) == half_of(default), pattern
            assert set(found.values()) == {half_of(inside)}, pattern


def test_the_value_of_a_recurrent_network_is_that_of_f32():
    policy = "mixed_float16"
    net, x = nn.RNN(nn.LSTMCell(12)), jax.random.normal(KEY, (2, 3, 8))
    variables = with_values(shapes_of(net, x))
    apply = forward(net, amp.PolicyMap(F32, {"cell": policy}))
    assert set(by_width(apply, variables, x).values()) == {half_of(policy)}
    found, expected = (jax.jit(f)(variables, x) for f in (apply, net.apply))
    assert relative_error(found, expected) < ROUNDINGS * eps(policy)


class Decoder(nn.Module):
    decode: bool = True

    @nn.compact
    def __call__(self, x, mask=None):
        attention = nn.MultiHeadDotProductAttention(
            num_heads=2, qkv_features=16, decode=self.decode, name="attn"
        )
        return nn.Dense(5, name="head")(x + attention(x, mask=mask))


STEPS = 6
SEQUENCE = jax.random.normal(jax.random.key(2), (STEPS, 2, 1, 16))


def decode(apply, variables):
    """The outputs of every step, and the caches after it."""
    params, cache = variables["params"], variables["cache"]
    step = jax.jit(lambda given, x: apply(given, x, mutable=["cache"]))
    outputs, caches = [], []
    for x in SEQUENCE:
        y, written = step({"params": params, "cache": cache}, x)
        cache = written["cache"]
        outputs.append(y)
        caches.append(cache)
    return jnp.stack(outputs), caches


@functools.cache
def decoded():
    """A decoder, its variables, and what it gives in f32."""
    net = Decoder()
    variables = with_values(shapes_of(net, jnp.zeros((2, STEPS, 16))))
    return net, variables, decode(net.apply, variables)


DECODED = {
    "no entries": lambda policy: amp.PolicyMap(policy),
    "attention in f32": lambda policy: amp.PolicyMap(policy, {"attn": F32}),
    "parts": lambda policy: amp.PolicyMap(policy, {"*/query": F32, "attn/out": F32}),
    "attention in half": lambda policy: amp.PolicyMap(
        F32, {nn.MultiHeadDotProductAttention: policy}
    ),
    # Pure half: what the model returns is half, its cache is not.
    "pure half": lambda policy: amp.PolicyMap(half_of(policy)),
}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("made", sorted(DECODED))
def test_a_decoding_step_keeps_the_dtypes_of_its_cache(made):
    net, variables, _ = decoded()
    policies = DECODED[made](BF16)
    apply = forward(net, policies, mutable=["cache"])
    y, written = jax.eval_shape(apply, variables, SEQUENCE[0])
    assert y.dtype == policies.default.output_dtype
    kept = jax.tree.map(
        lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype),
        *(written["cache"], variables["cache"]),
    )
    assert jax.tree.leaves(kept) == [True] * 3


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    ("made", "policy"),
    [
        ("no entries", "mixed_float16"),
        ("parts", "mixed_bfloat16"),
        ("attention in half", "mixed_float16"),
        ("pure half", "mixed_bfloat16"),
    ],
)
def test_decoding_step_by_step_is_that_of_f32(made, policy):
    net, variables, (expected, wanted) = decoded()
    apply = amp.autocast(net.apply, DECODED[made](policy))
    found, caches = decode(apply, variables)
    assert relative_error(found, expected) < ROUNDINGS * eps(policy)
    for step, (cache, f32) in enumerate(zip(caches, wanted, strict=True)):
        assert cache["attn"]["cache_index"] == step + 1
        for name in ("cached_key", "cached_value"):
            assert cache["attn"][name].dtype == jnp.float32
            error = relative_error(cache["attn"][name], f32["attn"][name])
            assert error < ROUNDINGS * eps(policy)


@pytest.mark.breadth(2)
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize(
    ("made", "policy"), [("parts", "mixed_float16"), ("pure half", "mixed_bfloat16")]
)
def test_a_scan_over_decoding_steps_is_the_loop(made, policy, outside):
    net, variables, (expected, caches) = decoded()
    policies = DECODED[made](policy)

    def steps(apply):
        def step(cache, x):
            given = {"params": variables["params"], "cache": cache}
            y, written = apply(given, x, mutable=["cache"])
            return written["cache"], y

        return lambda cache: lax.scan(step, cache, SEQUENCE)

    fn = (
        amp.autocast(steps(net.apply), policies)
        if outside
        else steps(amp.autocast(net.apply, policies))
    )
    cache, found = jax.jit(fn)(variables["cache"])
    assert relative_error(found, expected) < ROUNDINGS * eps(policy)
    assert cache["attn"]["cache_index"] == STEPS
    keys = cache["attn"]["cached_key"], caches[-1]["attn"]["cached_key"]
    assert relative_error(*keys) < ROUNDINGS * eps(policy)


# What modules write


class Sowing(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Dense(24, name="up")(x)
        self.sow("intermediates", "h", h)
        self.sow("intermediates", "rows", jnp.arange(3))
        return nn.Dense(5, name="head")(h)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("policy", [BF16, "f16"])
def test_what_is_sown_keeps_its_dtype(policy):
    net = Sowing()
    variables = with_values(shapes_of(net, X))
    policies = amp.PolicyMap(policy, {"head": policy})
    apply = jax.jit(forward(net, policies, mutable=["intermediates"]))
    expected, written = net.apply(variables, X, mutable=["intermediates"])
    found, state = apply(variables, X)
    assert found.dtype == policies.default.output_dtype
    (h,), (rows,) = state["intermediates"]["h"], state["intermediates"]["rows"]
    assert h.dtype == jnp.float32 and rows.dtype == jnp.int32
    assert relative_error(h, written["intermediates"]["h"][0]) < ROUNDINGS * eps(policy)
    assert relative_error(found, expected) < ROUNDINGS * eps(policy)


def test_captured_intermediates_keep_their_dtype():
    net = Sowing()
    for policy in (BF16, "f16"):
        apply = forward(net, policy, capture_intermediates=True, mutable=True)
        y, written = jax.eval_shape(apply, shapes_of(net, X), X)
        assert y.dtype == amp.get_policy(policy).output_dtype
        assert dtypes_in(written["intermediates"]) == {F32, "int32"}
        names = {"h", "rows", "up", "head", "__call__"}
        assert set(written["intermediates"]) == names


def test_dropout_drops_what_it_drops_without_autocast():
    policy = "mixed_float16"

    class Dropping(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(64, name="up")(x)
            return nn.Dropout(0.5, deterministic=False, name="drop")(x)

    net = Dropping()
    shapes = jax.eval_shape(net.init, {"params": KEY, "dropout": KEY}, X)
    random = np.random.default_rng(0)
    variables = jax.tree.map(lambda x: jnp.float32(random.normal(size=x.shape)), shapes)

    def drop(apply):
        return jax.jit(lambda key: apply(variables, X, rngs={"dropout": key}))

    plain = drop(net.apply)
    for entries in ({}, {"drop": F32, nn.Dense: "mixed_bfloat16"}):
        made = drop(amp.autocast(net.apply, amp.PolicyMap(policy, entries)))
        masks = set()
        for seed in range(3):
            key = jax.random.key(seed)
            found, expected = made(key), plain(key)
            np.testing.assert_array_equal(found == 0, expected == 0)
            error = relative_error(found, expected)
            assert error < ROUNDINGS * eps("mixed_bfloat16" if entries else policy)
            masks.add((np.asarray(found) == 0).tobytes())
        assert len(masks) == 3


def test_init_under_autocast_makes_the_same_parameters():
    net = nn.Sequential([nn.Dense(8), nn.LayerNorm()])
    policies = amp.PolicyMap("mixed_bfloat16", {"*": "mixed_float16", "layers_0": F32})
    found = jax.jit(amp.autocast(net.init, policies))(KEY, X)
    expected = jax.jit(net.init)(KEY, X)
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    assert dtypes_in(found) == {F32}


# Decorated methods


class Plain(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(x)


def decorated(*decorators):
    """A class as `Plain`, whose method has these decorators, the lowest last."""

    def method(self, x):
        return nn.Dense(8)(x)

    for decorator in reversed(decorators):
        method = decorator(method)
    return type("Plain", (nn.Module,), {"__call__": method})()


AUTOCAST = amp.autocast(policy="mixed_float16")


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    "decorators",
    [
        (AUTOCAST, nn.compact),
        (nn.compact, AUTOCAST),
        (nn.jit, AUTOCAST, nn.compact),
        (AUTOCAST, nn.jit, nn.compact),
        (AUTOCAST, nn.remat, nn.compact),
        (AUTOCAST, amp.with_policy("mixed_float16"), nn.compact),
    ],
)
def test_a_decorated_method_makes_its_parameters_and_computes_in_half(decorators):
    net = decorated(*decorators)
    variables = net.init(KEY, X)
    expected = shapes_of(Plain(), X)
    assert jax.tree.map(jnp.shape, variables) == jax.tree.map(jnp.shape, expected)
    assert dtypes_in(variables) == {F32}
    assert by_width(net.apply, variables, X) == {8: "float16"}
    error = relative_error(net.apply(variables, X), Plain().apply(variables, X))
    assert error < ROUNDINGS * eps("float16")


@pytest.mark.parametrize("mark", [amp.full_precision, amp.with_policy(F32)])
def test_a_mark_may_stand_above_compact(mark):
    net = decorated(mark, nn.compact)
    assert by_width(amp.autocast(net.apply), shapes_of(net, X), X) == {8: F32}


def test_what_a_decorated_method_writes_is_refused_with_the_remedy():
    class Norm(nn.Module):
        @amp.autocast
        @nn.compact
        def __call__(self, x, train):
            return nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))

    class Inside(nn.Module):
        @nn.compact
        def __call__(self, x):
            return amp.autocast(lambda x: nn.Dense(8)(x))(x)

    net = Norm()
    variables = with_values(shapes_of(net, X, train=False))
    evaluated = functools.partial(net.apply, train=False)
    assert by_width(evaluated, variables, X) == {8: "bfloat16"}

    def train(variables):
        return net.apply(variables, X, True, mutable=["batch_stats"])[0]

    remedy = r"^autocast\(fn\): the function writes to '{}' .* autocast\(model\.apply"
    for call in (train, jax.jit(train), amp.autocast(train)):
        with pytest.raises(TypeError, match=remedy.format("batch_stats")):
            call(variables)
    with pytest.raises(TypeError, match=remedy.format("params")):
        Inside().init(KEY, X)


# nnx inside of linen


class NnxLayers(nnx.Module):
    def __init__(self, *, rngs):
        self.up = nnx.Linear(16, 24, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(24, 20, rngs=rngs)])

    def __call__(self, x):
        return self.layers[0](nnx.relu(self.up(x)))


class Bridged(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16, name="in")(x)
        x = nnx.bridge.ToLinen(NnxLayers, name="wrapped")(x)
        return nn.Dense(5, name="head")(x)


@pytest.mark.slow
def test_paths_go_on_into_an_nnx_module_in_a_linen_module():
    net, all_of = Bridged(), {16, 24, 20, 5}
    for pattern, reached in (
        ("wrapped", {24, 20}),
        ("wrapped/up", {24}),
        ("wrapped/layers/0", {20}),
        ("**/layers/*", {20}),
        (NnxLayers, {24, 20}),
        (nnx.Linear, {24, 20}),
        (nnx.bridge.ToLinen, {24, 20}),
        (re.compile("wrapped/.*"), {24, 20}),
        (lambda info: info.path == ("wrapped", "up"), {24}),
        (nn.Dense, {16, 5}),
    ):
        assert_full(net, pattern, reached, all_of)


def test_the_value_of_an_nnx_module_in_a_linen_module_is_that_of_f32():
    net = Bridged()
    variables = with_values(shapes_of(net, X))
    apply = forward(net, amp.PolicyMap("mixed_float16", {"wrapped/up": F32}))
    found, expected = (jax.jit(f)(variables, X) for f in (apply, net.apply))
    assert relative_error(found, expected) < ROUNDINGS * eps("float16")


# Functions that modules call


def test_a_marked_function_inside_of_a_module_with_an_entry_wins():
    class Marked(nn.Module):
        @nn.compact
        def __call__(self, x):
            kernel = self.param("kernel", nn.initializers.lecun_normal(), (16, 24))
            x = amp.with_policy(BF16)(jnp.dot)(x, kernel)
            return nn.Dense(5, name="head")(x)

    assert_full(Marked(), Marked, {5}, {24, 5})


def test_a_jitted_helper_leaks_nothing_between_maps():
    net = Compact()
    variables = with_values(shapes_of(net, X))
    expected = jax.jit(Compact().apply)(variables, X)
    helper = jax.jit(lambda v, x: net.apply(v, x))
    # It is first used under a map.
    inside = amp.autocast(lambda v, x: helper(v, x), amp.PolicyMap("bf16", {"": "f16"}))
    assert jax.eval_shape(inside, variables, X).dtype == jnp.bfloat16
    for _ in range(2):
        for half, entries, reached in (
            ("bfloat16", {"first": F32}, {24, 16}),
            ("bfloat16", {"second": F32}, {32, 20}),
            ("bfloat16", {nn.Dense: F32}, WIDTHS),
            ("float16", {"first": F32}, {24, 16}),
            ("float16", {}, set()),
        ):
            policies = amp.PolicyMap(f"mixed_{half}", entries)
            inside = amp.autocast(lambda v, x: helper(v, x), policies)
            wanted = {width: F32 if width in reached else half for width in WIDTHS}
            assert by_width(inside, variables, X) == wanted
            assert set(by_width(helper, variables, X).values()) == {F32}
    np.testing.assert_array_equal(helper(variables, X), expected)


def test_a_helper_that_two_modules_call_is_told_apart_by_their_entries():
    helper = jax.jit(lambda h, w: h @ w)

    class Uses(nn.Module):
        @nn.compact
        def __call__(self, x):
            kernel = self.param("kernel", nn.initializers.lecun_normal(), (16, 16))
            return helper(x, kernel)

    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Uses(name="b")(Uses(name="a")(x))

    net = Two()
    variables = shapes_of(net, X)
    for glob, wanted in (("a", [F32, "bfloat16"]), ("b", ["bfloat16", F32])):
        apply = forward(net, amp.PolicyMap("mixed_bfloat16", {glob: F32}))
        assert products(apply, variables, X) == wanted


# Gradients


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(13, 16, name="embed")(tokens)
        h = nn.LayerNorm(name="norm_1")(x)
        mask = nn.make_causal_mask(tokens)
        x = x + nn.MultiHeadDotProductAttention(2, name="attn")(h, mask=mask)
        x = x + Block(24, 16, name="mlp")(nn.LayerNorm(name="norm_2")(x))
        return nn.Dense(13, name="head")(nn.RMSNorm(name="norm_3")(x))


TRANSFORMER_ENTRIES = {
    "several": {
        "head": F32,
        "attn/query": F32,
        re.compile("mlp/.*"): "mixed_float16",
        lambda info: info.name == "norm_2": F32,
        nn.Embed: "mixed_bfloat16",
    },
    "by class": {
        nn.LayerNorm: F32,
        Block: F32,
        nn.MultiHeadDotProductAttention: "mixed_float16",
    },
    "all but one": {"**": F32, "attn/**": "mixed_float16"},
}
TOKENS = jax.random.randint(KEY, (4, 7), 0, 13)


def transformer_loss(params, tokens):
    logits = nn.log_softmax(Transformer().apply(params, tokens[:, :-1]))
    chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)
    return -jnp.mean(chosen)


@functools.cache
def f32_gradients():
    params = with_values(shapes_of(Transformer(), TOKENS))
    return params, jax.jit(jax.value_and_grad(transformer_loss))(params, TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entries", "policy"),
    [
        ("several", "mixed_bfloat16"),
        ("by class", "mixed_float16"),
        ("all but one", "mixed_bfloat16"),
    ],
)
def test_gradients_of_a_transformer_block_are_those_of_f32(entries, policy):
    params, expected = f32_gradients()
    policies = amp.PolicyMap(policy, TRANSFORMER_ENTRIES[entries])
    loss = amp.autocast(transformer_loss, policies)
    found = jax.jit(jax.value_and_grad(loss))(params, TOKENS)
    assert dtypes_in(found) == {F32}
    # The coarsest half of the map decides.
    coarsest = "mixed_float16" if entries == "all but one" else "mixed_bfloat16"
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a, b) < ROUNDINGS * eps(coarsest)


def test_a_policy_of_f32_leaves_the_program_as_it_is():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.gelu(nn.LayerNorm()(nn.Dense(16)(x)))
            return nn.softmax(nn.Dense(4)(x))

    x = jnp.ones((2, 8))
    params = shapes_of(Model(), x)

    def loss(params, x):
        return jnp.sum(Model().apply(params, x)[:, 0])

    report = amp.explain(loss, "float32")(params, x)
    assert report.total.casts == 0
    assert report.total.saved == report.total.saved_without
    plain = jax.make_jaxpr(jax.grad(loss))(params, x)
    under = jax.make_jaxpr(jax.grad(amp.autocast(loss, "float32")))(params, x)
    operations = [[e.primitive.name for e in jaxpr.eqns] for jaxpr in (plain, under)]
    assert operations[0] == operations[1]
    assert (
        amp.explain(loss, "mixed_float16")(params, x).total.saved < report.total.saved
    )
