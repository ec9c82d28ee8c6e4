"""Norm layers under autocast, in linen and in nnx: they compute in f32."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jmp_amp as amp
from tests.programs import results_of
from tests.rounding import BF16, F16, POLICIES, ROUNDINGS, eps, relative_error
from tests.transform.flax_models import (
    F32,
    KEY,
    dtypes_in,
    in_linen,
    in_nnx,
    results_in,
)

HALF = "bfloat16"
IMAGES = jax.random.normal(KEY, (4, 6, 16))


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
            cls = MyNorm if self.norm == "MyNorm" else getattr(nn, self.norm)
            x = cls(name="norm", **options)(dense(x))
        return Tail(name="tail")(x)


class MyNorm(nn.LayerNorm):
    pass


class NnxTail(nnx.Module):
    def __init__(self, rngs):
        self.head = nnx.Linear(24, 5, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.tanh(x))


class NnxInNorm(nnx.Module):
    """The same model."""

    def __init__(self, norm, train=False):
        rngs = nnx.Rngs(0)
        up = nnx.Linear(16, 24, rngs=rngs)
        if norm in ("WeightNorm", "SpectralNorm"):
            options = {"update_stats": train} if norm == "SpectralNorm" else {}
            self.norm = getattr(nnx, norm)(up, rngs=rngs, **options)
        else:
            self.up, options = up, {}
            if norm == "BatchNorm":
                options["use_running_average"] = not train
            if norm == "GroupNorm":
                options["num_groups"] = 4
            cls = NnxMyNorm if norm == "MyNorm" else getattr(nnx, norm)
            self.norm = cls(24, rngs=rngs, **options)
        self.tail = NnxTail(rngs)

    def __call__(self, x):
        return self.tail(self.norm(self.up(x) if hasattr(self, "up") else x))


class NnxMyNorm(nnx.LayerNorm):
    pass


@functools.cache
def around(library, norm, train=False):
    if library == "linen":
        return in_linen(InNorm(norm, train), IMAGES)
    # WeightNorm has arrays of its own, which are no Variables.
    make = functools.partial(NnxInNorm, norm, train)
    return in_nnx(make, abstract=norm != "WeightNorm")


OUTER = {"linen": InNorm, "nnx": NnxInNorm}
MINE = {"linen": MyNorm, "nnx": NnxMyNorm}

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
# Those whose parameters stay f32 where others are half.
WITH_PARAMETERS = ("BatchNorm", "GroupNorm", "LayerNorm", "RMSNorm")
# And the modes of each: what does not differ is asked once.
MODES = dict.fromkeys(NORMS, (False,)) | dict.fromkeys(
    ("BatchNorm", "SpectralNorm"), (False, True)
)
each_library = pytest.mark.parametrize("library", ["linen", "nnx"])

# How the policy reaches the norm and its neighbours.
REACHING = {
    "default": lambda library, of: amp.PolicyMap(BF16),
    "path": lambda library, of: amp.PolicyMap(
        F32, {"up": BF16, "norm/*": BF16, "tail": BF16, "norm": BF16}
    ),
    "glob of all": lambda library, of: amp.PolicyMap(F32, {"**": BF16}),
    "class of all": lambda library, of: amp.PolicyMap(F32, {of.Module: BF16}),
    "regex and predicate": lambda library, of: amp.PolicyMap(
        F32,
        {
            re.compile("(norm/)?(up|layer)|tail"): BF16,
            lambda info: info.name == "norm": BF16,
        },
    ),
    "parent": lambda library, of: amp.PolicyMap(F32, {OUTER[library]: BF16}),
}


@pytest.mark.breadth(3)
@each_library
@pytest.mark.parametrize(
    ("norm", "train", "reaching"),
    [
        *((norm, train, "default") for norm in NORMS for train in MODES[norm]),
        *(("BatchNorm", True, reaching) for reaching in list(REACHING)[1:]),
        *(("WeightNorm", False, reaching) for reaching in list(REACHING)[1:]),
    ],
)
@pytest.mark.filterwarnings("ignore:.*matched no module")
def test_a_norm_computes_in_f32_and_hands_on_half(norm, train, reaching, library):
    net = around(library, norm, train)
    apply = amp.autocast(net.writing, REACHING[reaching](library, net.of))
    found = results_in(jax.make_jaxpr(apply)(net.variables, IMAGES))
    assert set(found[NORMS[norm]]) == {F32}
    for primitive in ("rsqrt", "reduce_sum", "sub", "div", "square", "mul"):
        assert set(found.get(primitive, ())) <= {F32}, primitive
    # What follows in half was handed on in half. A layer with a bias is read in f32.
    is_layer = norm in ("WeightNorm", "SpectralNorm")
    assert found["tanh"] == [F32 if is_layer else HALF]
    # Spectral norm's power iteration is matrix products too, those of the norm.
    assert found["dot_general"].count(HALF) == 2
    if norm != "SpectralNorm":
        assert len(found["dot_general"]) == 2


def enlarged(variables):
    """Weights whose results are beyond 1000: their squares are beyond f16."""

    def larger(path, leaf):
        # The kernel before the norm.
        return leaf * (1000 if leaf.shape == (16, 24) else 1)

    return jax.tree_util.tree_map_with_path(larger, variables)


@pytest.mark.breadth(1)
@each_library
def test_a_model_with_a_norm_gives_the_values_of_f32(library):
    nets = {(n, train): around(library, n, train) for n in NORMS for train in MODES[n]}
    both = amp.PolicyMap(BF16, {"norm": F16})

    @jax.jit
    def run(variables, x):
        return {
            key: {
                "f32": net.writing(variables[key], x),
                "mixed": amp.autocast(net.writing, both)(variables[key], x),
                "f32 of large": net.writing(enlarged(variables[key]), x)[0],
                "f16 of large": amp.autocast(net.writing, F16)(
                    enlarged(variables[key]), x
                )[0],
            }
            for key, net in nets.items()
        }

    found = run({key: net.values() for key, net in nets.items()}, IMAGES)
    for (norm, train), results in found.items():
        assert dtypes_in(results) == {F32}
        (y, stats), (wanted_y, wanted_stats) = results["mixed"], results["f32"]
        assert relative_error(y, wanted_y) < ROUNDINGS * eps(BF16), norm
        error = relative_error(results["f16 of large"], results["f32 of large"])
        assert error < ROUNDINGS * eps(F16), norm
        leaves = jax.tree.leaves(stats), jax.tree.leaves(wanted_stats)
        assert all(leaves) == (norm in ("BatchNorm", "SpectralNorm"))
        if all(leaves):
            # Those of weights have no half precision before them.
            exact = norm == "SpectralNorm" or not train
            bound = 32 * eps(F32) if exact else ROUNDINGS * eps(BF16)
            assert relative_error(*leaves) < bound, norm


# Entries of a map whose default is bf16, and in what the activation after the norm is.
AS_WRITTEN = (
    # An output dtype that is given for the class itself.
    (lambda cls, outer: {cls: "p=f32,c=f32,o=bf16"}, HALF),
    (lambda cls, outer: {cls: F32}, F32),
    # Where other entries reach it, it hands on the half that they say.
    (lambda cls, outer: {"norm": "c=bf16,o=f32"}, HALF),
    (lambda cls, outer: {cls: "c=f16,o=f32"}, F32),
    (lambda cls, outer: {"norm": F32}, F32),
    (lambda cls, outer: {"norm": F16}, HALF),
    (lambda cls, outer: {outer: F16}, "float16"),
    (lambda cls, outer: {"norm": F16, cls: "p=f32,c=f32,o=f32"}, F32),
)


@pytest.mark.breadth(2)
@each_library
@pytest.mark.parametrize("norm", WITH_PARAMETERS)
def test_an_entry_of_a_norm_class_is_taken_as_written(norm, library):
    net = around(library, norm)
    cls = getattr(net.of.norms, norm)
    rows = AS_WRITTEN if norm == "LayerNorm" else AS_WRITTEN[:3]
    for entries, tanh in rows:
        entries = entries(cls, OUTER[library])
        apply = net.under(amp.PolicyMap(BF16, entries))
        found = results_of(apply, net.variables, IMAGES, primitive="tanh")
        assert found == [tanh], entries


@each_library
def test_a_subclass_of_a_norm_is_a_norm(library):
    net = around(library, "MyNorm")
    for entries, tanh in (
        ({}, "float16"),
        ({"norm": "f16"}, "float16"),
        ({MINE[library]: F16}, F32),
        ({net.of.norms.LayerNorm: F16}, F32),
    ):
        apply = net.under(amp.PolicyMap(F16, entries))
        found = results_in(jax.make_jaxpr(apply)(net.variables, IMAGES))
        assert found["tanh"] == [tanh]
        if tanh == "float16":
            assert set(found["mul"]) == {F32}


# Batch statistics


@pytest.mark.breadth(2)
@each_library
@pytest.mark.parametrize(("policy", "train"), [(BF16, False), ("f16", True)])
def test_batch_statistics_are_f32_under_every_policy(policy, train, library):
    net = around(library, "BatchNorm", train)
    for entries in ({}, {"norm": "bf16"}, {net.of.norms.BatchNorm: "f16"}, {"**": F16}):
        apply = amp.autocast(net.writing, amp.PolicyMap(policy, entries))
        found, written = jax.eval_shape(apply, net.variables, IMAGES)
        assert found.dtype == amp.get_policy(policy).output_dtype
        assert dtypes_in(written) == {F32} and len(jax.tree.leaves(written)) == 2


@pytest.mark.breadth(1)
@each_library
def test_batch_statistics_are_those_of_f32(library):
    net = around(library, "BatchNorm", True)
    policies = (*POLICIES, "bf16")

    @jax.jit
    def run(variables, x):
        found = [amp.autocast(net.writing, p)(variables, x)[1] for p in policies]
        return net.writing(variables, x)[1], found

    expected, found = run(net.values(), IMAGES)
    for policy, stats in zip(policies, found, strict=True):
        assert dtypes_in(stats) == {F32}
        leaves = jax.tree.leaves(stats)
        error = relative_error(leaves, jax.tree.leaves(expected))
        assert error < ROUNDINGS * eps(policy)
        # Not rounded to half: they are f32 numbers.
        half = amp.get_policy(policy).compute_dtype
        assert any((x.astype(half).astype(F32) != x).any() for x in leaves)


# Half-precision parameters


def half_policy(half, output="f32"):
    return amp.get_policy(f"p={half},c={half},o={output}")


HALVES = {
    "linen": [*((n, "bf16") for n in WITH_PARAMETERS), ("BatchNorm", "f16"),
              ("RMSNorm", "f16")],
    "nnx": [("BatchNorm", "bf16"), ("RMSNorm", "f16")],
}  # fmt: skip


# nnx is tested by default: it has fewer norms with half parameters to compile.
@pytest.mark.breadth(1)
@pytest.mark.parametrize("library", ["nnx", "linen"])
def test_half_parameters_work_in_train_and_eval(library):
    def gradients(net, policy, variables):
        def loss(variables):
            y, written = amp.autocast(net.writing, policy)(variables, IMAGES)
            return jnp.mean(jnp.square(y)), (y, written)

        return jax.grad(loss, has_aux=True)(variables)

    cases = [(n, half, train) for n, half in HALVES[library] for train in MODES[n]]
    nets = {(n, train): around(library, n, train) for n, _, train in cases}
    full = {key: net.values() for key, net in nets.items()}
    cast = {
        (norm, half, train): amp.cast_params(full[norm, train], half_policy(half))
        for norm, half, train in cases
    }

    @jax.jit
    def run(cast, full):
        expected = {key: gradients(nets[key], F32, full[key]) for key in full}
        found = {
            (norm, half, train): gradients(nets[norm, train], half_policy(half), tree)
            for (norm, half, train), tree in cast.items()
        }
        return found, expected

    # linen's layers promote f32 inputs and half parameters by themselves.
    with jax.numpy_dtype_promotion("standard"):
        found, expected = run(cast, full)
    for norm, half, train in cases:
        roundings = ROUNDINGS * eps(half_policy(half))
        grads, (y, stats) = found[norm, half, train]
        wanted_grads, (wanted_y, wanted_stats) = expected[norm, train]
        assert y.dtype == jnp.float32
        assert relative_error(y, wanted_y) < roundings
        if norm == "BatchNorm":
            assert dtypes_in(stats) == {F32}
            leaves = map(jax.tree.leaves, (stats, wanted_stats))
            assert relative_error(*leaves) < roundings
        given = jax.tree.leaves(cast[norm, half, train])
        leaves = jax.tree.leaves(grads)
        assert [x.dtype for x in leaves] == [x.dtype for x in given]
        leaves = jax.tree.leaves(amp.cast_to_full(grads))
        assert all(np.isfinite(leaf).all() for leaf in leaves)
        error = relative_error(leaves, jax.tree.leaves(wanted_grads))
        assert error < 2 * roundings


@pytest.mark.breadth(3)
@each_library
@pytest.mark.parametrize("inputs", [F32, "half"])
@pytest.mark.parametrize(("half", "output"), [("bf16", "f32"), ("f16", "f16")])
@pytest.mark.parametrize("norm", WITH_PARAMETERS)
def test_half_parameters_give_one_dtype_in_train_and_eval(
    norm, half, output, inputs, library
):
    policy = half_policy(half, output)
    dtype = jnp.float32 if inputs == F32 else policy.compute_dtype
    x = jax.ShapeDtypeStruct(IMAGES.shape, dtype)
    made = set()
    for train in MODES[norm]:
        net = around(library, norm, train)
        cast = jax.eval_shape(lambda tree: amp.cast_params(tree, policy), net.variables)
        apply = amp.autocast(net.writing, policy)
        with jax.numpy_dtype_promotion("standard"):
            trace = jax.make_jaxpr(apply, return_shape=True)
            jaxpr, (y, written) = trace(cast, x)
        found = results_in(jaxpr)
        made.add((y.dtype.name, *found["tanh"]))
        assert dtypes_in(written) <= {F32}
        assert set(found["dot_general"]) == {policy.compute_dtype.name}
        assert set(found["rsqrt"]) == {F32}
    assert made == {(policy.output_dtype.name, policy.compute_dtype.name)}
