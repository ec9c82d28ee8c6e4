"""The likeliest slips of a new user: an error or a text that says what to write."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx, serialization

import jmp_amp as amp

W, X = jnp.ones((4, 4)), jnp.ones((2, 4))
PARAMS = {"layer": {"w": W}}
SCALE = amp.no_loss_scale()


def loss(w, x):
    return jnp.mean((x @ w) ** 2)


def wrapped(tx):
    return amp.with_loss_scale(tx, SCALE)


def low_precision(tx):
    return amp.with_low_precision_state(tx, min_size=1)


ADAM, ADAMW, SGD = optax.adam(0.1), optax.adamw(0.1), optax.sgd(0.1, momentum=0.9)
STATE = wrapped(ADAM).init(W)
# As orbax and flax read a checkpoint without a target.
RAW = serialization.msgpack_restore(serialization.to_bytes(STATE))
RAW_OF_ORBAX = {**RAW, "inner_state": [*RAW["inner_state"].values()], "structure": None}


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, name="layers_0")(x)


class Nnx(nnx.Module):
    def __init__(self):
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=nnx.Rngs(0))])

    def __call__(self, x):
        return self.layers[0](x)


MODEL = Nnx()


def updated(tx, state, params=W):
    return tx.update(params, state, params)


# The slip; the error, how it begins and words of the remedy.
SLIPS = {
    **{
        f"arguments of the function given to {name}": (
            lambda name=name: getattr(amp, name)(loss, "mixed_bfloat16", W, X),
            TypeError,
            f"{name}(fn, policy) was given 4 arguments. ",
            f"a second call: {name}(fn, policy)(*args).",
        )
        for name in ("explain", "diagnose", "tune", "autocast")
    },
    **{
        f"an argument of the function as the policy of {name}": (
            lambda name=name, keywords=keywords: getattr(amp, name)(
                loss, X, **keywords
            ),
            TypeError,
            f"{name}(fn, <array>): ",
            f"a second call: {name}(fn, policy)(*args).",
        )
        for name in ("explain", "diagnose", "tune", "autocast")
        for keywords in [{"max_grad_error": 0.1} if name == "tune" else {}]
    },
    **{
        f"the loss scale given to {name} itself": (
            lambda name=name: getattr(amp, name)(loss, loss_scale=SCALE),
            TypeError,
            f"{name}(fn) was given loss_scale=. ",
            f"{name}(fn)(*args, loss_scale=...).",
        )
        for name in ("value_and_grad", "grad")
    },
    **{
        f"{what} as the last argument of value_and_grad(loss)": (
            lambda state=state: amp.value_and_grad(loss)(W, X, state),
            TypeError,
            "value_and_grad(loss)(...): too many positional arguments. ",
            "value_and_grad(loss)(*args, loss_scale=state).",
        )
        for what, state in {"a state": STATE, "a scale": SCALE}.items()
    },
    "parameters given to value_and_grad": (
        lambda: amp.value_and_grad(loss, PARAMS),
        TypeError,
        "value_and_grad(loss, argnums=<dict>): not the position",
        "a second call: value_and_grad(loss)(*args).",
    ),
    "a misspelt keyword": (
        lambda: amp.explain(loss, tagret="cpu"),
        TypeError,
        "explain(fn, tagret=...): unknown",
        "Did you mean target?",
    ),
    "a result of explain without a call": (
        lambda: amp.explain(loss).total,
        AttributeError,
        "explain(loss): no Report yet.",
        "explain(loss)(*args).",
    ),
    "the name of a policy as a dtype": (
        lambda: amp.Policy("mixed_float16"),
        ValueError,
        "Policy(param_dtype='mixed_float16'): ",
        "amp.get_policy('mixed_float16')",
    ),
    **{
        f"the raw checkpoint of {reader} for {name}": (
            lambda call=call, raw=raw: call(raw),
            error,
            f"{name}: {fact}",
            "target=tx.init(params)",
        )
        for reader, raw in {"flax": RAW, "orbax": RAW_OF_ORBAX}.items()
        for fact, calls in {
            "there is no loss scale in this dict": (
                ("loss_scale_of", amp.loss_scale_of, ValueError),
                ("metrics", amp.metrics, ValueError),
            ),
            "the state is not one of this optimizer": (
                (
                    "import_opt_state",
                    lambda x: amp.import_opt_state(STATE, x),
                    ValueError,
                ),
            ),
            "update was given a dict, the state of another optimizer": (
                ("with_loss_scale", lambda x: updated(wrapped(ADAM), x), TypeError),
                ("with_kahan", lambda x: updated(amp.with_kahan(ADAM), x), TypeError),
                (
                    "with_low_precision_state",
                    lambda x: updated(low_precision(ADAM), x),
                    TypeError,
                ),
            ),
        }.items()
        for name, call, error in calls
    },
    "the raw inner state of orbax": (
        lambda: amp.import_opt_state(STATE, RAW_OF_ORBAX["inner_state"]),
        ValueError,
        "import_opt_state: the state is not one of this optimizer",
        "target=tx.init(params)",
    ),
    **{
        f"the state of another optimizer in {name}": (
            lambda wrap=wrap: updated(wrap(ADAM), wrap(SGD).init(W)),
            TypeError,
            f"{name}: update was given the state of another optimizer: it",
            "Begin with tx.init(params) of this one.",
        )
        for name, wrap in {
            "with_loss_scale": wrapped,
            "with_master_weights": amp.with_master_weights,
            "with_kahan": amp.with_kahan,
            "with_low_precision_state": low_precision,
        }.items()
    },
    "the state of other parameters": (
        lambda: updated(low_precision(ADAM), low_precision(ADAM).init(W[:1])),
        TypeError,
        "with_low_precision_state: update was given the state of another optimizer",
        "has [0].mu (1, 4), and not [0].mu (4, 4). Begin with tx.init(params)",
    ),
    "adam's state for adamw": (
        lambda: amp.import_opt_state(wrapped(ADAMW).init(W), ADAM.init(W)),
        ValueError,
        "import_opt_state: the state is not",
        "at [2] EmptyState().",
    ),
    "the state in place of gradients": (
        lambda: wrapped(ADAM).update(STATE, W, W),
        TypeError,
        "with_loss_scale: update was given an array, the state of another",
        "tx.update(gradients, state, params)",
    ),
    **{
        f"an nnx module as params of update, {given} as those of init": (
            lambda first=first: wrapped(ADAM).update(
                nnx.state(MODEL, nnx.Param), wrapped(ADAM).init(first), MODEL
            ),
            ValueError,
            "with_loss_scale: update was given gradients of structure {['layers']",
            "give nnx.state(model, nnx.Param) to init and to update; or take nnx.O",
        )
        for given, first in {
            "it": MODEL,
            "its parameters": nnx.state(MODEL, nnx.Param),
        }.items()
    },
    "semicolons in the text of a policy": (
        lambda: amp.autocast(loss, "p=f32; c=bf16"),
        ValueError,
        "autocast(fn, 'p=f32; c=bf16'): 'c=bf16' is not of the form pattern",
        "Write 'p=f32,c=bf16' if it is one policy, or \"mixed_bfloat16; **/head",
    ),
    "wrapped twice by O2": (
        lambda: (
            amp.recipe("O2", "bf16")
            .wrap(amp.recipe("O2", "bf16").wrap(ADAM))
            .init(W.astype(jnp.bfloat16))
        ),
        ValueError,
        "with_kahan: the optimizer inside has a KahanState already",
        "Wrap once, around the whole chain.",
    ),
}


@pytest.mark.breadth(3)
@pytest.mark.filterwarnings("ignore:recipe.'O2'..wrap.tx..init.params.. the")
@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_is_told_with_what_to_write(name):
    call, error, beginning, remedy = SLIPS[name]
    with pytest.raises(error) as raised:
        call()
    assert isinstance(raised.value, error)
    assert str(raised.value).startswith(beginning)
    assert remedy in str(raised.value)
    assert "Array(" not in str(raised.value)


@pytest.mark.parametrize("name", ["explain", "diagnose", "tune"])
def test_what_waits_for_arguments_says_so_when_it_is_printed(name):
    keywords = {"max_grad_error": 0.1} if name == "tune" else {}
    waiting = getattr(amp, name)(loss, **keywords)
    assert str(waiting).startswith(f"{name}(loss): no ")
    assert str(waiting).endswith(f"second call: {name}(loss)(*args).")


@pytest.mark.parametrize(
    ("glob", "model", "advice"),
    [
        (
            "Dense",
            "linen",
            "Give the class flax.linen.linear.Dense itself, not its name",
        ),
        ("nn.Dense", "linen", "Give the class flax.linen.linear.Dense itself"),
        ("**/Linear", "nnx", "Give the class flax.nnx.nn.linear.Linear itself"),
        ("layers.0", "nnx", "The closest path of a module called is 'layers/0'."),
    ],
)
def test_the_name_of_a_class_and_dots_in_a_map_are_told(glob, model, advice):
    module, args = (Nnx(), ()) if model == "nnx" else (Linen(), (PARAMS_OF_LINEN,))
    fn = module if model == "nnx" else module.apply
    half = amp.autocast(fn, amp.PolicyMap("mixed_bfloat16", {glob: "float32"}))
    with pytest.warns(UserWarning) as caught:
        jax.eval_shape(lambda *args: half(*args, X), *args)
    (told,) = caught
    assert advice in str(told.message)
    assert "layers" in str(told.message)


PARAMS_OF_LINEN = jax.eval_shape(Linen().init, jax.random.key(0), X)


def test_another_error_of_an_optimizer_stays_as_it_is():
    def update(updates, state, params=None):
        raise ValueError("of the optimizer")

    tx = wrapped(
        amp.with_master_weights(optax.GradientTransformation(SGD.init, update))
    )
    half = jnp.ones(2, jnp.bfloat16)
    with pytest.raises(ValueError, match="of the optimizer"):
        tx.update(half, tx.init(half), half)


def test_a_function_with_room_for_a_state_is_given_it():
    scaled = amp.value_and_grad(lambda w, scale: jnp.sum(w) * scale.value)
    value, _ = scaled(W, SCALE)
    np.testing.assert_array_equal(value, 16.0)
