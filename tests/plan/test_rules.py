"""The table of operations against the lists of the reference systems."""

import inspect
import json
import pathlib

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from jax import lax

import jmp_amp as amp
from jmp_amp.plan.tables import operations, rules
from jmp_amp.plan.tables.operations import Kind, OpClass, kind_of
from tests.programs import equations

ORACLE = pathlib.Path(__file__).parents[1] / "oracle"
TORCH = json.loads((ORACLE / "autocast_ops_torch.json").read_text())["ops"]

X = jnp.ones((8, 16))
W = jnp.ones((16, 16))
IMAGE = (1, 4, 4, 8)
POSITIVE = jnp.full((8, 16), 0.5)


def of_image(fn):
    return lambda h: fn(h.reshape(IMAGE))


# The operation of torch, as one writes it in JAX; `h` is an activation in half.
OPERATIONS = {
    "matmul": lambda h: h @ W,
    "mv": lambda h: h @ W[0],
    "bmm": lambda h: lax.batch_matmul(h[None], W[None]),
    "linalg_vecdot": lambda h: jnp.vecdot(h, h),
    "chain_matmul": lambda h: jnp.linalg.multi_dot([h, W, W]),
    "tensordot": lambda h: jnp.tensordot(h, W, 1),
    "conv2d": of_image(
        lambda h: lax.conv_general_dilated(
            h,
            jnp.ones((2, 2, 8, 3)),
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
    ),
    "conv_transpose2d": of_image(
        lambda h: lax.conv_transpose(h, jnp.ones((2, 2, 8, 3)), (2, 2), "SAME")
    ),
    "acos": jnp.acos,
    "cosh": jnp.cosh,
    "erfinv": jax.scipy.special.erfinv,
    "exp": jnp.exp,
    "expm1": jnp.expm1,
    "log": jnp.log,
    "log1p": jnp.log1p,
    "log2": jnp.log2,
    "logsumexp": jax.nn.logsumexp,
    "frobenius_norm": jnp.linalg.norm,
    "norm": lambda h: jnp.linalg.norm(h, axis=-1),
    "linalg_vector_norm": lambda h: jnp.linalg.vector_norm(h, axis=-1),
    "linalg_matrix_norm": jnp.linalg.matrix_norm,
    "nuclear_norm": lambda h: jnp.linalg.norm(h, "nuc"),
    "huber_loss": lambda h: optax.huber_loss(h, X),
    "mse_loss": lambda h: jnp.mean(optax.squared_error(h, X)),
    "l1_loss": lambda h: jnp.mean(jnp.abs(h - X)),
    "kl_div": lambda h: optax.kl_divergence(h, POSITIVE),
    "nll_loss": lambda h: -jnp.mean(h[:, 0]),
    "cross_entropy": lambda h: optax.softmax_cross_entropy_with_integer_labels(
        h, jnp.zeros(8, jnp.int32)
    ),
    "cosine_similarity": lambda h: optax.cosine_similarity(h, X),
    "pow": lambda h: h**POSITIVE,
    "pow_scalar": lambda h: h**1.5,
    "reciprocal": jnp.reciprocal,
    "sinh": jnp.sinh,
    "softplus": jax.nn.softplus,
    "tan": jnp.tan,
    "cumsum": lambda h: jnp.cumsum(h, axis=0),
    "prod": jnp.prod,
    "log_softmax": jax.nn.log_softmax,
    "amax": lambda h: jnp.max(h, axis=-1),
    "amin": lambda h: jnp.min(h, axis=-1),
    "clamp": lambda h: jnp.clip(h, 0.0, 1.0),
    "erf": lax.erf,
    "floor": jnp.floor,
    "gather": lambda h: h[jnp.arange(3)],
    "gelu": jax.nn.gelu,
    "hardtanh": jax.nn.hard_tanh,
    "leaky_relu": jax.nn.leaky_relu,
    "max_pool2d": of_image(lambda h: nn.max_pool(h, (2, 2))),
    "mish": lambda h: h * jnp.tanh(h),
    "mul_python_scalar": lambda h: h * 2.0,
    "neg": jnp.negative,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "sqrt": jnp.sqrt,
    "square": jnp.square,
    "std": lambda h: jnp.std(h, axis=-1),
    "sub": lambda h: h - h,
    "mul": lambda h: h * h,
    "div": lambda h: h / 3.0,
    "cat": lambda h: jnp.concatenate([h, h]),
    "stack": lambda h: jnp.stack([h, h]),
    "where": lambda h: jnp.where(X > 0, h, 0.0),
    "topk": lambda h: lax.top_k(h, 3)[0],
    "scatter_add": lambda h: jnp.zeros((4, 16)).at[jnp.arange(8) % 4].add(h),
    "cross": lambda h: jnp.cross(h[:, :3], h[:, 3:6]),
}
# Where this library differs on purpose.
DIFFERENT = {
    "mish": "f32 between products: it is two operations on what a softplus makes",
    "nll_loss": "the mean is f32; the sign is turned behind its rounding",
    "square": "follows: torch squares in f32, here only where an f32 sum reads it",
    "std": "f32: torch leaves it in half and sums in f32 inside its kernel",
    "scatter_add": "f32: it is a sum",
    "cross": "f32 between products: it is two operations",
    "linalg_vecdot": "f32: a product without a free dimension is a sum",
}


def arithmetic_dtypes(fn):
    """The dtypes in which the equations that are `fn`'s own compute."""

    def marked(x, w):
        h = x @ w
        with jax.named_scope("operation"):
            return fn(h)

    # The result is read in half, as in the middle of a network.
    policy = amp.Policy(compute_dtype="f16", output_dtype="f16")
    jaxpr = jax.make_jaxpr(amp.autocast(marked, policy))(X, W)
    exact = (Kind.MOVE, Kind.COMPARISON)
    inside = [
        e for e in equations(jaxpr) if "operation" in str(e.source_info.name_stack)
    ]
    inside = [e for outer in inside for e in (outer, *_inner(outer))]
    inside = [e for e in inside if not _calls(e) and _is_float(e)]
    inside = [e for e in inside if e.primitive.name != "convert_element_type"]
    own = [e for e in inside if kind_of(e.primitive.name) not in exact]
    own = own or [e for e in inside if kind_of(e.primitive.name) is Kind.MOVE]
    found = {v.aval.dtype.name for e in own for v in e.outvars}
    return found - {"bool", "int32"}


def _is_float(eqn):
    return any(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in eqn.outvars)


def _inner(eqn):
    for value in eqn.params.values():
        if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
            yield from equations(value)


def _calls(eqn):
    return any(True for _ in _inner(eqn))


@pytest.mark.breadth(4)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_runs_in_the_dtype_that_torch_runs_it_in(name):
    entry = TORCH[name]["cuda_f16"]
    of_half = entry.get("f16,f16") or entry["f16"]
    found = arithmetic_dtypes(OPERATIONS[name])
    if name in DIFFERENT:
        assert found != {of_half}, f"{name} no longer differs: {DIFFERENT[name]}"
    else:
        assert found == {of_half}


def test_every_primitive_that_torch_lists_is_in_the_class_that_torch_says():
    # Of the primitives that the oracle names for an operation; a composite's are many.
    category = {"lower_precision_fp": OpClass.LOW, "fp32": OpClass.FULL}
    seen = 0
    for entry in TORCH.values():
        expected = category.get(entry["category"])
        primitive = entry.get("jax_primitives")
        if expected is None or not primitive or not primitive.isidentifier():
            continue
        if primitive in ("custom_vjp", "composite"):
            continue
        seen += 1
        assert rules.PRIMITIVE_RULES[primitive].op_class is expected, primitive
    assert seen > 20


@pytest.mark.parametrize(
    ("paddle", "primitive"),
    [
        *((name, name) for name in ("exp", "expm1", "log", "log2", "rsqrt", "pow")),
        *((name, name) for name in ("tan", "acos", "asin", "sinh", "cosh", "atanh")),
        *((name, name) for name in ("cumprod", "cumsum", "reduce_sum", "reduce_prod")),
        ("erfinv", "erf_inv"),
        ("matmul", "dot_general"),
        ("conv2d", "conv_general_dilated"),
    ],
)
def test_a_primitive_is_in_the_class_that_paddle_says(paddle, primitive):
    lists = json.loads((ORACLE / "oplists_other.json").read_text())
    category = lists["paddle"]["float16"]["O1"][paddle]
    expected = {"white": OpClass.LOW, "black": OpClass.FULL}[category]
    assert rules.PRIMITIVE_RULES[primitive].op_class is expected


def test_every_loss_of_optax_is_in_the_table():
    not_a_loss = {"smooth_labels", "make_fenchel_young_loss"}
    losses = {
        name
        for name, value in vars(optax.losses).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }
    assert losses - not_a_loss <= set(rules.FUNCTION_RULES)


def test_every_primitive_of_the_table_exists():
    from jax.extend.core import primitives

    known = {
        p.name for p in vars(primitives).values() if hasattr(p, "multiple_results")
    }
    # Not exported, or not in every supported version of JAX.
    also = {
        *("all_gather_invariant", "broadcast_to", "cholesky_update", "copy", "log2"),
        *("layout_constraint", "lu_pivots_to_permutation", "one_minus_square"),
        *("optimization_barrier", "pbroadcast", "pvary", "ragged_dot_general"),
        *("reduce_scatter", "reshard", "scatter-sub", "split", "stack", "unstack"),
        *("mesh_cast", "symmetric_product", "tile", "with_memory_space_constraint"),
        "dim_as_value",
    }
    assert set(operations.OPERATIONS) - known - also == set()
