"""Bad input of the public calls: an error that names the call and the remedy."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jmp_amp as amp

F16 = "mixed_float16"
PARAMS = jnp.ones(3)
PLAIN = optax.sgd(0.1, momentum=0.9)
TX = amp.with_loss_scale(PLAIN, amp.dynamic_loss_scale())
STATE = TX.init(PARAMS)
TORCH = {
    "scale": 1024.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "_growth_tracker": 0,
}


def torch_with(tracker):
    return amp.loss_scale_from_torch(TORCH | {"_growth_tracker": tracker})


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(x)


class Nnx(nnx.Module):
    def __call__(self, x):
        return x @ x


def as_context(made):
    with made:
        pass


def report():
    return amp.explain(jnp.dot)(jnp.eye(2), jnp.eye(2))


# A flag is a bool

FLAGS = {
    "autocast.enabled": lambda flag: amp.autocast(jnp.abs, enabled=flag),
    "autocast.enabled as a decorator": lambda flag: amp.autocast(enabled=flag),
    "with_loss_scale.unscale": lambda flag: amp.with_loss_scale(
        PLAIN, amp.no_loss_scale(), unscale=flag
    ),
    "value_and_grad.has_aux": lambda flag: amp.value_and_grad(abs, has_aux=flag),
    "value_and_grad.holomorphic": lambda flag: amp.value_and_grad(
        abs, holomorphic=flag
    ),
    "value_and_grad.allow_int": lambda flag: amp.value_and_grad(abs, allow_int=flag),
    "grad.has_aux": lambda flag: amp.grad(abs, has_aux=flag),
    "grad.holomorphic": lambda flag: amp.grad(abs, holomorphic=flag),
    "grad.allow_int": lambda flag: amp.grad(abs, allow_int=flag),
    "tune.has_aux": lambda flag: amp.tune(abs, max_grad_error=1, has_aux=flag),
    "diagnose.has_aux": lambda flag: amp.diagnose(abs, has_aux=flag),
    "tune.progress": lambda flag: amp.tune(abs, max_grad_error=1, progress=flag),
    "cast_params.keep_norms": lambda flag: amp.cast_params({}, "bf16", keep_norms=flag),
    "recipe.enabled": lambda flag: amp.recipe("O1", enabled=flag),
    "recipe.master_weights": lambda flag: amp.recipe("O2", master_weights=flag),
    "recipe.keep_batchnorm_fp32": lambda flag: amp.recipe(
        "O2", keep_batchnorm_fp32=flag
    ),
    "recipe.master_grad": lambda flag: amp.recipe("O1", master_grad=flag),
}
# Of the state machine and of trees: flags that a program computes.
CONDITIONS = {
    "LossScale.adjust": lambda flag: amp.dynamic_loss_scale().adjust(flag),
    "LossScale.adjust, static": lambda flag: amp.no_loss_scale().adjust(flag),
    "select_tree": lambda flag: amp.select_tree(flag, PARAMS, PARAMS),
}


each_flag = pytest.mark.parametrize("name", [*FLAGS, *CONDITIONS])


@each_flag
def test_what_is_no_bool_is_no_flag(name):
    for value in ("no", "", 0, 1, 1.0, [True], np.int8(1)):
        with pytest.raises(TypeError) as raised:
            (FLAGS | CONDITIONS)[name](value)
        assert str(raised.value).startswith(name.partition(".")[0]), value
        assert repr(value) in str(raised.value)


@each_flag
def test_a_bool_of_python_or_numpy_is_a_flag(name):
    for value in (True, False, np.True_, np.False_):
        (FLAGS | CONDITIONS)[name](value)


def test_a_bool_of_numpy_means_what_it_says():
    assert amp.autocast(jnp.abs, enabled=np.False_) is jnp.abs
    assert amp.autocast(jnp.abs, enabled=np.True_) is not jnp.abs
    assert amp.recipe("O2", master_weights=np.False_).master_weights is False
    loss = lambda x: (x, "aux")  # noqa: E731
    assert amp.grad(loss, has_aux=np.True_)(1.0) == (1.0, "aux")


@pytest.mark.parametrize("name", CONDITIONS)
def test_a_condition_may_be_an_array_and_traced(name):
    jax.jit(CONDITIONS[name])(jnp.array(True))


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", CONDITIONS)
def test_a_condition_is_one_boolean(name):
    # One for each leaf, say: a loss scale would become an array of two.
    call = name.partition(",")[0]
    with pytest.raises(ValueError, match=rf"^{call}.*condition has shape \(2,\)"):
        CONDITIONS[name](jnp.array([True, False]))
    jax.vmap(CONDITIONS[name])(jnp.array([True, False]))


def test_every_flag_of_the_public_calls_is_known_here():
    flags = {
        f"{name}.{parameter.name}"
        for name, value in ((name, getattr(amp, name)) for name in amp.__all__)
        if inspect.isfunction(value)
        for parameter in inspect.signature(value).parameters.values()
        if isinstance(parameter.default, bool)
    }
    assert flags == {name for name in FLAGS if " " not in name and "recipe" not in name}


# Other input that is wrong: the call, the error, and words of the fact and the remedy.
WRONG = {
    **{
        f"{label} of the class {cls.__name__}": (
            lambda call=call, cls=cls: call(cls),
            (TypeError, f"{name}({cls.__name__}): a class, not a function. ", remedy),
        )
        for label, call in {
            "autocast": amp.autocast,
            "autocast, as a decorator,": amp.autocast(policy="mixed_float16"),
            "autocast, not enabled,": functools.partial(amp.autocast, enabled=False),
            "explain": amp.explain,
        }.items()
        for name in [label.partition(",")[0]]
        for cls, remedy in {
            Linen: f"{name}(model.apply, policy)",
            nn.Dense: "@with_policy(policy) gives the class a policy inside",
            Nnx: f"{name}(model, policy)",
            dict: f"Write {name}(fn, policy)",
        }.items()
    },
    "explain of a linen module": (
        lambda: amp.explain(Linen()),
        (
            TypeError,
            "explain(Linen(...)): a linen module holds no parameters",
            "Write explain(model.apply, policy)(*args).",
        ),
    ),
    **{
        f"autocast of {found}": (
            lambda fn=fn: amp.autocast(fn),
            (
                TypeError,
                f"autocast({shown}): the first argument is the function to transform, "
                f"found {found}.",
                remedy,
            ),
        )
        for fn, shown, found, remedy in (
            ({"w": PARAMS}, "<dict>", "dict", "Write autocast(loss_fn, policy)."),
            (PARAMS, "<array>", "array", "Write autocast(loss_fn, policy)."),
            ({"w": 1, 2: 3}, "{'w': 1, 2: 3}", "dict", "autocast(loss_fn, policy)"),
            ("cuda", "'cuda'", "str", "Write autocast(loss_fn, policy)."),
            ("bf16; x: f32", "'bf16; x: f32'", "str", "@autocast(policy='bf16; x: f"),
        )
    },
    **{
        f"with {name}": (
            lambda call=call: as_context(call()),
            (
                TypeError,
                "with autocast(...): autocast takes a function and returns one.",
                "Write autocast(loss_fn, policy)",
            ),
        )
        for name, call in {
            "autocast()": amp.autocast,
            "autocast(enabled=False)": lambda: amp.autocast(enabled=False),
        }.items()
    },
    "a dictionary of policies": (
        lambda: amp.autocast(abs, {"head": "float32"}),
        (
            TypeError,
            "autocast(fn, {'head': 'float32'}): get_policy({'head': 'float32'}): ",
            "Write PolicyMap(\"mixed_bfloat16\", {'head': 'float32'}).",
        ),
    ),
    "a dictionary of policies as the default": (
        lambda: amp.PolicyMap({nn.Dense: amp.Policy()}),
        (TypeError, "PolicyMap(default={<class ", 'PolicyMap("mixed_bfloat16", {<cl'),
    ),
    "parameters as the policy": (
        lambda: amp.autocast(abs, {"w": PARAMS}),
        (TypeError, "autocast(fn, <dict>): get_policy(<dict>): ", "mixed_bfloat16"),
    ),
    **{
        f"the dtype {dtype!r} as the policy": (
            lambda dtype=dtype: amp.get_policy(dtype),
            (
                TypeError,
                f"get_policy({dtype!r}): wanted a Policy or its text, got the dtype ",
                f'Write "{remedy}"',
            ),
        )
        for dtype, remedy in (
            (jnp.bfloat16, "mixed_bfloat16"),
            (np.float16, "mixed_float16"),
            (jnp.dtype("bfloat16"), "mixed_bfloat16"),
            (np.float32, "f32"),
            (float, "f32"),
        )
    },
    "a dtype in a map": (
        lambda: amp.PolicyMap("bf16", {"a": jnp.float16}),
        (TypeError, "PolicyMap(..., {'a': <class", 'Write "mixed_float16"'),
    ),
    "a dtype as the function": (
        lambda: amp.autocast(jnp.bfloat16),
        (TypeError, "autocast(<class ", "Write autocast(fn, 'mixed_bfloat16')"),
    ),
    **{
        f"with_policy of {fn.__name__}": (
            lambda fn=fn: amp.with_policy(fn),
            (
                TypeError,
                f"with_policy({fn.__name__}): the first argument is the policy.",
                '@with_policy("float32") above',
            ),
        )
        for fn in (report, Linen, Nnx)
    },
    "with_policy of parameters": (
        lambda: amp.with_policy("bf16")({"w": PARAMS}),
        (TypeError, "with_policy('p=bf16,c=bf16,o=bf16')(<dict>): it marks", "(fn)"),
    ),
    "cast_inputs of parameters": (
        lambda: amp.cast_inputs({"w": PARAMS}),
        (TypeError, "cast_inputs(<dict>): the first argument is", "cast_inputs(fn)"),
    ),
    **{
        f"{name} of {shown}": (
            lambda call=call, given=given: call(given),
            (TypeError, f"{name}({shown}): not a function.", "the loss function"),
        )
        for name, call in (("value_and_grad", amp.value_and_grad), ("grad", amp.grad))
        for given, shown in (({"w": PARAMS}, "<dict>"), (PARAMS, "<array>"))
    },
    "update of the state of the wrapped optimizer": (
        lambda: TX.update(PARAMS, PLAIN.init(PARAMS), PARAMS),
        (TypeError, "with_loss_scale: update was given a tuple", "import_opt_state"),
    ),
    "update of no state": (
        lambda: TX.update(PARAMS, None, PARAMS),
        (TypeError, "with_loss_scale: update was given a NoneType", "tx.init(params)"),
    ),
    "a growth interval beyond int32": (
        lambda: amp.dynamic_loss_scale(growth_interval=2**31),
        (ValueError, "dynamic_loss_scale(growth_interval=2147483648)", "below 2**31"),
    ),
    "a growth interval beyond all floats": (
        lambda: amp.dynamic_loss_scale(growth_interval=10**400),
        (ValueError, "dynamic_loss_scale(growth_interval=1000", "below 2**31"),
    ),
    "a hysteresis beyond int32": (
        lambda: amp.dynamic_loss_scale(hysteresis=2**31),
        (ValueError, "dynamic_loss_scale(hysteresis=2147483648)", "below 2**31"),
    ),
    "a report of an empty object": (
        lambda: amp.Report.from_json("{}"),
        (ValueError, "Report.from_dict: the key 'function' is missing", "to_dict()"),
    ),
    "a report of no text": (
        lambda: amp.Report.from_json(""),
        (ValueError, "Report.from_json: not JSON", "to_json()"),
    ),
    "a report of null": (
        lambda: amp.Report.from_json("null"),
        (ValueError, "Report.from_json: 'null' is JSON, but no object", "to_json()"),
    ),
    "a report of a number": (
        lambda: amp.Report.from_json(3),
        (TypeError, "Report.from_json: found int", "to_json()"),
    ),
    "a report of no dictionary": (
        lambda: amp.Report.from_dict([]),
        (TypeError, "Report.from_dict([])", "to_dict()"),
    ),
    "a report of other rows": (
        lambda: amp.Report.from_dict(report().to_dict() | {"equations": [{}]}),
        (ValueError, "Report.from_dict: a row is not one", "make the report again"),
    ),
    "skips in text": (
        lambda: amp.check_scale(STATE, "3"),
        (
            TypeError,
            "check_scale(opt_state, max_skips_in_a_row='3')",
            "Use an int, 0 or more",
        ),
    ),
    "skips that are traced": (
        lambda: jax.jit(lambda n: amp.check_scale(STATE, n))(3),
        (
            TypeError,
            "check_scale(opt_state, max_skips_in_a_row=",
            "Use an int, 0 or more",
        ),
    ),
    **{
        f"skips {number}": (
            lambda number=number: amp.check_scale(STATE, number),
            (
                ValueError,
                f"check_scale(opt_state, max_skips_in_a_row={number})",
                "Use an int, 0 or more",
            ),
        )
        for number in (float("nan"), float("inf"), -1, 1.5)
    },
    "a model that is none": (
        lambda: amp.cast_params({}, "bf16", model=3),
        (TypeError, "cast_params(params, policy, model=3)", "Give the module"),
    ),
    "a backend that is none": (
        lambda: amp.half_dtype(3),
        (TypeError, "half_dtype(3)", "Use one of cpu, gpu"),
    ),
    **{
        f"tracker {tracker}": (
            lambda tracker=tracker: torch_with(tracker),
            (ValueError, f"loss_scale_from_torch: '_growth_tracker' is {tracker}", "0"),
        )
        for tracker in (-1, 2001, 2.5, float("nan"))
    },
    **{
        f"argnums {argnums!r}": (
            lambda argnums=argnums: amp.value_and_grad(abs, argnums=argnums),
            (TypeError, f"value_and_grad(abs, argnums={argnums!r})", "Use an int"),
        )
        for argnums in ("x", 1.5, None, (), (0, "x"), True)
    },
    "a path that is no text": (
        lambda: report().drill_down(3),
        (TypeError, "Report.drill_down(3)", "Write a glob"),
    ),
    "a width that is no number": (
        lambda: report().drill_down(width="x"),
        (TypeError, "Report.drill_down(width='x')", "Use an int"),
    ),
    "a width of nothing": (
        lambda: report().drill_down(width=0),
        (ValueError, "Report.drill_down(width=0)", "Use an int"),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_refused_with_the_call_and_the_remedy(name):
    call, (error, beginning, remedy) = WRONG[name]
    with pytest.raises(error) as raised:
        call()
    assert type(raised.value) is error
    assert str(raised.value).startswith(beginning)
    assert remedy in str(raised.value)


# What transforms, marks or explains functions, and words of the error.
MARKED = "it marks a function, a method or a Flax module"
EXPLAINED = "the first argument is the function to explain"
IN_F64 = "cannot compute in float64"
OF_FUNCTIONS = [
    (lambda: amp.autocast(F16), TypeError, "autocast(fn, 'mixed_float16')"),
    (lambda: amp.autocast(3), TypeError, "found int"),
    (lambda: amp.autocast(abs, "mixed_float17"), ValueError, "mixed_float16"),
    (lambda: amp.autocast(abs, 16), TypeError, "16"),
    (lambda: amp.autocast(abs, "c=f8_e4m3"), ValueError, "float8_e4m3fn"),
    (lambda: amp.autocast(abs, "c=f64"), ValueError, "float64"),
    (lambda: amp.with_policy("mixed_float17"), ValueError, "mixed_float16"),
    (lambda: amp.with_policy(16), TypeError, "16"),
    (lambda: amp.with_policy("c=f64"), ValueError, "float64"),
    (lambda: amp.with_policy("c=f8_e4m3"), ValueError, "float8_e4m3fn"),
    (lambda: amp.full_precision(3), TypeError, "found int"),
    (lambda: amp.full_precision("bf16"), TypeError, "found str"),
    (lambda: amp.cast_inputs(3), TypeError, "found int"),
    (lambda: amp.cast_inputs(abs, "f8_e4m3"), (TypeError, ValueError), "f8_e4m3"),
    (lambda: amp.cast_inputs(abs, jnp.float64), ValueError, "float64"),
    (lambda: amp.cast_inputs(abs, jnp.int32), (TypeError, ValueError), "int32"),
    (lambda: amp.cast_inputs(abs, "bf17"), (TypeError, ValueError), "bf17"),
    (lambda: amp.with_policy("float32")(int), TypeError, f"{MARKED}, found type"),
    (lambda: amp.with_policy("float32")("relu"), TypeError, f"{MARKED}, found str"),
    (lambda: amp.with_policy(F16)(3), TypeError, f"{MARKED}, found int"),
    (lambda: amp.explain("float32"), TypeError, f"explain('float32'): {EXPLAINED}"),
    (lambda: amp.explain(amp.Policy()), TypeError, EXPLAINED),
    (lambda: amp.explain(3), TypeError, f"explain(3): {EXPLAINED}"),
    (lambda: amp.explain(abs, "c=fp17"), ValueError, "fp17"),
    (lambda: amp.explain(abs, "c=f64"), ValueError, f"explain(fn, 'c=f64'): {IN_F64}"),
]


@pytest.mark.parametrize(("call", "error", "words"), OF_FUNCTIONS)
def test_what_is_no_function_and_no_policy_is_refused_before_anything_runs(
    call, error, words
):
    with pytest.raises(error) as raised:
        call()
    assert words in str(raised.value)


def test_what_is_just_within_bounds_is_taken():
    largest = 2**31 - 1
    scale = amp.dynamic_loss_scale(growth_interval=largest, hysteresis=largest)
    assert scale.adjust(False).adjust(True).growth_tracker == 1
    assert torch_with(2000).growth_tracker == 2000
    for number in (0, 3.0, np.int64(3), jnp.int32(3)):
        amp.check_scale(STATE, number)
    assert amp.grad(lambda x, y: x * y, argnums=np.int64(1))(2.0, 3.0) == 2.0
