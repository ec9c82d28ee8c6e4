"""A map of policies: which module computes in which dtype, in linen and in nnx.

The same is asked of both; what only one of them has is in `test_linen.py` and
`test_nnx.py`.
"""

import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jmp_amp as amp
from tests.programs import products
from tests.rounding import POLICIES, ROUNDINGS, eps, half_of, relative_error
from tests.transform.flax_models import (
    F32,
    WIDTHS,
    Block,
    Built,
    Compact,
    NnxBlock,
    NnxNet,
    Setup,
    X,
    by_width,
    dtypes_in,
    in_linen,
    in_nnx,
)

HALF, OTHER = "bfloat16", "float16"
BF16, F16 = POLICIES
LIBRARIES = ("linen", "nnx")
each_library = pytest.mark.parametrize("library", LIBRARIES)


def at(widths, inside, outside, all_of=WIDTHS):
    return {width: inside if width in widths else outside for width in all_of}


MODELS: dict[str, Callable[[], Built]] = {
    "compact": lambda: in_linen(Compact(), X),
    "setup": lambda: in_linen(Setup(), X),
    "nnx": lambda: in_nnx(NnxNet),
}
built = functools.cache(lambda model: MODELS[model]())
each_model = pytest.mark.parametrize("model", MODELS)
# One of each library that has the method `encode`.
each_with_methods = pytest.mark.parametrize("model", ["setup", "nnx"])

# A pattern for the classes of a library, and the widths of the modules that it reaches.
REACHED = {
    "class": (lambda of: of.Block, {24, 16, 32, 20}),
    "subclass": (lambda of: of.WideBlock, {32, 20}),
    "base class": (lambda of: of.Module, WIDTHS),
    "a class of the library": (lambda of: of.Dense, WIDTHS),
    "name": (lambda of: "head", {5}),
    "block by name": (lambda of: "first", {24, 16}),
    "path": (lambda of: "second/down", {20}),
    "star": (lambda of: "*/up", {24, 32}),
    "question mark": (lambda of: "firs?", {24, 16}),
    "set": (lambda of: "[a-f]irst/[t-v]p", {24}),
    "two stars first": (lambda of: "**/up", {24, 32}),
    "two stars last": (lambda of: "second/**", {32, 20}),
    "two stars": (lambda of: "**", WIDTHS),
    "two stars and a top-level name": (lambda of: "**/head", {5}),
    "outermost": (lambda of: "", WIDTHS),
    "regex": (lambda of: re.compile("(first|second)/down"), {16, 20}),
    "regex of a whole path": (lambda of: re.compile(".*p"), {24, 32}),
    "predicate of the path": (
        lambda of: lambda info: info.path[:1] == ("second",),
        {32, 20},
    ),
    "predicate of the class": (lambda of: lambda info: info.cls is of.Block, {24, 16}),
    "predicate of the name": (lambda of: lambda info: info.name == "down", {16, 20}),
    "predicate of the outermost": (lambda of: lambda info: info.name is None, WIDTHS),
    "predicate of the method": (
        lambda of: lambda info: info.method == "__call__" and info.cls is of.Dense,
        WIDTHS,
    ),
}


@pytest.mark.breadth(4)
@pytest.mark.parametrize(
    ("model", "inside", "outside"),
    [("compact", F32, BF16), ("setup", F16, F32), ("nnx", F16, F32)],
)
@pytest.mark.parametrize("pattern", REACHED)
def test_an_entry_reaches_the_modules_that_it_matches(pattern, model, inside, outside):
    net, (pattern, reached) = built(model), REACHED[pattern]
    policies = amp.PolicyMap(outside, {pattern(net.of): inside})
    found = by_width(net.under(policies), net.variables, X)
    assert found == at(reached, half_of(inside), half_of(outside))


# Entries of a map whose default is bf16, and the dtype of each width. Those of a parent
# and of what is in it may come in any order: a module's own match is the nearer one.
SEVERAL = {
    "each reaches its modules": (
        lambda of: [("first", F32), (of.WideBlock, F16), (re.compile(".*/down"), F32)],
        {24: F32, 16: F32, 32: OTHER, 20: F32, 5: HALF},
    ),
    "in an entry by name": (
        lambda of: [("first", F32), ("first/up", BF16)],
        at({16}, F32, HALF),
    ),
    "in an entry by class": (
        lambda of: [(of.Block, F32), ("**/down", BF16)],
        at({24, 32}, F32, HALF),
    ),
    "all in an entry by regex": (
        lambda of: [(re.compile("second"), F32), (of.Dense, BF16)],
        at(set(), F32, HALF),
    ),
    "in the outermost": (
        lambda of: [("", F32), (of.WideBlock, BF16)],
        at({24, 16, 5}, F32, HALF),
    ),
    "a grandchild": (
        lambda of: [("", F32), ("second/up", BF16)],
        at({24, 16, 20, 5}, F32, HALF),
    ),
}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("model", ["compact", "nnx"])
@pytest.mark.parametrize("case", SEVERAL)
def test_a_modules_own_match_beats_what_it_inherits(case, model):
    net, (entries, expected) = built(model), SEVERAL[case]
    entries = entries(net.of)
    orders = [entries] if len(entries) > 2 else [entries, entries[::-1]]
    for order in orders:
        policies = amp.PolicyMap(BF16, order)
        assert by_width(net.under(policies), net.variables, X) == expected


@each_library
def test_among_the_entries_of_a_module_the_latest_wins(library):
    net = built({"linen": "compact", "nnx": "nnx"}[library])
    entries = [("**/up", F32), (net.of.Dense, BF16)]
    for order, reached in ((entries, set()), (entries[::-1], {24, 32})):
        policies = amp.PolicyMap(BF16, order)
        found = by_width(net.under(policies), net.variables, X)
        assert found == at(reached, F32, HALF)


@pytest.mark.breadth(2)
@each_model
def test_backward_products_have_the_policy_of_their_module(model):
    net = built(model)
    apply = net.under(amp.PolicyMap(BF16, {"second": F32}))
    loss = lambda variables: jnp.sum(jnp.square(apply(variables, X)))  # noqa: E731
    found = products(jax.grad(loss), net.variables)
    # Three products for each of five layers, but the gradient of the inputs.
    assert len(found) == 14 and found.count(F32) == 6
    again = products(jax.jit(jax.grad(jax.checkpoint(loss))), net.variables)
    # And the products of the block, forward, once more.
    assert again.count(F32) in (7, 8) and set(again) == {F32, HALF}


@pytest.mark.breadth(2)
@each_model
def test_a_map_without_entries_is_its_default(model):
    net = built(model)
    for policy in (BF16, F32, "f16"):
        made = [
            str(jax.make_jaxpr(net.under(each))(net.variables, X))
            for each in (policy, amp.PolicyMap(policy), amp.PolicyMap(policy, {}))
        ]
        assert made[0] == made[1] == made[2]


@pytest.mark.breadth(1)
@each_with_methods
def test_the_value_under_a_map_is_that_of_f32(model):
    net = built(model)
    mixed = {"first": F32, net.of.WideBlock: BF16}
    policies = (*POLICIES, amp.PolicyMap(F16, mixed), amp.PolicyMap(F16, {"": F32}))

    @jax.jit
    def everything(variables, x):
        found = [net.under(each)(variables, x) for each in policies]
        return net.apply(variables, x), found

    expected, (bf16, f16, map_of_both, nothing) = everything(net.values(), X)
    for found, half in ((bf16, BF16), (f16, F16), (map_of_both, BF16)):
        assert found.dtype == jnp.float32
        assert relative_error(found, expected) < ROUNDINGS * eps(half)
    np.testing.assert_array_equal(nothing, expected)


# Names of modules in containers

CONTAINER = {24, 16, 32, 20}


class Lists(nn.Module):
    def setup(self):
        self.blocks = [nn.Dense(24), nn.Dense(16)]
        self.heads = {"left": nn.Dense(32), "right": nn.Dense(20)}

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.heads["left"](x), self.heads["right"](x)


class NnxLists(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        sizes = ((16, 24), (24, 16))
        self.blocks = nnx.List(nnx.Linear(*size, rngs=rngs) for size in sizes)
        heads = {"left": nnx.Linear(16, 32, rngs=rngs)}
        self.heads = nnx.Dict(heads, right=nnx.Linear(16, 20, rngs=rngs))

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.heads["left"](x), self.heads["right"](x)


def nnx_sequence():
    rngs = nnx.Rngs(0)
    first, last = nnx.Linear(16, 24, rngs=rngs), nnx.Linear(24, 16, rngs=rngs)
    return nnx.Sequential(first, nnx.relu, last, NnxBlock(16, 32, 20, rngs))


# linen writes an index into the name, nnx has it as a name of its own.
CONTAINERS = {
    "linen, sequential": (
        lambda: in_linen(
            nn.Sequential([nn.Dense(24), nn.relu, nn.Dense(16), Block(32, 20)]), X
        ),
        {
            "layers_0": {24},
            "layers_2": {16},
            "layers_3/up": {32},
            "layers_[13]/*": {32, 20},
            "layers_*": CONTAINER,
        },
    ),
    "nnx, sequential": (
        lambda: in_nnx(nnx_sequence),
        {
            "layers/0": {24},
            "layers/2": {16},
            "layers/3/up": {32},
            "layers/[13]/*": {32, 20},
            "layers/*": CONTAINER,
            "layers/**": CONTAINER,
        },
    ),
    "linen, lists": (
        lambda: in_linen(Lists(), X),
        {"blocks_1": {16}, "heads_l*": {32}, "blocks_[01]": {24, 16}},
    ),
    "nnx, lists": (
        lambda: in_nnx(NnxLists),
        {"blocks/1": {16}, "heads/l*": {32}, "blocks/[01]": {24, 16}},
    ),
}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("container", CONTAINERS)
def test_modules_in_lists_and_dictionaries_have_paths(container):
    make, globs = CONTAINERS[container]
    net = make()
    for glob, reached in globs.items():
        found = by_width(net.under(amp.PolicyMap(BF16, {glob: F32})), net.variables, X)
        assert found == at(reached, F32, HALF, CONTAINER), glob


# Methods


@each_with_methods
def test_any_method_can_be_applied(model):
    net = built(model)
    for entries, wanted in (
        ({"first": F32}, {24: F32, 16: F32}),
        ({"**/up": F32}, {24: F32, 16: HALF}),
        ({net.of.Block: F32, "first/down": BF16}, {24: F32, 16: HALF}),
        ({lambda info: info.name == "down": F32}, {24: HALF, 16: F32}),
    ):
        apply = net.under(amp.PolicyMap(BF16, entries), method="encode")
        assert by_width(apply, net.variables, X) == wanted


@each_with_methods
def test_a_predicate_can_tell_methods_apart(model):
    seen = set()

    def encodes(info):
        seen.add((info.path, info.method))
        return info.method == "encode"

    net, policies = built(model), amp.PolicyMap(BF16, {encodes: F32})
    found = by_width(net.under(policies), net.variables, X)
    assert found == at({24, 16}, F32, HALF)
    assert {((), "__call__"), ((), "encode"), (("first",), "__call__")} <= seen
    assert {method for _, method in seen} == {"__call__", "encode"}
    apply = net.under(policies, method="encode")
    assert by_width(apply, net.variables, X) == {24: F32, 16: F32}


class Tied(nn.Module):
    def setup(self):
        self.embed = nn.Embed(11, 16)
        self.block = Block(24, 16)

    def __call__(self, tokens):
        return self.embed.attend(self.block(self.embed(tokens)))


class NnxTied(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(11, 16, rngs=rngs)
        self.block = NnxBlock(16, 24, 16, rngs)

    def __call__(self, tokens):
        return self.embed.attend(self.block(self.embed(tokens)))


TOKENS = jnp.arange(6)


@functools.cache
def tied(library):
    return in_linen(Tied(), TOKENS) if library == "linen" else in_nnx(NnxTied)


@each_library
def test_a_tied_embedding_is_one_module_with_two_methods(library):
    net = tied(library)
    for pattern, full in (
        (net.of.Embed, {11}),
        ("embed", {11}),
        (lambda info: info.method == "attend", {11}),
        (lambda info: info.cls is net.of.Embed and info.method == "__call__", set()),
        ("block", {24, 16}),
    ):
        apply = net.under(amp.PolicyMap(BF16, {pattern: F32}))
        found = by_width(apply, net.variables, TOKENS)
        assert found == at(full, F32, HALF, {24, 16, 11}), pattern


@pytest.mark.breadth(1)
@each_library
def test_gradients_of_a_tied_embedding_sum_both_uses(library):
    net = tied(library)
    maps = [amp.PolicyMap(p, {lambda i: i.method == "attend": F32}) for p in POLICIES]

    @jax.jit
    def gradients(variables):
        def of(apply):
            return jax.grad(lambda v: jnp.mean(jnp.square(apply(v, TOKENS))))(variables)

        return of(net.apply), [of(net.under(each)) for each in maps]

    expected, both = gradients(net.values())
    for policy, found in zip(POLICIES, both, strict=True):
        assert dtypes_in(found) == {F32}
        error = relative_error(*map(jax.tree.leaves, (found, expected)))
        assert error < ROUNDINGS * eps(policy)


# Transformations of modules: each has `layers`, a block, and a head


class Carrying(Block):
    def __call__(self, x, _):
        return super().__call__(x), None


STACKED = dict(variable_axes={"params": 0}, split_rngs={"params": True})


def scanned(module, x):
    layers = nn.scan(
        lambda block, x, _: (block(x), None), variable_axes={"params": 0}, length=3,
        split_rngs={"params": True},
    )  # fmt: skip
    return layers(Block(24, 16, name="layers"), x, None)[0]


def scanned_class(module, x):
    return nn.scan(Carrying, length=3, **STACKED)(24, 16, name="layers")(x, None)[0]


def remat_scanned(module, x):
    remat = nn.remat(Carrying, prevent_cse=False)
    return nn.scan(remat, length=2, **STACKED)(24, 16, name="layers")(x, None)[0]


def while_loop(module, x):
    block = Block(24, 16, name="layers")
    x = block(x)
    if module.is_initializing():
        return x
    return nn.while_loop(
        lambda _, carry: carry[0] < 2,
        lambda block, carry: (carry[0] + 1, block(carry[1])),
        block,
        (0, x),
    )[1]


def cond(module, x):
    block = Block(24, 16, name="layers")
    if module.is_initializing():
        return block(x)
    is_small = x[0, 0] < 9
    return nn.cond(is_small, lambda block, x: block(x), lambda _, x: x + 1, block, x)


def switch(module, x):
    block = Block(24, 16, name="layers")
    branches = [
        lambda block, x: block(x),
        lambda block, x: 2 * block(x),
        lambda _, x: x + 1,
    ]
    if module.is_initializing():
        return block(x)
    return nn.switch((x[0, 0] < 9).astype(jnp.int32), branches, block, x)


class Lifted(nn.Module):
    lift: Callable

    @nn.compact
    def __call__(self, x):
        return nn.Dense(5, name="head")(self.lift(self, x))


class JittedMethod(nn.Module):
    def setup(self):
        self.layers = Block(24, 16)
        self.head = nn.Dense(5)

    @nn.jit
    def __call__(self, x):
        return self.head(self.layers(x))


class NnxLifted(nnx.Module):
    def __init__(self, lift, stacked):
        self.lift = lift
        self.layers = blocks(stacked) if stacked else NnxBlock(16, 24, 16, nnx.Rngs(0))
        self.head = nnx.Linear(16, 5, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.head(self.lift(self.layers, x))


def blocks(count):
    @nnx.split_rngs(splits=count)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return NnxBlock(16, 24, 16, rngs)

    return make(nnx.Rngs(0))


def call(layer, x):
    return layer(x)


def through(layers, x, transform=lambda fn: fn):
    carried = transform(lambda x, layer: layer(x))
    return nnx.scan(carried, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, layers)


def nnx_while(layer, x):
    return nnx.while_loop(
        lambda carry: carry[0] < 2,
        lambda carry: (carry[0] + 1, carry[1], carry[1](carry[2])),
        (jnp.int32(0), layer, x),
    )[2]


def plus_one(_, x):
    return x + 1


# nnx: the transformation, and how many layers are stacked.
NNX_LIFTS = {
    "scan": (through, 3),
    "scan of remat": (functools.partial(through, transform=nnx.remat), 3),
    "remat": (lambda layer, x: nnx.remat(call)(layer, x), 0),
    "vmap": (lambda layers, x: nnx.vmap(call, in_axes=(0, 0))(layers, x), 4),
    "vmap over data": (
        lambda layer, x: nnx.vmap(call, in_axes=(None, 0))(layer, x[None])[0],
        0,
    ),
    "jit": (lambda layer, x: nnx.jit(call)(layer, x), 0),
    "while": (nnx_while, 0),
    "cond": (lambda layer, x: nnx.cond(x[0, 0] < 9, call, plus_one, layer, x), 0),
    "switch": (
        lambda layer, x: nnx.switch(jnp.int32(1), [plus_one, call], layer, x),
        0,
    ),
}
LIFTED: dict[str, Callable[[], Built]] = {
    **{
        f"linen, {name}": functools.partial(in_linen, Lifted(lift), X)
        for name, lift in {
            "scan": scanned,
            "scan of a class": scanned_class,
            "scan of remat": remat_scanned,
            "remat": lambda _, x: nn.remat(Block)(24, 16, name="layers")(x),
            "vmap": lambda _, x: nn.vmap(Block, in_axes=0, **STACKED)(
                24, 16, name="layers"
            )(x),
            "jit": lambda _, x: nn.jit(Block)(24, 16, name="layers")(x),
            "while": while_loop,
            "cond": cond,
            "switch": switch,
        }.items()
    },
    "linen, jitted method": functools.partial(in_linen, JittedMethod(), X),
    **{
        f"nnx, {name}": functools.partial(
            in_nnx, functools.partial(NnxLifted, *arguments)
        )
        for name, arguments in NNX_LIFTS.items()
    },
}
lifted = functools.cache(lambda model: LIFTED[model]())

LIFTED_ENTRIES = {
    "class": (lambda of: of.Block, {24, 16}),
    "path of a child": (lambda of: "layers/up", {24}),
    "predicate": (lambda of: lambda info: info.path == ("layers", "down"), {16}),
    "outside": (lambda of: "head", {5}),
}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("model", LIFTED)
def test_transformed_modules_are_reached_as_others_are(model):
    net = lifted(model)
    for name, (pattern, reached) in LIFTED_ENTRIES.items():
        apply = net.under(amp.PolicyMap(BF16, {pattern(net.of): F32}))
        found = by_width(apply, net.variables, X)
        # Of a module that is called twice, as in the while loop, both times.
        assert found == at(reached, F32, HALF, {24, 16, 5}), name


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    "model",
    [
        *("linen, cond", "linen, jit", "linen, scan of remat", "linen, vmap"),
        *("linen, while", "nnx, scan of remat"),
    ],
)
def test_gradients_of_transformed_modules_are_those_of_f32(model):
    net = lifted(model)
    mixed = net.under(amp.PolicyMap(BF16, {"layers/up": F32}))

    @jax.jit
    def both(variables):
        def of(apply):
            loss = lambda variables: jnp.mean(jnp.square(apply(variables, X)))  # noqa: E731
            # A while loop has no reverse mode.
            differentiate = loss if "while" in model else jax.value_and_grad(loss)
            return jax.tree.leaves(differentiate(variables))

        return of(mixed), of(net.apply)

    found, expected = both(net.values())
    assert dtypes_in(found) == {F32}
    assert relative_error(found, expected) < ROUNDINGS * eps(BF16)


# Two modules that are traced once if nothing tells them apart


class TwoOfClass(nn.Module):
    @nn.compact
    def __call__(self, x):
        jitted = nn.jit(Block)
        return jitted(16, 16, name="b")(jitted(16, 16, name="a")(x))


class JittedBlock(nn.Module):
    @nn.jit
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(16, name="up")(x))
        return nn.Dense(16, name="down")(x)


class TwoWithMethod(nn.Module):
    def setup(self):
        self.a, self.b = JittedBlock(), JittedBlock()

    def __call__(self, x):
        return self.b(self.a(x))


class Parent(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.jit(Block)(16, 16, name="inner")(x)


class TwoParents(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Parent(name="b")(Parent(name="a")(x))


class NnxTwo(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.a, self.b = (NnxBlock(16, 16, 16, rngs) for _ in range(2))

    def __call__(self, x):
        jitted = nnx.jit(call)
        return jitted(self.b, jitted(self.a, x))


TWO = {
    "linen, class": lambda: in_linen(TwoOfClass(), X),
    "linen, method": lambda: in_linen(TwoWithMethod(), X),
    "linen, in two parents": lambda: in_linen(TwoParents(), X),
    "nnx": lambda: in_nnx(NnxTwo),
}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("model", TWO)
def test_two_jitted_modules_of_one_class_are_told_apart_by_path(model):
    net = TWO[model]()
    for pattern, wanted in (
        ("a", [F32, F32, HALF, HALF]),
        ("b/**/down", [HALF, HALF, HALF, F32]),
        (
            lambda info: info.path[:1] + info.path[-1:] == ("b", "up"),
            [HALF, HALF, F32, HALF],
        ),
        (JittedBlock if "method" in model else net.of.Block, [F32] * 4),
        ("**/down", [HALF, F32, HALF, F32]),
    ):
        apply = net.under(amp.PolicyMap(BF16, {pattern: F32}))
        assert products(apply, net.variables, X) == wanted, pattern
        if pattern in ("a", "**/down"):
            assert products(jax.jit(apply), net.variables, X) == wanted, pattern


# Marks

marked = amp.with_policy(F32)


class Marked(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = marked(nn.Dense)(24, name="up")(x)
        x = marked(Block(16, 20, name="block"))(x)
        x = amp.full_precision(lambda h: nn.Dense(32, name="inner")(h))(x)
        return nn.Dense(5, name="head")(x)


class NnxMarked(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up = marked(nnx.Linear)(16, 24, rngs=rngs)
        self.block = marked(NnxBlock(24, 16, 20, rngs))
        self.inner = nnx.Linear(20, 32, rngs=rngs)
        self.head = nnx.Linear(32, 5, rngs=rngs)

    def __call__(self, x):
        x = amp.full_precision(lambda h: self.inner(h))(self.block(self.up(x)))
        return self.head(x)


@pytest.mark.breadth(1)
@each_library
def test_a_mark_inside_of_a_map_is_innermost(library):
    net = in_linen(Marked(), X) if library == "linen" else in_nnx(NnxMarked)
    wanted = {24: F32, 16: F32, 20: F32, 32: F32, 5: HALF}
    for entries, changed in (
        ({}, {}),
        ({"": BF16}, {}),
        ({"up": BF16}, {}),
        ({net.of.Block: BF16}, {}),
        # Inside of the mark: an entry of what is inside is the innermost.
        ({"block/up": BF16}, {16: HALF}),
        ({"inner": BF16}, {32: HALF}),
        ({"head": F32}, {5: F32}),
    ):
        apply = net.under(amp.PolicyMap(BF16, entries))
        assert by_width(apply, net.variables, X) == wanted | changed, entries
