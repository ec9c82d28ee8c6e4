"""nnx objects under autocast: they end as they end without it, to the last detail."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors, nnx
from flax import linen as nn
from jax import lax

import jmp_amp as amp

BF16, F16 = "mixed_bfloat16", "mixed_float16"
X = jax.random.normal(jax.random.key(0), (8, 16))
ROUNDINGS = 16


@pytest.fixture(autouse=True)
def standard_promotion():
    # Flax's own layers mix weak and strong dtypes, optax.adam likewise.
    with jax.numpy_dtype_promotion("standard"):
        yield


class Net(nnx.Module):
    """Something that writes for every reason there is: statistics, random numbers."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(16, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(self.encode(x)))

    def encode(self, x):
        return nnx.relu(self.norm(self.linear(x)))


class Count(nnx.Variable):
    pass


class Average(nnx.Variable):
    pass


def tolerance(policy):
    if policy == "exactly":
        return 0.0
    return ROUNDINGS * float(jnp.finfo(policy.removeprefix("mixed_")).eps)


def assert_close(found, expected, policy):
    """The same trees: floats to within half precision, everything else exactly."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for a, b in pairs:
        if not isinstance(b, jax.Array | np.ndarray):
            assert a == b
            continue
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        if not jnp.issubdtype(b.dtype, jnp.floating):
            np.testing.assert_array_equal(a, b)
            continue
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        # What is zero but for rounding (a mean after a norm, the gradient of a bias
        # before one) has nothing to be relative to: activations are of size 1.
        size = max(np.linalg.norm(b), 1e-2 * np.sqrt(b.size))
        assert np.linalg.norm(a - b) <= tolerance(policy) * size


def structure(node):
    """Where an object holds what: (path, class, attributes) of all that it leads to."""
    return [
        (path, type(each), sorted(vars(each)) if is_module(each) else None)
        for path, each in nnx.iter_graph(node)
        if is_module(each) or isinstance(each, nnx.Variable)
    ]


def is_module(node):
    return isinstance(node, nnx.Module)


def objects(node):
    return dict(nnx.iter_graph(node))


def assert_as_without_autocast(program, make, policy=BF16):
    """Runs `program(transform, model)` with and without autocast, and compares.

    Compared are its results, and all that it did to the model.
    """
    plain, mixed = make(), make()
    plain_before, mixed_before = objects(plain), objects(mixed)
    expected = program(lambda fn: fn, plain)
    found = program(amp.autocast(policy=policy), mixed)
    assert_close(values(found), values(expected), policy)
    assert structure(mixed) == structure(plain)
    assert_close(nnx.to_pure_dict(nnx.state(mixed)), pure(plain), policy)
    plain_after, mixed_after = objects(plain), objects(mixed)
    for path, node in plain_before.items():
        if isinstance(node, nnx.Pytree | nnx.Variable) and (
            plain_after.get(path) is node
        ):
            assert mixed_after[path] is mixed_before[path], path
    # What belongs to no trace any more can be written.
    for variable in mixed_after.values():
        if isinstance(variable, nnx.Variable):
            variable.set_raw_value(variable.get_raw_value())
    return found


def pure(node):
    return nnx.to_pure_dict(nnx.state(node))


def values(results):
    """Results with the states of nnx objects in their place."""
    return jax.tree.map(
        lambda leaf: pure(leaf) if is_module(leaf) else leaf, results, is_leaf=is_module
    )


# Programs: each takes `amped`, which is `autocast` or nothing, and a model
Program = Callable[[Callable[..., Any], Any], Any]
PROGRAMS: dict[str, tuple[Program, Callable[[], Any]]] = {}


def programs(of_a_kind, kind, make=Net):
    PROGRAMS.update({f"{kind}: {name}": (p, make) for name, p in of_a_kind.items()})


# How a function comes by a module

GLOBAL = Net()


def of_a_global(x):
    return GLOBAL(x)


def of_a_helper(x):
    return of_a_global(x) * 2


def with_default(model):
    def forward(x, model=model):
        return model(x)

    return forward


def with_keyword_default(model):
    def forward(x, *, model=model):
        return model(x)

    return forward


def with_inner_function(model):
    def outer(x):
        def inner(x):
            return model(x)

        return inner(x) + inner(x)

    return outer


def with_cells(*models):
    held = list(models)
    return lambda x: [model(x) for model in held]


def with_lambda_in_lambda(model):
    apply = lambda x: model(x)  # noqa: E731
    return lambda x: apply(x)


def recursive(model):
    def forward(x, n):
        return x if n == 0 else forward(model(x), n - 1)

    return lambda x: forward(x, 2)


def decorated(model):
    @functools.wraps(model)
    def forward(*args):
        return model(*args)

    return forward


WAYS = {
    "argument": lambda amped, m: amped(lambda m, x: m(x))(m, X),
    "keyword": lambda amped, m: amped(lambda x, m: m(x))(X, m=m),
    "dict": lambda amped, m: amped(lambda d: d["m"](d["x"]))({"m": m, "x": X}),
    "list": lambda amped, m: amped(lambda ms, x: ms[0](x))([m, 3], X),
    "twice": lambda amped, m: amped(lambda a, b, x: a(x) + b(x))(m, m, X),
    "part and whole": lambda amped, m: amped(lambda a, b, x: a(b(x)))(m, m.norm, X),
    "argument and closure": lambda amped, m: amped(lambda a, x: a(m(x)))(m, X),
    "closure": lambda amped, m: amped(lambda x: m(x))(X),
    "part in closure": lambda amped, m: amped(lambda x: m.norm(x))(X),
    "list in closure": lambda amped, m: amped(with_cells(m, m.norm))(X),
    "lambda in lambda": lambda amped, m: amped(with_lambda_in_lambda(m))(X),
    "inner function": lambda amped, m: amped(with_inner_function(m))(X),
    "recursion": lambda amped, m: amped(recursive(m))(X),
    "decorated": lambda amped, m: amped(decorated(m))(X),
    "default": lambda amped, m: amped(with_default(m))(X),
    "keyword default": lambda amped, m: amped(with_keyword_default(m))(X),
    "partial": lambda amped, m: amped(functools.partial(lambda m, x: m(x), m))(X),
    "partial by keyword": lambda amped, m: amped(
        functools.partial(lambda x, m: m(x), m=m)
    )(X),
    "bound method": lambda amped, m: amped(m.encode)(X),
    "bound method of a part": lambda amped, m: amped(m.norm.__call__)(X),
    "unbound method": lambda amped, m: amped(Net.encode)(m, X),
    "module": lambda amped, m: amped(m)(X),
    "variable": lambda amped, m: amped(lambda v, x: x @ v[...])(m.linear.kernel, X),
    "jitted": lambda amped, m: amped(nnx.jit(lambda m, x: m(x)))(m, X),
    "two calls": lambda amped, m: [amped(m)(X) for _ in range(2)],
    "nested": lambda amped, m: amped(lambda x: amped(m.encode)(x) + m(x))(X),
}


programs(WAYS, "found")


@pytest.mark.parametrize("fn", [of_a_global, of_a_helper])
def test_a_module_that_is_a_global_is_found(fn):
    start = jax.tree.map(jnp.copy, nnx.state(GLOBAL))
    before = structure(GLOBAL)
    expected, state = fn(X), jax.tree.map(jnp.copy, pure(GLOBAL))
    nnx.update(GLOBAL, start)
    assert_close(amp.autocast(fn, BF16)(X), expected, BF16)
    assert_close(pure(GLOBAL), state, BF16)
    assert structure(GLOBAL) == before
    nnx.update(GLOBAL, start)


class Holder:
    """No nnx object, but it holds one."""

    def __init__(self, model):
        self.model = model

    def __call__(self, x):
        return self.model(x)


@pytest.mark.parametrize("way", ["argument", "closure", "itself", "method"])
def test_a_module_that_hides_in_another_object_is_found_or_refused(way):
    model = Net()
    holder = Holder(model)
    before = jax.tree.map(jnp.copy, pure(model))
    run = {
        "argument": lambda: amp.autocast(lambda h, x: h(x))(holder, X),
        "closure": lambda: amp.autocast(lambda x: holder(x))(X),
        "itself": lambda: amp.autocast(holder)(X),
        "method": lambda: amp.autocast(holder.__call__)(X),
    }[way]
    try:
        found = run()
    except errors.TraceContextError:
        assert_close(pure(model), before, "exactly")
    else:
        other = Net()
        assert_close(found, other(X), BF16)
        assert_close(pure(model), pure(other), BF16)


# What it does to the module


def set_up(m, x):
    m.extra = nnx.Linear(16, 16, rngs=nnx.Rngs(1))
    m.calls = Count(jnp.int32(3))
    m.scale = nnx.Param(jnp.ones(16))
    m.note = "a string"
    return m.extra(m.encode(x)) * m.scale[None]


def replace_parts(m, x):
    m.linear = nnx.Linear(16, 16, rngs=nnx.Rngs(1))
    m.head, m.linear = m.linear, m.head
    m.norm.use_running_average = True
    del m.dropout
    return m.head(m.encode(x))


def switch_modes(m, x):
    m.eval()
    y = m(x)
    m.train()
    return y + m(x)


def leave_in_eval(m, x):
    m.eval()
    return m(x)


def share_parts(m, x):
    m.other = m.linear
    m.again = m.norm
    return m.again(m.other(m.norm(x)))


def write_parameters(m, x):
    m.linear.kernel[...] = m.linear.kernel[...] * 2
    m.linear.bias.set_value(jnp.mean(x, axis=0))
    return m(x)


def write_in_place(m, x):
    m.head.kernel[0, :] = x[0]
    return m(x)


def return_parts(m, x):
    return m(x), m.norm, [m.linear.kernel, m], {"new": nnx.Linear(4, 4, rngs=m_rngs())}


def m_rngs():
    return nnx.Rngs(5)


def return_state(m, x):
    graphdef, state = nnx.split(m)
    y = m(x)
    return y, nnx.to_pure_dict(state), graphdef == nnx.graphdef(m)


def clone_and_call(m, x):
    return nnx.clone(m)(x) + m(x)


def view_in_eval(m, x):
    return nnx.view(m, deterministic=True, use_running_average=True)(x) + m(x)


def split_and_merge(m, x):
    graphdef, params, rest = nnx.split(m, nnx.Param, ...)
    merged = nnx.merge(graphdef, params, rest)
    y = merged(x)
    nnx.update(m, nnx.state(merged, nnx.Not(nnx.Param)))
    return y


def update_from_state(m, x):
    state = nnx.state(m, nnx.Param)
    nnx.update(m, jax.tree.map(lambda leaf: leaf * 0.5, state))
    return m(x)


def count_calls(m, x):
    m.calls = Count(jnp.int32(0))
    m.average = Average(jnp.zeros(16))
    for _ in range(3):
        m.calls[...] += 1
        m.average[...] = 0.9 * m.average[...] + 0.1 * jnp.mean(m.linear(x), axis=0)
    return x * m.average[None]


def pop_intermediates(m, x):
    m.seen = nnx.Intermediate(m.linear(x))
    return m(x), nnx.to_pure_dict(nnx.pop(m, nnx.Intermediate))


def pass_on(m, x):
    return m(x), 3, None, "text"


def nothing_written(m, x):
    return m.linear(x)


DEEDS = {
    deed.__name__: deed
    for deed in (
        *(set_up, replace_parts, switch_modes, leave_in_eval, share_parts),
        *(write_parameters, write_in_place, return_parts, return_state),
        *(clone_and_call, view_in_eval, split_and_merge, update_from_state),
        *(count_calls, pop_intermediates, pass_on, nothing_written),
    )
}
# What is added, replaced, returned, written in place and taken out. The other deeds do
# no more than these to what nnx.jit brings back.
JITTED = ("set_up", "switch_modes", "replace_parts", "return_parts", "write_in_place")
JITTED += ("pop_intermediates",)
for name, deed in DEEDS.items():
    programs({name: lambda amped, m, f=deed: amped(f)(m, X)}, "done to it")
    if name in JITTED:
        programs({name: lambda amped, m, f=deed: nnx.jit(amped(f))(m, X)}, "in nnx.jit")


def test_what_is_returned_is_the_object_itself_or_a_new_one():
    model = Net()
    made, norm, parts = amp.autocast(
        lambda m, x: (
            nnx.Linear(16, 16, rngs=nnx.Rngs(1)),
            m.norm,
            [m, m.linear.kernel],
        )
    )(model, X)
    assert type(made) is nnx.Linear and made.kernel.dtype == jnp.float32
    assert norm is model.norm
    assert parts[0] is model and parts[1] is model.linear.kernel


def test_random_numbers_are_those_without_autocast():
    """The masks, and the counts of the streams: exactly."""
    for make in (Net, lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(3))):
        plain, mixed = make(), make()
        apply = plain.dropout if isinstance(plain, Net) else plain
        other = mixed.dropout if isinstance(mixed, Net) else mixed
        ones = jnp.ones((32, 32))
        for _ in range(3):
            np.testing.assert_array_equal(amp.autocast(other)(ones), apply(ones))
        assert_close(pure(mixed), pure(plain), BF16)


def draw(rngs, x):
    return jax.random.normal(rngs.params(), x.shape) + rngs.noise.uniform(x.shape) + x


programs(
    {"as arguments": lambda amped, rngs: [amped(draw)(rngs, X) for _ in range(2)]},
    "random streams",
    lambda: nnx.Rngs(0, noise=1),
)


def test_a_written_variable_keeps_its_dtype_whatever_the_policy():
    class Statistics(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
            self.mean = Average(jnp.zeros(16))
            self.half = Average(jnp.zeros(16, jnp.float16))
            self.calls = Count(jnp.int32(0))

        def __call__(self, x):
            y = self.linear(x)
            self.mean[...] = y.mean(0)
            self.half[...] = y.mean(0).astype(jnp.float16)
            self.calls[...] += 1
            return y

    for policy in ("bf16", "f16", BF16, "float32"):
        model = Statistics()
        y = amp.autocast(model, policy)(X)
        assert y.dtype == amp.get_policy(policy).output_dtype
        dtypes = (model.mean.dtype, model.half.dtype, model.calls.dtype)
        assert dtypes == (jnp.float32, jnp.float16, jnp.int32)
        assert model.calls[...] == 1
        np.testing.assert_allclose(
            model.mean[...], model.linear(X).mean(0), atol=0.02, rtol=0.02
        )


def test_a_variable_that_is_not_written_keeps_its_very_array():
    model = Net()
    kernel, mean = model.linear.kernel.get_raw_value(), model.norm.mean.get_raw_value()
    amp.autocast(lambda m, x: m.linear(x))(model, X)
    assert model.linear.kernel.get_raw_value() is kernel
    assert model.norm.mean.get_raw_value() is mean


class Rounded(nnx.Param):
    """A variable with accessors of its own."""

    def get_value(self, *, index=...):
        return jnp.round(super().get_value(index=index))

    def set_value(self, value, *, index=...):
        super().set_value(value + 1, index=index)


class WithAccessors(nnx.Module):
    def __init__(self):
        self.w = Rounded(jnp.full((16, 16), 0.75))

    def __call__(self, x):
        y = x @ self.w.get_value()
        self.w.set_value(self.w.get_value() + 2)
        return y


# Models of all shapes


class Shared(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(16, 16, rngs=rngs)
        self.second = self.first
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.other_norm = self.norm
        self.tied = nnx.Linear(16, 16, rngs=rngs)
        self.tied.kernel = self.first.kernel

    def __call__(self, x):
        x = self.norm(self.first(x))
        return self.tied(self.other_norm(self.second(x)))


class Containers(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List(nnx.Linear(16, 16, rngs=rngs) for _ in range(2))
        self.named = nnx.Dict(a=nnx.BatchNorm(16, rngs=rngs), b=Net())
        self.stack = nnx.Sequential(
            nnx.Linear(16, 16, rngs=rngs), nnx.relu, nnx.Dropout(0.5, rngs=rngs)
        )
        self.pair = nnx.data((nnx.BatchNorm(16, rngs=rngs), {"x": Net()}))
        self.nothing = None

    def __call__(self, x):
        for block in self.blocks:
            x = self.named["a"](block(x))
        x = self.pair[1]["x"](self.pair[0](self.stack(x)))
        return self.named.b(x)


class NoPytree(nnx.Module, pytree=False):
    def __init__(self):
        self.parts = [Net(), nnx.BatchNorm(16, rngs=nnx.Rngs(1))]
        self.note = "static"

    def __call__(self, x):
        self.note = "written"
        return self.parts[1](self.parts[0](x))


class Cyclic(nnx.Module):
    def __init__(self):
        self.net = Net()
        self.child = nnx.BatchNorm(16, rngs=nnx.Rngs(0))
        self.child.parent = self

    def __call__(self, x):
        return self.child.parent.net(self.child(x))


class Properties(nnx.Module):
    """Attributes that are no methods, methods that are no functions."""

    def __init__(self):
        self.net = Net()

    @property
    def width(self):
        return self.net.linear.out_features

    @staticmethod
    def double(x):
        return 2 * x

    @classmethod
    def make(cls):
        return cls()

    @nnx.jit
    def jitted(self, x):
        return self.net(x)

    remat = nnx.remat(lambda self, x: self.net(x))
    partial = functools.partialmethod(lambda self, n, x: n * self.net(x), 2)

    def _private(self, x):
        return self.net(x)

    def __getitem__(self, n):
        return self.net

    def __call__(self, x):
        x = self._private(self.double(x)) * self.width + self[3](x)
        return self.jitted(x) + self.remat(x) + self.partial(x)


class Derived(Properties):
    def __call__(self, x):
        return super().__call__(x) + nnx.relu(x)


class Slots(nnx.Module):
    """Its `__init__` has required arguments, its attributes are checked."""

    def __init__(self, width, *, rngs):
        self.net = Net()
        self.width = width

    def __setattr__(self, name, value):
        assert name in ("net", "width", "_pytree__state") or name.startswith("_pytree")
        super().__setattr__(name, value)

    def __call__(self, x):
        return self.net(x) * self.width


MODELS = {
    "shared": Shared,
    "containers": Containers,
    "no pytree": NoPytree,
    "cyclic": Cyclic,
    "derived": Derived,
    "slots": lambda: Slots(3, rngs=nnx.Rngs(0)),
    "accessors": WithAccessors,
    "list": lambda: nnx.List([Net(), nnx.BatchNorm(16, rngs=nnx.Rngs(0))]),
    "sequential": lambda: nnx.Sequential(Net(), nnx.relu, Net()),
    "lora": lambda: nnx.LoRALinear(16, 16, lora_rank=2, rngs=nnx.Rngs(0)),
    "marked": lambda: amp.full_precision(Net)(),
    "marked instance": lambda: amp.full_precision(Net()),
}


def call_model(model, x):
    if isinstance(model, nnx.List):
        for each in model:
            x = each(x)
        return x
    return model(x)


def called_twice(amped, model):
    return [amped(call_model)(model, X) for _ in range(2)]


def merged_inside(amped, model):
    """The functional pattern: the description of the model closed over."""
    graphdef, state = nnx.split(model)

    def forward(state, x):
        merged = nnx.merge(graphdef, state)
        y = call_model(merged, x)
        return y, nnx.state(merged)

    y, state = jax.jit(amped(forward))(state, X)
    nnx.update(model, state)
    return y


SPLIT = ("shared", "no pytree", "cyclic", "lora", "containers", "derived", "marked")
for name, make in MODELS.items():
    programs({name: called_twice}, "model", make)
    if name in SPLIT:
        programs({name: merged_inside}, "split model", make)


def decoding():
    attention = nnx.MultiHeadAttention(
        4, 16, dropout_rate=0.0, decode=True, rngs=nnx.Rngs(0)
    )
    attention.init_cache((2, 4, 16))
    return attention


def with_dropout():
    options = dict(dropout_rate=0.5, deterministic=False, normalize_qk=True)
    return nnx.MultiHeadAttention(4, 16, decode=False, rngs=nnx.Rngs(0), **options)


TOKENS = X.reshape(2, 4, 16)


def decode_in_a_loop(amped, attention):
    @nnx.scan(in_axes=(nnx.StateAxes({...: nnx.Carry}), 1), out_axes=1)
    def steps(attention, x):
        return attention(x[:, None])[:, 0]

    return amped(steps)(attention, TOKENS)


def started_inside(amped, attention):
    def run(attention, x):
        attention.init_cache((2, 4, 16))
        return attention(x)

    return amped(run)(attention, TOKENS[:, :1])


programs(
    {
        "step by step": lambda amped, m: [
            amped(lambda m, x: m(x))(m, TOKENS[:, i : i + 1]) for i in range(4)
        ],
        "in a loop": decode_in_a_loop,
        "started inside": started_inside,
    },
    "decode cache",
    decoding,
)
programs(
    {"twice": lambda amped, m: [amped(m)(TOKENS) for _ in range(2)]},
    "attention with dropout",
    with_dropout,
)


class Sows(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(16, 16, rngs=nnx.Rngs(0))

    def __call__(self, x):
        x = self.linear(x)
        self.sow(nnx.Intermediate, "hidden", x)
        return nnx.relu(x)


def capture_outside(amped, model):
    y, seen = nnx.capture(amped(lambda m, x: m(x)), nnx.Intermediate)(model, X)
    return y, nnx.to_pure_dict(seen)


def capture_inside(amped, model):
    def run(model, x):
        y, seen = nnx.capture(model, nnx.Intermediate)(x)
        return y, nnx.to_pure_dict(seen)

    return amped(run)(model, X)


def capture_methods(amped, model):
    capture = nnx.capture(model, nnx.Intermediate, method_outputs=nnx.Intermediate)
    y, seen = amped(lambda x: capture(x))(X)
    return y, nnx.to_pure_dict(seen)


programs(
    {
        "captured outside": capture_outside,
        "captured inside": capture_inside,
        "of methods": capture_methods,
        # They are in the module.
        "sown": lambda amped, m: amped(m)(X),
    },
    "intermediates",
    Sows,
)


# Transformations of nnx inside


def stacked(count=3):
    @nnx.split_rngs(splits=count)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return Layer(rngs)

    return make(nnx.Rngs(0))


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(16, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(nnx.relu(self.norm(self.linear(x))))


def through_scan_of_remat(layers, x):
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    @nnx.remat
    def forward(x, layer):
        return layer(x)

    return forward(x, layers)


def through_vmap(layers, x):
    return nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None), out_axes=0)(layers, x)


INSIDE = {
    "jit": lambda m, x: nnx.jit(lambda m, x: m(x))(m, x),
    "remat": lambda m, x: nnx.remat(lambda m, x: m(x))(m, x),
    "cond on one side": lambda m, x: nnx.cond(
        x[0, 0] < 9, lambda m, x: m(x), lambda m, x: x, m, x
    ),
    "switch": lambda m, x: nnx.switch(
        jnp.int32(1), [lambda m, x: x, lambda m, x: m(x), lambda m, x: m.head(x)], m, x
    ),
    "while": lambda m, x: nnx.while_loop(
        lambda carry: carry[0] < 2,
        lambda carry: (carry[0] + 1, carry[1], carry[1](carry[2])),
        (jnp.int32(0), m, x),
    )[2],
    "scan over data": lambda m, x: nnx.scan(
        lambda m, x: m(x[None])[0],
        in_axes=(nnx.StateAxes({...: nnx.Carry}), 0),
        out_axes=0,
    )(m, x),
    "grad": lambda m, x: nnx.to_pure_dict(
        nnx.grad(lambda m, x: jnp.mean(m(x) ** 2))(m, x)
    ),
    "jax.jit, closed over": lambda m, x: jax.jit(lambda x: m.linear(x))(x),
    "jax.checkpoint, closed over": lambda m, x: jax.checkpoint(m.linear)(x),
    "lax.scan, closed over": lambda m, x: lax.scan(
        lambda x, _: (m.linear(x), None), x, None, length=2
    )[0],
}


for name, fn in INSIDE.items():
    programs({name: lambda amped, m, fn=fn: amped(fn)(m, X)}, "inside")
for name, fn in {"scan of remat": through_scan_of_remat, "vmap": through_vmap}.items():
    twice = lambda amped, m, fn=fn: [amped(fn)(m, X) for _ in range(2)]  # noqa: E731
    programs({name: twice}, "inside, stacked", stacked)


# Transformations of nnx outside


AROUND = {
    "vmap": lambda amped, m: nnx.vmap(
        amped(lambda layer, x: layer(x)), in_axes=(0, None), out_axes=0
    )(m, X),
    "scan of remat": lambda amped, m: nnx.scan(
        nnx.remat(amped(lambda layer, x: layer(x))),
        in_axes=(0, nnx.Carry),
        out_axes=nnx.Carry,
    )(m, X),
    "remat in scan": lambda amped, m: nnx.scan(
        lambda layer, x: nnx.remat(amped(type(layer).__call__))(layer, x),
        in_axes=(0, nnx.Carry),
        out_axes=nnx.Carry,
    )(m, X),
    "jit of scan": lambda amped, m: nnx.jit(
        nnx.scan(
            amped(lambda layer, x: layer(x)), in_axes=(0, nnx.Carry), out_axes=nnx.Carry
        )
    )(m, X),
}


programs(AROUND, "autocast inside", stacked)


def mean_square_of(m, x):
    return jnp.mean(jnp.square(m(x)))


def with_aux(m, x):
    y = m(x)
    return jnp.mean(jnp.square(y)), {"mean": y.mean(), "m": m.norm.mean[...]}


def second(x, m):
    return mean_square_of(m, x)


def two(a, b, x):
    return mean_square_of(a, b.linear(x))


ONLY_HEAD = nnx.DiffState(0, nnx.All(nnx.Param, nnx.PathContains("head")))
GRADIENTS = {
    "value_and_grad": lambda amped, m: nnx.value_and_grad(amped(mean_square_of))(m, X),
    "has_aux": lambda amped, m: nnx.value_and_grad(amped(with_aux), has_aux=True)(m, X),
    "two argnums": lambda amped, m: nnx.grad(amped(second), argnums=(0, 1))(X, m),
    "DiffState": lambda amped, m: nnx.grad(amped(mean_square_of), argnums=ONLY_HEAD)(
        m, X
    ),
    "two modules": lambda amped, m: nnx.grad(amped(two), argnums=(0, 1))(m, Net(), X),
    "closed over inputs": lambda amped, m: nnx.grad(
        amped(lambda m: mean_square_of(m, X))
    )(m),
    "jit": lambda amped, m: nnx.jit(nnx.value_and_grad(amped(mean_square_of)))(m, X),
    "remat": lambda amped, m: nnx.grad(nnx.remat(amped(mean_square_of)))(m, X),
    "amp": lambda amped, m: amp.value_and_grad(amped(mean_square_of))(
        m, X, loss_scale=amp.static_loss_scale(2.0**8)
    ),
    "inside, closed over": lambda amped, m: nnx.grad(
        lambda m, x: amped(lambda x: mean_square_of(m, x))(x)
    )(m, X),
    "autocast outside": lambda amped, m: amped(
        lambda m, x: nnx.grad(mean_square_of)(m, x)
    )(m, X),
}


for name, of in GRADIENTS.items():
    programs({name: lambda amped, m, of=of: nnx.as_pure(of(amped, m))}, "gradient")


# jax.grad over a State, the description of the model closed over or given.


def closed_over(amped, model):
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, rest, x):
        # A copy: `rest` belongs to the trace around the gradient.
        merged = nnx.merge(graphdef, params, rest, copy=True)
        y = jnp.mean(jnp.square(merged(x)))
        return y, nnx.state(merged, nnx.Not(nnx.Param))

    step = jax.jit(jax.grad(amped(loss), has_aux=True))
    gradients, state = step(params, rest, X)
    nnx.update(model, state)
    return nnx.to_pure_dict(gradients)


def as_argument(amped, model):
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    @functools.partial(jax.jit, static_argnums=0)
    def step(graphdef, params, rest, x):
        def loss(graphdef, params, rest, x):
            merged = nnx.merge(graphdef, params, rest, copy=True)
            y = jnp.mean(jnp.square(merged(x)))
            return y, nnx.split(merged, nnx.Param, ...)[2]

        transformed = jax.grad(amped(loss), argnums=1, has_aux=True)
        return transformed(graphdef, params, rest, x)

    gradients, state = step(graphdef, params, rest, X)
    nnx.update(model, state)
    return nnx.to_pure_dict(gradients)


def whole(amped, model):
    graphdef, state = nnx.split(model)

    def forward(state, x):
        merged = nnx.merge(graphdef, state)
        return merged(x), nnx.split(merged)

    y, (new_graphdef, new_state) = amped(forward)(state, X)
    assert new_graphdef == graphdef
    model_again = nnx.merge(new_graphdef, new_state)
    assert structure(model_again) == structure(model)
    nnx.update(model, new_state)
    return y


GIVEN = {"closed over": closed_over, "as argument": as_argument, "whole": whole}
programs(GIVEN, "description")


# Bridges


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16)(x)
        x = nn.BatchNorm(use_running_average=False)(x)
        return nn.Dropout(0.5, deterministic=False)(x)


class Mixed(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0, dropout=1)
        self.block = nnx.bridge.ToNNX(LinenBlock(), rngs=rngs).lazy_init(X)
        self.head = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        y = self.block(x, mutable=["batch_stats"])
        return self.head(y)


programs({"in nnx": called_twice}, "linen", Mixed)
BY_DEFAULT = {
    *("found: argument", "found: recursion", "found: nested"),
    *("done to it: set_up", "done to it: nothing_written", "in nnx.jit: set_up"),
    *("random streams: as arguments", "model: accessors", "model: shared"),
    *("model: marked instance", "split model: shared", "split model: lora"),
    *("intermediates: captured outside", "intermediates: captured inside"),
    *("intermediates: of methods", "intermediates: sown", "inside: jit"),
    *("inside: lax.scan, closed over", "autocast inside: scan of remat"),
    *("gradient: has_aux", "gradient: inside, closed over", "linen: in nnx"),
    *("description: closed over", "description: as argument", "description: whole"),
}
assert BY_DEFAULT < PROGRAMS.keys()


@pytest.mark.filterwarnings("ignore:.*outside of:DeprecationWarning")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow] * (n not in BY_DEFAULT))
        for n in PROGRAMS
    ],
)
def test_a_module_ends_as_without_autocast(name):
    assert_as_without_autocast(*PROGRAMS[name])


# Traces around


def test_a_module_that_is_only_read_may_belong_to_another_trace():
    model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    expected = model(X)
    for outer in (jax.jit, jax.checkpoint, jax.vmap):
        found = outer(lambda x: amp.autocast(lambda x: model(x))(x))(X)
        assert_close(found, expected, BF16)
    gradient = jax.grad(lambda x: amp.autocast(lambda x: model(x).sum())(x))(X)
    assert_close(gradient, jax.grad(lambda x: model(x).sum())(X), BF16)
    assert type(model) is nnx.Linear


def test_a_module_that_is_written_must_not_belong_to_another_trace():
    model = Net()
    before = jax.tree.map(jnp.copy, pure(model))
    with pytest.raises(errors.TraceContextError, match="as an argument") as raised:
        jax.jit(lambda x: amp.autocast(lambda x: model(x))(x))(X)
    assert "Net" in str(raised.value)
    assert_close(pure(model), before, "exactly")
    assert structure(model) == structure(Net())
    # And it works afterwards.
    assert_close(amp.autocast(model)(X), Net()(X), BF16)


def test_a_function_that_fails_leaves_the_module_alone():
    def fails(m, x):
        m.extra = 3
        m(x)
        raise KeyError("on purpose")

    model = Net()
    before = jax.tree.map(jnp.copy, pure(model))
    for fn in (fails, nnx.jit(fails)):
        with pytest.raises(KeyError, match="on purpose"):
            amp.autocast(fn)(model, X)
        assert structure(model) == structure(Net())
        assert_close(pure(model), before, "exactly")
    assert_close(amp.autocast(model)(X), Net()(X), BF16)


def test_nothing_is_left_behind_in_the_class_or_the_function():
    model = Net()

    def forward(x):
        return model(x)

    before = {name: id(value) for name, value in vars(Net).items()}
    cells = [cell.cell_contents for cell in forward.__closure__]
    amp.autocast(forward)(X)
    assert {name: id(value) for name, value in vars(Net).items()} == before
    assert forward.__closure__[0].cell_contents is cells[0] is model
    assert amp.autocast(forward).__name__ == "forward"
    model.eval()
    plain = str(jax.make_jaxpr(model)(X))
    assert "bf16" not in plain and "amp[" not in plain


def test_disabled_autocast_is_the_function_itself():
    model = Net()
    assert amp.autocast(model, enabled=False) is model


def test_a_jitted_step_compiles_once():
    traces = []

    @nnx.jit
    def step(model, x):
        traces.append(None)
        return amp.autocast(lambda m, x: m(x))(model, x)

    model = Net()
    for _ in range(3):
        step(model, X)
    assert len(traces) == 1


def test_explain_of_an_abstract_module_executes_and_writes_nothing():
    abstract = nnx.eval_shape(Net)
    inputs = jax.ShapeDtypeStruct(X.shape, X.dtype)
    before = structure(abstract)
    leaves = jax.tree.leaves(nnx.state(abstract))
    for fn, args in (
        (lambda m, x: m(x), (abstract, inputs)),
        (abstract, (inputs,)),
        (lambda x: abstract(x), (inputs,)),
    ):
        report = amp.explain(fn, BF16)(*args)
        assert report.total.matmuls_in_half == report.total.matmuls == 2
    assert structure(abstract) == before
    after = jax.tree.leaves(nnx.state(abstract))
    assert all(a is b for a, b in itertools.zip_longest(after, leaves))


def test_explain_of_a_module_writes_nothing():
    model = Net()
    before = jax.tree.map(jnp.copy, pure(model))
    report = amp.explain(lambda m, x: m(x), BF16)(model, X)
    assert report.total.matmuls_in_half == 2
    assert_close(pure(model), before, "exactly")
    assert structure(model) == structure(Net())


KEY = jax.random.key(3)


def test_an_nnx_module_in_linen_writes_as_without_autocast():
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nnx.bridge.to_linen(Layer, name="layer")(x)
            return nn.Dense(16)(x)

    model = Outer()
    variables = model.init({"params": jax.random.key(0), "dropout": KEY}, X)

    def apply(variables, x):
        return model.apply(variables, x, mutable=True, rngs={"dropout": KEY})

    expected = apply(variables, X)
    found = amp.autocast(apply, BF16)(variables, X)
    assert_close(values_of(found), values_of(expected), BF16)


def values_of(tree):
    return [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")]
