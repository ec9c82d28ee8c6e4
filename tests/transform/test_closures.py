"""Functions and classes of every kind reach nnx modules; what they write is kept."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors, nnx
from flax import linen as nn

import jmp_amp as amp
from jmp_amp.transform.closures import Closures

X = jax.random.normal(jax.random.key(0), (8, 16))
MAP = amp.PolicyMap("mixed_bfloat16", {"linear": "float32"})
# Two roundings of bf16 operands.
TOLERANCE = 4 * float(jnp.finfo(jnp.bfloat16).eps)


class Model(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(16, 16, rngs=nnx.Rngs(0))

    def forward(self, x):
        return self.linear(x)

    def _private(self, x):
        return self.linear(x)


def assert_close(found, wanted):
    scale = float(jnp.max(jnp.abs(wanted)))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE * scale)


def dtypes(fn, *args):
    equations = amp.explain(fn, MAP)(*args).equations
    return [e.dtype for e in equations if e.matmuls]


MODEL, CALLS = Model(), 0
HELD = [MODEL]
PARTIAL = functools.partial(Model.forward, MODEL)


def counted(x):
    global CALLS
    CALLS += 1
    return MODEL.forward(x)


def test_a_global_that_a_function_assigns_is_assigned():
    before = CALLS
    assert_close(amp.autocast(counted)(X), MODEL.forward(X))
    assert CALLS == before + 1


def test_lists_and_dictionaries_that_a_function_changes_are_changed():
    model, log = Model(), []
    held = {"model": model, "calls": 0, "old": 1}
    models = [model]

    def fn(x):
        held["calls"] += 1
        del held["old"]
        models.append("another")
        log.append("called")
        return held["model"].forward(x) + models[0].forward(x)

    wanted = 2 * model.forward(X)
    assert_close(amp.autocast(fn)(X), wanted)
    assert held == {"model": model, "calls": 1}
    assert models == [model, "another"] and models[0] is model
    assert log == ["called"]


@pytest.mark.parametrize(
    "fn", [lambda x: HELD[0].forward(x), lambda x: PARTIAL(x)], ids=["list", "partial"]
)
def test_a_global_that_holds_a_module_is_searched(fn):
    assert dtypes(fn, X) == ["f32"]


def test_a_method_of_a_base_class_is_the_one_that_is_called():
    class Louder(Model):
        def forward(self, x):
            return 100 * super().forward(x)

        def quiet(self, x):
            return amp.autocast(super().forward)(x)

    model = Louder()
    wanted = model.linear(X)
    assert_close(amp.autocast(super(Louder, model).forward)(X), wanted)
    assert_close(model.quiet(X), wanted)
    assert_close(amp.autocast(model.forward)(X), 100 * wanted)


def test_a_method_is_found_by_what_it_is_and_not_by_its_name():
    def renamed(method):
        def forward(self, x):
            return 2 * method(self, x)

        return forward

    class Twice(Model):
        other = renamed(Model.forward)

        def __hidden(self, x):
            return 3 * self.linear(x)

        def hidden(self):
            return self.__hidden

    model = Twice()
    assert_close(amp.autocast(model.other)(X), 2 * model.linear(X))
    assert_close(amp.autocast(model.hidden())(X), 3 * model.linear(X))


def test_descriptors_of_a_class_do_what_they_do():
    class OnInstances:
        def __get__(self, instance, owner):
            if instance is None:
                raise RuntimeError("only on instances")
            return 5

    class Dispatching(Model):
        number = OnInstances()

        @functools.singledispatchmethod
        def scaled(self, by):
            return self.linear(X)

        @scaled.register
        def _(self, by: int):
            return self.linear(X) * by * self.number

    model = Dispatching()
    found = amp.autocast(lambda model: model.scaled(3))(model)
    assert_close(found, 15 * model.linear(X))


def test_private_methods_have_the_policy_of_their_module():
    class Outer(nnx.Module):
        def __init__(self):
            self.linear = Model()

        def __call__(self, x):
            return self.linear._private(x)

    assert dtypes(Outer(), X) == ["f32"]


def test_a_users_class_is_not_told_of_subclasses():
    told = []

    class Registered(nnx.Module):
        def __init_subclass__(cls, *, tag, **kwargs):
            super().__init_subclass__(**kwargs)
            told.append(tag)

        def __init__(self):
            self.linear = nnx.Linear(16, 16, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.linear(x)

    class Derived(Registered, tag="derived"):
        pass

    model = Derived()
    assert_close(amp.autocast(model)(X), model.linear(X))
    assert told == ["derived"] and type(model) is Derived


def test_layers_of_one_class_are_alike_inside_of_autocast():
    class Stack(nnx.Module):
        def __init__(self):
            self.layers = nnx.List(
                [nnx.Linear(16, 16, rngs=nnx.Rngs(i)) for i in range(2)]
            )

    traces = []

    @jax.jit
    def layer_of(layer, x):
        traces.append(1)
        return layer(x)

    def stacked(model):
        layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *model.layers)
        return jax.lax.scan(lambda x, layer: (layer(x), None), X, layers)[0]

    def one_by_one(model):
        x = X
        for layer in model.layers:
            x = layer_of(layer, x)
        return x

    def chosen(model):
        layer = jax.lax.cond(
            X[0, 0] > 0, *[lambda i=i: model.layers[i] for i in (0, 1)]
        )
        return layer(X)

    model = Stack()
    wanted = model.layers[1](model.layers[0](X))
    assert_close(amp.autocast(stacked)(model), wanted)
    assert_close(amp.autocast(one_by_one)(model), wanted)
    assert len(traces) == 1
    assert_close(amp.autocast(chosen)(model), chosen(model))


@pytest.mark.breadth(2)
@pytest.mark.parametrize("transform", [nnx.jit, jax.jit, nnx.remat])
@pytest.mark.parametrize("special", [0, 1])
def test_layers_are_told_apart_by_the_class_of_what_they_are_a_part_of(
    special, transform
):
    class Part(nnx.Module):
        def __init__(self):
            self.block = Model()

    left, right = type("Left", (Part,), {}), type("Right", (Part,), {})

    class Both(nnx.Module):
        def __init__(self):
            self.parts = nnx.List([left(), right()])

        def __call__(self, x):
            run = transform(lambda block, x: block.forward(x))
            # Neither part is called itself.
            return run(self.parts[1].block, run(self.parts[0].block, x))

    policy = amp.PolicyMap("mixed_bfloat16", {(left, right)[special]: "float32"})
    equations = amp.explain(Both(), policy)(X).equations
    wanted = ["bf16", "bf16"]
    wanted[special] = "f32"
    assert [e.dtype for e in equations if e.matmuls] == wanted


def test_a_module_that_is_not_found_is_told_of():
    class Trainer:
        def __init__(self):
            self.model = nnx.BatchNorm(16, rngs=nnx.Rngs(0))

        def loss(self, x):
            return jnp.sum(self.model(x))

    with pytest.raises(errors.TraceContextError) as raised:
        amp.autocast(Trainer().loss)(X)
    assert "pass the module" in " ".join(raised.value.__notes__)


def test_no_tracer_outlives_the_trace():
    model = nn.Sequential([nn.Dense(8), nn.BatchNorm(use_running_average=False)])
    variables = model.init(jax.random.key(0), X)

    def fn(variables):
        return model.apply(variables, X, mutable=["batch_stats"])

    with jax.checking_leaks():
        jax.jit(amp.autocast(fn))(variables)


def test_long_lists_are_not_searched_and_others_once():
    asked = []

    def is_object(value):
        asked.append(value)
        return value == "object"

    long, short = list(range(2000)), list(range(10))

    def fn():
        return long, short, short

    assert Closures(is_object, str.upper, getattr).exchange(fn) is fn
    # The function, its two cells, the numbers of the short list, its defaults.
    assert len(asked) < 40


def test_a_partial_keeps_its_class():
    partial = jax.tree_util.Partial(lambda model, x: model.forward(x), MODEL)

    def fn(x):
        assert type(partial) is jax.tree_util.Partial
        return partial(x)

    assert_close(amp.autocast(fn)(X), MODEL.forward(X))
