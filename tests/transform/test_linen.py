"""linen modules and a map of policies: which module computes in which dtype."""

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
from tests.programs import equations, products, results_of
from tests.rounding import POLICIES, ROUNDINGS, eps, half_of, one_policy, relative_error

F32 = "float32"
KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (4, 16))

each_policy = pytest.mark.parametrize("policy", POLICIES)
each_mode = pytest.mark.parametrize("train", [False, True])


def by_width(fn, *args):
    """The dtype of the operands of the matrix products that give so many features."""
    found = {}
    for eqn in equations(jax.make_jaxpr(fn)(*args)):
        if eqn.primitive.name == "dot_general":
            a, b = (v.aval.dtype.name for v in eqn.invars)
            width = eqn.outvars[0].aval.shape[-1]
            assert a == b == found.setdefault(width, a)
    return found


def forward(model, policies, **options):
    """The model under autocast, as a function of variables and inputs."""
    apply = amp.autocast(model.apply, policies)
    return lambda variables, *args: apply(variables, *args, **options)


def dtypes_in(tree):
    return {leaf.dtype.name for leaf in jax.tree.leaves(tree)}


def shapes_of(net, *args, **options):
    """The variables of a model, without their values."""
    return jax.eval_shape(functools.partial(net.init, **options), KEY, *args)


def variables_of(net, *args, **options):
    """Variables of a model with values; compiling an initialisation takes long."""
    random = np.random.default_rng(0)

    def value(path, leaf):
        if jnp.issubdtype(leaf.dtype, jnp.integer) or path[0].key == "cache":
            return jnp.zeros(leaf.shape, leaf.dtype)
        if path[-1].key in ("var", "scale"):
            return jnp.asarray(random.uniform(0.5, 1.5, leaf.shape), leaf.dtype)
        return jnp.asarray(random.normal(0, 0.3, leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(value, shapes_of(net, *args, **options))


# Modules that are told apart by their widths: a block gives `up` features, then `down`.


class Block(nn.Module):
    up: int
    down: int

    @nn.compact
    def __call__(self, x):
        # A ReLU that flips would move the gradients by more than roundings do.
        x = nn.silu(nn.Dense(self.up, name="up")(x))
        return nn.Dense(self.down, name="down")(x)


class WideBlock(Block):
    pass


class Compact(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = Block(24, 16, name="first")(x)
        x = WideBlock(32, 20, name="second")(x)
        return nn.Dense(5, name="head")(x)


class Setup(nn.Module):
    def setup(self):
        self.first = Block(24, 16)
        self.second = WideBlock(32, 20)
        self.head = nn.Dense(5)

    def __call__(self, x):
        return self.head(self.second(self.encode(x)))

    def encode(self, x):
        return self.first(x)


WIDTHS = {24, 16, 32, 20, 5}

# The widths of the modules that an entry for each pattern reaches.
REACHED = {
    "class": (Block, {24, 16, 32, 20}),
    "subclass": (WideBlock, {32, 20}),
    "base class": (nn.Module, WIDTHS),
    "a class of linen": (nn.Dense, WIDTHS),
    "name": ("head", {5}),
    "block by name": ("first", {24, 16}),
    "path": ("second/down", {20}),
    "star": ("*/up", {24, 32}),
    "question mark": ("firs?", {24, 16}),
    "set": ("[a-f]irst/[t-v]p", {24}),
    "two stars first": ("**/up", {24, 32}),
    "two stars last": ("second/**", {32, 20}),
    "two stars": ("**", WIDTHS),
    "two stars and a top-level name": ("**/head", {5}),
    "outermost": ("", WIDTHS),
    "regex": (re.compile("(first|second)/down"), {16, 20}),
    "regex of a whole path": (re.compile(".*p"), {24, 32}),
    "predicate of the path": (lambda info: info.path[:1] == ("second",), {32, 20}),
    "predicate of the class": (lambda info: info.cls is Block, {24, 16}),
    "predicate of the name": (lambda info: info.name == "down", {16, 20}),
    "predicate of the outermost": (lambda info: info.name is None, WIDTHS),
    "predicate of the method": (
        lambda info: info.method == "__call__" and info.cls is nn.Dense,
        WIDTHS,
    ),
}


def expected_dtypes(reached, inside, outside, widths=WIDTHS):
    return {width: inside if width in reached else outside for width in widths}


@functools.cache
def shapes_of_net(model):
    return shapes_of(model(), X)


@pytest.mark.parametrize(
    ("model", "policy"), [(Compact, "mixed_bfloat16"), (Setup, "mixed_float16")]
)
@pytest.mark.parametrize("pattern", sorted(REACHED))
def test_an_entry_reaches_the_modules_that_it_matches(pattern, model, policy):
    pattern, reached = REACHED[pattern]
    half, net = half_of(policy), model()
    variables = shapes_of_net(model)
    found = by_width(forward(net, amp.PolicyMap(policy, {pattern: F32})), variables, X)
    assert found == expected_dtypes(reached, F32, half)
    found = by_width(forward(net, amp.PolicyMap(F32, {pattern: policy})), variables, X)
    assert found == expected_dtypes(reached, half, F32)


@one_policy
@pytest.mark.parametrize("model", [Compact, Setup])
def test_several_entries_each_reach_their_modules(model, policy):
    half, net = half_of(policy), model()
    (other,) = set(map(half_of, POLICIES)) - {half}
    policies = amp.PolicyMap(
        policy, {"first": F32, WideBlock: f"mixed_{other}", re.compile(".*/down"): F32}
    )
    found = by_width(forward(net, policies), shapes_of(net, X), X)
    assert found == {24: F32, 16: F32, 32: other, 20: F32, 5: half}


@pytest.mark.parametrize("model", [Compact, Setup])
def test_backward_products_have_the_policy_of_their_module(model):
    net = model()
    variables = shapes_of(net, X)
    apply = forward(net, amp.PolicyMap("mixed_bfloat16", {"second": F32}))
    found = products(jax.grad(lambda v: jnp.sum(jnp.square(apply(v, X)))), variables)
    # Three products for each of five layers, but the gradient of the inputs.
    assert len(found) == 14 and found.count(F32) == 6


def test_a_map_without_entries_is_its_default():
    net = Compact()
    variables = shapes_of(net, X)
    for policy in (*POLICIES, F32, "bf16"):
        made = [
            str(jax.make_jaxpr(forward(net, each))(variables, X))
            for each in (policy, amp.PolicyMap(policy), amp.PolicyMap(policy, {}))
        ]
        assert made[0] == made[1] == made[2]


@each_policy
def test_the_value_under_a_map_is_that_of_f32(policy):
    net = Setup()
    variables = variables_of(net, X)
    policies = amp.PolicyMap(policy, {"first": F32, WideBlock: "mixed_bfloat16"})
    found = jax.jit(forward(net, policies))(variables, X)
    assert found.dtype == jnp.float32
    roundings = ROUNDINGS * eps("mixed_bfloat16")
    assert relative_error(found, jax.jit(net.apply)(variables, X)) < roundings


def test_everything_in_f32_is_the_model_itself():
    net = Compact()
    variables = variables_of(net, X)
    found = jax.jit(forward(net, amp.PolicyMap("mixed_float16", {"": F32})))
    expected = jax.jit(net.apply)(variables, X)
    np.testing.assert_array_equal(found(variables, X), expected)


# Names


@one_policy
def test_a_name_does_not_hide_the_class(policy):
    class Named(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = Block(24, 16, name="LayerNorm_0")(x)
            x = nn.LayerNorm(name="Dense_7")(x)
            return nn.Dense(5, name="Block_3")(x)

    net = Named()
    variables = shapes_of(net, X)
    half = half_of(policy)
    for pattern, reached in (
        (Block, {24, 16}),
        ("Block_3", {5}),
        ("LayerNorm_0", {24, 16}),
        (nn.LayerNorm, set()),
    ):
        apply = forward(net, amp.PolicyMap(policy, {pattern: F32}))
        wanted = expected_dtypes(reached, F32, half, {24, 16, 5})
        assert by_width(apply, variables, X) == wanted
    # What is named like a norm is none, and the norm is one under any name.
    plain = forward(net, policy)
    assert set(by_width(plain, variables, X).values()) == {half}
    assert results_of(plain, variables, X, primitive="rsqrt") == [F32]


@one_policy
def test_automatic_names_are_paths(policy):
    net = nn.Sequential([nn.Dense(24), nn.relu, nn.Dense(16), Block(32, 20)])
    variables = shapes_of(net, X)
    for glob, reached in (
        ("layers_0", {24}),
        ("layers_2", {16}),
        ("layers_3/up", {32}),
        ("layers_[13]/*", {32, 20}),
        ("layers_*", {24, 16, 32, 20}),
    ):
        apply = forward(net, amp.PolicyMap(policy, {glob: F32}))
        wanted = expected_dtypes(reached, F32, half_of(policy), {24, 16, 32, 20})
        assert by_width(apply, variables, X) == wanted


@one_policy
def test_lists_and_dictionaries_of_modules_have_paths(policy):
    class Lists(nn.Module):
        def setup(self):
            self.blocks = [nn.Dense(24), nn.Dense(16)]
            self.heads = {"left": nn.Dense(20), "right": nn.Dense(5)}

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
            return self.heads["left"](x), self.heads["right"](x)

    net = Lists()
    variables = shapes_of(net, X)
    assert set(variables["params"]) == {
        *("blocks_0", "blocks_1", "heads_left", "heads_right")
    }
    policies = amp.PolicyMap(policy, {"blocks_1": F32, "heads_l*": F32})
    found = by_width(forward(net, policies), variables, X)
    half = half_of(policy)
    assert found == {24: half, 16: F32, 20: F32, 5: half}


# Methods


@one_policy
@pytest.mark.parametrize(
    "method",
    [
        "encode",
        Setup.encode,
        lambda net, x: net.encode(x),
        lambda net, x: net.first(x),
    ],
    ids=["text", "function", "lambda of a method", "lambda of a module"],
)
def test_any_method_can_be_applied(method, policy):
    net = Setup()
    variables = shapes_of(net, X)
    half = half_of(policy)
    for entries, wanted in (
        ({"first": F32}, {24: F32, 16: F32}),
        ({"**/up": F32}, {24: F32, 16: half}),
        ({Block: F32, "first/down": policy}, {24: F32, 16: half}),
        ({lambda info: info.name == "down": F32}, {24: half, 16: F32}),
    ):
        apply = forward(net, amp.PolicyMap(policy, entries), method=method)
        assert by_width(apply, variables, X) == wanted


@one_policy
def test_a_predicate_can_tell_methods_apart(policy):
    seen = set()

    def encodes(info):
        seen.add((info.path, info.method))
        return info.method == "encode"

    net = Setup()
    variables = shapes_of(net, X)
    found = by_width(forward(net, amp.PolicyMap(policy, {encodes: F32})), variables, X)
    assert found == expected_dtypes({24, 16}, F32, half_of(policy))
    assert {((), "__call__"), ((), "encode"), (("first",), "__call__")} <= seen
    assert {method for _, method in seen} == {"__call__", "encode"}
    for method in ("encode", Setup.encode):
        apply = forward(net, amp.PolicyMap(policy, {encodes: F32}), method=method)
        assert by_width(apply, variables, X) == {24: F32, 16: F32}


@one_policy
def test_methods_of_a_bound_module_have_its_policy(policy):
    net = Setup()
    variables = shapes_of(net, X)

    def apply(variables, x):
        bound = net.bind(variables)
        return bound.head(bound.second(bound.encode(x)))

    fn = amp.autocast(apply, amp.PolicyMap(policy, {"second": F32}))
    wanted = expected_dtypes({32, 20}, F32, half_of(policy))
    assert by_width(fn, variables, X) == wanted


# Lifted transformations


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            lambda block, x, _: (block(x), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
        )
        x, _ = layers(Block(24, 16, name="layers"), x, None)
        return nn.Dense(5, name="head")(x)


class Carrying(Block):
    def __call__(self, x, _):
        return super().__call__(x), None


class ScannedClass(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            Carrying,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
        )
        x, _ = layers(24, 16, name="layers")(x, None)
        return nn.Dense(5, name="head")(x)


class Remat(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.remat(Block)(24, 16, name="layers")(x)
        return nn.Dense(5, name="head")(x)


class Vmapped(nn.Module):
    @nn.compact
    def __call__(self, x):
        block = nn.vmap(
            Block,
            in_axes=0,
            variable_axes={"params": 0},
            split_rngs={"params": True},
        )
        x = block(24, 16, name="layers")(x)
        return nn.Dense(5, name="head")(x)


class Jitted(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.jit(Block)(24, 16, name="layers")(x)
        return nn.Dense(5, name="head")(x)


class JittedMethod(nn.Module):
    def setup(self):
        self.layers = Block(24, 16)
        self.head = nn.Dense(5)

    @nn.jit
    def __call__(self, x):
        return self.head(self.layers(x))


class RematScanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            nn.remat(Carrying, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
        )
        x, _ = layers(24, 16, name="layers")(x, None)
        return nn.Dense(5, name="head")(x)


class While(nn.Module):
    @nn.compact
    def __call__(self, x):
        block = Block(24, 16, name="layers")
        x = block(x)
        if not self.is_initializing():
            _, x = nn.while_loop(
                lambda _, carry: carry[0] < 2,
                lambda block, carry: (carry[0] + 1, block(carry[1])),
                block,
                (0, x),
            )
        return nn.Dense(5, name="head")(x)


class Cond(nn.Module):
    @nn.compact
    def __call__(self, x):
        block = Block(24, 16, name="layers")
        if self.is_initializing():
            block(x)
        else:
            x = nn.cond(
                x[0, 0] < 9, lambda block, x: block(x), lambda _, x: x + 1, block, x
            )
        return nn.Dense(5, name="head")(x)


class Switch(nn.Module):
    @nn.compact
    def __call__(self, x):
        block = Block(24, 16, name="layers")
        branches = [
            lambda block, x: block(x),
            lambda block, x: 2 * block(x),
            lambda _, x: x + 1,
        ]
        if self.is_initializing():
            block(x)
        else:
            x = nn.switch((x[0, 0] < 9).astype(jnp.int32), branches, block, x)
        return nn.Dense(5, name="head")(x)


LIFTED = {
    each.__name__: each
    for each in (
        *(Scanned, ScannedClass, Remat, Vmapped, Jitted, JittedMethod),
        *(RematScanned, While, Cond, Switch),
    )
}

LIFTED_ENTRIES = {
    "class": (Block, {24, 16}),
    "name": ("layers", {24, 16}),
    "path of a child": ("layers/up", {24}),
    "glob": ("**/down", {16}),
    "regex": (re.compile("layers/u."), {24}),
    "predicate": (lambda info: info.path == ("layers", "down"), {16}),
    "outside": ("head", {5}),
}


@one_policy
@pytest.mark.parametrize("model", sorted(LIFTED))
def test_lifted_modules_are_reached_as_others_are(model, policy):
    net = LIFTED[model]()
    variables = shapes_of(net, X)
    half = half_of(policy)
    for name, (pattern, reached) in LIFTED_ENTRIES.items():
        if half == "float16" and name not in ("class", "path of a child"):
            continue
        apply = forward(net, amp.PolicyMap(policy, {pattern: F32}))
        wanted = expected_dtypes(reached, F32, half, {24, 16, 5})
        assert by_width(apply, variables, X) == wanted, name


@pytest.mark.parametrize("model", ["Cond", "Jitted", "RematScanned", "Vmapped"])
def test_gradients_of_lifted_modules_are_those_of_f32(model):
    net = LIFTED[model]()
    variables = variables_of(net, X)

    def loss(apply):
        return lambda variables: jnp.mean(jnp.square(apply(variables, X)))

    policies = amp.PolicyMap("mixed_bfloat16", {"layers/up": F32})
    found = jax.jit(jax.value_and_grad(loss(forward(net, policies))))(variables)
    expected = jax.jit(jax.value_and_grad(loss(net.apply)))(variables)
    assert dtypes_in(found) == {F32}
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a, b) < ROUNDINGS * eps("mixed_bfloat16")


def test_the_value_of_a_while_loop_over_a_module_is_that_of_f32():
    net = While()
    variables = variables_of(net, X)
    apply = forward(net, amp.PolicyMap("mixed_bfloat16", {"layers/up": F32}))
    found, expected = (jax.jit(f)(variables, X) for f in (apply, net.apply))
    assert relative_error(found, expected) < ROUNDINGS * eps("mixed_bfloat16")


@one_policy
def test_two_modules_of_one_jitted_class_are_told_apart_by_path(policy):
    jitted = nn.jit(Block)

    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jitted(16, 16, name="b")(jitted(16, 16, name="a")(x))

    net, half = Two(), half_of(policy)
    variables = shapes_of(net, X)
    for pattern, wanted in (
        ("a", [F32, F32, half, half]),
        ("b", [half, half, F32, F32]),
        ("a/up", [F32, half, half, half]),
        ("b/down", [half, half, half, F32]),
        (re.compile("b/.*"), [half, half, F32, F32]),
        (lambda info: info.path == ("b", "up"), [half, half, F32, half]),
        (Block, [F32] * 4),
        ("**/down", [half, F32, half, F32]),
    ):
        apply = forward(net, amp.PolicyMap(policy, {pattern: F32}))
        assert products(apply, variables, X) == wanted, pattern
        assert products(jax.jit(apply), variables, X) == wanted, pattern


@one_policy
def test_two_modules_with_a_jitted_method_are_told_apart_by_path(policy):
    class JittedBlock(nn.Module):
        @nn.jit
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Dense(16, name="up")(x))
            return nn.Dense(16, name="down")(x)

    class Two(nn.Module):
        def setup(self):
            self.a, self.b = JittedBlock(), JittedBlock()

        def __call__(self, x):
            return self.b(self.a(x))

    net, half = Two(), half_of(policy)
    variables = shapes_of(net, X)
    for pattern, wanted in (
        ("a", [F32, F32, half, half]),
        ("b", [half, half, F32, F32]),
        ("a/up", [F32, half, half, half]),
        ("b/down", [half, half, half, F32]),
        (JittedBlock, [F32] * 4),
    ):
        apply = forward(net, amp.PolicyMap(policy, {pattern: F32}))
        assert products(apply, variables, X) == wanted, pattern


def test_a_jitted_block_in_two_parents_is_told_apart_by_path():
    jitted = nn.jit(Block)

    class Parent(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jitted(16, 16, name="inner")(x)

    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Parent(name="b")(Parent(name="a")(x))

    net = Two()
    variables = shapes_of(net, X)
    half = "bfloat16"
    for glob, wanted in (
        ("a/inner", [F32, F32, half, half]),
        ("b", [half, half, F32, F32]),
        ("b/inner/up", [half, half, F32, half]),
    ):
        apply = forward(net, amp.PolicyMap("mixed_bfloat16", {glob: F32}))
        assert products(apply, variables, X) == wanted, glob


# Shared modules


@one_policy
def test_modules_that_share_a_scope_have_one_path(policy):
    class Sharing(nn.Module):
        def setup(self):
            self.inner = Block(24, 16)
            nn.share_scope(self, self.inner)
            self.head = nn.Dense(5)

        def __call__(self, x):
            return self.head(self.inner(x))

    net, half = Sharing(), half_of(policy)
    variables = shapes_of(net, X)
    assert set(variables["params"]) == {"up", "down", "head"}
    for pattern, reached in (
        (Block, {24, 16}),
        ("up", {24}),
        ("down", {16}),
        ("head", {5}),
        ("", {24, 16, 5}),
    ):
        apply = forward(net, amp.PolicyMap(policy, {pattern: F32}))
        wanted = expected_dtypes(reached, F32, half, {24, 16, 5})
        assert by_width(apply, variables, X) == wanted, pattern


@one_policy
def test_a_module_that_is_called_twice_has_its_policy_both_times(policy):
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            shared = nn.Dense(16, name="shared")
            return nn.Dense(5, name="head")(shared(nn.relu(shared(x))))

    net, half = Twice(), half_of(policy)
    variables = shapes_of(net, X)
    apply = forward(net, amp.PolicyMap(policy, {"shared": F32}))
    assert products(apply, variables, X) == [F32, F32, half]


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


@one_policy
def test_a_module_shared_by_two_parents_has_the_policy_of_who_calls_it(policy):
    net, half = Users(), half_of(policy)
    variables = shapes_of(net, X)
    assert set(variables["params"]) == {"shared"}
    for entries, wanted in (
        ({"a": F32}, [F32, half]),
        ({"b": F32}, [half, F32]),
        ({User: F32}, [F32, F32]),
        ({"shared": F32}, [F32, F32]),
        ({"shared": F32, "a": policy}, [F32, F32]),
        ({"a": F32, "shared": policy}, [half, half]),
    ):
        apply = forward(net, amp.PolicyMap(policy, entries))
        assert products(apply, variables, X) == wanted, entries


class Tied(nn.Module):
    def setup(self):
        self.embed = nn.Embed(11, 16)
        self.block = Block(24, 16)

    def __call__(self, tokens):
        return self.embed.attend(self.block(self.embed(tokens)))


@each_policy
def test_a_tied_embedding_is_one_module_with_two_methods(policy):
    net, half = Tied(), half_of(policy)
    tokens = jnp.arange(6)
    variables = shapes_of(net, tokens)
    for pattern, wanted in (
        (nn.Embed, {24: half, 16: half, 11: F32}),
        ("embed", {24: half, 16: half, 11: F32}),
        (lambda info: info.method == "attend", {24: half, 16: half, 11: F32}),
        (lambda info: info.cls is nn.Embed and info.method == "__call__", None),
        ("block", {24: F32, 16: F32, 11: half}),
    ):
        apply = forward(net, amp.PolicyMap(policy, {pattern: F32}))
        found = by_width(apply, variables, tokens)
        assert found == (wanted or {24: half, 16: half, 11: half}), pattern


@each_policy
def test_gradients_of_a_tied_embedding_sum_both_uses(policy):
    net, tokens = Tied(), jnp.arange(6)
    variables = variables_of(net, tokens)

    def loss(apply):
        return lambda v: jnp.mean(jnp.square(apply(v, tokens)))

    apply = forward(net, amp.PolicyMap(policy, {lambda i: i.method == "attend": F32}))
    found = jax.jit(jax.grad(loss(apply)))(variables)
    expected = jax.jit(jax.grad(loss(net.apply)))(variables)
    assert dtypes_in(found) == {F32}
    assert relative_error(found, expected) < ROUNDINGS * eps(policy)


# Recurrent networks and caches


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.RNN(nn.LSTMCell(12), name="rnn")(nn.Dense(16, name="in")(x))
        return nn.Dense(5, name="head")(x)


@each_policy
def test_the_cell_of_a_recurrent_network_is_a_module(policy):
    net, half = Recurrent(), half_of(policy)
    x = jax.random.normal(KEY, (2, 3, 8))
    variables = shapes_of(net, x)
    # linen gives a cell that is made in the call of a model to the model.
    assert "LSTMCell_0" in variables["params"]
    for pattern in (
        *("rnn", "LSTMCell_0", nn.LSTMCell, nn.RNN),
        *(re.compile(".*Cell_0"), lambda info: "Cell" in info.cls.__name__),
    ):
        apply = forward(net, amp.PolicyMap(policy, {pattern: F32}))
        found = by_width(apply, variables, x)
        assert (found.pop(16), found.pop(5)) == (half, half), pattern
        assert set(found.values()) == {F32}, pattern
    apply = forward(net, amp.PolicyMap(F32, {nn.LSTMCell: policy}))
    found = by_width(apply, variables, x)
    assert (found.pop(16), found.pop(5)) == (F32, F32)
    assert set(found.values()) == {half}
    alone = nn.RNN(nn.LSTMCell(12))
    variables = variables_of(alone, x)
    apply = forward(alone, amp.PolicyMap(F32, {"cell": policy}))
    assert set(by_width(apply, variables, x).values()) == {half}
    found, expected = (jax.jit(f)(variables, x) for f in (apply, alone.apply))
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
    variables = variables_of(net, jnp.zeros((2, STEPS, 16)))
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


@one_policy
@pytest.mark.parametrize("made", sorted(DECODED))
def test_a_decoding_step_keeps_the_dtypes_of_its_cache(made, policy):
    net, variables, _ = decoded()
    policies = DECODED[made](policy)
    apply = forward(net, policies, mutable=["cache"])
    y, written = jax.eval_shape(apply, variables, SEQUENCE[0])
    assert y.dtype == policies.default.output_dtype
    kept = jax.tree.map(
        lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype),
        *(written["cache"], variables["cache"]),
    )
    assert jax.tree.leaves(kept) == [True] * 3


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


@pytest.mark.parametrize("policy", [*POLICIES, "bf16", "f16"])
def test_what_is_sown_keeps_its_dtype(policy):
    net = Sowing()
    variables = variables_of(net, X)
    policies = amp.PolicyMap(policy, {"head": policy})
    apply = jax.jit(forward(net, policies, mutable=["intermediates"]))
    expected, written = net.apply(variables, X, mutable=["intermediates"])
    found, state = apply(variables, X)
    assert found.dtype == policies.default.output_dtype
    (h,), (rows,) = state["intermediates"]["h"], state["intermediates"]["rows"]
    assert h.dtype == jnp.float32 and rows.dtype == jnp.int32
    assert relative_error(h, written["intermediates"]["h"][0]) < ROUNDINGS * eps(policy)
    assert relative_error(found, expected) < ROUNDINGS * eps(policy)


@pytest.mark.parametrize("policy", [*POLICIES, "bf16", "f16"])
def test_captured_intermediates_keep_their_dtype(policy):
    net = Sowing()
    apply = forward(net, policy, capture_intermediates=True, mutable=True)
    y, written = jax.eval_shape(apply, shapes_of(net, X), X)
    assert y.dtype == amp.get_policy(policy).output_dtype
    assert dtypes_in(written["intermediates"]) == {F32, "int32"}
    assert set(written["intermediates"]) == {"h", "rows", "up", "head", "__call__"}


class Statistics(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(not train, name="norm")(nn.Dense(24, name="up")(x))
        return nn.Dense(5, name="head")(jnp.tanh(x))


@each_mode
@pytest.mark.parametrize("policy", [*POLICIES, "bf16", "f16"])
@pytest.mark.parametrize(
    "entries", [{}, {"norm": "bf16"}, {nn.BatchNorm: "f16"}, {"**": "mixed_float16"}]
)
def test_batch_statistics_are_f32_under_every_policy(entries, policy, train):
    net, output = Statistics(), amp.get_policy(policy).output_dtype
    variables = shapes_of(net, X, train=False)
    apply = amp.autocast(net.apply, amp.PolicyMap(policy, entries))
    fn = functools.partial(apply, train=train, mutable=["batch_stats"])
    found, written = jax.eval_shape(fn, variables, X)
    assert found.dtype == output
    assert dtypes_in(written) == {F32} and len(jax.tree.leaves(written)) == 2
    frozen = jax.eval_shape(functools.partial(apply, train=False), variables, X)
    assert frozen.dtype == output


@pytest.mark.parametrize("policy", [*POLICIES, "bf16"])
def test_batch_statistics_are_those_of_f32(policy):
    net = Statistics()
    variables = variables_of(net, X, train=False)

    def both(apply):
        def modes(variables, x):
            y, written = apply(variables, x, True, mutable=["batch_stats"])
            return y, written, apply({**variables, **written}, x, False)

        return jax.jit(modes)

    expected = both(net.apply)(variables, X)
    found = both(amp.autocast(net.apply, policy))(variables, X)
    assert dtypes_in(found[1]) == {F32}
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a, b) < ROUNDINGS * eps(policy)


@each_policy
def test_dropout_drops_what_it_drops_without_autocast(policy):
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
    expected = Plain().init(KEY, X)
    assert jax.tree.map(jnp.shape, variables) == jax.tree.map(jnp.shape, expected)
    assert dtypes_in(variables) == {F32}
    assert by_width(net.apply, variables, X) == {8: "float16"}
    error = relative_error(net.apply(variables, X), Plain().apply(variables, X))
    assert error < ROUNDINGS * eps("float16")


@pytest.mark.parametrize("mark", [amp.full_precision, amp.with_policy(F32)])
def test_a_mark_may_stand_above_compact(mark):
    net = decorated(mark, nn.compact)
    variables = net.init(KEY, X)
    assert by_width(amp.autocast(net.apply), variables, X) == {8: F32}


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
    variables = net.init(KEY, X, False)
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


class NnxBlock(nnx.Module):
    def __init__(self, features, *, rngs):
        self.up = nnx.Linear(features, 24, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(24, 20, rngs=rngs)])

    def __call__(self, x):
        return self.layers[0](nnx.relu(self.up(x)))


class Bridged(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16, name="in")(x)
        x = nnx.bridge.ToLinen(NnxBlock, args=(16,), name="wrapped")(x)
        return nn.Dense(5, name="head")(x)


@each_policy
def test_paths_go_on_into_an_nnx_module_in_a_linen_module(policy):
    net = Bridged()
    variables = shapes_of(net, X)
    for pattern, reached in (
        ("wrapped", {24, 20}),
        ("wrapped/up", {24}),
        ("wrapped/layers/0", {20}),
        ("**/layers/*", {20}),
        (NnxBlock, {24, 20}),
        (nnx.Linear, {24, 20}),
        (nnx.bridge.ToLinen, {24, 20}),
        (re.compile("wrapped/.*"), {24, 20}),
        (lambda info: info.path == ("wrapped", "up"), {24}),
        (nn.Dense, {16, 5}),
    ):
        apply = forward(net, amp.PolicyMap(policy, {pattern: F32}))
        wanted = expected_dtypes(reached, F32, half_of(policy), {16, 24, 20, 5})
        assert by_width(apply, variables, X) == wanted, pattern
    variables = variables_of(net, X)
    found = jax.jit(forward(net, amp.PolicyMap(policy, {"wrapped/up": F32})))
    expected = jax.jit(net.apply)(variables, X)
    assert relative_error(found(variables, X), expected) < ROUNDINGS * eps(policy)


# Inheritance


@one_policy
@pytest.mark.parametrize("reverse", [False, True])
def test_a_modules_own_match_beats_what_it_inherits(reverse, policy):
    half, net = half_of(policy), Compact()
    variables = shapes_of(net, X)
    for parent, child, wanted in (
        ("first", "first/up", {24: half, 16: F32, 32: half, 20: half, 5: half}),
        (Block, "**/down", {24: F32, 16: half, 32: F32, 20: half, 5: half}),
        (re.compile("second"), nn.Dense, None),
        ("", WideBlock, {24: F32, 16: F32, 32: half, 20: half, 5: F32}),
        ("", "second/up", {24: F32, 16: F32, 32: half, 20: F32, 5: F32}),
    ):
        entries = [(parent, F32), (child, policy)]
        policies = amp.PolicyMap(policy, entries[::-1] if reverse else entries)
        found = by_width(forward(net, policies), variables, X)
        assert found == (wanted or dict.fromkeys(WIDTHS, half)), (parent, child)


@one_policy
def test_among_the_entries_of_a_module_the_latest_wins(policy):
    half, net = half_of(policy), Compact()
    variables = shapes_of(net, X)
    entries = [("**/up", F32), (nn.Dense, policy)]
    found = by_width(forward(net, amp.PolicyMap(policy, entries)), variables, X)
    assert set(found.values()) == {half}
    policies = amp.PolicyMap(policy, entries[::-1])
    found = by_width(forward(net, policies), variables, X)
    assert found == expected_dtypes({24, 32}, F32, half)


@one_policy
def test_grandchildren_inherit_and_siblings_do_not(policy):
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(7, name="last")(Compact(name="net")(x))

    half, net = half_of(policy), Outer()
    variables = shapes_of(net, X)
    policies = amp.PolicyMap(policy, {"net": F32, "net/second": policy})
    found = by_width(forward(net, policies), variables, X)
    assert found == {24: F32, 16: F32, 32: half, 20: half, 5: F32, 7: half}


# Norm layers


class Tail(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(5, name="head")(jnp.tanh(x))


class InNorm(nn.Module):
    """A dense layer, a norm, and an activation before a dense layer."""

    norm: str
    train: bool = False

    @nn.compact
    def __call__(self, x):
        dense = nn.Dense(24, name="up")
        if self.norm == "WeightNorm":
            x = nn.WeightNorm(dense, name="norm")(x)
        elif self.norm == "SpectralNorm":
            x = nn.SpectralNorm(dense, name="norm")(x, update_stats=self.train)
        else:
            options = {}
            if self.norm == "BatchNorm":
                options["use_running_average"] = not self.train
            if self.norm == "GroupNorm":
                options["num_groups"] = 4
            x = getattr(nn, self.norm)(name="norm", **options)(dense(x))
        return Tail(name="tail")(x)


# For each norm, an operation that only it has.
NORMS = {
    "BatchNorm": "rsqrt",
    "LayerNorm": "rsqrt",
    "GroupNorm": "rsqrt",
    "RMSNorm": "rsqrt",
    "InstanceNorm": "rsqrt",
    "WeightNorm": "reduce_sum",
    "SpectralNorm": "div",
}
IMAGES = jax.random.normal(KEY, (4, 6, 16))

each_norm = pytest.mark.parametrize("norm", sorted(NORMS))


def results_in(fn, *args):
    """The dtypes of the float results of each primitive."""
    found = {}
    for eqn in equations(jax.make_jaxpr(fn)(*args)):
        dtype = eqn.outvars[0].aval.dtype if eqn.outvars else None
        if dtype is not None and jnp.issubdtype(dtype, jnp.floating):
            found.setdefault(eqn.primitive.name, []).append(dtype.name)
    return found


# How the policy reaches the norm and its neighbours.
REACHING = {
    "default": (lambda half: amp.PolicyMap(half)),
    "path": (lambda half: amp.PolicyMap(F32, {"up": half, "tail": half, "norm": half})),
    "glob of all": (lambda half: amp.PolicyMap(F32, {"**": half})),
    "class of all": (lambda half: amp.PolicyMap(F32, {nn.Module: half})),
    "regex and predicate": (
        lambda half: amp.PolicyMap(
            F32, {re.compile("up|tail"): half, lambda info: info.name == "norm": half}
        )
    ),
    "parent": (lambda half: amp.PolicyMap(F32, {InNorm: half})),
}


@one_policy
@each_norm
@each_mode
def test_a_norm_computes_in_f32_and_hands_on_half(norm, train, policy):
    net, half = InNorm(norm, train), half_of(policy)
    variables = shapes_of(net, IMAGES)
    for name, made in REACHING.items():
        if half == "float16" and name not in ("default", "path"):
            continue
        apply = forward(net, made(policy), mutable=["batch_stats"])
        found = results_in(apply, variables, IMAGES)
        assert set(found[NORMS[norm]]) == {F32}, name
        for primitive in ("rsqrt", "reduce_sum", "sub", "div", "square", "mul"):
            assert set(found.get(primitive, ())) <= {F32}, (name, primitive)
        # What follows in half was handed on in half.
        assert found["tanh"] == [half], name
        # Spectral norm's power iteration is matrix products too, those of the norm.
        assert found["dot_general"].count(half) == 2, name
        if norm != "SpectralNorm":
            assert len(found["dot_general"]) == 2, name


@each_norm
def test_a_model_with_a_norm_gives_the_values_of_f32(norm):
    variables = variables_of(InNorm(norm), IMAGES)

    def both(policy, **options):
        def modes(variables, x):
            models = [InNorm(norm, train) for train in (True, False)]
            applied = [amp.autocast(net.apply, policy, **options) for net in models]
            return [apply(variables, x, mutable=["batch_stats"]) for apply in applied]

        return jax.jit(modes)(variables, IMAGES)

    policy = amp.PolicyMap("mixed_bfloat16", {"norm": "mixed_float16"})
    found, expected = both(policy), both(policy, enabled=False)
    assert dtypes_in(found) == {F32}
    for (y, stats), (wanted_y, wanted_stats) in zip(found, expected, strict=True):
        assert relative_error(y, wanted_y) < ROUNDINGS * eps("mixed_bfloat16")
        if jax.tree.leaves(wanted_stats):
            error = relative_error(stats, wanted_stats)
            assert error < ROUNDINGS * eps("mixed_bfloat16")


@pytest.mark.parametrize("norm", ["BatchNorm", "GroupNorm", "LayerNorm", "RMSNorm"])
@each_mode
def test_an_entry_of_a_norm_class_is_taken_as_written(norm, train):
    net, cls = InNorm(norm, train), getattr(nn, norm)
    variables = shapes_of(net, IMAGES)

    def results(entries):
        policies = amp.PolicyMap("mixed_bfloat16", entries)
        apply = forward(net, policies, mutable=["batch_stats"])
        return results_in(apply, variables, IMAGES)

    # Its output dtype is that of the entry, no compute dtype.
    assert results({cls: "p=f32,c=f32,o=bf16"})["tanh"] == ["bfloat16"]
    assert results({cls: F32})["tanh"] == [F32]
    assert results({cls: "c=f16,o=f32"})["tanh"] == [F32]
    assert results({"norm": "c=bf16,o=f32"})["tanh"] == ["bfloat16"]
    assert results({"norm": F32})["tanh"] == [F32]
    # And so is its compute dtype, where no mean over values asks for f32.
    if norm == "BatchNorm" and not train:
        assert "bfloat16" in results({cls: "bf16"})["mul"]
    assert set(results({"norm": "bf16"})["mul"]) == {F32}


def test_a_subclass_of_a_norm_is_a_norm():
    class MyNorm(nn.LayerNorm):
        pass

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = MyNorm(name="mine")(nn.Dense(24, name="up")(x))
            return nn.Dense(5, name="head")(jnp.tanh(x))

    net = Net()
    variables = shapes_of(net, X)
    for entries, mul, tanh in (
        ({}, {F32}, ["float16"]),
        ({"mine": "f16"}, {F32}, ["float16"]),
        ({MyNorm: "mixed_float16"}, None, [F32]),
        ({nn.LayerNorm: "mixed_float16"}, None, [F32]),
    ):
        apply = forward(net, amp.PolicyMap("mixed_float16", entries))
        assert results_of(apply, variables, X, primitive="tanh") == tanh
        if mul is not None:
            assert set(results_of(apply, variables, X, primitive="mul")) == mul


# Half-precision parameters


HALF_NORMS = ("BatchNorm", "GroupNorm", "LayerNorm", "RMSNorm")


def losses_of(policy, norm):
    """The gradients and outputs of both modes, train and eval, as one program."""

    def modes(variables, x):
        def loss(variables, train):
            apply = forward(InNorm(norm, train), policy, mutable=["batch_stats"])
            y, written = apply(variables, x)
            return jnp.mean(jnp.square(y)), (y, written)

        gradient = jax.grad(loss, has_aux=True)
        return {train: gradient(variables, train) for train in (True, False)}

    return modes


@functools.cache
def f32_losses(norm):
    variables = variables_of(InNorm(norm), IMAGES)
    return variables, jax.jit(losses_of(F32, norm))(variables, IMAGES)


@pytest.mark.parametrize(
    ("norm", "half"),
    [
        *((norm, "bf16") for norm in HALF_NORMS),
        ("BatchNorm", "f16"),
        ("RMSNorm", "f16"),
    ],
)
def test_half_parameters_work_in_train_and_eval(norm, half):
    policy = amp.get_policy(f"p={half},c={half},o=f32")
    variables, expected = f32_losses(norm)
    cast = amp.cast_params(variables, policy)
    assert dtypes_in(cast["params"]["norm"]) == {F32}
    assert dtypes_in(cast["params"]["up"]) == {policy.compute_dtype.name}
    # linen's layers promote f32 inputs and half parameters by themselves.
    with jax.numpy_dtype_promotion("standard"):
        found = jax.jit(losses_of(policy, norm))(cast, IMAGES)
    roundings = ROUNDINGS * eps(policy)
    for train in (True, False):
        grads, (y, stats) = found[train]
        wanted_grads, (wanted_y, wanted_stats) = expected[train]
        assert y.dtype == jnp.float32
        assert relative_error(y, wanted_y) < roundings
        if norm == "BatchNorm":
            assert dtypes_in(stats) == {F32}
            assert relative_error(stats, wanted_stats) < roundings
        same = jax.tree.map(lambda g, p: g.dtype == p.dtype, grads, cast)
        assert all(jax.tree.leaves(same))
        grads = amp.cast_to_full(grads)["params"]
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
        assert relative_error(grads, wanted_grads["params"]) < 2 * roundings


@pytest.mark.parametrize("inputs", [F32, "half"])
@pytest.mark.parametrize("output", [F32, "half"])
@pytest.mark.parametrize("half", ["bf16", "f16"])
@pytest.mark.parametrize("norm", HALF_NORMS)
def test_half_parameters_give_one_dtype_in_train_and_eval(norm, half, output, inputs):
    policy = amp.get_policy(f"p={half},c={half},o={output.replace('half', half)}")
    shapes = shapes_of(InNorm(norm), IMAGES)
    cast = jax.eval_shape(lambda tree: amp.cast_params(tree, policy), shapes)
    dtype = jnp.float32 if inputs == F32 else policy.compute_dtype
    x = jax.ShapeDtypeStruct(IMAGES.shape, dtype)
    made = set()
    for train in (True, False):
        apply = forward(InNorm(norm, train), policy, mutable=["batch_stats"])
        with jax.numpy_dtype_promotion("standard"):
            y, written = jax.eval_shape(apply, cast, x)
            found = results_in(apply, cast, x)
        made.add((y.dtype.name, *found["tanh"]))
        assert dtypes_in(written) <= {F32}
        assert set(found["dot_general"]) == {policy.compute_dtype.name}
        assert set(found["rsqrt"]) == {F32}
    assert made == {(policy.output_dtype.name, policy.compute_dtype.name)}


# Marks, and caches of jitted functions

marked = amp.with_policy(F32)


@one_policy
def test_a_mark_inside_of_a_map_is_innermost(policy):
    class Marked(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = marked(nn.Dense)(24, name="up")(x)
            x = marked(Block(16, 20, name="block"))(x)
            x = amp.full_precision(lambda h: nn.Dense(8, name="inner")(h))(x)
            return nn.Dense(5, name="head")(x)

    net, half = Marked(), half_of(policy)
    variables = shapes_of(net, X)
    wanted = {24: F32, 16: F32, 20: F32, 8: F32, 5: half}
    for entries, changed in (
        ({}, {}),
        ({"": policy}, {}),
        ({"up": policy}, {}),
        ({Block: policy}, {}),
        # Inside of the mark: an entry of what is inside is the innermost.
        ({"block/up": policy}, {16: half}),
        ({"inner": policy}, {8: half}),
        ({"head": F32}, {5: F32}),
    ):
        apply = forward(net, amp.PolicyMap(policy, entries))
        assert by_width(apply, variables, X) == wanted | changed, entries


@one_policy
def test_a_marked_function_inside_of_a_module_with_an_entry_wins(policy):
    class Marked(nn.Module):
        @nn.compact
        def __call__(self, x):
            kernel = self.param("kernel", nn.initializers.lecun_normal(), (16, 24))
            x = amp.with_policy(policy)(jnp.dot)(x, kernel)
            return nn.Dense(5, name="head")(x)

    net = Marked()
    variables = shapes_of(net, X)
    apply = forward(net, amp.PolicyMap(policy, {Marked: F32}))
    assert by_width(apply, variables, X) == {24: half_of(policy), 5: F32}


def test_a_jitted_helper_leaks_nothing_between_maps():
    net = Compact()
    variables = variables_of(net, X)
    maps = [
        (amp.PolicyMap("mixed_bfloat16", {"first": F32}), {24, 16}, "bfloat16"),
        (amp.PolicyMap("mixed_bfloat16", {"second": F32}), {32, 20}, "bfloat16"),
        (amp.PolicyMap("mixed_bfloat16", {nn.Dense: F32}), WIDTHS, "bfloat16"),
        (amp.PolicyMap("mixed_float16", {"first": F32}), {24, 16}, "float16"),
        (amp.PolicyMap("mixed_float16"), set(), "float16"),
    ]
    for fn in (jax.jit(net.apply), jax.jit(lambda v, x: net.apply(v, x))):
        plain = fn(variables, X)
        for _ in range(2):
            for policies, reached, half in maps:
                inside = amp.autocast(lambda v, x, fn=fn: fn(v, x), policies)
                wanted = expected_dtypes(reached, F32, half)
                assert by_width(inside, variables, X) == wanted
                assert set(by_width(fn, variables, X).values()) == {F32}
        np.testing.assert_array_equal(fn(variables, X), plain)


def test_a_jitted_helper_first_used_under_a_map_is_plain_outside():
    net = Compact()
    variables = variables_of(net, X)
    helper = jax.jit(net.apply)
    inside = amp.autocast(lambda v, x: helper(v, x), amp.PolicyMap("bf16", {"": "f16"}))
    assert jax.eval_shape(inside, variables, X).dtype == jnp.bfloat16
    assert set(by_width(helper, variables, X).values()) == {F32}
    expected = jax.jit(Compact().apply)(variables, X)
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
    params = variables_of(Transformer(), TOKENS)
    return params, jax.jit(jax.value_and_grad(transformer_loss))(params, TOKENS)


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
    params = Model().init(jax.random.key(0), x)

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
