"""What a report says of a program: figures from closed forms, and nothing executed."""

import dataclasses
import json
import math
import re

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from IPython.lib.pretty import pretty
from jax import lax
from jax.custom_derivatives import linear_call
from jax.extend import core

import jmp_amp as amp
from jmp_amp.reports.tables import scale_text
from tests.programs import casts_of


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def explained(fn, *args, policy="mixed_bfloat16", **kwargs):
    return amp.explain(fn, policy)(*args, **kwargs)


def of(report, operation):
    return [e for e in report.equations if e.operation == operation]


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(32, name="up")(x))
        return nn.LayerNorm(name="norm")(nn.Dense(8, name="down")(x))


MODEL = MLP()
X = f32(4, 16)
VARIABLES = jax.eval_shape(MODEL.init, jax.random.key(0), X)
UP, DOWN = 2 * 4 * 16 * 32, 2 * 4 * 32 * 8


# The figures


def test_flops_of_an_mlp_are_those_of_its_shapes():
    modules = explained(MODEL.apply, VARIABLES, X).modules
    assert modules["MLP/up"].flops == modules["MLP/up"].flops_in_half == UP
    assert modules["MLP/down"].flops == modules["MLP/down"].flops_in_half == DOWN
    assert modules["MLP/norm"].flops == 0


def test_totals_are_the_sums_of_the_modules():
    report = explained(MODEL.apply, VARIABLES, X)
    assert report.total == tuple(map(sum, zip(*report.modules.values(), strict=True)))
    assert report.total.flops == UP + DOWN


@pytest.mark.breadth(2)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"padding": "VALID"},
        {"padding": "SAME"},
        {"padding": "SAME", "window_strides": (2, 3)},
        {"padding": ((2, 0), (1, 3)), "rhs_dilation": (2, 1)},
        {"padding": ((1, 1), (0, 2)), "lhs_dilation": (2, 3)},
    ],
)
def test_flops_of_a_convolution_are_those_that_xla_counts(options, groups):
    image, kernel = f32(2, 9, 11, 4), f32(3, 4, 4 // groups, 6)

    def fn(image, kernel):
        return lax.conv_general_dilated(
            image,
            kernel,
            **{"window_strides": (1, 1), **options},
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    counted = jax.jit(fn).lower(image, kernel).cost_analysis()["flops"]
    assert explained(fn, image, kernel).total.flops == counted


def test_flops_of_a_valid_convolution_are_the_closed_form():
    def fn(image, kernel):
        return lax.conv(image, kernel, (1, 1), "VALID")

    report = explained(fn, f32(2, 3, 8, 8), f32(5, 3, 3, 3))
    assert report.total.flops == 2 * (2 * 5 * 6 * 6) * (3 * 3 * 3)


def test_flops_of_the_gradient_of_a_convolution_are_those_that_xla_counts():
    def loss(image, kernel):
        return jnp.sum(lax.conv(image, kernel, (1, 1), "VALID"))

    gradient = jax.grad(loss, argnums=(0, 1))
    args = f32(4, 3, 8, 8), f32(5, 3, 3, 3)
    convs = of(explained(gradient, *args), "conv_general_dilated")
    # Forward, and one each for image and kernel: every product is made three times.
    forward = 2 * (4 * 5 * 6 * 6) * (3 * 3 * 3)
    assert [e.flops for e in convs] == [forward] * len(convs)


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (jnp.matmul, ((5, 4, 3), (5, 3, 7))),
        (lambda x, y: jnp.einsum("abc,dcb->ad", x, y), ((3, 4, 5), (2, 5, 4))),
    ],
)
def test_flops_of_a_product_are_those_that_xla_counts(fn, shapes):
    args = [f32(*shape) for shape in shapes]
    counted = jax.jit(fn).lower(*args).cost_analysis()["flops"]
    assert explained(fn, *args).total.flops == counted


def test_flops_of_a_ragged_product_are_those_of_its_rows():
    sizes = jax.ShapeDtypeStruct((3,), jnp.int32)
    report = explained(lax.ragged_dot, f32(12, 4), f32(3, 4, 5), sizes)
    assert report.total.flops == 2 * 12 * 4 * 5
    assert report.total.matmuls == 1

    def gradient(x, w, sizes):
        return jax.value_and_grad(lambda w: jnp.sum(lax.ragged_dot(x, w, sizes)))(w)

    # Each row is in one group: it is multiplied once, for the kernel of that group.
    products = explained(gradient, f32(12, 4), f32(3, 4, 5), sizes).equations
    flops = [e.flops for e in products if e.operation == "ragged_dot_general"]
    assert flops == [2 * 12 * 4 * 5] * 2


def test_the_body_of_a_scan_counts_as_often_as_it_runs():
    def fn(x, ws):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    report = explained(fn, f32(4, 16), f32(6, 16, 16))
    (product,) = of(report, "dot_general")
    assert (product.flops, product.times) == (6 * 2 * 4 * 16 * 16, 6)
    assert report.total.matmuls == report.total.matmuls_in_half == 1


def test_a_scan_in_a_scan_counts_the_product_of_both():
    def inner(x, w):
        return lax.scan(lambda x, _: (x @ w, None), x, length=3)[0]

    def fn(x, ws):
        return lax.scan(lambda x, w: (inner(x, w), None), x, ws)[0]

    report = explained(fn, f32(4, 16), f32(6, 16, 16))
    assert report.total.flops == 18 * 2 * 4 * 16 * 16


def test_every_branch_of_a_cond_and_a_while_loop_count_once():
    def branches(flag, x, w):
        return lax.cond(flag, lambda: x @ w, lambda: x @ w @ w)

    flag = jax.ShapeDtypeStruct((), jnp.bool_)
    one = 2 * 4 * 16 * 16
    assert explained(branches, flag, X, f32(16, 16)).total.flops == 3 * one

    def loop(x, w):
        return lax.while_loop(lambda x: x[0, 0] < 0, lambda x: x @ w, x)

    assert explained(loop, X, f32(16, 16)).total.flops == one


def test_a_shard_map_counts_all_of_its_shards():
    mesh = jax.make_mesh((8,), ("shard",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    fn = jax.shard_map(
        lambda x, w: x @ w,
        mesh=mesh,
        in_specs=(spec("shard"), spec()),
        out_specs=spec("shard"),
    )
    assert explained(fn, f32(16, 4), f32(4, 5)).total.flops == 2 * 16 * 4 * 5


def test_a_product_of_integers_is_no_matmul_to_lower():
    ints = jax.ShapeDtypeStruct((4, 4), jnp.int8)
    assert explained(lambda x, y: x @ y, ints, ints).total.matmuls == 0


def test_a_product_that_stays_f32_is_not_counted_in_half():
    policy = amp.get_policy("mixed_float16").with_full("dot_general")
    total = explained(lambda x, w: x @ w, X, f32(16, 4), policy=policy).total
    assert (total.matmuls, total.matmuls_in_half, total.flops_in_half) == (1, 0, 0)


# Casts


def inserted(fn, *args, policy="mixed_bfloat16"):
    """The casts between floats that autocast adds to a program without any."""
    assert not casts_of(fn, *args)
    names = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
    return sorted(
        f"{names[source]} to {names[target]} of {shape}"
        for shape, source, target in casts_of(amp.autocast(fn, policy), *args)
    )


def shared_activation(x, w):
    h = jnp.exp(x @ w)
    return h @ w + jnp.tanh(h) @ w


def returned_input(x, w):
    return x, w @ w, jnp.float32(1.0)


def in_a_scan(x, ws):
    return lax.scan(lambda x, w: (jax.nn.softmax(x @ w), jnp.sum(x)), x, ws)


def in_branches(x, w):
    return lax.cond(jnp.sum(x) > 0, lambda: x @ w, lambda: jnp.exp(x @ w))


def attention(x, w):
    scores = jnp.where(jnp.tri(16) > 0, w @ w.T, -1e9)
    return jax.nn.softmax(scores) @ (x.T @ x @ w)


def in_a_block_and_beside_it(x, w):
    # The softmax and the cumulative sum, which is not cheap, share one cast to f32.
    h = x @ w
    return jax.nn.softmax(h) @ w, jnp.cumsum(h, axis=0) @ w


def checkpointed(x, w):
    return jax.checkpoint(shared_activation)(x, w)


def jitted(x, w):
    inner = jax.jit(lambda x, w: jax.nn.gelu(x @ w))
    return inner(inner(x, w), w)


@pytest.mark.breadth(3)
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "float16"])
@pytest.mark.parametrize(
    "fn",
    [
        *(shared_activation, returned_input, in_branches, attention, checkpointed),
        *(jitted, in_a_scan, in_a_block_and_beside_it),
    ],
)
def test_casts_are_those_of_the_program_that_runs(fn, policy):
    args = (f32(16, 16), f32(5, 16, 16) if fn is in_a_scan else f32(16, 16))
    program = inserted(fn, *args, policy=policy)
    report = explained(fn, *args, policy=policy)
    pairs = report.casts
    for pair in {cast.partition(" of ")[0] for cast in program} | set(pairs):
        assert sum(cast.startswith(pair) for cast in program) == pairs[pair][0], pair


def test_a_cast_that_several_equations_share_is_the_first_ones():
    report = explained(in_a_block_and_beside_it, f32(16, 16), f32(16, 16))
    raised = [
        e.operation
        for e in report.equations
        for c in e.casts
        if (c.source, c.where) == ("bf16", "operand")
    ]
    assert raised == ["reduce_max"]


def test_casts_of_a_model_are_those_of_the_program_that_runs():
    program = inserted(MODEL.apply, VARIABLES, X)
    report = explained(MODEL.apply, VARIABLES, X)
    assert report.total.casts == len(program)
    # The input, kernels and biases; what the norm reads. Its result is the output.
    parameters = 16 * 32 + 32 + 32 * 8 + 8
    assert report.casts == {
        "f32 to bf16": (5, 4 * 16 + parameters),
        "bf16 to f32": (1, 4 * 8),
    }


def test_casts_in_a_scan_count_once_and_their_elements_as_often_as_it_runs():
    def fn(x, ws):
        start = x[jnp.arange(4)]  # what a lookup begins is carried in half
        return lax.scan(lambda x, w: (x @ w, None), start, ws)[0]

    report = explained(fn, f32(4, 16), f32(6, 16, 16))
    (product,) = of(report, "dot_general")
    assert sum(cast.elements for cast in product.casts) == 6 * 16 * 16


def test_a_cast_that_the_program_asks_for_is_not_an_inserted_one():
    def fn(x):
        return x.astype(jnp.bfloat16)

    assert explained(fn, X).total.casts == 0


def test_f32_policy_casts_nothing():
    report = explained(MODEL.apply, VARIABLES, X, policy="float32")
    assert report.total.casts == report.total.in_half == 0


# Modules, names, reasons


def test_every_equation_names_its_module_and_its_source():
    report = explained(MODEL.apply, VARIABLES, X)
    products = of(report, "dot_general")
    assert [e.module for e in products] == ["MLP/up", "MLP/down"]
    lines = [e.source.rpartition(":") for e in products]
    assert all(file == __file__ for file, _, _ in lines)
    first, second = (int(line) for _, _, line in lines)
    assert second == first + 1


def test_the_module_of_an_equation_is_the_same_in_the_backward_pass():
    def loss(variables, x):
        return jnp.sum(MODEL.apply(variables, x))

    forward = explained(loss, VARIABLES, X)
    backward = explained(jax.grad(loss), VARIABLES, X)
    assert {e.module for e in of(backward, "dot_general")} == {"MLP/up", "MLP/down"}
    assert forward.modules["MLP/up"].matmuls == 1
    assert backward.modules["MLP/up"].matmuls == 2  # its input has no gradient
    assert backward.modules["MLP/down"].matmuls == 3
    assert all(e.dtype == "bf16" for e in of(backward, "dot_general"))


def test_jitted_functions_and_named_scopes_are_modules_and_library_helpers_are_not():
    @jax.jit
    def block(x, w):
        with jax.named_scope("inside"):
            return jnp.where(x @ w > 0, 1.0, 0.0)

    report = explained(lambda x, w: block(x, w) @ w, f32(4, 4), f32(4, 4))
    products = of(report, "dot_general")
    assert [e.module for e in products] == ["block/inside", ""]
    assert set(report.modules) == {"", "block/inside"}


@jax.custom_jvp
def doubled(x):
    return x * 2.0


doubled.defjvp(lambda primals, tangents: (doubled(*primals), tangents[0] * 2.0))


def test_bodies_of_custom_jvp_and_checkpoint_are_read():
    def fn(x, w):
        return jax.checkpoint(lambda x: doubled(x @ w) @ w)(x)

    report = explained(fn, X, f32(16, 16))
    assert [e.dtype for e in report.equations if e.is_floating] == ["bf16"] * 3
    assert [e.depth for e in report.equations] == [0, 1, 1, 2, 1]
    assert not report.opaque


def test_what_stays_in_f32_is_grouped_by_reason_and_the_largest_comes_first():
    def fn(x, w):
        return jnp.sum(jnp.exp(x @ w)), jnp.cumsum(x @ w)

    reasons = explained(fn, f32(64, 4), f32(4, 64)).stays_full
    assert [r.elements for r in reasons] == sorted(
        (r.elements for r in reasons), reverse=True
    )
    by_operation = {name: r for r in reasons for name in r.operations}
    assert by_operation["exp"].elements == 64 * 64
    assert by_operation["cumsum"] is by_operation["reduce_sum"]
    assert by_operation["cumsum"].equations == 2


@pytest.mark.filterwarnings("ignore:Policy. 'tahn' decided nothing")
def test_names_of_the_policy_that_decided_nothing_are_told():
    def gate(x):
        return jnp.tanh(x)

    policy = amp.Policy().with_low("gate", "tahn").with_full("cumsum", "scatter-add")
    report = explained(
        lambda x, w: jnp.cumsum(gate(x @ w)), X, f32(16, 4), policy=policy
    )
    assert report.unused_rules == ("scatter_add", "tahn")
    assert "tahn" in str(report)


@pytest.mark.filterwarnings("ignore:Policy. '.*' decided nothing")
@pytest.mark.parametrize(
    ("names", "shown"),
    [
        # Names of the tables are no mistakes, nor are those that are like none of them.
        (("cumsum", "scatter-add", "logsumexp", "my_fn"), []),
        (("sofmtax", "my_fn"), [["my_fn"], ["sofmtax", "softmax"]]),
        (("tahn",), [["tahn", "tan", "or", "tanh"]]),
        (("scater_add", "l2_los"), [["l2_los", "l2_loss"], ["scater_add", "scatter_"]]),
    ],
)
def test_a_misspelt_name_of_the_policy_is_told_what_it_may_mean(names, shown):
    policy = amp.Policy().with_full(*names)
    text = str(explained(lambda x: jax.nn.relu(x), X, policy=policy))
    lines = text.partition("Named by the policy, and decided nothing\n")[2].split("\n")
    assert ("did you mean" in lines[0]) == bool(shown)
    for cells in shown:
        (line,) = (line for line in lines if line.split()[:1] == cells[:1])
        assert " ".join(line.split()).startswith(" ".join(cells))


@jax.custom_vjp
def kernel(x, w):
    return jnp.sin(x @ w)


kernel.defvjp(lambda x, w: (kernel(x, w), (x, w)), lambda res, g: (g @ res[1].T, None))


def test_an_opaque_call_is_told_with_the_products_in_it():
    report = explained(lambda x, w: kernel(x, w) @ w, X, f32(16, 16))
    (call,) = report.opaque
    assert call.operation == "custom_vjp_call" and call.calls == "kernel"
    assert (call.matmuls, call.matmuls_in_half) == (1, 0)
    assert call.flops == 2 * 4 * 16 * 16
    assert report.total.matmuls == 2 and report.total.matmuls_in_half == 1
    assert "amp.cast_inputs" in str(report) and "kernel" in str(report)


@jax.custom_batching.custom_vmap
def batched(x, w):
    return jnp.sin(x @ w) @ w


batched.def_vmap(lambda size, is_batched, x, w: (batched(x, w), True))

OPAQUE = {
    "a custom_vjp: as traced, with 1 product in f32; "
    "amp.cast_inputs has it in half": kernel,
    "a custom_vmap: as traced, with 2 products in f32; "
    "amp.cast_inputs has it in half": batched,
    # What the caller has lowered needs no advice.
    "a custom_vjp: as traced": lambda x, w: amp.cast_inputs(kernel)(x, w),
    "a callback to Python: as traced": lambda x, w: jax.pure_callback(
        lambda x, w: x, x, x, w
    ),
    "reduce, unknown to the plan: as traced": lambda x, w: lax.reduce(
        x, 0.0, lambda a, b: a + 2 * b, (0,)
    ),
}


@pytest.mark.parametrize("reason", OPAQUE)
def test_an_opaque_call_says_what_it_is_and_what_to_do(reason):
    report = explained(OPAQUE[reason], X, f32(16, 16))
    (call,) = report.opaque
    assert call.reason == reason
    # In a column of a table, a reason has line breaks.
    assert set(reason.split()) <= set(str(report).split())


def test_an_opaque_call_of_a_library_is_told_with_its_name(tmp_path):
    folder = tmp_path / "site-packages" / "solvers"
    folder.mkdir(parents=True)
    code = """
import jax
solved = jax.custom_vjp(lambda field, y: field(field(y)), nondiff_argnums=(0,))
solved.defvjp(
    lambda field, y: (solved(field, y), None), lambda field, _, g: (field(g),)
)
def solve(field, y):
    return solved(field, y)
"""
    solvers: dict = {}
    exec(compile(code, str(folder / "loops.py"), "exec"), solvers)

    def field(y):
        return jnp.tanh(y @ jnp.eye(16))

    def fn(field):
        return lambda y: solvers["solve"](field, y)

    (call,) = explained(fn(field), X).opaque
    assert call.reason == (
        "a custom_vjp of solvers: as traced, with 2 products in f32; autocast the "
        "function that it calls"
    )
    (call,) = explained(fn(amp.autocast(field)), X).opaque
    assert call.reason == "a custom_vjp of solvers: as traced"
    assert (call.matmuls, call.matmuls_in_half) == (2, 2)


def twice_multiplied(a, b):
    """A solution that takes two products, of a system that is another one."""

    def solve(matvec, b):
        return a @ (a @ b)

    return lax.custom_linear_solve(lambda x: a @ x, b, solve, solve)


def linear(a, b):
    return linear_call(lambda a, x: a @ x, lambda a, c: a.T @ (a @ c), a, b)


def written_to(a, b):
    place = jax.new_ref(b)

    @jax.jit
    def step(place):
        place[...] = a @ place[...]

    lax.cond(b[0, 0] > 0, lambda: step(place), lambda: None)
    return place[...] @ b.T


def gradients(fn):
    return jax.grad(lambda a, b: jnp.sum(jnp.sin(fn(a, b))), argnums=(0, 1))


AS_TRACED = {
    "solve": jnp.linalg.solve,
    "gradients of solve": gradients(jnp.linalg.solve),
    "solve a batch": jax.vmap(jnp.linalg.solve, (None, 0)),
    "inverse": lambda a, b: jnp.linalg.inv(a) @ b,
    "products that solve": twice_multiplied,
    "linear_call": linear,
    "kernel": lambda a, b: kernel(a, b),
    "branch that writes": written_to,
}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("fn", AS_TRACED.values(), ids=AS_TRACED)
def test_the_products_that_run_as_traced_are_those_of_the_compiled_program(fn):
    # A system tells products to its derivative alone; LU factors take none.
    args = f32(16, 16), f32(16, 8)
    if fn is AS_TRACED["solve a batch"]:
        args = f32(16, 16), f32(3, 16, 8)
    compiled = jax.jit(fn).lower(*args).compile().as_text()
    report = explained(fn, *args, policy="float32")
    assert report.total.matmuls == len(re.findall(r"= \S+ dot\(", compiled))
    assert report.total.matmuls_in_half == 0


def test_cast_inputs_lowers_what_an_opaque_call_multiplies():
    report = explained(lambda x, w: amp.cast_inputs(kernel)(x, w) @ w, X, f32(16, 16))
    assert report.total.matmuls == report.total.matmuls_in_half == 2


def test_integers_and_calls_are_no_floating_equations():
    def fn(x, w):
        return jax.jit(lambda h: (h > 0).astype(jnp.int32) + 1)(x @ w)

    report = explained(fn, X, f32(16, 16))
    assert report.total.equations == 2  # the product and the comparison
    assert [e.dtype for e in of(report, "jit")] == [""]
    assert [e.is_floating for e in of(report, "add")] == [False]


# Saved for the backward pass


def saved(fn, *args):
    """Bytes of what `jax.vjp` keeps beside its arguments."""

    def residuals(*args):
        return jax.tree.leaves(jax.vjp(fn, *args)[1])

    jaxpr = jax.make_jaxpr(residuals)(*args).jaxpr
    made = {v for eqn in jaxpr.eqns for v in eqn.outvars}
    kept = {v for v in jaxpr.outvars if v in made}
    return sum(v.aval.size * v.aval.dtype.itemsize for v in kept)


def test_bytes_saved_for_the_backward_pass_are_those_of_vjp():
    def loss(variables, x):
        return jnp.mean(MODEL.apply(variables, x) ** 2)

    batch = f32(256, 16)
    total = explained(loss, VARIABLES, batch).total
    assert total.saved == saved(amp.autocast(loss), VARIABLES, batch)
    assert total.saved_without == saved(loss, VARIABLES, batch)
    assert 0 < total.saved < total.saved_without


def test_bytes_saved_by_a_chain_of_tanh_are_those_of_its_activations():
    def fn(x, w):
        return jnp.tanh(jnp.tanh(x @ w) @ w) @ w

    total = explained(fn, X, f32(16, 16)).total
    # The results of both tanh and their derivatives, 1 - y^2. In half precision these
    # are made again, and the casts of x and, for each product, of w are kept.
    assert total.saved_without == 4 * (4 * 16) * 4
    assert total.saved == 2 * (2 * (4 * 16) + 4 * 16 + 3 * 16 * 16)


def weights_in_a_scan(ws, x):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0]


def weights_in_jitted_calls(ws, x):
    for w in ws:
        x = jax.jit(lambda h, w: jnp.tanh(h @ w))(x, w)
    return x


def weights_unrolled(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return x


@pytest.mark.breadth(2)
@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize(
    "fn", [weights_unrolled, weights_in_jitted_calls, weights_in_a_scan]
)
def test_copies_of_weights_are_told_apart_from_activations(fn, batch):
    weights = f32(3, 16, 16) if fn is weights_in_a_scan else [f32(16, 16)] * 3
    report, small = (explained(fn, weights, f32(size, 16)) for size in (batch, 1))
    total = report.total
    # Three weights and x, which three products read. A carry of a loop is no argument;
    # a turn casts its slice of an argument again.
    in_loop = fn is weights_in_a_scan
    numbers = 3 * 16 * 16 + (0 if in_loop else batch * 16)
    copies = 0 if in_loop else 2 * numbers
    assert (total.copies, total.copies_without) == (copies, 0)
    assert (report.arguments, report.arguments_without) == (
        4 * numbers if in_loop else 0,
        4 * numbers,
    )
    kept, kept_without = total.saved - total.copies, total.saved_without
    assert 0 < kept <= kept_without / 2
    assert kept == batch * (small.total.saved - small.total.copies)
    # The ratio is that of activations: it does not depend on the batch.
    ratio = f"({kept / kept_without:.2f}x), and of arguments "
    assert ratio in report.summary and ratio in small.summary
    assert amp.Report.from_json(report.to_json()) == report


def test_copies_of_weights_that_are_stored_in_half_are_those_of_the_program_in_f32():
    w, x = jax.ShapeDtypeStruct((16, 16), jnp.bfloat16), f32(4, 16)
    stored = "p=bf16,c=bf16,o=f32"
    report = explained(lambda w, x: jnp.sin(x @ w), w, x, policy=stored)
    total = report.total
    # Kept as it is; in f32 it is a copy.
    assert report.arguments == 2 * 16 * 16
    assert total.copies == 2 * 4 * 16
    assert total.copies_without == 4 * 16 * 16
    assert report.arguments_without == 4 * 4 * 16


def test_bytes_are_told_of_the_module_that_keeps_them():
    @jax.jit
    def block(x, w):
        with jax.named_scope("inside"):
            return jnp.sin(x @ w)

    report = explained(lambda x, w: block(x, w), X, f32(16, 16), policy="float32")
    # The argument of the sine, in whatever form: 4 * 16 numbers.
    assert {path: c.saved for path, c in report.modules.items()} == {
        "": 0,
        "block/inside": 4 * 16 * 4,
    }


SCOPE = jax.named_scope


def gated(h, w, gain):
    """A block whose mask, its zeros and whose gain are the same in every turn."""
    with SCOPE("block"):
        with SCOPE("gain"):
            scale = jnp.exp(gain)
        h = jnp.tanh(h @ w) * scale
        with SCOPE("drop"):
            kept = jax.random.bernoulli(jax.random.key(0), 0.9, h.shape)
            return jnp.where(kept, h / 0.9, 0.0)


def scanned(x, ws, gain):
    return lax.scan(lambda h, w: (gated(h, w, gain), None), x, ws)[0]


def counted_up(x, ws, gain):
    return lax.fori_loop(0, 3, lambda i, h: gated(h, ws[i], gain), x)


def scanned_twice(x, ws, gain):
    def turn(h, _):
        with SCOPE("mid"):
            return scanned(h, ws, gain), None

    return lax.scan(turn, x, length=2)[0]


def two_layers(x, ws, gain):
    for i in range(2):
        with SCOPE(f"layer{i}"):
            x = scanned(x, ws, gain)
    return x


@jax.jit
def called(x, ws, gain):
    with SCOPE("mid"):
        return scanned(x, ws, gain)


MASK, ZEROS, GAIN = 8 * 16, 8 * 16 * 4, 4


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    ("fn", "around"),
    [
        (scanned, ["net"]),
        (counted_up, ["net"]),
        (scanned_twice, ["net/mid"]),
        (two_layers, ["net/layer0", "net/layer1"]),
        (called, ["net/called/mid"]),
    ],
)
def test_what_every_turn_of_a_loop_keeps_alike_is_of_the_module_in_the_loop(fn, around):
    def net(x, ws, gain):
        with SCOPE("net"):
            return fn(x, ws, gain)

    report = explained(net, f32(8, 16), f32(3, 16, 16), f32(), policy="float32")
    saved = {path: costs.saved for path, costs in report.modules.items()}
    assert {*saved} <= {e.module for e in report.equations}
    for path in around:
        assert saved[f"{path}/block/drop"] == MASK + ZEROS
        assert saved[f"{path}/block/gain"] == GAIN
    assert {kept.module for kept in report.largest_kept if kept.size == ZEROS} == {
        f"{path}/block/drop" for path in around
    }


@pytest.mark.parametrize(
    ("fn", "word"),
    [
        (lambda x: lax.while_loop(lambda x: x[0, 0] < 0, jnp.sin, x), "while_loop"),
        (lambda x: jnp.argmax(x), "no result is floating-point"),
        (lambda x: jax.pure_callback(lambda x: x, f32(4, 16), x), "allback"),
    ],
)
def test_a_function_without_derivative_says_why(fn, word):
    report = explained(fn, X)
    assert report.saved is None
    assert word in report.not_differentiable
    assert "not differentiable" in report.summary
    assert word in str(report)
    assert amp.Report.from_json(report.to_json()) == report


def test_integer_arguments_leave_nothing_to_differentiate():
    ints = jax.ShapeDtypeStruct((4,), jnp.int32)
    report = explained(lambda n: n.astype(jnp.float32) * 2.0, ints)
    assert report.not_differentiable == "no argument is floating-point"


# How it is called


def test_nothing_is_executed():
    def never(x):
        raise AssertionError("executed")

    def fn(x, w):
        jax.debug.callback(never, x)
        return jax.pure_callback(never, f32(4, 16), x @ w) + 1.0

    report = explained(fn, jnp.ones((4, 16)), jnp.ones((16, 16)))
    assert "pure_callback" in [e.operation for e in report.opaque]


def test_arguments_that_are_no_arrays_and_keywords_reach_the_function():
    def fn(x, activation, *, w, twice=False):
        y = activation(x @ w)
        return y @ w if twice else y

    w = f32(16, 16)
    assert explained(fn, X, jnp.tanh, w=w).total.matmuls == 1
    assert explained(fn, X, jnp.tanh, w=w, twice=True).total.matmuls == 2


def test_parameters_of_an_nnx_module_count_as_differentiated():
    model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))

    def apply(model, x):
        return jnp.sin(model(x))

    total = explained(apply, model, X).total
    graph, params = nnx.split(model)
    split = explained(lambda params, x: apply(nnx.merge(graph, params), x), params, X)
    assert total.matmuls_in_half == 1
    assert total.saved == split.total.saved > 0


def test_a_report_is_plain_data_that_reads_back():
    report = explained(MODEL.apply, VARIABLES, X, policy="mixed_float16")
    data = json.loads(json.dumps(report.to_dict()))
    assert data == report.to_dict()
    assert amp.Report.from_dict(report.to_dict()) == report
    assert amp.Report.from_dict(data) == report
    assert amp.Report.from_json(report.to_json()) == report
    assert data["total"]["flops"] == UP + DOWN
    assert data["modules"]["MLP/up"]["matmuls"] == 1
    assert data["policy"] == "p=f32,c=f16,o=f32"
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.policy = "float32"


def test_shapes_are_tuples_of_ints_and_lists_in_json():
    def fn(x):
        rows, columns = lax.split(x, (1, 3))
        return jnp.sum(rows) + jnp.sum(columns)

    report = explained(fn, X)
    split, *_ = report.equations
    assert split.shapes == ((1, 16), (3, 16))
    data = json.loads(report.to_json())
    assert [row["shapes"] for row in data["equations"][:2]] == [
        [[1, 16], [3, 16]],
        [[]],
    ]
    assert amp.Report.from_dict(data).equations == report.equations
    assert "[1,16] [3,16]" in report.drill_down()


def test_a_report_with_shapes_as_text_still_reads_back():
    report = explained(lambda x: jnp.sum(x @ x.T), X)
    data = report.to_dict()
    for row in data["equations"]:
        row["shapes"] = [str(shape).replace(" ", "") for shape in row["shapes"]]
    assert data["equations"][1]["shapes"] == ["[4,4]"]
    assert amp.Report.from_dict(data) == report
    data["equations"][1]["shapes"] = ["[four]"]
    with pytest.raises(ValueError, match="make the report again"):
        amp.Report.from_dict(data)


def test_the_same_call_gives_the_same_report():
    first, second = (explained(MODEL.apply, VARIABLES, X) for _ in range(2))
    assert first == second and str(first) == str(second)


# What is shown


def test_the_text_tells_the_figures_in_lines_of_100_characters():
    report = explained(MODEL.apply, VARIABLES, X)
    text = str(report)
    assert max(map(len, text.splitlines())) <= 100
    assert "2 of 2 matmuls in half (100% of 6.14 kFLOP)" in " ".join(text.split())
    rows = [line.split() for line in text.splitlines()]
    # Kept in half: the input and the kernel. The f32 program has both as arguments.
    assert 2 * (4 * 16 + 16 * 32) == 1152
    assert ["up", "2/3", "1/1", "4.1", "k", "3", "608", "1.15", "kB"] in rows
    assert "\x1b" not in text


def test_numbers_are_aligned_right_and_names_left_in_text_and_html():
    report = explained(MODEL.apply, VARIABLES, X)
    lines = str(report).splitlines()
    heading, _, *rows = lines[lines.index("Modules") + 1 :][:7]
    last = heading.index("FLOP") + len("FLOP") - 1
    # Of "4.1 k", "2.05 k" and "6.14 k".
    assert [row[last] for row in rows[:5]] == [" ", "k", "k", " ", "k"]
    assert heading.startswith(" module ") and rows[0].startswith(" MLP ")
    html = report._repr_html_()
    assert '<th style="text-align: right; padding: 0 0.6em">casts</th>' in html
    assert '<td style="text-align: right; padding: 0 0.6em">2/3</td>' in html
    assert '<th style="text-align: left; padding: 0 0.6em">module</th>' in html
    assert 'text-align: left; padding: 0 0.6em; white-space: pre">  up</td>' in html


def test_ipython_shows_the_text_of_a_result_and_not_its_fields():
    report = amp.explain(lambda x: jnp.exp(x @ x))(jnp.ones((2, 2)))
    assert pretty(report) == str(report)
    # As it looks for it: in the class itself, before the `repr` of a dataclass.
    assert all("_repr_pretty_" in vars(c) for c in (amp.Diagnosis, amp.Tuning))


def test_the_html_escapes_what_it_shows():
    report = explained(lambda x: x + 1.0, X)
    assert report.function == "<lambda>"
    assert "&lt;lambda&gt;" in report._repr_html_()
    assert "<lambda>" not in report._repr_html_()


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    ("pattern", "modules"),
    [
        ("**", {"MLP", "MLP/up", "MLP/down", "MLP/norm"}),
        ("MLP", {"MLP"}),
        ("MLP/*", {"MLP/up", "MLP/down", "MLP/norm"}),
        ("**/up", {"MLP/up"}),
        ("*/*o*", {"MLP/down", "MLP/norm"}),
        # As a policy takes it: without the outermost module.
        ("up", {"MLP/up"}),
        ("down/up", set()),
    ],
)
def test_a_glob_chooses_modules(pattern, modules):
    report = explained(MODEL.apply, VARIABLES, X)
    lines = report.drill_down(pattern).splitlines()
    assert {line for line in lines if line in report.modules} == modules
    if not modules:
        assert "MLP/norm" in lines[0]


def test_the_drill_down_tells_source_dtype_class_reason_and_casts():
    report = explained(MODEL.apply, VARIABLES, X)
    (row,) = [
        line.split()
        for line in report.drill_down("MLP/up").splitlines()
        if "dot_general" in line
    ]
    assert row[1].startswith("test_report.py:")
    assert row[2:6] == ["dot_general", "[4,32]", "bf16", "low"]
    assert row[-2:] == ["f32>bf16", "x2"]


def equation_of(jaxpr, identity):
    """The equation that an identity names: indices of equations and bodies in turns."""
    first, *rest = map(int, identity.split("."))
    eqn = getattr(jaxpr, "jaxpr", jaxpr).eqns[first]
    if not rest:
        return eqn
    body, *inside = rest
    bodies = list(core.jaxprs_in_params(eqn.params))
    if eqn.primitive.name == "while":
        bodies = [eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]]
    return equation_of(bodies[body], ".".join(map(str, inside)))


def program_of_many_bodies(w, x):
    @jax.jit
    def block(x):
        return jnp.tanh(x @ w)

    x = block(block(x))
    x, _ = jax.lax.scan(lambda c, _: (block(c), None), x, None, length=2)
    x = jax.lax.while_loop(lambda x: jnp.max(x) > 2.0, lambda x: x * 0.5, x)
    x = jax.lax.cond(x[0, 0] > 0, jnp.exp, lambda x: jnp.sin(x) + 1.0, x)
    return jax.checkpoint(jax.nn.relu)(x).sum()


def test_an_identity_leads_to_its_equation_under_every_policy_and_in_every_trace():
    args = jnp.eye(4), jnp.ones((2, 4))
    jaxpr = jax.make_jaxpr(program_of_many_bodies)(*args)
    found = {
        policy: {
            e.identity: e.operation
            for e in explained(program_of_many_bodies, *args, policy=policy).equations
        }
        for policy in ("mixed_bfloat16", "mixed_float16", "float32")
    }
    first, *others = found.values()
    assert len(first) > 20 and all(other == first for other in others)
    for identity, operation in first.items():
        assert equation_of(jaxpr, identity).primitive.name == operation, identity


def test_the_drill_down_tells_the_identity_of_each_equation():
    args = jnp.eye(4), jnp.ones((2, 4))
    report = explained(program_of_many_bodies, *args)
    text = report.drill_down()
    for equation in report.equations:
        assert f" {equation.identity} " in text


def test_text_is_text_in_a_notebook_too(monkeypatch):
    # What Rich takes for the sign of a notebook.
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    report = explained(MODEL.apply, VARIABLES, X)
    assert "Modules" in str(report)
    assert "dot_general" in report.drill_down()


def test_a_product_under_a_policy_of_f32_says_so():
    (product,) = amp.explain(jnp.dot, "float32")(
        jnp.ones((2, 2)), jnp.ones((2, 2))
    ).equations
    assert (product.dtype, product.reason) == ("f32", "the policy computes in f32")


def test_products_in_f64_are_told():
    with jax.enable_x64(True):
        x = jax.ShapeDtypeStruct((4, 4), jnp.float64)
        report = explained(jnp.dot, x, x)
    assert (report.total.matmuls_in_half, report.total.matmuls) == (0, 1)
    _, told = str(report).split("What stays in f64")
    assert "float64 is left as it is: give it float32 arrays" in told
    assert "What stays in f64" not in str(explained(jnp.dot, f32(4, 4), f32(4, 4)))


def test_products_that_only_tell_the_derivative_what_is_solved_are_not_counted():
    a = jnp.eye(128)
    assert amp.explain(jnp.linalg.solve)(a, a).total.matmuls == 0
    assert "dot_general" not in jax.jit(jnp.linalg.solve).lower(a, a).as_text()

    def loss(w, x):
        return jnp.mean(jnp.square(jnp.tanh(x @ w) @ w))

    for target in (None, "cpu"):
        gradient = jax.grad(amp.autocast(loss, target=target))
        found = amp.explain(gradient, "float32")(a, a).total
        # Two forward, and three for their derivatives.
        assert (found.matmuls, found.flops) == (5, 5 * 2 * 128**3), target


@pytest.mark.parametrize("scale", [2.0**24, 65536.0, 2.0, 1.0, 0.25, 1000.0, 0.75])
def test_a_loss_scale_is_shown_as_a_program_writes_it(scale):
    text = scale_text(scale)
    assert eval(text) == scale
    is_power = scale == 2.0 ** round(math.log2(scale))
    assert ("**" in text) == (is_power and scale != 1.0)
