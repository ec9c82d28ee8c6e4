"""Parts of a program that have a policy of their own."""

import abc
import dataclasses
import functools
import pickle
import threading
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

import jmp_amp as amp
from tests.constructs import ROWS
from tests.constructs.branches import layer
from tests.constructs.calls import pallas_double
from tests.constructs.regions import PLACES, around, attention, traced_in
from tests.programs import dtypes_of, equations, products, results_of, saved
from tests.rounding import (
    BF16,
    F16,
    KEY,
    POLICIES,
    ROUNDINGS,
    W,
    X,
    assert_only_rounded,
    eps,
    half_of,
    mean_square,
    relative_error,
)


@pytest.mark.breadth(2)
@pytest.mark.parametrize("place", PLACES)
def test_a_region_has_its_own_policy_wherever_it_is(place):
    fn = amp.autocast(around(place, amp.full_precision(layer)), BF16)
    assert products(fn, W) == ["bfloat16", "float32", "bfloat16"]
    assert results_of(fn, W, primitive="tanh") == ["float32"]
    fn = amp.autocast(around(place, amp.with_policy(F16)(layer)), BF16)
    assert products(fn, W) == ["bfloat16", "float16", "bfloat16"]


@pytest.mark.breadth(2)
@pytest.mark.parametrize("place", sorted(set(PLACES) - {"while"}))
def test_the_backward_products_of_a_region_have_its_policy(place):
    loss = ROWS[f"f32_in_{place}"].loss
    found = products(jax.grad(amp.autocast(loss, BF16)), W)
    # One forward (or two, recomputed), and two backward: by `h` and by `w`.
    assert found.count("float32") in (3, 4)
    assert found.count("bfloat16") == len(found) - found.count("float32") == 5


@pytest.mark.parametrize("place", PLACES)
def test_a_wholly_full_precision_function_has_no_half_precision(place):
    fn = amp.autocast(amp.full_precision(around(place, layer)), F16)
    found = {
        v.aval.dtype.name
        for eqn in equations(jax.make_jaxpr(fn)(W))
        for v in (*eqn.invars, *eqn.outvars)
    }
    assert "float32" in found and found.isdisjoint(("bfloat16", "float16"))


@pytest.mark.parametrize("place", PLACES)
def test_outside_autocast_a_region_changes_nothing(place):
    plain = str(jax.make_jaxpr(around(place, layer))(W))
    for mark in (amp.full_precision, amp.with_policy("bf16"), amp.cast_inputs):
        assert str(jax.make_jaxpr(around(place, mark(layer)))(W)) == plain


def test_the_name_of_a_marked_function_is_its_own():
    def block(h):
        "Doubles."
        return 2 * h

    for mark in (amp.full_precision, amp.with_policy(F16), amp.cast_inputs):
        assert mark(block).__name__ == "block" and mark(block).__doc__ == "Doubles."


# Nesting


def test_the_innermost_policy_wins():
    inner = amp.with_policy(F16)(lambda h, w: h @ w)
    middle = amp.full_precision(lambda h, w: inner(h @ w, w) @ w)
    fn = amp.autocast(lambda w: middle(X @ w, w) @ w, BF16)
    assert products(fn, W) == ["bfloat16", "float32", "float16", "float32", "bfloat16"]


def test_the_innermost_policy_wins_through_jit_scan_and_checkpoint():
    inner = jax.jit(amp.with_policy(F16)(lambda h, w: h @ w))

    @amp.full_precision
    def middle(h, w):
        body = jax.checkpoint(lambda h, _: (jnp.tanh(inner(h @ w, w) @ w), None))
        return lax.scan(body, h, None, length=2)[0]

    fn = amp.autocast(lambda w: mean_square(middle(X @ w, w) @ w), BF16)
    expected = ["bfloat16", "float32", "float16", "float32", "bfloat16"]
    assert products(fn, W) == expected
    counts = {d: products(jax.grad(fn), W).count(d) for d in set(expected)}
    assert counts["bfloat16"] == 5
    assert counts["float16"] >= 3 and counts["float32"] >= 6

    def plain(w):
        turn = lambda h, _: jnp.tanh(h @ w @ w @ w)  # noqa: E731
        return mean_square(functools.reduce(turn, range(2), X @ w) @ w)

    found, wanted = jax.jit(jax.grad(fn))(W), jax.grad(plain)(W)
    assert relative_error(found, wanted) < 2 * ROUNDINGS * eps(BF16)


def test_the_same_policy_inside_changes_nothing():
    fn = lambda w: jnp.tanh(X @ w) @ w  # noqa: E731
    marked = lambda w: (  # noqa: E731
        amp.with_policy(amp.get_policy(BF16).with_output_dtype("bf16"))(layer)(X, w) @ w
    )
    found, expected = (
        sorted(results_of(amp.autocast(f, BF16), W, primitive="dot_general"))
        for f in (marked, fn)
    )
    assert found == expected
    np.testing.assert_array_equal(amp.autocast(marked)(W), amp.autocast(fn)(W))


def test_a_region_inside_itself_works():
    @amp.full_precision
    def power(h, w, n):
        return h if n == 0 else power(h @ w, w, n - 1)

    fn = amp.autocast(lambda w: power(X @ w, w, 3) @ w)
    assert products(fn, W) == ["bfloat16", *["float32"] * 3, "bfloat16"]


def test_an_autocast_inside_a_region_wins():
    inner = amp.autocast(lambda h, w: h @ w, F16)
    fn = amp.autocast(lambda w: amp.full_precision(inner)(X @ w, w) @ w, BF16)
    assert products(fn, W) == ["bfloat16", "float16", "bfloat16"]


# Values that leave


def test_what_leaves_in_f32_makes_what_reads_it_f32():
    half = half_of(BF16)
    block = amp.full_precision(lambda h, w: h @ w)
    fn = amp.autocast(lambda w: jnp.tanh(block(X @ w, w)) @ w, BF16)
    assert results_of(fn, W, primitive="tanh") == ["float32"]
    handed_on = amp.with_policy(f"p=f32,c=f32,o={half}")(lambda h, w: h @ w)
    fn = amp.autocast(lambda w: jnp.tanh(handed_on(X @ w, w)) @ w, BF16)
    assert results_of(fn, W, primitive="tanh") == [half]
    assert products(fn, W) == [half, "float32", half]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_half_region_inside_an_f32_program_is_one(policy):
    half = half_of(policy)
    low = amp.with_policy(f"p=f32,c={half},o={half}")(lambda w: X @ w)
    fn = amp.autocast(lambda w: jnp.tanh(low(w)), "float32")
    assert products(fn, W) == [half]
    assert results_of(fn, W, primitive="tanh") == ["float32"]
    exact = np.asarray(X, np.float64) @ np.asarray(W, np.float64)
    assert relative_error(fn(W), np.tanh(exact)) < ROUNDINGS * eps(policy)


def test_parameters_of_a_full_region_are_not_rounded():
    # 1 + 2**-12 has no place in bf16 nor in f16.
    w = jnp.full((16, 16), 1 + 2.0**-12)
    block = amp.full_precision(lambda w: jnp.sum(w * w, axis=0))
    for policy in POLICIES:
        found = amp.autocast(lambda w: (block(w), X @ w), policy)(w)[0]
        np.testing.assert_array_equal(found, block(w))


# Nothing leaks


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16)(nn.LayerNorm()(nn.Dense(16)(x)))
        return nn.Dense(4)(jnp.tanh(x))


def text(fn, *args):
    return str(jax.make_jaxpr(fn)(*args))


def test_neither_order_of_calls_leaks_between_plain_and_autocast():
    def fresh():
        marked = amp.full_precision(layer)
        return jax.jit(lambda w: marked(X @ w, w) @ w)

    first, second = fresh(), fresh()
    plain, mixed = text(first, W), text(amp.autocast(first), W)
    assert (text(amp.autocast(second), W), text(second, W)) == (mixed, plain)
    assert "bf16" in mixed and "bf16" not in plain
    assert text(first, W) == plain and text(amp.autocast(first), W) == mixed
    # and what was compiled is what was traced:
    first(W), amp.autocast(first)(W)
    np.testing.assert_array_equal(first(W), jnp.tanh(X @ W @ W) @ W)


@pytest.mark.parametrize("order", [(BF16, F16, None), (None, F16, BF16)])
def test_a_jitted_helper_with_norms_does_not_leak_between_policies(order):
    net = Net()
    variables = jax.eval_shape(net.init, KEY, X)

    def traced(helper, policy):
        fn = helper if policy is None else amp.autocast(helper, policy)
        return text(fn, variables, X)

    alone = {policy: traced(jax.jit(net.apply), policy) for policy in order}
    helper = jax.jit(net.apply)
    for policy in (*order, *order):
        assert traced(helper, policy) == alone[policy]
    assert len(set(alone.values())) == 3


def test_a_jitted_helper_has_the_policy_of_each_of_its_regions():
    helper = jax.jit(lambda h, w: h @ w)
    full, half = amp.full_precision(helper), amp.with_policy(F16)(helper)

    def fn(w):
        return half(full(helper(X, w), w), w), full(X @ w, w), helper(X, w)

    found = products(amp.autocast(fn, BF16), W)
    assert sorted(found) == sorted(
        ["bfloat16", "float32", "float16", "bfloat16", "float32", "bfloat16"]
    )


def test_a_helper_with_norms_has_the_policy_of_each_of_its_regions():
    net = Net()
    variables = jax.eval_shape(net.init, KEY, X)
    helper = jax.jit(net.apply)

    def fn(variables):
        return (
            helper(variables, X),
            amp.full_precision(helper)(variables, X),
            amp.with_policy(F16)(helper)(variables, X),
        )

    found = products(amp.autocast(fn, BF16), variables)
    assert found == ["bfloat16"] * 3 + ["float32"] * 3 + ["float16"] * 3


def test_an_error_inside_a_region_leaves_no_policy_behind():
    @amp.full_precision
    def broken(x):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        amp.autocast(broken)(X)
    marked = amp.cast_inputs(lambda x: x)
    assert text(marked, X) == text(lambda x: x, X)


def test_threads_have_policies_of_their_own():
    net = Net()
    variables = jax.jit(net.init)(KEY, X)

    def made():
        return jax.jit(
            lambda v, x: amp.full_precision(layer)(net.apply(v, x), W[:4, :4])
        )

    helper = made()
    expected = {
        policy: text(amp.autocast(helper, policy), variables, X) for policy in POLICIES
    }
    expected[None] = text(helper, variables, X)
    # Traced anew, by the threads.
    helper = made()
    wait = threading.Barrier(3)
    wrong = []

    def work(policy):
        wait.wait()
        for _ in range(3):
            fn = helper if policy is None else amp.autocast(helper, policy)
            if text(fn, variables, X) != expected[policy]:
                wrong.append(policy)

    threads = [threading.Thread(target=work, args=(p,)) for p in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# cast_inputs


def test_a_custom_vjp_is_traced_in_half_and_its_results_stay_half():
    def fn(w, attend):
        h = X @ w
        h = h + attend(h, h)
        return mean_square(jnp.tanh(h) @ w)

    traced_in.clear()
    mixed = amp.autocast(lambda w: fn(w, amp.cast_inputs(attention)))
    assert set(products(jax.grad(mixed), W)) == {"bfloat16"}
    assert set(traced_in) == {"bfloat16"} and len(traced_in) >= 4
    assert products(mixed, W) == ["bfloat16"] * 4
    kept = saved(mixed, W, (8, 16))
    assert kept and kept.count("float32") <= 1


def test_a_pallas_kernel_is_traced_in_half():
    def fn(w):
        return jnp.tanh(amp.cast_inputs(pallas_double)(X @ w) + X @ w) @ w

    mixed = amp.autocast(fn)
    assert dtypes_of(mixed, W, primitive="pallas_call") == [("bfloat16", "bfloat16")]
    assert_only_rounded(lambda transform, w: transform(fn)(w))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_the_dtype_of_cast_inputs_is_the_one_that_it_names(dtype):
    seen = []

    @jax.custom_vjp
    def note(tree, flag):
        assert flag is True
        seen.append(jax.tree.map(lambda x: x.dtype.name, tree))
        return tree

    def call(w):
        tree = {"h": X @ w, "i": jnp.arange(2), "z": jnp.ones(2, jnp.complex64)}
        # The rule is not what is tested: it need not be there.
        return amp.cast_inputs(lambda tree, *, flag: note.fun(tree, flag), dtype=dtype)(
            tree, flag=True
        )

    found = amp.autocast(call, BF16)(W)
    (types,) = seen
    assert types == {"h": jnp.dtype(dtype).name, "i": "int32", "z": "complex64"}
    assert jax.tree.map(lambda x: x.dtype.name, found) == {
        "h": "float32",
        "i": "int32",
        "z": "complex64",
    }


def test_cast_inputs_in_a_full_precision_region_casts_to_f32():
    traced_in.clear()
    fn = amp.full_precision(lambda w: amp.cast_inputs(attention)(X @ w, X))
    found = amp.autocast(fn, BF16)(W)
    assert set(traced_in) == {"float32"}
    np.testing.assert_allclose(found, attention(X @ W, X), rtol=1e-5, atol=1e-6)


def test_float64_inputs_are_not_cast():
    with jax.enable_x64(True):
        x = jnp.full((2, 2), 1 + 2.0**-40, jnp.float64)
        found = amp.autocast(amp.cast_inputs(lambda x: x @ x), F16)(x)
        assert found.dtype == jnp.float64
        np.testing.assert_array_equal(found, x @ x)


def test_an_input_that_is_returned_by_cast_inputs_is_an_f32_array():
    found = amp.autocast(amp.cast_inputs(lambda x, n: (x, n)), BF16)(X, 3)
    assert found[0].dtype == jnp.float32 and found[1] == 3
    assert relative_error(found[0], X) < eps(BF16)


# Regions and rules


def test_a_region_in_the_rule_of_a_custom_jvp_has_its_policy():
    gradient = jax.grad(amp.autocast(ROWS["region_in_custom_jvp"].loss))
    assert set(results_of(gradient, W, primitive="cos")) == {"float32"}
    assert set(products(gradient, W)) == {"bfloat16"}


# Modules and methods


def test_a_method_can_be_marked():
    class Model:
        @amp.full_precision
        def head(self, h, w):
            return h @ w

        @amp.with_policy(F16)
        def body(self, x, w):
            return x @ w

        def __call__(self, x, w):
            return self.head(self.body(x, w) @ w, w)

    fn = amp.autocast(lambda w: Model()(X, w), BF16)
    assert products(fn, W) == ["float16", "bfloat16", "float32"]


def test_a_region_may_have_no_arrays_and_keyword_arguments():
    @amp.with_policy(F16)
    def block(w, *, mode, scale=2.0):
        assert mode == "a" and isinstance(scale, float)
        return {"y": X @ w * scale, "none": None, "name": mode}

    found = amp.autocast(block, BF16)(W, mode="a")
    assert found["none"] is None and found["name"] == "a"
    assert relative_error(found["y"], 2 * X @ W) < ROUNDINGS * eps(F16)
    assert products(lambda w: amp.autocast(block, BF16)(w, mode="a")["y"], W) == [
        "float16"
    ]


def test_a_scope_that_the_user_names_stays_inside_a_region():
    @amp.full_precision
    def block(w):
        with jax.named_scope("mine"):
            return X @ w

    lowered = jax.jit(amp.autocast(lambda w: block(w) @ w)).lower(W)
    assert "mine/dot_general" in lowered.as_text(debug_info=True)


def test_a_region_survives_being_differentiated_inside_autocast():
    found = products(amp.autocast(ROWS["region_in_gradient"].fn), W)
    assert found.count("float32") == 3 and found.count("bfloat16") == 2


def test_constants_that_f16_cannot_hold_are_right_on_both_sides_of_a_region():
    block = amp.full_precision(lambda h: h * 1e6)
    fn = lambda w: (block(X @ w) * 1e-6) @ w  # noqa: E731
    assert relative_error(amp.autocast(fn, F16)(W), fn(W)) < ROUNDINGS * eps(F16)
    made = amp.full_precision(lambda: jnp.float32(1e6))
    fn = lambda w: ((X @ w) * made() * 1e-6) @ w  # noqa: E731
    assert relative_error(amp.autocast(fn, F16)(W), fn(W)) < ROUNDINGS * eps(F16)


# Names of dtypes, of users and of modules


@pytest.mark.parametrize(("dtype", "name"), [("bf16", "bfloat16"), ("f16", "float16")])
def test_cast_inputs_takes_the_names_that_policies_take(dtype, name):
    seen = []

    def note(x):
        seen.append(x.dtype.name)
        return x

    amp.autocast(amp.cast_inputs(note, dtype), "float32")(X)
    assert seen == [name]


def test_every_equation_outside_of_regions_is_unmarked():
    fn = amp.autocast(lambda w: amp.full_precision(layer)(X @ w, w) @ w)
    names = [str(e.source_info.name_stack) for e in equations(jax.make_jaxpr(fn)(W))]
    assert sum("amp[" in name for name in names) >= 2
    assert names[-1] == "" or "amp[" not in names[-1]


# Names of the user that look like the text of a policy but for their beginning, their
# end or their dtypes.
LOOKALIKES = (
    "clamp[0] ramp[f32] lamp[p=f32,c=f32,o=f32] amp[0] amp[f32] amp[] amp[f16 "
    "amp[p=f32,c=f32,o=f32]_1 x_amp[p=f32,c=f32,o=f32]"
).split()


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", LOOKALIKES)
def test_a_name_of_the_user_is_no_policy(name):
    def fn(w):
        with jax.named_scope(name):
            return mean_square(layer(X @ w, w))

    plain = lambda w: mean_square(layer(X @ w, w))  # noqa: E731
    found, expected = (amp.autocast(each, F16) for each in (fn, plain))
    assert products(jax.grad(found), W) == products(jax.grad(expected), W)
    # A report shows the name as it is.
    modules = {e.module for e in amp.explain(fn, F16)(W).equations}
    assert modules == {name}


def test_a_linen_module_may_have_any_name():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(4, name="clamp[0]")(x)
            return mark_f32(nn.Dense(4, name="ramp[f32]"))(x)

    params = jax.eval_shape(Net().init, KEY, X)
    assert products(amp.autocast(Net().apply, F16), params, X) == ["float16", "float32"]


# Flax modules

mark_f32 = amp.with_policy("float32")
MarkedDense = mark_f32(nn.Dense)


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16)(x)
        x = MarkedDense(16)(x)
        x = mark_f32(nn.Dense(16))(x)
        return nn.Dense(16)(x)


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(16, 16, rngs=rngs)
        self.second = mark_f32(nnx.Linear)(16, 16, rngs=rngs)
        self.third = mark_f32(nnx.Linear(16, 16, rngs=rngs))

    def __call__(self, x):
        return self.head(self.second(self.first(x)))

    def head(self, x):
        return self.third(x)


def test_linen_classes_and_modules_can_be_marked_and_keep_their_names():
    net = LinenNet()
    variables = jax.eval_shape(net.init, jax.random.key(0), X)
    assert sorted(variables["params"]) == [f"Dense_{i}" for i in range(4)]
    apply = amp.autocast(net.apply, BF16)
    expected = ["bfloat16", "float32", "float32", "bfloat16"]
    assert products(apply, variables, X) == expected
    assert products(net.apply, variables, X) == ["float32"] * 4


def test_marking_a_linen_module_leaves_the_module_itself_alone():
    net = LinenNet()
    marked = mark_f32(net)
    variables = jax.eval_shape(marked.init, jax.random.key(0), X)
    assert products(amp.autocast(marked.apply, BF16), variables, X) == ["float32"] * 4
    assert "bfloat16" in products(amp.autocast(net.apply, BF16), variables, X)
    assert isinstance(marked, LinenNet)


def test_nnx_classes_and_modules_can_be_marked_and_stay_modules():
    net = NnxNet(nnx.Rngs(0))
    expected = ["bfloat16", "float32", "float32"]
    assert products(amp.autocast(lambda x: net(x), BF16), X) == expected
    marked = mark_f32(net)
    assert isinstance(marked, NnxNet) and marked.first is net.first
    merged = nnx.merge(*nnx.split(marked))
    for module in (marked, merged):
        found = products(amp.autocast(lambda x, module=module: module(x), BF16), X)
        assert found == ["float32"] * 3
    assert products(amp.autocast(lambda x: marked.head(x), BF16), X) == ["float32"]
    assert products(amp.autocast(lambda x: net(x), BF16), X) == expected


class Told:
    """A user's base: it counts the classes of the user, and wants an argument."""

    def __init_subclass__(cls, *, tag, **kwargs):
        super().__init_subclass__(**kwargs)
        cls.told = [*getattr(cls, "told", ()), tag]


class ToldLinen(Told, nn.Module, tag="base"):
    features: int = 16

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.features)(x)


class ToldNnx(Told, nnx.Module, tag="base"):
    def __init__(self):
        self.linear = nnx.Linear(16, 16, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.linear(x)


@pytest.mark.parametrize("cls", [ToldLinen, ToldNnx])
def test_marking_tells_nothing_to_a_users_class_and_its_subclasses_do(cls):
    marked = mark_f32(cls)
    assert marked.told == cls.told == ["base"] and type(marked) is type(cls)
    assert marked.__mro__ == (marked, *cls.__mro__)
    assert type(mark_f32(cls())).told == ["base"]

    class Derived(marked, tag="derived"):
        pass

    assert Derived.told == ["base", "derived"]
    for each in (marked(), Derived(), mark_f32(cls())):
        if cls is ToldNnx:
            fn, args = amp.autocast(lambda x, each=each: each(x), BF16), (X,)
        else:
            fn = amp.autocast(each.apply, BF16)
            args = jax.eval_shape(each.init, jax.random.key(0), X), X
        assert products(fn, *args) == ["float32"]


T = TypeVar("T")


class Slotted:
    __slots__ = ()

    def __init_subclass__(cls, *, tag, **kwargs):
        super().__init_subclass__(**kwargs)
        cls.told = [*getattr(cls, "told", ()), tag]


class Dense(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(16, 16, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.linear(x)


class SlottedFirst(Slotted, Dense, tag="base"):
    pass


class GenericFirst(Generic[T], Dense):
    pass


class GenericOfInt(GenericFirst[int]):
    pass


class GenericTold(Generic[T], Told, Dense, tag="base"):
    pass


class Abstract(Dense, abc.ABC):
    @abc.abstractmethod
    def width(self): ...


class Concrete(Abstract):
    def width(self):
        return 16


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    "cls", [SlottedFirst, GenericFirst, GenericOfInt, GenericTold, Concrete]
)
def test_classes_of_all_layouts_run_under_autocast_and_are_marked(cls):
    net = cls()
    assert products(amp.autocast(lambda x: net(x), BF16), X) == ["bfloat16"]
    mark_f32(net)
    for marked in (mark_f32(cls)(), mark_f32(net)):
        fn = amp.autocast(lambda x, marked=marked: marked(x), BF16)
        assert products(fn, X) == ["float32"]
        assert isinstance(marked, cls) and getattr(marked, "told", ["base"]) == ["base"]


def test_an_abstract_class_is_marked_for_its_subclasses():
    @mark_f32
    class Base(Dense, abc.ABC):
        @abc.abstractmethod
        def width(self): ...

    class Derived(Base):
        def width(self):
            return 16

    net = Derived()
    assert products(amp.autocast(lambda x: net(x), BF16), X) == ["float32"]
    with pytest.raises(TypeError, match="abstract"):
        Base()


def test_a_jitted_method_of_a_marked_class_can_still_be_lowered():
    @mark_f32
    class Net(nnx.Module):
        @functools.partial(jax.jit, static_argnums=0)
        def double(self, x):
            return x * 2

    net = Net()
    assert "multiply" in Net.double.lower(net, X).as_text()


class EveryMethod(nnx.Module, pytree=False):
    """Methods of all kinds, each with one product."""

    def __init__(self):
        self.w = nnx.Param(jnp.eye(16))

    def compute(self, x):
        return x @ self.w[...]

    def _private(self, x):
        return x @ self.w[...]

    def __hidden(self, x):
        return x @ self.w[...]

    @functools.partial(jax.jit, static_argnums=0)
    def jitted(self, x):
        return x @ jnp.eye(16)

    @functools.singledispatchmethod
    def dispatching(self, x):
        return x @ self.w[...]

    @staticmethod
    def static(x):
        return x @ jnp.eye(16)

    @classmethod
    def of_class(cls, x):
        return x @ jnp.eye(16)

    @property
    def product(self):
        return X @ self.w[...]

    def __matmul__(self, x):
        return x @ self.w[...]


@pytest.mark.parametrize("mark", ["class", "object"])
def test_methods_of_all_kinds_have_the_policy_of_a_marked_class(mark):
    model = mark_f32(EveryMethod)() if mark == "class" else mark_f32(EveryMethod())

    def used(call):
        return products(amp.autocast(lambda x: call(model, x), BF16), X)

    for name in "compute _private _EveryMethod__hidden jitted dispatching".split():
        assert used(lambda m, x, name=name: getattr(m, name)(x)) == ["float32"], name
    # Of these a class has one for all its objects, or Python asks for the value.
    assert used(lambda m, x: m.static(x)) == ["bfloat16"]
    assert used(lambda m, x: type(m).of_class(x)) == ["bfloat16"]
    assert used(lambda m, x: m.product) == ["bfloat16"]
    assert used(lambda m, x: m @ x) == ["bfloat16"]
    assert not jax.tree_util.all_leaves([nnx.Linear(1, 1, rngs=nnx.Rngs(0))])
    assert jax.tree_util.all_leaves([model])


def test_a_private_method_is_no_region_inside_of_the_module_that_calls_it():
    class Block(nnx.Module):
        def __call__(self, x):
            return self._again(x @ jnp.eye(16)) @ jnp.eye(16)

        def _again(self, x):
            return x @ jnp.eye(16)

    marked = amp.with_policy("mixed_bfloat16")(Block())
    for model, policy in ((Block(), BF16), (marked, "float32")):
        fn = amp.autocast(lambda x, model=model: model(x), policy)
        assert products(fn, X) == ["bfloat16"] * 3


@amp.with_policy("float32")
class PickledLinen(nn.Module):
    features: int
    name_of_it: str = "marked"

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.features)(x)


@amp.with_policy("float32")
class PickledNnx(nnx.Module):
    def __init__(self, features):
        self.features = features

    def __call__(self, x):
        return x @ jnp.ones((16, self.features))


@pytest.mark.parametrize("cls", [PickledLinen, PickledNnx])
def test_modules_of_a_marked_class_are_pickled_and_keep_their_fields(cls):
    model = pickle.loads(pickle.dumps(cls(4)))
    assert type(model) is cls and model.features == 4
    if cls is PickledLinen:
        assert model == cls(4) and model.clone(features=8) == cls(8)
        assert [each.name for each in dataclasses.fields(cls)][:2] == [
            "features",
            "name_of_it",
        ]
        found = model.init_with_output(jax.random.key(0), X)[0]
    else:
        found = model(X)
    assert found.shape == (8, 4)
