"""Recipes mean what their systems mean by them, and refuse what those refuse.

The table of Apex is that of apex/amp/frontend.py.
"""

from __future__ import annotations

import functools
import pickle
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jmp_amp as amp
from tests import h100, measures
from tests.training.wrappers import BF16, F16, F32, STORING, standard

NAMES = (
    *("O0", "O1", "O2", "O3", "OD", "auto", "fp16", "bf16", "fp8", "fp16_apex"),
    *("fp16_naive", "mixed_float16", "mixed_bfloat16", "float32"),
)


class Model(nn.Module):
    train: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(32)(x)
        x = nn.BatchNorm(use_running_average=not self.train, momentum=0.5)(x)
        return nn.Dense(4, name="head")(nn.relu(x))


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 8)).astype(np.float32)
    return x, x[:, :4] * np.float32(2.0)


@functools.cache
def variables() -> Any:
    return jax.jit(Model().init)(jax.random.key(0), data()[0])


def dtypes(tree: Any) -> dict[str, str]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.dtype.name
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def train(recipe: amp.Recipe) -> tuple[Any, Any, list[float]]:
    """Trains the model as the README does; the same lines for every recipe."""
    apply = recipe.autocast(functools.partial(Model().apply, mutable=["batch_stats"]))
    x, y = data()
    stats = variables()["batch_stats"]
    with standard():
        tx = recipe.wrap(optax.chain(optax.clip_by_global_norm(10.0), optax.adam(1e-2)))
        params, opt_state = recipe.init(tx, variables()["params"])

    @jax.jit
    @standard()
    def step(params: Any, stats: Any, opt_state: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            out, new = apply({"params": params, "batch_stats": stats}, x)
            return jnp.mean((out.astype(F32) - y) ** 2), new["batch_stats"]

        gradient = amp.value_and_grad(loss_fn, has_aux=True)
        (loss, new), grads = gradient(params, loss_scale=opt_state)
        updates, opt_state = tx.update(grads, opt_state, params)
        new = amp.keep_if_finite(opt_state, new, stats)
        return optax.apply_updates(params, updates), new, opt_state, loss

    losses = []
    for _ in range(30):
        params, stats, opt_state, loss = step(params, stats, opt_state)
        losses.append(float(loss))
    # An array that is bound to a device is compiled for, without a new trace.
    assert step._cache_size() == 1
    return params, opt_state, losses


# The table of Apex


@pytest.mark.parametrize(
    ("level", "cast", "keeps", "masters", "dynamic"),
    [
        ("O0", F32, None, False, False),
        ("O1", None, None, None, True),
        ("O2", F16, True, True, True),
        ("O3", F16, False, False, False),
    ],
)
def test_levels_have_the_properties_of_apex(level, cast, keeps, masters, dynamic):
    recipe = amp.recipe(level, half_dtype="float16")
    assert recipe.cast_model_type == cast
    assert recipe.keep_batchnorm_fp32 is keeps
    assert recipe.master_weights is masters
    assert recipe.loss_scale.dynamic is dynamic
    assert recipe.loss_scale.value == (2.0**16 if dynamic else 1.0)
    assert recipe.loss_scale.max_scale == (2.0**24 if dynamic else 1.0)
    compute = F32 if level == "O0" else F16
    assert recipe.policy == amp.Policy(cast or F32, compute, F32)


@functools.cache
def trained_in_f32() -> tuple[Any, Any, list[float]]:
    return train(amp.recipe("O0"))


# Names in other systems of what is trained below under the first one.
SAME = {
    "O0": ("float32",),
    "O1": ("auto",),
    "mixed_float16": ("fp16", "fp16_apex"),
    "bf16": ("mixed_bfloat16",),
}


@pytest.mark.parametrize("name", SAME)
def test_names_of_one_setup_differ_in_the_scaler_alone(name):
    def setup(name: str) -> dict[str, Any]:
        fields = dict(vars(amp.recipe(name)))
        dynamic = fields.pop("loss_scale").dynamic
        del fields["name"], fields["system"]
        return fields | {"dynamic": dynamic}

    for other in SAME[name]:
        assert setup(other) == setup(name)


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", [n for n in NAMES if n not in sum(SAME.values(), ())])
def test_every_recipe_trains_with_the_same_lines(name):
    f32 = trained_in_f32()[2]
    result = trained_in_f32() if name == "O0" else train(amp.recipe(name))
    params, opt_state, losses = result
    assert f32[-1] < 0.2 * f32[0]
    # Weights that are merely rounded are not held to this.
    if name != "O3":
        policy = amp.recipe(name).policy
        half = getattr(policy, "default", policy).compute_dtype
        assert losses[-1] == pytest.approx(f32[-1], rel=16 * float(jnp.finfo(half).eps))
    else:
        assert losses[-1] < 0.5 * losses[0]
    assert amp.loss_scale_of(opt_state).value >= 1.0
    assert amp.metrics(opt_state)["applied"] > 20
    stored = amp.recipe(name).cast_model_type or F32
    assert params["head"]["kernel"].dtype == stored


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_prints_a_row_of_a_table(name):
    lines = str(amp.recipe(name, half_dtype=None)).splitlines()
    assert lines[0].startswith(f"{name} of ")
    assert lines[2].split() == (
        "parameters compute outputs norms masters loss scale losses".split()
    )
    # Of fp8, the heads that are left out stand below.
    assert (len(lines) > 5) == (name == "fp8")


def test_half_precision_is_by_default_what_the_machine_multiplies():
    for name in ("O1", "O2", "O3", "OD", "auto"):
        policy = amp.recipe(name).policy
        assert policy.compute_dtype == amp.half_dtype()


@pytest.mark.parametrize(
    ("name", "system", "scale"),
    [
        ("fp16", "torch", 2.0**16),
        ("fp16_apex", "apex", 2.0**16),
        ("fp16_naive", "colossalai", 2.0**16),
        ("mixed_float16", "keras", 2.0**15),
    ],
)
def test_names_that_say_float16_scale_as_their_system_does(name, system, scale):
    recipe = amp.recipe(name)
    preset = amp.loss_scale_preset(system)
    assert jax.tree.structure(recipe.loss_scale) == jax.tree.structure(preset)
    assert recipe.loss_scale.value == preset.value == scale


@pytest.mark.parametrize("name", ["bf16", "mixed_bfloat16"])
def test_bfloat16_is_not_scaled_unless_it_is_asked_for(name):
    assert not amp.recipe(name).loss_scale.dynamic
    assert amp.recipe(name).loss_scale.value == 1.0
    assert amp.recipe(name, loss_scale="dynamic").loss_scale.dynamic
    assert amp.recipe(name, init_scale=8.0).loss_scale.value == 8.0


def test_the_parameters_of_the_scaler_go_by_the_names_of_its_system():
    scale = amp.recipe("OD", "f16", incr_every_n_steps=7, decr_every_n_nan_or_inf=3)
    assert scale.loss_scale.growth_interval == 7
    assert scale.loss_scale.hysteresis == 3
    naive = amp.recipe("fp16_naive", initial_scale=2.0**10, max_scale=2.0**12)
    assert naive.loss_scale.value == 2.0**10
    assert naive.loss_scale.max_scale == 2.0**12


def test_parameters_of_a_scaler_that_cannot_be_are_refused_as_part_of_the_recipe():
    with pytest.raises(ValueError, match=r"recipe\('fp16'\): .*hysteresis=-1"):
        amp.recipe("fp16", hysteresis=-1)


@pytest.mark.parametrize("key", ["verbosity", "verbose", "log_num_zeros_in_grad"])
def test_what_others_print_is_left_out(key):
    with pytest.raises(TypeError, match=rf"{key}=1\): nothing is printed here. Leave"):
        amp.recipe("O1", **{key: 1})


# What is stored how


def test_parameters_are_half_and_norms_and_statistics_are_not_at_o2():
    cast = amp.recipe("O2", "f16").cast_params(variables())
    assert dtypes(cast) == {
        "batch_stats/BatchNorm_0/mean": "float32",
        "batch_stats/BatchNorm_0/var": "float32",
        "params/BatchNorm_0/bias": "float32",
        "params/BatchNorm_0/scale": "float32",
        "params/Dense_0/bias": "float16",
        "params/Dense_0/kernel": "float16",
        "params/head/bias": "float16",
        "params/head/kernel": "float16",
    }


@pytest.mark.parametrize(
    "recipe",
    [
        lambda: amp.recipe("O3", "f16"),
        lambda: amp.recipe("O2", "f16", keep_batchnorm_fp32=False),
        lambda: amp.recipe("O2", "f16", keep_batchnorm_fp32="False"),
    ],
)
def test_norms_are_half_where_they_are_not_kept(recipe):
    found = dtypes(recipe().cast_params(variables()))
    assert found["params/BatchNorm_0/scale"] == "float16"
    assert found["batch_stats/BatchNorm_0/mean"] == "float32"


def test_masters_begin_with_the_digits_of_the_original():
    recipe = amp.recipe("O2", "bf16")
    params = variables()["params"]
    half, opt_state = recipe.init(recipe.wrap(optax.sgd(0.1)), params)
    assert half["head"]["kernel"].dtype == BF16
    assert jnp.any(half["head"]["kernel"].astype(F32) != params["head"]["kernel"])
    chex.assert_trees_all_equal(amp.export_params(half, opt_state), params)
    exported = amp.recipe("O2", "bf16", save_dtype="f16").export_params(half, opt_state)
    expected = params["head"]["kernel"].astype(F16)
    chex.assert_trees_all_equal(exported["head"]["kernel"], expected)


@pytest.mark.breadth(2)
@pytest.mark.parametrize("wrapper", [amp.with_kahan, amp.with_master_weights])
@pytest.mark.parametrize("inner", [optax.sgd(0.1, momentum=0.9), optax.adam(1e-2)])
def test_init_begins_masters_as_init_from_does(wrapper, inner):
    recipe = amp.recipe("O2", "bf16")

    def wrapped(init_from: Any) -> optax.GradientTransformationExtraArgs:
        return amp.with_loss_scale(wrapper(inner, init_from=init_from), SCALE)

    given = variables()["params"]
    module = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    with standard():
        params, opt_state = recipe.init(wrapped(None), given)
        expected = wrapped(given).init(params)
        model, optimizer = recipe.init(wrapped(None), module)
        of_module = nnx.Optimizer(model, wrapped(module), wrt=nnx.Param)
    states = [nnx.to_pure_dict(nnx.state(each)) for each in (optimizer, of_module)]
    for found, wanted in ((opt_state, expected), states):
        chex.assert_trees_all_equal(found, wanted)
        chex.assert_trees_all_equal_dtypes(found, wanted)


def test_a_recipe_prints_while_a_program_is_traced():
    def traced(scale: jax.Array) -> jax.Array:
        assert "dynamic, traced" in str(amp.recipe("O1", "f16", init_scale=scale))
        return scale

    jax.jit(traced)(2.0)


def test_recipes_of_equal_fields_are_equal():
    runs = []

    @functools.partial(jax.jit, static_argnums=0)
    def fn(recipe, x):
        runs.append(recipe)
        return recipe.autocast(jnp.sin)(x)

    others = ("O2", {}), ("O1", {"init_scale": 8.0}), ("O1", {"half_dtype": "float16"})
    for name, options in (("O1", {}), ("O1", {}), *others):
        recipe = amp.recipe(name, **{"half_dtype": "bfloat16", **options})
        assert recipe == pickle.loads(pickle.dumps(recipe)) != name
        fn(recipe, 1.0)
    assert len(runs) == 1 + len(others)


def test_a_recipe_is_itself_when_its_scale_was_donated():
    recipe = amp.recipe("O1", "float16")

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def step(recipe, scale):
        return scale.adjust(jnp.asarray(True))

    scale = recipe.loss_scale
    for _ in range(2):
        scale = step(recipe, scale)
    assert recipe == recipe != amp.recipe("O1", "float16")


def test_half_parameters_without_masters_are_refused_by_a_recipe_of_f32_ones():
    half = {"w": jnp.ones(3, BF16)}
    recipe = amp.recipe("O1", "bfloat16")
    with pytest.raises(ValueError, match=r"some of these are half.*export_params"):
        recipe.init(recipe.wrap(optax.sgd(0.1)), half)
    # Whoever keeps the digits in another way may.
    tx = recipe.wrap(amp.with_stochastic_rounding(optax.sgd(0.1), jax.random.key(0)))
    assert recipe.init(tx, half)[0] is half


def test_an_export_without_the_digits_that_the_optimizer_keeps_is_refused():
    recipe = amp.recipe("O2", "bfloat16")
    given = {"w": jnp.full(3, 1.001)}
    params, opt_state = recipe.init(recipe.wrap(optax.sgd(0.1)), given)
    with pytest.raises(ValueError, match="Give its state too"):
        recipe.export_params(params)
    with pytest.raises(TypeError, match="params is a LossScaleState"):
        recipe.export_params(opt_state, params)
    chex.assert_trees_all_equal(recipe.export_params(params, opt_state), given)
    # Nothing is kept of those that are all there.
    assert recipe.export_params(given)["w"].dtype == F32


def test_arguments_in_the_wrong_order_are_refused():
    recipe = amp.recipe("O1")
    with pytest.raises(TypeError, match=r"tx is of <class 'dict'>. Give the optimizer"):
        recipe.init({"w": jnp.ones(3)}, recipe.wrap(optax.sgd(0.1)))


def test_a_state_of_another_recipe_is_refused_by_that_of_half_weights():
    params = {"w": jnp.ones(3)}
    o1, o2 = amp.recipe("O1", "float16"), amp.recipe("O2", "float16")
    _, opt_state = o1.init(o1.wrap(optax.sgd(0.1)), params)
    tx = o2.wrap(optax.sgd(0.1))
    half, _ = o2.init(tx, params)
    with pytest.raises(TypeError, match=r"another optimizer.*import_opt_state"):
        tx.update(params, opt_state, half)
    masters = amp.with_master_weights(optax.sgd(0.1)).init(half)
    kahan = amp.with_kahan(optax.sgd(0.1))
    with pytest.raises(TypeError, match="given a MasterWeightsState, the state of"):
        kahan.update(params, masters, half)


@pytest.mark.parametrize("name, meant", [("float16", "fp16"), ("fp32", "O0")])
def test_a_near_word_is_not_what_another_word_means(name, meant):
    with pytest.raises(ValueError, match=f'Did you mean "{meant}"'):
        amp.recipe(name)


def test_a_level_as_a_property_is_the_name():
    with pytest.raises(TypeError, match=r"the level is the name. Write recipe\("):
        amp.recipe("O1", level="O2")


@pytest.mark.parametrize("policy", ["O1", amp.recipe("O1")], ids=["name", "recipe"])
def test_a_recipe_where_a_policy_belongs_is_refused_with_what_to_write(policy):
    with pytest.raises((TypeError, ValueError), match=r"recipe.*\.autocast\(fn\)"):
        amp.autocast(jnp.sin, policy)


def test_a_recipe_prints_the_operations_that_were_moved():
    lists = {"custom_white_list": {"softmax"}, "custom_black_list": {"matmul_v2"}}
    text = str(amp.recipe("O1", "bfloat16", **lists))
    assert "Policy: p=f32,c=bf16,o=f32,low=softmax,full=dot_general" in text
    assert "Policy" not in str(amp.recipe("O1", "bfloat16"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("word", [None, "all", "auto", "Least "])
def test_a_recipe_saves_what_it_is_told(name, word):
    plain = amp.recipe(name)
    compute = in_force(plain).compute_dtype
    recipe = amp.recipe(name, saved=word)
    default = "all" if compute == F32 else "auto"
    said = default if word is None else word.strip().lower()
    assert in_force(recipe).saved == said
    assert (recipe.policy == plain.policy) == (said == default)
    # Nothing else changes.
    others = "system cast_model_type keep_batchnorm_fp32 master_weights enabled".split()
    for field in others:
        assert getattr(recipe, field) == getattr(plain, field)


def in_force(recipe):
    policy = recipe.policy
    return policy.default if isinstance(policy, amp.PolicyMap) else policy


def test_a_recipe_prints_what_it_saves():
    text = str(amp.recipe("O1", "bfloat16", saved="least"))
    assert "Policy: p=f32,c=bf16,o=f32,s=least" in text
    for saved in (None, "auto"):
        assert "Policy" not in str(amp.recipe("O1", "bfloat16", saved=saved))


def test_lists_and_excluded_layers_leave_what_is_saved():
    lists = {"custom_white_list": {"tanh"}, "custom_black_list": {"exp"}}
    recipe = amp.recipe("O1", "f16", saved="least", **lists)
    assert str(recipe.policy) == "p=f32,c=f16,o=f32,s=least,low=tanh,full=exp"
    recipe = amp.recipe("O1", "f16", saved="least", excluded_layers=["**/head"])
    assert str(recipe.policy) == "p=f32,c=f16,o=f32,s=least; **/head: p=f32,c=f32,o=f32"
    assert recipe.policy.entries[0][1].saved == "all"


def test_what_is_not_enabled_saves_all():
    assert amp.recipe("O1", saved="least", enabled=False).policy.saved == "all"


def test_a_word_in_the_place_of_another_override_is_pointed_at():
    with pytest.raises(TypeError, match=r"save='all'\): .*Did you mean saved\?"):
        amp.recipe("O1", save="all")


def test_a_recipe_skips_on_all_devices_of_an_axis():
    recipe = amp.recipe("O1", "f16")
    tx = recipe.wrap(optax.sgd(1.0), axis_name="d")
    update = jax.jit(jax.vmap(tx.update, axis_name="d", in_axes=(0, None)))
    updates, _ = update(jnp.array([1.0, jnp.nan]), tx.init(jnp.float32(0.0)))
    assert not updates.any()


def test_an_optimizer_that_another_recipe_wrapped_is_refused():
    tx = amp.recipe("O1").wrap(optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"has no masters: this recipe has not"):
        amp.recipe("O2").init(tx, variables()["params"])


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", ["O2", "O3", "fp16_naive"])
def test_half_parameters_that_were_forgotten_are_warned_of(name):
    recipe = amp.recipe(name, "f16")
    tx, params = recipe.wrap(optax.sgd(0.1)), variables()["params"]
    told = r"the parameters are f32.* recipe\.init\(tx, params\)"
    with pytest.warns(UserWarning, match=told) as caught:
        tx.init(params)
    assert len(caught) == 1 and caught[0].filename == __file__
    # Neither of these forgets them.
    recipe.init(tx, params)
    tx.init(recipe.cast_params(params))


def test_an_optimizer_of_norms_alone_or_of_f32_parameters_is_not_warned_of():
    tx = amp.recipe("O2", "bf16").wrap(optax.sgd(0.1))
    tx.init({"LayerNorm_0": {"scale": jnp.ones(3), "bias": jnp.ones(3)}})
    amp.recipe("O1", "bf16").wrap(optax.sgd(0.1)).init({"kernel": jnp.ones((2, 2))})
    amp.recipe("O2", enabled=False).wrap(optax.sgd(0.1)).init({"w": jnp.ones((2, 2))})


def test_an_optimizer_that_is_not_wrapped_is_refused():
    with pytest.raises(ValueError, match=r"Use tx = recipe\.wrap\(tx\) before"):
        amp.recipe("O1").init(optax.sgd(0.1), variables()["params"])


@pytest.mark.breadth(1)
@pytest.mark.parametrize(
    ("name", "digits"),
    [("O2", None), ("O1", None), ("O3", None), ("O3", "kahan"), ("O3", "stochastic")],
)
def test_an_nnx_module_is_trained_with_an_nnx_optimizer(name, digits):
    class Layer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.dense = nnx.Linear(8, 4, rngs=rngs)
            self.norm = nnx.LayerNorm(4, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.norm(self.dense(x))

    recipe = amp.recipe(name, "bf16")
    original = Layer(nnx.Rngs(0))
    before = jax.device_get(nnx.to_pure_dict(nnx.state(original)))
    tx = optax.sgd(1e-2)
    tx = recipe.wrap(tx if digits is None else STORING[digits](tx))
    model, optimizer = recipe.init(tx, original)
    stored = F32 if name == "O1" else BF16
    assert model.dense.kernel[...].dtype == stored
    assert model.norm.scale[...].dtype == (BF16 if name == "O3" else F32)
    if name == "O2":
        exported = recipe.export_params(model, optimizer)
        chex.assert_trees_all_equal(
            exported.dense.kernel[...], original.dense.kernel[...]
        )
    x, y = data()

    @nnx.jit
    def step(model: Any, optimizer: Any) -> jax.Array:
        def loss_fn(model: Any) -> jax.Array:
            return jnp.mean((recipe.autocast(model)(x) - y) ** 2)

        with standard():
            gradient = amp.value_and_grad(loss_fn)
            loss, grads = gradient(model, loss_scale=optimizer)
            optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(20)]
    assert losses[-1] < losses[0]
    assert amp.metrics(optimizer)["applied"] == 20
    kernel = model.dense.kernel[...]
    assert kernel.dtype == stored
    exported = amp.export_params(model, optimizer).dense.kernel[...]
    assert exported.dtype == F32
    np.testing.assert_array_equal(exported.astype(stored), kernel)
    for moved in (kernel.astype(F32), exported):
        assert (moved != before["dense"]["kernel"]).any()
    # The module that it was made of is left alone.
    chex.assert_trees_all_equal(nnx.to_pure_dict(nnx.state(original)), before)


def test_batch_norm_runs_in_eval_mode_at_o2():
    # In Apex it raised.
    recipe = amp.recipe("O2", "f16")
    params = recipe.cast_params(variables())
    x, _ = data()
    apply = Model(train=False).apply
    with standard():
        found = recipe.autocast(apply)(params, x)
    expected = jax.jit(apply)(variables(), x)
    assert found.dtype == F32
    np.testing.assert_allclose(found, expected, atol=8 * float(jnp.finfo(F16).eps))


# What runs in what


def test_only_products_are_half_with_od():
    params, (x, _) = variables(), data()
    model = Model(train=False)
    report = amp.explain(model.apply, amp.recipe("OD", "bf16").policy)(params, x)
    arithmetic = {"dot_general": "bf16", "add": "f32", "mul": "f32", "sub": "f32"}
    for equation in report.equations:
        if equation.operation in arithmetic:
            assert equation.dtype == arithmetic[equation.operation], equation
    assert report.total.matmuls_in_half == report.total.matmuls == 2
    by_default = amp.explain(model.apply, "mixed_bfloat16")(params, x)
    assert any(e.operation == "add" and e.dtype == "bf16" for e in by_default.equations)


def test_lists_move_operations_between_half_and_float32():
    def fn(x, w):
        return jnp.sum(jnp.exp(x @ w))

    x, w = jnp.ones((4, 4)), jnp.ones((4, 4))
    white = amp.recipe("O1", "bf16", custom_white_list={"exp"}).policy
    black = amp.recipe("O1", "bf16", custom_black_list={"matmul_v2"}).policy

    def found(policy: Any) -> dict[str, str]:
        report = amp.explain(fn, policy)(x, w)
        return {e.operation: e.dtype for e in report.equations}

    assert found(amp.recipe("O1", "bf16").policy)["exp"] == "f32"
    assert found(white)["exp"] == "bf16"
    assert found(black)["dot_general"] == "f32"
    od = amp.recipe("OD", "bf16", custom_white_list={"elementwise_add"}).policy
    assert "add" not in od.full
    assert "add" in od.low


def test_excluded_layers_are_float32_and_so_are_their_parameters():
    recipe = amp.recipe("O2", "bf16", excluded_layers=["head"])
    params = recipe.cast_params(variables())
    assert params["params"]["head"]["kernel"].dtype == F32
    assert params["params"]["Dense_0"]["kernel"].dtype == BF16
    with standard():
        report = amp.explain(Model(train=False).apply, recipe.policy)(params, data()[0])
    assert [e.dtype for e in report.equations if e.matmuls] == ["bf16", "f32"]
    by_class = amp.recipe("O1", "bf16", excluded_layers=nn.Dense)
    report = amp.explain(Model(train=False).apply, by_class.policy)(
        variables(), data()[0]
    )
    assert report.total.matmuls_in_half == 0


def test_outputs_are_cast():
    recipe = amp.recipe("O1", "bf16", cast_model_outputs="f16")
    found = recipe.autocast(jnp.matmul)(jnp.ones((2, 2)), jnp.ones((2, 2)))
    assert found.dtype == F16


@pytest.mark.breadth(1)
@pytest.mark.parametrize("name", ["O2", "OD", "mixed_float16"])
def test_what_is_not_enabled_is_exactly_float32(name):
    recipe = amp.recipe(name, enabled=False)
    params, opt_state, losses = train(recipe)
    expected, _, expected_losses = trained_in_f32()
    chex.assert_trees_all_equal(params, expected)
    assert losses == expected_losses
    assert amp.loss_scale_of(opt_state).value == 1.0
    fn = lambda x: jnp.sum(x @ x)  # noqa: E731
    assert str(jax.make_jaxpr(recipe.autocast(fn))(jnp.ones((3, 3)))) == str(
        jax.make_jaxpr(fn)(jnp.ones((3, 3)))
    )


def test_several_losses_have_scales_of_their_own():
    recipe = amp.recipe("O1", "f16", num_losses=2, init_scale=2.0**4)
    scales = recipe.loss_scales
    tx = recipe.wrap(optax.sgd(1.0))
    params, opt_state = recipe.init(tx, jnp.ones(3))
    losses = (lambda p: jnp.sum(p) * 2, lambda p: jnp.sum(p) * jnp.inf)
    grads = [
        jax.jit(amp.grad(loss))(params, loss_scale=scale)
        for loss, scale in zip(losses, scales, strict=True)
    ]
    adjusted = [
        scale.adjust(amp.all_finite(grad))
        for scale, grad in zip(scales, grads, strict=True)
    ]
    assert [scale.value for scale in adjusted] == [2.0**4, 2.0**3]
    updates, opt_state = tx.update(sum(grads), opt_state, params)
    assert not jnp.any(updates)
    assert not amp.last_step_finite(opt_state)


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("O0", "float32"), *((name, "bfloat16") for name in ("O1", "O2", "O3", "OD"))],
)
def test_products_are_half_in_the_backward_pass_too(name, dtype):
    params, (x, y) = variables(), data()
    recipe = amp.recipe(name, "bf16")
    apply = recipe.autocast(Model(train=False).apply)

    def loss_fn(params: Any) -> jax.Array:
        return jnp.mean((apply(params, x) - y) ** 2)

    with standard():
        found = measures.matmuls(jax.grad(loss_fn), recipe.cast_params(params))
    # Two forward, one of each kernel, one of the hidden activation.
    assert [each.operands for each in found] == [(dtype, dtype)] * 5


# What is refused


REFUSED = {
    ValueError: [
        ("O5", {}, r"unknown recipe\. .*There are O0, O1, O2, O3, OD"),
        ("02", {}, r'the letter O, not the digit zero: "O2"'),
        ("o2", {}, r'Did you mean "O2"\?'),
        ("fp61", {}, r'Did you mean "fp16"\?'),
        (2, {}, r"recipe\(2\): unknown recipe"),
        ("O1", {"keep_batchnorm_fp32": True}, r"norms too, .*Use O2"),
        ("O1", {"keep_batchnorm_fp32": False}, r"norms too, .*Use O2"),
        ("O1", {"master_weights": True}, r"need no masters.*Use O2"),
        ("OD", {"master_weight": False}, r"master_weight=False.*Use O2"),
        ("O1", {"cast_model_type": "f16"}, r"Use O2 or O3 for half parameters"),
        ("O2", {"patch_torch_functions": True}, r"another recipe. Use O1"),
        ("O1", {"patch_functions": False}, r"O2 or O3 .*, O0 for f32"),
        ("O1", {"loss_scale": "dyn"}, r'neither "dynamic" nor a positive'),
        ("O1", {"loss_scale": 0.0}, r'neither "dynamic" nor a positive'),
        ("O2", {"cast_model_type": "e4m3"}, r"float16, bfloat16 or float32"),
        ("fp16_apex", {"opt_level": "02"}, r"It is the letter O"),
        ("O2", {"num_losses": 0}, r"an int, at least 1"),
        ("O2", {"num_losses": True}, r"an int, at least 1"),
        ("fp16_apex", {"opt_level": "O7"}, r"unknown level"),
        (
            "O1",
            {"custom_white_list": {"tanh"}, "custom_black_list": {"tanh", "exp"}},
            r"Policy: 'tanh' is both in low and in full",
        ),
        ("O1", {"half_dtype": "f32"}, r"is no half dtype"),
        ("fp16", {"half_dtype": "bf16"}, r"f16 by the name and bf16 by half_dtype"),
        (
            "fp16_naive",
            {"cast_model_type": "bf16"},
            r"f16 by the name and bf16 by cast_mod",
        ),
        ("O2", {"half_dtype": "f16", "cast_model_type": "bf16"}, r"in one place"),
    ],
    TypeError: [
        ("O1", {"loss_scale": [1]}, r'neither "dynamic" nor a positive'),
        ("O2", {"loss_scale": 8, "init_scale": 2}, r"init_scale is of a dy"),
        ("O2", {"keep_batchnorm_fp32": "no"}, r"neither True nor False"),
        ("O2", {"enabled": 1}, r"enabled=1\): neither True nor False"),
        ("O2", {"cast_model_type": "int8"}, r"not a floating dtype"),
        ("O1", {"loss_scale": True}, r'neither "dynamic" nor a positive'),
        ("O2", {"scaler": 3}, r"unknown property"),
        ("O2", {"keep_batchnorm_fp32": []}, r"neither True nor False"),
        ("O1", {"custom_white_list": 5}, r"Use a set of strings"),
        ("O2", {"init_scal": 2}, r"Did you mean init_scale\?.*keep_batch"),
        ("O1", {"half": "f16"}, r"half='f16'\): .*Did you mean half_dtype\?"),
        ("O1", {"scale": 8}, r"Did you mean .*loss_scale"),
        ("O1", {"model_type": "f16"}, r"Did you mean cast_model_type\?"),
        ("O1", {"target": "cpu"}, r"recipe\.autocast\(fn, target="),
        ("O2", {"opt_level": "O1"}, r"the level is the name"),
        ("O2", {"master_weight": 1}, r"master_weight=1\): neither True"),
        ("O2", {"master_weight": True, "master_weights": True}, r"given twice"),
        ("O1", {"custom_white_list": "tanh"}, r"Use a set of strings"),
    ],
}


@pytest.mark.parametrize(
    ("error", "name", "overrides", "message"),
    [(error, *row) for error, rows in REFUSED.items() for row in rows],
)
def test_what_contradicts_a_recipe_is_refused(error, name, overrides, message):
    with pytest.raises(error, match=message):
        amp.recipe(name, **overrides)


@pytest.mark.parametrize(
    ("name", "overrides", "check"),
    [
        ("O0", {"loss_scale": "dynamic"}, lambda r: r.loss_scale.dynamic),
        ("O3", {"loss_scale": "128.0"}, lambda r: r.loss_scale.value == 128.0),
        ("O1", {"loss_scale": 64}, lambda r: r.loss_scale.value == 64.0),
        (
            "O1",
            {"loss_scale": 64, "enabled": False},
            lambda r: r.loss_scale.value == 1.0,
        ),
        ("O3", {"keep_batchnorm_fp32": True}, lambda r: r.keep_batchnorm_fp32),
        ("O3", {"master_weights": True}, lambda r: r.master_weights),
        # Parameters that are f32 need none.
        ("O0", {"master_weights": True}, lambda r: r.master_weights is False),
        ("O2", {"master_weights": False}, lambda r: not r.master_weights),
        ("O2", {"cast_model_type": "f32"}, lambda r: r.policy.compute_dtype == F32),
        ("O2", {"cast_model_type": "f16"}, lambda r: r.policy.param_dtype == F16),
        ("O1", {"keep_batchnorm_fp32": None}, lambda r: r.keep_batchnorm_fp32 is None),
        ("fp16_apex", {"opt_level": "O2"}, lambda r: r.master_weights),
        ("O1", {"loss_scale": np.array(8.0)}, lambda r: r.loss_scale.value == 8.0),
        (
            "O2",
            {"half_dtype": "f16", "incr_every_n_steps": 3},
            lambda r: r.loss_scale.growth_interval == 3,
        ),
        ("O2", {"master_grad": False}, lambda r: r.master_weights),
        ("O1", {"patch_functions": True}, lambda r: r.policy.compute_dtype != F32),
    ],
)
def test_legal_overrides_are_taken(name, overrides, check):
    assert check(amp.recipe(name, **overrides))


# What is held in memory


def convolved(kernels: list[jax.Array], x: jax.Array) -> jax.Array:
    spatial = "HW"[: x.ndim - 2]
    order = (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C")
    for kernel in kernels:
        strides = (1,) * len(spatial)
        x = jax.lax.conv_general_dilated(
            jax.nn.relu(x), kernel, strides, "SAME", dimension_numbers=order
        )
    return jnp.mean(x.astype(jnp.float32) ** 2)


def scaled_grad(loss: Any) -> Any:
    return functools.partial(amp.grad(loss), loss_scale=SCALE)


def unscaled_grad(loss: Any) -> Any:
    return functools.partial(amp.grad(loss), loss_scale=amp.no_loss_scale())


KAHAN, SCALE = amp.with_kahan(optax.adamw(1e-3)), amp.static_loss_scale(2.0**10)


MOVED: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
    "scaled": (amp.with_loss_scale(KAHAN, SCALE), scaled_grad, (3, 3, 256, 256)),
    "unscaled inside": (
        amp.with_loss_scale(KAHAN, SCALE, unscale=True),
        jax.grad,
        (3, 3, 256, 256),
    ),
    "amp.grad": (KAHAN, unscaled_grad, (3, 3, 256, 256)),
    "one dimension": (KAHAN, unscaled_grad, (9, 256, 256)),
    "jax.grad": (KAHAN, jax.grad, (3, 3, 256, 256)),
    "rounded": (optax.adamw(1e-3), unscaled_grad, (3, 3, 256, 256)),
}


@pytest.mark.breadth(2)
@pytest.mark.filterwarnings("ignore:.* the loss is float16")
@pytest.mark.parametrize("name", MOVED)
def test_moments_of_kernels_are_not_moved_to_the_layout_of_convolutions(name):
    tx, gradient, kernel = MOVED[name]
    # XLA transposed them all before the model ran: five times the memory, here.
    loss = amp.autocast(convolved, "float16")

    @standard()
    def step(params: Any, opt_state: Any, x: Any) -> Any:
        grads = gradient(loss)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    x = jax.ShapeDtypeStruct((2, *[16] * (len(kernel) - 2), 256), jnp.float32)
    found = {}
    for dtype in (jnp.float32, jnp.float16):
        params = [jax.ShapeDtypeStruct(kernel, dtype)] * 3
        opt_state = jax.eval_shape(tx.init, params)
        found[dtype] = h100.figures(
            *(step, params, opt_state, x),
            read=lambda program: {
                "temp": h100.temp_bytes(program),
                "moved": h100.traffic(program).bytes_moved,
            },
            donate_argnums=(0, 1),
        )
    for full, half in zip(*(each.values() for each in found.values()), strict=True):
        assert half < 0.8 * full


@pytest.mark.parametrize("name", ["O1", "fp16_apex", "f8", "bf17"])
def test_a_word_that_is_no_policy_may_be_the_name_of_a_recipe(name):
    with pytest.raises(ValueError, match=r"amp.recipe\(.*recipe\.autocast\(fn\)"):
        amp.autocast(jnp.sin, name)
