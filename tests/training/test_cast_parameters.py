"""Parameters in the dtypes of a policy, module by module, and back."""

import fnmatch
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict, freeze

import jmp_amp as amp

BF16, F16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16), jnp.dtype(jnp.float32)
HALVES = {"bf16": BF16, "p=f16,c=f16,o=f32": F16}
X = jax.random.normal(jax.random.key(0), (4, 8))

each_half = pytest.mark.parametrize("policy", HALVES)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(nn.Dense(8)(x))
        return x + nn.Dense(8, name="out")(nn.RMSNorm(name="my_rms")(y))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dense(8, name="stem")(x)
        x = nn.BatchNorm(use_running_average=not train, name="bn")(x)
        for _ in range(2):
            x = Block()(x)
        x = nn.GroupNorm(2)(x)
        x = nn.WeightNorm(nn.Dense(8))(x)
        x = nn.SpectralNorm(nn.Dense(8))(x, update_stats=train)
        shift = self.param("shift", nn.initializers.zeros_init(), (8,))
        return nn.Dense(4, name="head")(x + shift[None])


def linen_variables(model=None):
    with jax.numpy_dtype_promotion("standard"):
        return jax.jit((model or Model()).init)(jax.random.key(1), X)


VARIABLES = linen_variables()

NORMS = (
    "bn",
    "Block_0/LayerNorm_0",
    "Block_0/my_rms",
    "Block_1/LayerNorm_0",
    "Block_1/my_rms",
    "GroupNorm_0",
    "WeightNorm_0",
    "SpectralNorm_0",
)


def dtypes(tree):
    """The dtype of every leaf by its path, `Block_0/out/kernel`."""
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {
        re.sub(r"(/value|/get_raw_value)$", "", _path(path)): leaf.dtype
        for path, leaf in found
    }


def _path(keys):
    names = [
        str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in keys
    ]
    return "/".join(names)


def is_norm(path):
    # Norms that wrap a layer hold their own scale, not the layer's kernel.
    return any(path.startswith(norm + "/") for norm in NORMS)


def assert_half_but_for_norms(params, half):
    for path, dtype in dtypes(params).items():
        assert dtype == (F32 if is_norm(path) else half), path


def assert_equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)


# Trees of linen


@pytest.mark.breadth(2)
@each_half
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("given_model", [False, True])
def test_linen_parameters_are_half_but_for_those_of_norms(policy, frozen, given_model):
    variables = freeze(VARIABLES) if frozen else VARIABLES
    model = Model() if given_model else None
    found = amp.cast_params(variables, policy, model=model)
    assert type(found) is type(variables)
    assert jax.tree.structure(found) == jax.tree.structure(variables)
    assert_half_but_for_norms(found["params"], HALVES[policy])
    for name in variables.keys() - {"params"}:
        assert_equal(found[name], variables[name])
    bare = amp.cast_params(variables["params"], policy, model=model)
    assert type(bare) is type(variables["params"])
    assert_equal(bare, found["params"])


@each_half
def test_values_are_those_of_numpy_rounded_once(policy):
    half = HALVES[policy]
    kernel = amp.cast_params(VARIABLES, policy)["params"]["stem"]["kernel"]
    expected = np.asarray(VARIABLES["params"]["stem"]["kernel"]).astype(half)
    np.testing.assert_array_equal(np.asarray(kernel), expected)


# Written out: (2 - 2**-10) * 2**15 and (2 - 2**-7) * 2**127.
LARGEST = {F16: 65504.0, BF16: 3.3895313892515355e38}
F32_MAX = 3.4028234663852886e38


@each_half
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("asarray", [np.asarray, jnp.asarray])
def test_a_finite_parameter_is_stored_as_the_largest_number_at_most(
    policy, jit, asarray
):
    half = HALVES[policy]
    finite = [7e4, -7e4, 65519.0, 65520.0, F32_MAX, -F32_MAX, 1.001, -0.0, 3e-6, 1e-40]
    others = [np.inf, -np.inf, np.nan]
    values = np.float32([finite + others])
    with np.errstate(over="ignore"):
        expected = values.astype(half)
    largest = np.asarray(LARGEST[half], half)
    is_beyond = np.isfinite(values) & ~np.isfinite(expected)
    assert is_beyond.sum() == {F16: 5, BF16: 2}[half]
    expected = np.where(is_beyond, np.copysign(largest, expected), expected)

    def cast(params):
        return amp.cast_params(params, policy)["layer"]["u"]

    found = (jax.jit(cast) if jit else cast)({"layer": {"u": asarray(values)}})
    assert isinstance(found, np.ndarray) == (asarray is np.asarray and not jit)
    assert found.dtype == half
    np.testing.assert_array_equal(
        np.asarray(found).view(np.uint16), expected.view(np.uint16)
    )


def test_a_half_parameter_is_stored_in_the_range_of_the_other_half():
    # The number of bf16 that is next to 65504 is 65536, which is inf in f16.
    values = jnp.array([65280.0, 65536.0, -7e4, F32_MAX / 2, jnp.inf], jnp.bfloat16)
    found = amp.cast_params({"u": values, "v": np.asarray(values)}, "f16")
    expected = np.array([65280, 65504, -65504, 65504, np.inf], np.float16)
    np.testing.assert_array_equal(found["u"], expected)
    np.testing.assert_array_equal(found["v"], expected)
    assert found["u"].dtype == found["v"].dtype == F16


def test_a_parameter_is_stored_on_its_device_and_in_its_memory():
    device = jax.devices()[5]
    place = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    found = amp.cast_params(jax.device_put({"u": jnp.ones(3)}, place), "bf16")["u"]
    assert found.dtype == BF16
    assert found.devices() == {device}
    assert found.sharding.memory_kind == "pinned_host"


def test_what_is_exported_in_half_is_in_its_range():
    params = {"u": jnp.array([7e4, -jnp.inf])}
    found = amp.export_params(params, dtype="float16")
    np.testing.assert_array_equal(found["u"], np.float16([65504, -np.inf]))


@pytest.mark.filterwarnings("ignore:.*the parameters of this policy are f32")
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_a_policy_with_float32_parameters_changes_nothing(policy):
    found = amp.cast_params(VARIABLES, policy)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(VARIABLES), strict=True):
        assert a is b


def test_half_parameters_are_widened_by_a_policy_with_float32_parameters():
    half = amp.cast_params(VARIABLES, "bf16")
    assert set(dtypes(amp.cast_params(half, "mixed_bfloat16")).values()) == {F32}
    assert set(
        dtypes(amp.cast_params(half, "p=f16,c=f16,o=f32")["params"]["stem"]).values()
    ) == {F16}


@each_half
def test_what_is_no_float_of_ordinary_width_is_left_alone(policy):
    with jax.enable_x64(True):
        leaves = {
            "int": jnp.arange(2, dtype=jnp.int32),
            "bool": jnp.array([True]),
            "complex": jnp.ones(2, jnp.complex64),
            "double": jnp.ones(2, jnp.float64),
            "fp8": jnp.ones(2, jnp.float8_e4m3fn),
            "key": jax.random.key(0),
            "numpy": np.ones(2, np.float64),
            "text": "text",
            "none": None,
            "number": 3,
            "float": 2.5,
            "fn": abs,
        }
        params = {"dense": {"kernel": jnp.ones((2, 2), jnp.float32), **leaves}}
        found = amp.cast_params(params, policy)["dense"]
        assert found.pop("kernel").dtype == HALVES[policy]
        assert all(found[name] is leaf for name, leaf in leaves.items())
        exported = amp.export_params({"dense": {**found}})["dense"]
        assert all(exported[name] is leaf for name, leaf in leaves.items())


def test_only_params_are_cast_among_the_collections_of_linen():
    variables = {
        "params": {"layer": {"kernel": jnp.ones((2, 2))}},
        "batch_stats": {"layer": {"mean": jnp.ones(2)}},
        "cache": {"attention": {"cached_key": jnp.ones(2), "index": jnp.int32(0)}},
        "intermediates": {"x": (jnp.ones(2),)},
        "_overwrite_with_gradient": {"amax": jnp.ones(2)},
    }
    found = amp.cast_params(variables, "bf16")
    assert found.pop("params")["layer"]["kernel"].dtype == BF16
    assert all(
        a is b
        for a, b in zip(
            jax.tree.leaves(found),
            jax.tree.leaves({k: v for k, v in variables.items() if k != "params"}),
            strict=True,
        )
    )


def test_shapes_without_values_are_cast_as_arrays_are():
    abstract = jax.eval_shape(lambda: VARIABLES)
    found = amp.cast_params(abstract, "bf16")
    assert dtypes(found) == dtypes(amp.cast_params(VARIABLES, "bf16"))
    leaves = jax.tree.leaves(found)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert [leaf.shape for leaf in leaves] == [
        leaf.shape for leaf in jax.tree.leaves(VARIABLES)
    ]
    assert set(dtypes(amp.export_params(found)).values()) == {F32}


def test_casting_works_inside_of_jit_and_eval_shape():
    expected = dtypes(amp.cast_params(VARIABLES, "bf16"))
    for transform in (jax.jit, lambda fn: lambda v: jax.eval_shape(fn, v)):
        found = transform(lambda v: amp.cast_params(v, "bf16"))(VARIABLES)
        assert dtypes(found) == expected


class Boxed(nn.Module):
    @nn.compact
    def __call__(self, x):
        split = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        x = nn.Dense(8, kernel_init=split)(x)
        scale = nn.with_partitioning(nn.initializers.ones_init(), ("model",))
        return nn.LayerNorm(scale_init=scale)(x)


def test_boxes_of_partitioned_parameters_stay():
    variables = jax.jit(Boxed().init)(jax.random.key(0), X)
    found = amp.cast_params(variables, "bf16")
    assert jax.tree.structure(found) == jax.tree.structure(variables)
    kernel = found["params"]["Dense_0"]["kernel"]
    assert isinstance(kernel, nn.Partitioned) and kernel.names == (None, "model")
    assert kernel.value.dtype == BF16
    scale = found["params"]["LayerNorm_0"]["scale"]
    assert isinstance(scale, nn.Partitioned) and scale.value.dtype == F32
    exported = amp.export_params(found)
    assert jax.tree.structure(exported) == jax.tree.structure(variables)
    assert set(dtypes(exported).values()) == {F32}


def test_stacked_layers_of_scan_and_transformed_names_are_known():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.LayerNorm()(nn.Dense(8)(x)), None

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            scanned = nn.scan(
                nn.remat(Layer, prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=3,
            )
            x, _ = scanned()(x, None)
            return nn.jit(nn.LayerNorm)()(nn.remat(nn.LayerNorm)()(x))

    variables = jax.jit(Stack().init)(jax.random.key(0), X)
    for path, dtype in dtypes(amp.cast_params(variables, "bf16")["params"]).items():
        assert dtype == (F32 if "LayerNorm" in path else BF16), path


# A norm is known by its leaves, its name or its class


def test_a_norm_is_known_by_its_leaves_and_a_layer_with_a_kernel_is_none():
    params = {
        "anything": {"scale": jnp.ones(2), "bias": jnp.ones(2)},
        "rms": {"scale": jnp.ones(2)},
        "scaled_layer": {"kernel": jnp.ones((2, 2)), "scale": jnp.ones(2)},
        "dense": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)},
        "LayerNorm_7": {"bias": jnp.ones(2)},
        "free": jnp.ones(2),
    }
    assert dtypes(amp.cast_params(params, "f16")) == {
        "LayerNorm_7/bias": F32,
        "anything/bias": F32,
        "anything/scale": F32,
        "dense/bias": F16,
        "dense/kernel": F16,
        "free": F16,
        "rms/scale": F32,
        "scaled_layer/kernel": F16,
        "scaled_layer/scale": F16,
    }


class SetUp(nn.Module):
    """Names of its own for everything; a norm without a scale."""

    def setup(self):
        self.first = nn.Dense(8)
        self.between = nn.LayerNorm(use_scale=False)
        self.layers = [nn.Dense(8), nn.BatchNorm(use_running_average=True)]
        self.inner = SetUpInner()

    def __call__(self, x):
        x = self.between(self.first(x))
        for layer in self.layers:
            x = layer(x)
        return self.inner(x)


class SetUpInner(nn.Module):
    def setup(self):
        self.centre = nn.GroupNorm(2, use_scale=False)
        self.up = MyDense(8)

    def __call__(self, x):
        return self.up(self.centre(x))


class MyDense(nn.Dense):
    pass


def test_modules_made_by_setup_are_known_by_their_class_if_the_model_is_given():
    with jax.numpy_dtype_promotion("standard"):
        variables = jax.jit(SetUp().init)(jax.random.key(0), X)
    for given in (variables, variables["params"]):
        found = amp.cast_params(given, "bf16", model=SetUp())
        found = dtypes(found.get("params", found))
        norms = {"between/bias", "layers_1/bias", "layers_1/scale", "inner/centre/bias"}
        assert {path for path, dtype in found.items() if dtype == F32} == norms
        assert {path for path, dtype in found.items() if dtype == BF16} == (
            found.keys() - norms
        )
    # Without it `between` is a layer with a bias, as far as its name and leaves tell.
    assert amp.cast_params(variables, "bf16")["params"]["between"]["bias"].dtype == BF16


def test_entries_for_classes_find_modules_made_by_setup_if_the_model_is_given():
    with jax.numpy_dtype_promotion("standard"):
        variables = jax.jit(SetUp().init)(jax.random.key(0), X)
    policy = amp.PolicyMap("bf16", {MyDense: "float32", SetUpInner: "f16"})
    found = amp.cast_params(variables, policy, model=SetUp())
    found = dtypes(found["params"])
    assert found["inner/up/kernel"] == F32 and found["inner/centre/bias"] == F32
    assert found["first/kernel"] == found["layers_0/kernel"] == BF16


# Maps


def found_for(entries, default="bf16", variables=VARIABLES, model=None):
    policy = amp.PolicyMap(default, entries)
    return dtypes(amp.cast_params(variables, policy, model=model)["params"])


@pytest.mark.parametrize(
    ("entries", "f16", "f32"),
    [
        ({"head": "f16"}, {"head"}, set()),
        ({"**/head": "float32"}, set(), {"head"}),
        ({"Block_*": "f16"}, {"Block_0/Dense_0", "Block_0/out", "Block_1/Dense_0",
                              "Block_1/out"}, set()),
        ({"Block_[1]/**": "f16"}, {"Block_1/Dense_0", "Block_1/out"}, set()),
        ({"*/out": "f16"}, {"Block_0/out", "Block_1/out"}, set()),
        ({"Block_0": "f16", "Block_0/out": "float32"}, {"Block_0/Dense_0"},
         {"Block_0/out"}),
        # A module's own entry beats what its parents pass down, whatever the order.
        ({"Block_0/out": "float32", "Block_0": "f16"}, {"Block_0/Dense_0"},
         {"Block_0/out"}),
        # Of two entries for one module the latest wins.
        ({"Block_0/out": "float32", "**/out": "f16"},
         {"Block_0/out", "Block_1/out"}, set()),
        ({re.compile(r"Block_\d/Dense_0"): "f16"},
         {"Block_0/Dense_0", "Block_1/Dense_0"}, set()),
        ({re.compile("Block"): "f16", "head": "f16"}, {"head"}, set()),
        ({lambda info: info.name == "out" and info.path[0] == "Block_1": "f16"},
         {"Block_1/out"}, set()),
        ({lambda info: len(info.path) == 2 and info.method == "__call__": "f16"},
         {"Block_0/Dense_0", "Block_0/out", "Block_1/Dense_0", "Block_1/out"}, set()),
        ({Block: "f16"}, {"Block_0/Dense_0", "Block_0/out", "Block_1/Dense_0",
                          "Block_1/out"}, set()),
        ({nn.Dense: "f16"}, {"Block_0/Dense_0", "Block_1/Dense_0"}, set()),
        ({"": "f16"}, {"*"}, set()),
        ({"**": "f16"}, {"*"}, set()),
    ],
)  # fmt: skip
def test_entries_choose_the_dtype_of_the_parameters_of_their_modules(entries, f16, f32):
    unmatched = re.compile("Block") in entries
    if unmatched:
        with pytest.warns(UserWarning, match="matched no module"):
            found = found_for(entries)
    else:
        found = found_for(entries)
    for path, dtype in found.items():
        module = path.rpartition("/")[0]
        if is_norm(path) and path != "WeightNorm_0/Dense_0/kernel":
            assert dtype == F32, path
        elif module in f16 or f16 == {"*"}:
            assert dtype == F16, path
        elif module in f32:
            assert dtype == F32, path
        elif not is_norm(path) and "Dense_" not in module:
            assert dtype == BF16, path


@pytest.mark.parametrize(
    ("entries", "f32"),
    [
        ({"shift": "float32"}, {"shift"}),
        ({"head/bias": "float32"}, {"head/bias"}),
        ({"Model/head/bias": "float32"}, {"head/bias"}),
        ({"**/out/bias": "float32"}, {"Block_0/out/bias", "Block_1/out/bias"}),
        ({"*/out/[b]*": "float32"}, {"Block_0/out/bias", "Block_1/out/bias"}),
        ({re.compile(r"Block_1/\w+/bias"): "float32"},
         {"Block_1/out/bias", "Block_1/Dense_0/bias"}),
        # It beats the entry of its module, whatever the order.
        ({"head/bias": "float32", "head": "bf16"}, {"head/bias"}),
        # Of two entries for one parameter the latest wins.
        ({"**/bias": "float32", "**/[bB]ias": "bf16", "head/bias": "float32"},
         {"head/bias"}),
        # What matches a module is for modules: shift is none.
        ({"*": "float32"}, {"*/*"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("given_model", [False, True])
def test_an_entry_may_name_one_parameter_of_a_half_module(entries, f32, given_model):
    model = Model() if given_model else None
    for path, dtype in found_for(entries, model=model).items():
        if not is_norm(path):
            named = any(fnmatch.fnmatchcase(path, each) for each in f32)
            assert dtype == (F32 if named else BF16), path


def test_a_name_that_a_module_has_too_is_the_module():
    params = {
        "gate": {"kernel": jnp.ones((2, 2))},
        "mlp": {"gate": jnp.ones(2), "kernel": jnp.ones((2, 2))},
    }
    found = amp.cast_params(params, amp.PolicyMap("bf16", {"**/gate": "float32"}))
    assert dtypes(found) == {"gate/kernel": F32, "mlp/gate": BF16, "mlp/kernel": BF16}
    found = amp.cast_params(params, amp.PolicyMap("bf16", {"mlp/gate": "float32"}))
    assert dtypes(found) == {"gate/kernel": BF16, "mlp/gate": F32, "mlp/kernel": BF16}


def test_an_entry_that_names_parameters_leaves_norms_in_f32():
    found = found_for({"**/scale": "f16", "**/bias": "f16"})
    assert found["head/bias"] == F16
    assert {d for path, d in found.items() if path.endswith("scale")} == {F32}
    assert found["bn/bias"] == found["Block_0/LayerNorm_0/bias"] == F32


def test_an_entry_for_a_norm_class_is_taken_as_it_is_written():
    found = found_for({nn.LayerNorm: "f16", nn.GroupNorm: "bf16"})
    assert found["Block_0/LayerNorm_0/scale"] == F16
    assert found["GroupNorm_0/scale"] == BF16
    assert found["bn/scale"] == found["Block_0/my_rms/scale"] == F32
    # Other entries that reach a norm do not make its parameters half.
    found = found_for({"**/LayerNorm_0": "f16", "GroupNorm_0": "bf16", "bn": "f16"})
    assert found["Block_0/LayerNorm_0/scale"] == found["GroupNorm_0/scale"] == F32
    assert found["bn/scale"] == F32


def test_an_entry_that_matches_nothing_is_warned_about_once():
    policy = amp.PolicyMap("bf16", {"nowhere/at/all": "f16"})
    with pytest.warns(UserWarning, match="'nowhere/at/all' matched no module"):
        amp.cast_params(VARIABLES, policy)
    amp.cast_params(VARIABLES, policy)


@pytest.mark.parametrize("model", ["linen", "nnx"])
@pytest.mark.parametrize(
    ("policy", "half"), [("mixed_bfloat16", "bf16"), ("mixed_float16", "f16")]
)
def test_a_policy_that_stores_f32_and_computes_in_half_is_warned_of(
    policy, half, model
):
    params = nnx.Linear(2, 2, rngs=nnx.Rngs(0)) if model == "nnx" else VARIABLES
    told = f"the parameters of this policy are f32.*p={half},c={half},o=f32"
    with pytest.warns(UserWarning, match=told) as caught:
        amp.cast_params(params, policy)
    assert all(each.filename == __file__ for each in caught)


def test_casting_to_f32_and_parts_to_half_do_not_warn():
    amp.cast_params(VARIABLES, amp.get_policy("mixed_float16"))
    amp.cast_params(VARIABLES, "float32")
    amp.cast_params(VARIABLES, amp.PolicyMap("mixed_float16", {"Block_0/out": "f16"}))


# nnx


class NnxModel(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.stem = nnx.Linear(8, 8, rngs=rngs)
        self.tied = nnx.Linear(8, 8, rngs=rngs)
        self.tied.kernel = self.stem.kernel
        self.same = self.stem
        self.between = nnx.BatchNorm(8, rngs=rngs)
        self.blocks = nnx.List(NnxBlock(rngs) for _ in range(2))
        self.shift = nnx.Param(jnp.zeros(8))
        self.count = nnx.Variable(jnp.zeros(()))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=True, rngs=rngs)
        self.attention.init_cache((1, 4, 8))
        self.integers = nnx.Param(jnp.arange(3))

    def __call__(self, x):
        x = self.between(self.tied(self.same(self.stem(x))))
        for block in self.blocks:
            x = block(x)
        return x + self.shift[None]


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.my_norm = nnx.RMSNorm(8, rngs=rngs)

    def __call__(self, x):
        return x + self.linear(self.my_norm(x))


class MyNorm(nnx.LayerNorm):
    pass


def nnx_dtypes(node):
    state = nnx.state(node) if isinstance(node, nnx.Module) else node
    return {
        "/".join(map(str, path)): leaf.get_raw_value().dtype
        for path, leaf in nnx.to_flat_state(state)
    }


NNX_HALF = {
    "stem/kernel",
    "stem/bias",
    "tied/bias",
    "blocks/0/linear/kernel",
    "blocks/0/linear/bias",
    "blocks/1/linear/kernel",
    "blocks/1/linear/bias",
    "shift",
    *(
        f"attention/{part}/{leaf}"
        for part in ("query", "key", "value", "out")
        for leaf in ("kernel", "bias")
    ),
}


def canonical(found):
    """Shared Variables are listed at the first of their paths."""
    return {path.replace("same/", "stem/"): dtype for path, dtype in found.items()}


@pytest.mark.breadth(1)
@each_half
def test_an_nnx_module_is_copied_and_only_its_parameters_are_cast(policy):
    model = NnxModel()
    before = nnx_dtypes(model)
    held = dict(nnx.iter_graph(model))
    arrays = [id(leaf) for leaf in jax.tree.leaves(nnx.state(model))]
    found = amp.cast_params(model, policy)
    assert type(found) is NnxModel and found is not model
    assert {
        path
        for path, dtype in canonical(nnx_dtypes(found)).items()
        if dtype == HALVES[policy]
    } == NNX_HALF
    for path, dtype in nnx_dtypes(found).items():
        assert dtype == HALVES[policy] or dtype == before[path]
    # The caller's module is as it was, and shares no Variable with the new one.
    assert nnx_dtypes(model) == before
    assert [id(leaf) for leaf in jax.tree.leaves(nnx.state(model))] == arrays
    new = {id(node) for _, node in nnx.iter_graph(found)}
    shared = [
        path
        for path, node in held.items()
        if isinstance(node, nnx.Variable | nnx.Module) and id(node) in new
    ]
    assert not shared
    # Shared Variables and modules stay shared.
    assert found.same is found.stem and found.tied.kernel is found.stem.kernel
    assert nnx.graphdef(found).num_leaves == nnx.graphdef(model).num_leaves


@each_half
@pytest.mark.parametrize("given_model", [False, True])
def test_an_nnx_state_is_cast_as_its_module_is(policy, given_model):
    model = NnxModel()
    graphdef, state = nnx.split(model)
    before = nnx_dtypes(state)
    found = amp.cast_params(state, policy, model=model if given_model else None)
    assert type(found) is nnx.State and nnx_dtypes(state) == before
    assert nnx_dtypes(found) == nnx_dtypes(amp.cast_params(model, policy))
    assert_equal(found, nnx.state(amp.cast_params(model, policy)))
    merged = nnx.merge(graphdef, found)
    assert merged.same is merged.stem
    params = nnx.state(model, nnx.Param)
    cast = amp.cast_params(params, policy, model=model if given_model else None)
    assert nnx_dtypes(cast) == {
        path: dtype
        for path, dtype in nnx_dtypes(found).items()
        if path in nnx_dtypes(params)
    }


def test_a_norm_without_scale_is_known_in_a_state_by_the_model():
    class Plain(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.centre = nnx.LayerNorm(8, use_scale=False, rngs=rngs)
            self.mine = MyNorm(8, rngs=rngs)

    model = Plain()
    state = nnx.state(model)
    assert set(nnx_dtypes(amp.cast_params(model, "bf16")).values()) == {F32}
    with_model = amp.cast_params(state, "bf16", model=model)
    assert set(nnx_dtypes(with_model).values()) == {F32}
    without = nnx_dtypes(amp.cast_params(state, "bf16"))
    assert without == {"centre/bias": BF16, "mine/bias": F32, "mine/scale": F32}


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    ("entries", "f16"),
    [
        ({"blocks/0/**": "f16"}, {"blocks/0/linear/kernel", "blocks/0/linear/bias"}),
        ({"blocks/[12]": "f16"}, {"blocks/1/linear/kernel", "blocks/1/linear/bias"}),
        ({re.compile(r"blocks/\d/linear"): "f16"},
         {f"blocks/{i}/linear/{leaf}" for i in "01" for leaf in ("kernel", "bias")}),
        ({lambda info: info.name == "1": "f16"},
         {"blocks/1/linear/kernel", "blocks/1/linear/bias"}),
        ({"": "f16", "same": "bf16"}, NNX_HALF - {
            "stem/kernel", "stem/bias"}),
    ],
)  # fmt: skip
def test_entries_find_nnx_modules_by_path(entries, f16):
    model = NnxModel()
    policy = amp.PolicyMap("bf16", entries)
    for found in (
        amp.cast_params(model, policy),
        amp.cast_params(nnx.state(model), policy),
        amp.cast_params(nnx.state(model), policy, model=model),
    ):
        found = canonical(nnx_dtypes(found))
        assert {path for path, dtype in found.items() if dtype == F16} == f16
        assert {path for path, dtype in found.items() if dtype == BF16} == (
            NNX_HALF - f16
        )


def test_an_entry_may_name_one_parameter_of_an_nnx_module():
    model = NnxModel()
    f32 = {"shift", "blocks/0/linear/bias", "blocks/1/linear/bias"}
    policy = amp.PolicyMap("bf16", {"shift": "float32", "**/linear/bias": "float32"})
    for cast in (
        amp.cast_params(model, policy),
        amp.cast_params(nnx.state(model), policy),
        amp.cast_params(nnx.state(model), policy, model=model),
    ):
        found = canonical(nnx_dtypes(cast))
        halves = {path for path, dtype in found.items() if dtype == BF16}
        assert halves == NNX_HALF - f32
        assert {found[path] for path in f32} == {F32}


def test_entries_find_nnx_modules_by_class():
    model = NnxModel()
    policy = amp.PolicyMap("bf16", {NnxBlock: "f16", nnx.BatchNorm: "f16"})
    expected = {
        *(f"blocks/{i}/linear/{leaf}" for i in (0, 1) for leaf in ("kernel", "bias")),
        "between/scale",
        "between/bias",
    }
    for found in (
        amp.cast_params(model, policy),
        amp.cast_params(nnx.state(model), policy, model=model),
    ):
        found = nnx_dtypes(found)
        assert {path for path, dtype in found.items() if dtype == F16} == expected
        assert found["between/mean"] == found["blocks/0/my_norm/scale"] == F32


def test_a_subclass_of_a_module_class_is_of_its_policy():
    class Deep(nnx.Linear):
        pass

    class Two(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.a, self.b = (
                Deep(2, 2, rngs=rngs),
                nnx.Einsum("ab,bc->ac", (2, 2), rngs=rngs),
            )

    found = nnx_dtypes(
        amp.cast_params(Two(), amp.PolicyMap("bf16", {nnx.Linear: "f16"}))
    )
    assert found["a/kernel"] == F16 and found["b/kernel"] == BF16


def test_an_abstract_nnx_module_and_one_inside_of_nnx_jit_are_cast():
    expected = nnx_dtypes(amp.cast_params(NnxModel(), "bf16"))
    assert nnx_dtypes(amp.cast_params(nnx.eval_shape(NnxModel), "bf16")) == expected
    inside = nnx.jit(lambda: amp.cast_params(NnxModel(), "bf16"))
    assert nnx_dtypes(inside()) == expected


# Back


@pytest.mark.breadth(1)
@each_half
def test_parameters_that_half_can_hold_come_back_as_they_were(policy):
    half = HALVES[policy]

    def representable(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return leaf.astype(half).astype(leaf.dtype)

    variables = jax.tree.map(representable, VARIABLES)
    assert_equal(amp.export_params(amp.cast_params(variables, policy)), variables)
    model = NnxModel()
    nnx.update(model, jax.tree.map(representable, nnx.state(model)))
    cast = amp.cast_params(model, policy)
    exported = amp.export_params(cast)
    assert type(exported) is NnxModel and exported is not cast
    assert exported.same is exported.stem
    assert_equal(nnx.state(exported), nnx.state(model))
    assert canonical(nnx_dtypes(cast))["stem/kernel"] == half
    state = amp.export_params(amp.cast_params(nnx.state(model), policy))
    assert_equal(state, nnx.state(model))


def test_export_casts_every_half_leaf_to_the_dtype_that_is_asked_for():
    tree = {"a": jnp.ones(2, jnp.bfloat16), "b": [jnp.ones(2, jnp.float16)], "c": 1.5}
    assert dtypes(amp.export_params({"a": tree["a"], "b": tree["b"]})) == {
        "a": F32,
        "b/0": F32,
    }
    assert amp.export_params(tree)["c"] == 1.5
    assert amp.export_params(tree, dtype="bf16")["b"][0].dtype == BF16
    assert amp.export_params(tree, opt_state=(), dtype="float16")["a"].dtype == F16
    frozen = amp.export_params(freeze(tree))
    assert isinstance(frozen, FrozenDict) and frozen["a"].dtype == F32
    assert tree["a"].dtype == BF16


# Mistakes


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: amp.cast_params(Model(), "bf16"), TypeError, "model="),
        (lambda: amp.cast_params(VARIABLES, "bf17"), ValueError, "bf17"),
        (lambda: amp.cast_params(VARIABLES, 16), TypeError, "16"),
        (lambda: amp.cast_params(VARIABLES, None), TypeError, "None"),
        (lambda: amp.cast_params(VARIABLES, jnp.bfloat16), TypeError, "bfloat16"),
        (lambda: amp.export_params({}, dtype="int32"), TypeError, "int32"),
        (lambda: amp.export_params({}, dtype="bf17"), TypeError, "bf17"),
    ],
)
def test_a_mistake_is_named(call, error, message):
    with pytest.raises((error, ValueError) if error is TypeError else error) as raised:
        call()
    assert message in str(raised.value)


def test_a_class_that_a_linen_tree_does_not_tell_is_warned_about_with_a_remedy():
    class Named(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2, name="head")(nn.Dense(3, name="up")(x))

    params = jax.jit(Named().init)(jax.random.key(0), jnp.ones((1, 4)))
    policy = "p=bf16,c=bf16,o=f32"
    by_class = amp.PolicyMap(policy, {nn.Dense: "float32"})
    with pytest.warns(UserWarning, match=r"Dense matched no module.*give a glob such"):
        amp.cast_params(params, by_class, model=Named())
    by_path = amp.PolicyMap(policy, {"**/head": "float32"})
    cast = amp.cast_params(params, by_path)["params"]
    assert cast["head"]["kernel"].dtype == jnp.float32
    assert cast["up"]["kernel"].dtype == jnp.bfloat16


def test_buffers_of_an_nnx_module_are_no_parameters():
    class Positions(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
            self.positions = jnp.arange(1000.0)

    cast = amp.cast_params(Positions(), "p=bf16,c=bf16,o=f32")
    assert cast.layer.kernel[...].dtype == jnp.bfloat16
    np.testing.assert_array_equal(cast.positions, np.arange(1000.0, dtype=np.float32))
