"""The programs that a diagnosis compiles: which are used again, and which refused."""

import contextlib
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jmp_amp as amp
from jmp_amp.numerics.calls.executables import Executables
from jmp_amp.numerics.measure import programs

_COMPILED = "/jax/core/compile/backend_compile_duration"
_TOLD = []
W, X = jnp.full((4, 4), 30.0), jnp.full((8, 4), 2.0)


@pytest.fixture(scope="module")
def compilations():
    """Returns a function that tells how many programs JAX has compiled."""

    def told(event, seconds, **_):
        if event == _COMPILED:
            _TOLD.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(told)
    return lambda: len(_TOLD)


def loss(w, x):
    return jnp.sum((x @ w) ** 2)


def test_a_second_call_with_other_values_compiles_nothing(compilations):
    rng = np.random.default_rng(0)
    diagnosed, found, counts = amp.diagnose(loss), [], []
    for rows in (8, 8, 4, 8, 4):
        shapes = (4, 4), (rows, 4)
        args = [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes]
        before = compilations()
        found.append(diagnosed(*args).to_dict())
        counts.append(compilations() - before)
    assert counts[2] >= 3 and (counts[1], *counts[3:]) == (0, 0, 0)
    assert found[2] != found[4] == amp.diagnose(loss)(*args).to_dict()


def test_the_run_that_checks_the_policy_is_not_compiled_again(compilations):
    diagnosed = amp.diagnose(lambda w, x: jnp.mean((x @ w) ** 2))
    first = diagnosed(W * 10, X * 100)
    before = compilations()
    assert (
        diagnosed(W * 11, X * 100).policy
        == first.policy
        != amp.PolicyMap("mixed_float16")
    )
    # The arguments were multiplied: by programs that JAX has compiled already.
    assert compilations() == before


@pytest.mark.slow
def test_what_is_closed_over_and_which_argument_is_read_is_that_of_this_call():
    held = {}
    diagnosed = amp.diagnose(lambda w, a, b: w * held["x"] * (a if held["a"] else b))
    two, seven = jnp.full(2, 2.0), jnp.full(2, 7.0)
    for largest, is_first in ((3.0, True), (5.0, True), (5.0, False)):
        held.update(x=np.float32([1.0, largest]), a=is_first)
        by = 2.0 if is_first else 7.0
        found = diagnosed(np.ones(2, np.float32), two, seven).value.tolist()
        assert found == [by, by * largest]


@pytest.mark.slow
def test_an_nnx_module_is_as_it_is_at_this_call(compilations):
    class Scaled(nnx.Module):
        def __init__(self):
            self.w, self.factor = nnx.Param(jnp.ones(2)), 1.0

        def __call__(self, x):
            return self.w[...] * x * self.factor

    model = Scaled()
    diagnosed = amp.diagnose(lambda model, x: model(x), "p=f32,c=f32,o=f32")
    values = [diagnosed(model, jnp.ones(2)).value.tolist()]
    model.w[...] = 3 * model.w[...]
    before = compilations()
    values.append(diagnosed(model, jnp.ones(2)).value.tolist())
    assert compilations() == before
    model.factor = 5.0
    values.append(diagnosed(model, jnp.ones(2)).value.tolist())
    assert values == [[1.0, 1.0], [3.0, 3.0], [15.0, 15.0]]


def test_the_callbacks_of_this_call_are_called():
    held = {}

    def called(x):
        seen, factor = held["seen"], held["factor"]
        jax.debug.callback(lambda x: seen.append(float(x[0])), x)
        return jax.pure_callback(lambda x: x * factor, jax.typeof(x), x)

    diagnosed = amp.diagnose(called)
    for factor in np.float32([3.0, 5.0]):
        held.update(seen=[], factor=factor)
        found = diagnosed(jnp.full(1, 2.0))
        jax.effects_barrier()
        # Under the policy and as it is.
        assert (held["seen"], found.value) == ([2.0, 2.0], 2 * factor)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("kind", ["argument", "constraint", "default"])
def test_the_devices_are_those_of_this_call(kind):
    held = {}

    def doubled(x):
        if kind == "constraint":
            mesh = jax.sharding.Mesh(held["devices"], ("d",))
            sharding = NamedSharding(mesh, PartitionSpec("d"))
            x = jax.lax.with_sharding_constraint(x, sharding)
        return x * 2

    diagnosed = amp.diagnose(doubled)
    for held["devices"] in (jax.devices()[:2], jax.devices()[2:4]):
        x, where = np.ones(4, np.float32), contextlib.nullcontext()
        if kind == "argument":
            x = jax.device_put(x, held["devices"][0])
        elif kind == "default":
            where = jax.default_device(held["devices"][0])
        with where:
            found = diagnosed(x).value.devices()
        wanted = held["devices"] if kind == "constraint" else held["devices"][:1]
        assert found == set(wanted)


def compiled_of(executables, fn, *args):
    with executables.compiling("diagnose(fn)") as compile_:
        return compile_(fn, *args, options=dict).result()


def test_results_are_of_the_types_that_the_program_returns():
    executables, numbers = Executables(), jnp.zeros(4, jnp.uint32)
    for kind in ("rbg", "unsafe_rbg"):
        compiled = compiled_of(
            executables, lambda x, k=kind: jax.random.wrap_key_data(x, impl=k), numbers
        )
        assert compiled(numbers).dtype == jax.random.key(0, impl=kind).dtype


def test_devices_may_be_named_inside_of_a_call():
    executables, x = Executables(), np.ones(4, np.float32)
    for devices in (jax.devices()[:2], jax.devices()[2:4]):
        sharding = NamedSharding(jax.sharding.Mesh(devices, "d"), PartitionSpec("d"))
        placed = jax.jit(lambda x, s=sharding: jax.lax.with_sharding_constraint(x, s))
        assert compiled_of(executables, placed, x)(x).devices() == set(devices)


def test_a_large_constant_is_not_read_again():
    executables, x = Executables(), jnp.float32(2)
    for size, same in ((1 << 10, True), (1 << 21, False)):
        constant = np.arange(size, dtype=np.float32)
        first, second = (
            compiled_of(executables, lambda x, c=constant: x * c, x) for _ in range(2)
        )
        assert (first is second) == same


def test_only_the_last_programs_are_kept():
    executables, x = Executables(), jnp.float32(2)

    def power(exponent):
        return compiled_of(executables, lambda x: jax.lax.integer_pow(x, exponent), x)

    first, second = power(2), power(3)
    for exponent in range(4, 17):
        power(exponent)
    assert power(2) is first
    power(17)
    assert power(2) is first and power(3) is not second


def test_what_failed_is_compiled_again():
    executables = Executables()
    failed, well = Future(), Future()
    failed.set_exception(MemoryError())
    assert executables.once("key", lambda: failed) is failed
    assert executables.once("key", lambda: well) is well
    assert executables.once("key", Future) is well


@pytest.mark.breadth(1)
@pytest.mark.parametrize(("turns", "fast"), [(4, True), (1000, False)])
def test_a_program_with_many_turns_is_optimised(turns, fast, monkeypatch):
    told = []
    compile_ = jax.stages.Lowered.compile

    def compiled(self, compiler_options):
        told.append("xla_backend_optimization_level" in compiler_options)
        return compile_(self, compiler_options)

    def fn(x):
        turn = jax.checkpoint(lambda x, _: (jnp.sin(x @ x), None))
        return jax.lax.scan(turn, x, None, length=turns)[0]

    monkeypatch.setattr(jax.stages.Lowered, "compile", compiled)
    # Two operations on four values: less than it in four turns, more in a thousand.
    monkeypatch.setattr(programs, "_LARGE", 2_000)
    amp.diagnose(fn)(jnp.ones((2, 2)))
    # The fourth program compares the gradients.
    assert told == [fast, fast, fast, True]


@pytest.mark.parametrize("asked", ["diagnose", "tune"])
def test_a_rule_that_uses_an_array_around_it_is_told(asked):
    def fn(w, x):
        scale = jnp.tanh(x.sum())
        scaled = jax.custom_vjp(lambda x: x * scale)
        scaled.defvjp(lambda x: (x * scale, None), lambda _, g: (g * scale,))
        return jnp.sum(scaled(x @ w))

    w = jnp.ones((2, 2))
    assert np.isfinite(jax.jit(jax.grad(fn))(w, w)).all()
    bound = {"max_grad_error": 0.1} if asked == "tune" else {}
    with pytest.raises(TypeError, match=rf"^{asked}\(.*Pass the array as an argument"):
        getattr(amp, asked)(fn, **bound)(w, w)


def test_an_array_that_was_kept_from_an_earlier_call_is_told():
    kept = []

    def fn(w):
        kept.append(jnp.sum(w @ w))
        return kept[0]

    diagnosed = amp.diagnose(fn)
    assert diagnosed(jnp.ones((2, 2))).value == 8.0
    with pytest.raises(TypeError, match=r"^diagnose\(fn\): .* of an earlier call\?"):
        diagnosed(jnp.ones((2, 2)))
