"""`Policy(reduce_dtype="float32")`: gradients of f32 parameters leave in f32.

A bf16 number has 16 zeros at the end of its f32 bits. So has a gradient that was summed
in bf16 and cast, and hardly any number that was summed in f32.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_amp as amp
from examples.benchmarks import collectives
from jmp_amp.plan.program import cpu_target
from jmp_amp.plan.program.cpu_target import Cpu
from tests import h100
from tests.programs import dtypes_of

HALF, REDUCED = "p=f32,c=bf16,o=f32", "p=f32,c=bf16,o=f32,r=f32"
IMAGES = ("NHWC", "HWIO", "NHWC")
# The part of a gradient's elements with more digits than bf16 has.
MANY, FEW = 0.8, 0.05


def array(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


X = array(0, 32, 16)
IMAGE = array(0, 4, 8, 8, 4)
END = array(9, 16, 16)


def end(h):
    """A loss that reads `h` in half: a product with a constant."""
    return jnp.sum(jnp.tanh(h @ END) ** 2)


def convolved(w, strides=(1, 1), padding="SAME", **options):
    options["dimension_numbers"] = IMAGES
    made = lax.conv_general_dilated(IMAGE, w, strides, padding, **options)
    return jnp.sum(jnp.tanh(made) ** 2)


def many_moves(w):
    return end(jnp.tanh(X @ w.reshape(4, 4, 16).transpose(2, 0, 1).reshape(16, 16)))


def looked_up(table, w):
    h = table[jnp.arange(32) % 10] + w[None, 0]
    return jnp.sum(jnp.tanh(h @ w @ table.T) ** 2)


def scanned(w, b, how=lambda turn: turn):
    def turn(h, layer):
        return jnp.tanh(h @ layer[0] + layer[1][None]), None

    return jnp.sum(lax.scan(how(turn), X, (w, b))[0] ** 2)


def shared_over_turns(w):
    def turn(h, _):
        return jnp.tanh(h @ w), None

    return jnp.sum(lax.scan(turn, X, None, length=6)[0] ** 2)


def branches(w, v):
    first, second = lambda w, v: X @ w, lambda w, v: jnp.tanh(X @ v) @ w
    return end(jnp.tanh(lax.cond(X[0, 0] > 100.0, first, second, w, v)))


def helper(w):
    layer = jax.jit(lambda w, h: jnp.tanh(h @ w))
    return end(layer(w, layer(w, X)))


def normalised_weight(w, b):
    norms = jnp.sqrt(jnp.sum(w * w, axis=0, keepdims=True))
    return end(jnp.tanh(X @ (w / norms * b[None])))


def layer_norm(w, b, s):
    h = X @ w
    h = h - jnp.mean(h, -1, keepdims=True)
    h = h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)
    return end(h * s[None] + b[None])


def first_token(w, b):
    h = jnp.tanh(X @ w).reshape(4, 8, 16) * jnp.arange(1.0, 5.0)[:, None, None]
    tokens = jnp.concatenate([jnp.broadcast_to(b, (4, 1, 16)), h], 1)
    return end(jnp.cumsum(tokens, axis=0))


def queries(w, q):
    q = jnp.broadcast_to(q, (32, 16, 16))
    return end(jnp.einsum("bqd,bd->bq", q, jnp.tanh(X @ w)))


def moved_and_read_twice(w):
    v = w.T
    return end(X[:16] @ END * v) + end(X[16:] @ END * v * 0.3)


def of_layer(layer):
    """A loss of what a layer makes."""
    return lambda *params: end(jnp.tanh(layer(*params)))


def of_sum(layer):
    return lambda *params: jnp.sum(jnp.tanh(layer(*params)) ** 2)


def split(w):
    first, second = jnp.split(w, 2)
    return end(jnp.tanh(X @ first) + jnp.tanh(X @ second.T))


def unstacked(w):
    first, second = jnp.unstack(w)
    return jnp.tanh(X @ first) @ second


SQUARE, VECTOR = (16, 16), (16,)
DENSE = {"dense": (of_sum(lambda w, b: X @ w + b[None]), [(16, 24), (24,)])}
SIZES = jnp.array([10, 12, 10], jnp.int32)
# A function of parameters, and their shapes.
OF_SQUARES = {
    "transposed": of_layer(lambda w: X @ w.T),
    "first_axes": of_layer(lambda w: lax.dot_general(X.T, w, (((0,), (0,)), ((), ())))),
    "gated": of_layer(
        lambda w: jnp.einsum("n,nd,df->nf", jax.nn.sigmoid(X[:, 0]), X, w)
    ),
    "many_moves": many_moves,
    "tied": lambda w: jnp.sum(jnp.tanh(X @ w) @ w.T),
    "shared_over_turns": shared_over_turns,
    "helper": helper,
    "helper_of_moved": lambda w: end(jax.jit(lambda w: jnp.tanh(X @ w))(w.T)),
    "mapped": of_layer(lambda w: jax.vmap(lambda row: row @ w)(X)),
    "masked": of_layer(lambda w: X @ (w * (1.5 + END))),
    # XLA for CPUs moves the transpose into the product of the gradient.
    "one_example_at_a_time": of_sum(lambda w: jax.vmap(lambda x: w @ x)(X)),
    "moved_and_read_twice": moved_and_read_twice,
}
OF_TWO_SQUARES = {
    "branches": branches,
    "queries": queries,
    "sum_of_weights": of_layer(lambda w, v: X @ (w + v)),
    "joined": of_layer(lambda w, v: (X @ jnp.concatenate([w, v], 1)).reshape(64, 16)),
}
OF_A_VECTOR_TOO = {
    "normalised_weight": normalised_weight,
    "scaled": lambda w, b: end(jnp.tanh(X @ w) * b[None]),
    "scaled_in_full": lambda w, b: end(jnp.tanh(X @ w) * jnp.broadcast_to(b, (32, 16))),
    "slopes": lambda w, b: end(jnp.where(X @ w > 0, X @ w, X @ w * b[None])),
    "maximum": lambda w, b: end(jnp.maximum(X @ w, b[None])),
    "quotient": lambda w, b: end(jnp.tanh(X @ w) / (3 + b[None])),
    "first_token": first_token,
}
PROGRAMS = DENSE | {
    **{name: (fn, [SQUARE]) for name, fn in OF_SQUARES.items()},
    **{name: (fn, [SQUARE, SQUARE]) for name, fn in OF_TWO_SQUARES.items()},
    **{name: (fn, [SQUARE, VECTOR]) for name, fn in OF_A_VECTOR_TOO.items()},
    "layer_norm": (layer_norm, [SQUARE, VECTOR, VECTOR]),
    "looked_up": (looked_up, [(10, 16), SQUARE]),
    "experts": (
        of_layer(lambda w: jnp.einsum("bd,edf->ebf", X, w)),
        [(4, *SQUARE)],
    ),
    "mapped_parameters": (
        of_layer(lambda w: jax.vmap(lambda w: X @ w)(w)),
        [(4, *SQUARE)],
    ),
    "convolution": (functools.partial(convolved, strides=(2, 2)), [(3, 3, 4, 8)]),
    "grouped_convolution": (
        lambda w: convolved(
            w, padding="VALID", rhs_dilation=(2, 2), feature_group_count=2
        ),
        [(3, 3, 2, 8)],
    ),
    "transposed_convolution": (
        of_sum(
            lambda w: lax.conv_transpose(
                IMAGE, w, (2, 2), "SAME", dimension_numbers=IMAGES
            )
        ),
        [(3, 3, 4, 8)],
    ),
    "ragged": (of_sum(lambda w: lax.ragged_dot(X, w, SIZES)), [(3, 16, 24)]),
    "scanned": (scanned, [(5, *SQUARE), (5, *VECTOR)]),
    "scanned_remat": (
        functools.partial(scanned, how=jax.checkpoint),
        [(5, *SQUARE), (5, *VECTOR)],
    ),
    "split": (split, [(32, 16)]),
    "unstacked": (of_layer(unstacked), [(2, *SQUARE)]),
}


def program(name):
    """A function, and arguments."""
    fn, shapes = PROGRAMS[name]
    return fn, parameters(shapes)


def parameters(shapes):
    return [0.3 * array(seed, *shape) for seed, shape in enumerate(shapes, 1)]


def digits(gradient):
    """The part of the elements that no bf16 number is equal to."""
    return float((np.asarray(gradient).view(np.uint32) & 0xFFFF != 0).mean())


def distance(found, expected):
    found, expected = (np.asarray(x, np.float64) for x in (found, expected))
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


# XLA for CPUs leaves out a cast to half between two in f32, if it may.
EXACT = {"xla_allow_excess_precision": False}


@functools.cache
def gradients(name, policy, inside=False):
    """The value and gradients; `inside` of autocast, or around it."""
    loss, params = program(name)
    derived = functools.partial(jax.value_and_grad, argnums=(*range(len(params)),))
    if policy is None:
        fn = derived(loss)
    elif inside:
        fn = amp.autocast(derived(loss), policy)
    else:
        fn = derived(amp.autocast(loss, policy))
    return jax.jit(fn, compiler_options=EXACT if inside else None)(*params)


@pytest.mark.breadth(4)
@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_leave_in_f32_and_values_stay(name, inside):
    value, found = gradients(name, REDUCED, inside)
    other, half = gradients(name, HALF, inside)
    # The sum of two weights is f32, and is rounded once.
    assert value == other or name == "sum_of_weights"
    _, expected = gradients(name, None)
    for new, old, right in zip(found, half, expected, strict=True):
        assert digits(new) > MANY
        # The same roundings but one. 1.1: where that one happened to help.
        assert distance(new, right) <= 1.1 * distance(old, right)


# Of weights that are stored in half: products, in regions of all kinds.
STORED = [
    *("transposed", "many_moves", "tied", "convolution", "ragged", "helper", "mapped"),
    *("shared_over_turns", "mapped_parameters", "split", "joined"),
]


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", STORED)
def test_gradients_of_half_parameters_leave_in_f32_and_values_stay(name):
    loss, params = program(name)
    params = [w.astype(jnp.bfloat16) for w in params]
    positions = tuple(range(len(params)))
    (value, found), (other, half) = (
        jax.jit(amp.value_and_grad(amp.autocast(loss, policy), positions))(*params)
        for policy in (REDUCED, HALF)
    )
    exact = [w.astype(jnp.float32) for w in params]
    expected = jax.grad(loss, positions)(*exact)
    assert value == other
    for new, old, right in zip(found, half, expected, strict=True):
        assert digits(new) > MANY
        assert distance(new, right) <= 1.02 * distance(old, right)


def test_a_region_says_itself_whether_its_gradients_are_f32():
    inner = amp.with_policy(HALF)(lambda h, w: h @ w)
    fn = amp.autocast(lambda w, v: end(jnp.tanh(inner(X @ w, v))), REDUCED)
    w, v = (each.astype(jnp.bfloat16) for each in parameters([SQUARE, SQUARE]))
    found, other = jax.jit(amp.grad(fn, (0, 1)))(w, v)
    assert digits(found) > MANY and digits(other) < FEW


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
def test_without_it_the_same_gradients_are_half(inside):
    # So that the test above can fail. Sums of what many elements read are f32 anyway.
    found = [g for each in PROGRAMS for g in gradients(each, HALF, inside)[1]]
    seen = [digits(g) for g in found if g.ndim > 1]
    assert np.mean([each < FEW for each in seen]) > 0.5


def layers(x, ws):
    """Layers that one line makes, for the first of which both factors are arguments."""
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.sum(x**2)


def convolutions(x, ws):
    for w in ws:
        w = jnp.broadcast_to(w, (3, 3, *w.shape))
        made = lax.conv_general_dilated(x, w, (1, 1), "SAME", None, None, IMAGES)
        x = jnp.tanh(made)
    return jnp.sum(x**2)


@pytest.mark.breadth(2)
@pytest.mark.parametrize("how", [lambda f: f, jax.jit], ids=["inline", "jit"])
@pytest.mark.parametrize(
    ("fn", "x"), [(layers, X), (convolutions, array(5, 2, 8, 8, 16))]
)
def test_inside_gradients_of_activations_are_half(fn, x, how):
    gradient = jax.grad(how(fn), argnums=1)
    report = amp.explain(gradient, REDUCED)(x, parameters([SQUARE] * 3))
    products = [e.reason for e in report.equations if e.flops]
    # Three layers, and the gradients of their weights and of the inputs of two.
    of_weights = [r for r in products if "the gradient of a parameter is f32" in r]
    assert (len(products), len(of_weights)) == (8, 3)


def test_inside_a_policy_in_f32_is_as_it_was():
    f32 = "p=f32,c=f32,o=f32,r=f32"
    report = amp.explain(jax.grad(OF_SQUARES["transposed"]), f32)(array(1, *SQUARE))
    reasons = {e.reason for e in report.equations if e.flops}
    assert reasons == {"the policy computes in f32"}


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_inside_the_gradient_of_a_half_weight_is_half(stored):
    def loss(w):
        return jnp.sum((X.astype(w.dtype) @ w).astype(jnp.float32) ** 2)

    report = amp.explain(jax.grad(loss), REDUCED)(array(1, *SQUARE).astype(stored))
    reasons = [e.reason for e in report.equations if e.flops]
    assert ("a parameter is f32" in reasons[-1]) == (stored == "float32")


@pytest.mark.breadth(1)
@pytest.mark.parametrize("policy", [HALF, REDUCED], ids=["half", "reduced"])
def test_a_checkpoint_that_saves_products_runs_none_again(policy):
    saveable = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

    @functools.partial(jax.checkpoint, policy=saveable)
    def layer(h, w):
        return jnp.tanh(jax.nn.gelu(h @ w) @ w.T)

    def loss(ws):
        return jnp.sum(functools.reduce(layer, ws, X) ** 2)

    gradient = jax.jit(jax.grad(amp.autocast(loss, policy)))
    compiled = gradient.lower(parameters([SQUARE] * 2)).compile()
    # Each product, and its two derivatives, but for that of the input.
    assert compiled.as_text().count(" dot(") == 3 * 4 - 1


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    "name", "dense many_moves looked_up convolution scanned slopes quotient".split()
)
def test_forward_mode_is_that_of_half(name):
    loss, params = program(name)
    tangents = [array(20 + i, *x.shape) for i, x in enumerate(params)]
    found, expected = (
        jax.jit(functools.partial(jax.jvp, amp.autocast(loss, policy)))(
            params, tangents
        )
        for policy in (REDUCED, HALF)
    )
    np.testing.assert_allclose(found[1], expected[1], rtol=2e-2)
    reference = jax.jvp(loss, params, tangents)[1]
    np.testing.assert_allclose(found[1], reference, rtol=0.1, atol=0.5)


@pytest.mark.parametrize(
    ("name", "move"),
    [
        *(("transposed", "transpose"), ("many_moves", "reshape")),
        *(("joined", "concatenate"), ("split", "split")),
    ],
)
def test_a_parameter_is_cast_before_it_is_moved(name, move):
    # Devices that gather what the move reads send each other half.
    loss, params = program(name)
    moves = dtypes_of(amp.autocast(loss, REDUCED), *params, primitive=move)
    assert "bfloat16" in str(moves)


def test_a_product_is_summed_in_f32_from_half_operands():
    w, along = array(1, 16, 8), array(2, 32, 8)
    along = along.astype(jnp.bfloat16).astype(jnp.float32)

    def loss(w):
        return jnp.sum((X @ w) * along)

    found = jax.jit(jax.grad(amp.autocast(loss, REDUCED)))(w)
    half = np.asarray(X.astype(jnp.bfloat16), np.float64)
    expected = half.T @ np.asarray(along, np.float64)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    rounded = jax.jit(jax.grad(amp.autocast(loss, HALF)))(w)
    assert not np.allclose(rounded, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("word", ["all", "auto", "least"])
def test_what_is_kept_does_not_decide_in_what_a_gradient_is_summed(word):
    w, b = 0.3 * array(1, 3, 128, 128), 0.3 * array(2, 3, 128)
    x = array(3, 64, 128)

    def loss(w, b):
        def turn(h, layer):
            w, b = layer
            return jax.nn.gelu(h @ w + b[None]) @ w.T, None

        return jnp.mean(lax.scan(turn, x, (w, b))[0] ** 2)

    policies = (f"{HALF},s={word}", f"{REDUCED},s={word}")
    half, found = (
        jax.jit(jax.grad(amp.autocast(loss, policy), (0, 1)))(w, b)
        for policy in policies
    )
    expected = jax.grad(loss, (0, 1))(w, b)
    for new, old, right in zip(found, half, expected, strict=True):
        assert digits(new) > MANY
        assert distance(new, right) <= 1.05 * distance(old, right)


SECOND = {
    "hessian": lambda f, w, b: jax.hessian(f, 1)(w, b),
    "jacobian": lambda f, w, b: jax.jacfwd(jax.grad(f))(w, b),
    "gradient": lambda f, w, b: jax.grad(lambda w: jnp.sum(jax.grad(f)(w, b) ** 2))(w),
    "vmap": lambda f, w, b: jax.vmap(jax.grad(f), (0, None))(jnp.stack([w, 2 * w]), b),
}


@pytest.mark.breadth(1)
@pytest.mark.parametrize("second", SECOND)
def test_second_derivatives(second):
    loss, _ = program("dense")
    fns = (amp.autocast(loss, REDUCED), loss)
    found, expected = (
        jax.jit(functools.partial(SECOND[second], fn))(*parameters([(16, 8), (8,)]))
        for fn in fns
    )
    assert distance(found, expected) < 0.03


def test_one_module_of_a_map():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = jnp.tanh(nn.Dense(16, name="first")(x))
            return nn.Dense(16, name="second")(x)

    model = Two()
    params = jax.jit(model.init)(jax.random.key(0), X)
    policies = amp.PolicyMap(HALF, {"second": REDUCED})
    loss = amp.autocast(lambda p: jnp.sum(model.apply(p, X) ** 2), policies)
    found = jax.jit(jax.grad(loss))(params)["params"]
    assert digits(found["first"]["kernel"]) < FEW
    assert digits(found["second"]["kernel"]) > MANY


def gradient_of(recipe):
    tx = recipe.wrap(optax.sgd(0.1))
    w, state = recipe.init(tx, 0.1 * array(1, 16, 16))
    loss = recipe.autocast(OF_SQUARES["transposed"])
    _, found = amp.value_and_grad(loss)(w, loss_scale=state)
    assert found.dtype == jnp.float32
    return found


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", ["O1", "O2", "O3", "OD", "bf16"])
def test_recipes_take_it(name):
    recipe = amp.recipe(name, half_dtype="bfloat16", reduce_dtype="float32")
    assert "summed in f32" in str(recipe)
    assert digits(gradient_of(recipe)) > MANY
    # So that it can fail.
    assert digits(gradient_of(amp.recipe(name, half_dtype="bfloat16"))) < FEW


def test_explain_says_where():
    dense, params = program("dense")
    report = amp.explain(dense, REDUCED)(*params)
    assert "its gradient leaves in f32" in str(report)
    (product,) = [e for e in report.equations if e.operation == "dot_general"]
    assert product.f32_gradients == 2 and "leaves in f32" in product.reason
    assert "its gradient leaves in f32" in str(report.why(product.identity))
    # There and back.
    assert type(report).from_json(report.to_json()) == report
    plain = amp.explain(dense, HALF)(*params)
    assert "leaves in f32" not in str(plain)
    assert [e.dtype for e in plain.equations] == [e.dtype for e in report.equations]


def test_a_message_between_shards_is_f32():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(w, x):
        return lax.pmean(jnp.sum(jnp.tanh(x @ w.T) ** 2), "d")

    def summed(policy):
        inside = jax.shard_map(
            jax.grad(amp.autocast(loss, policy)),
            mesh=mesh,
            in_specs=(P(), P("d")),
            out_specs=P(),
        )
        text = str(jax.make_jaxpr(inside)(array(1, 16, 16), X))
        return [
            line for line in text.splitlines() if "psum" in line and "16,16" in line
        ]

    (half,), (found,) = summed(HALF), summed(REDUCED)
    assert "bf16[16,16]" in half and "f32[16,16]" in found


def pointwise(w, v):
    """A product, then two convolutions of one pixel, one of them strided."""
    h = jnp.tanh(array(5, 1024, 64) @ w).reshape(16, 8, 8, 64)
    kernel = w.reshape(1, 1, 64, 64)
    h = jnp.tanh(
        lax.conv_general_dilated(h, kernel, (1, 1), "SAME", None, None, IMAGES)
    )
    image = v.reshape(16, 16, 16, 64)
    made = lax.conv_general_dilated(image, kernel, (2, 2), "SAME", None, None, IMAGES)
    return jnp.mean(jnp.tanh(made + h) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("argnum", [0, 1])
def test_products_of_a_cpu(argnum, monkeypatch):
    monkeypatch.setattr(cpu_target, "this_cpu", lambda: Cpu(native=True))
    args = 0.2 * array(1, 64, 64), array(2, 16 * 16 * 16 * 64)
    half, found = (
        jax.jit(jax.grad(amp.autocast(pointwise, policy, target="cpu"), argnum))(*args)
        for policy in (HALF, REDUCED)
    )
    expected = jax.grad(pointwise, argnum)(*args)
    assert distance(found, expected) <= distance(half, expected) < 0.02
    gradient = jax.jit(jax.grad(amp.autocast(pointwise, REDUCED, target="cpu"), argnum))
    lines = gradient.lower(*args).as_text().splitlines()
    products = [line for line in lines if "stablehlo.dot_general" in line]
    assert products and all(line.count("xbf16>") == 2 for line in products)
    # Of the image three of four pixels are not read.
    read = np.asarray(expected) != 0
    assert digits(half[read]) < MANY < digits(found[read])


# Convolutions of an H100


def tokens_convolved(w, x):
    numbers = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=numbers)


def images_convolved(w, x, strides=(1, 1), padding="SAME", **options):
    options["dimension_numbers"] = IMAGES
    return lax.conv_general_dilated(x, w, strides, padding, **options)


def transposed_back(w, x):
    return lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=IMAGES)


def convolved_in_turns(w, x):
    def turn(h, w):
        return jax.nn.relu(images_convolved(w, h)), None

    return lax.scan(turn, x, w)[0]


WINDOW, PIXELS = (3, 3, 32, 64), (8, 16, 16, 32)
# Of a kernel and an image, and their shapes.
CONVOLUTIONS = {
    "plain": (images_convolved, WINDOW, PIXELS),
    "strided": (functools.partial(images_convolved, strides=(2, 2)), WINDOW, PIXELS),
    "dilated": (
        functools.partial(images_convolved, rhs_dilation=(2, 2)),
        *(WINDOW, PIXELS),
    ),
    "grouped": (
        functools.partial(images_convolved, feature_group_count=4),
        *((3, 3, 8, 64), PIXELS),
    ),
    "depthwise": (
        functools.partial(images_convolved, feature_group_count=32),
        *((3, 3, 1, 32), PIXELS),
    ),
    "one dimension": (tokens_convolved, (3, 32, 64), (8, 128, 32)),
    "transposed": (transposed_back, WINDOW, PIXELS),
    "scanned": (convolved_in_turns, (4, 3, 3, 32, 32), PIXELS),
    "mapped kernels": (
        jax.vmap(images_convolved, (0, None)),
        *((4, *WINDOW), PIXELS),
    ),
    "mapped images": (
        jax.vmap(lambda w, x: images_convolved(w, x[None])[0], (None, 0)),
        *(WINDOW, PIXELS),
    ),
}


def loss_of_convolution(name, w, x):
    return jnp.sum(jnp.tanh(CONVOLUTIONS[name][0](w, x)) ** 2)


def gradient_of_convolution(name, policy, inside=False, argnums=0):
    loss = functools.partial(loss_of_convolution, name)
    if inside:
        return amp.autocast(jax.grad(loss, argnums), policy)
    return jax.grad(amp.autocast(loss, policy), argnums)


of_each_convolution = pytest.mark.parametrize(
    ("name", "half", "inside"),
    [
        (name, *how)
        for name in CONVOLUTIONS
        for how in [("bf16", False), ("f16", False), ("bf16", True)]
    ],
)


@pytest.mark.slow
@h100.needs_compiler
@of_each_convolution
def test_an_h100_makes_the_gradient_of_a_kernel_of_half_operands(name, inside, half):
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in CONVOLUTIONS[name][1:]]
    before, after = (
        h100.compile_for_gpu(gradient_of_convolution(name, policy, inside), *args)
        for policy in (f"p=f32,c={half},o=f32", f"p=f32,c={half},o=f32,r=f32")
    )
    products = [
        sorted((c.operands, c.result) for c in h100.convolutions(program))
        for program in (before, after)
    ]
    assert products[0] == products[1]
    # The cotangent of a carry is f32 inside, with and without it.
    if (name, inside) != ("scanned", True):
        assert {operands for operands, _ in products[1]} == {(half, half)}
    assert h100.temp_bytes(after) <= 1.01 * h100.temp_bytes(before)


@pytest.mark.breadth(4)
@of_each_convolution
def test_the_gradient_of_a_kernel_is_no_less_accurate(name, half, inside, monkeypatch):
    def as_on_gpus(*args, cpu, default):
        return default(*args)

    monkeypatch.setattr(lax, "platform_dependent", as_on_gpus)
    kernel, image = CONVOLUTIONS[name][1:]
    w, x = 0.1 * array(1, *kernel), array(2, *image)
    exact = jax.grad(functools.partial(loss_of_convolution, name))
    with jax.enable_x64(True):
        expected = exact(*(jnp.asarray(np.asarray(a, np.float64)) for a in (w, x)))
    before, after = (
        jax.jit(gradient_of_convolution(name, policy, inside), compiler_options=EXACT)(
            w, x
        )
        for policy in (f"p=f32,c={half},o=f32", f"p=f32,c={half},o=f32,r=f32")
    )
    assert after.dtype == jnp.float32
    assert distance(after, expected) <= 1.02 * distance(before, expected) < 0.1


def eight_devices():
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=h100.H100, topology="1x1x8"
    )
    return Mesh(np.array(topology.devices), ("d",))


def convolved_on_eight(mesh, transform):
    """The gradient of a kernel, of images on eight H100s, compiled."""
    fn = jax.jit(
        transform(gradient_of_convolution("plain", REDUCED)),
        out_shardings=NamedSharding(mesh, P()),
    )
    specs = zip(CONVOLUTIONS["plain"][1:], (P(), P("d")), strict=True)
    args = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in specs
    ]
    options = {"xla_gpu_enable_triton_gemm": False}
    return fn.lower(*args).compile(compiler_options=options)


@pytest.mark.slow
@h100.needs_compiler
def test_devices_add_up_f32_gradients_of_a_kernel():
    mesh = eight_devices()
    program = convolved_on_eight(mesh, lambda fn: fn)
    assert set(collectives.sent(program).reduced) == {"f32"}

    def sharded(gradient):
        def summed(w, x):
            return lax.psum(gradient(lax.pcast(w, "d", to="varying"), x), "d")

        return jax.shard_map(summed, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())

    # In a `shard_map` a convolution is that of one device.
    program = convolved_on_eight(mesh, sharded)
    assert set(collectives.sent(program).reduced) == {"f32"}
    operands = {each.operands for each in h100.convolutions(program)}
    assert operands == {("bf16", "bf16")}


# What eight H100s would send each other


@functools.cache
def step_for_8(layout, policy, stored="f32"):
    """What is read of a step: what is sent, and the dtypes of its products."""

    h100.skip_without_compiler()
    model, is_half = collectives.GPT(256, layers=2), stored == "half"
    program = collectives.compiled(layout, policy, model, is_half)
    operands = {gemm.operands for gemm in h100.gemms(program)}
    return collectives.sent(program), sorted(operands)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "matmul"),
    [
        ("data", ""),
        pytest.param("rows", "", marks=pytest.mark.nightly),
        pytest.param("columns", "", marks=pytest.mark.nightly),
        pytest.param("data", ",m=fp8", marks=pytest.mark.nightly),
    ],
)
def test_devices_add_up_f32_and_gather_half(layout, matmul):
    steps = [step_for_8(layout, f"{each}{matmul}") for each in (HALF, REDUCED)]
    (before, operands), (after, same_operands) = steps
    assert before.reduced["bf16"] > 2**17
    assert set(after.reduced) == {"f32"}
    assert after.gathered == before.gathered
    assert after.temp <= 1.6 * before.temp
    assert operands == same_operands
    eights = {"f8e4m3fn", "f8e5m2"} if matmul else set()
    assert {d for each in operands for d in each} == {"bf16", *eights}


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["data", "rows"])
def test_devices_add_up_f32_gradients_of_weights_that_are_half(layout):
    before, after = (step_for_8(layout, p, "half")[0] for p in (HALF, REDUCED))
    assert before.reduced["bf16"] > 2**17
    assert set(after.reduced) == {"f32"}
    assert after.gathered == before.gathered


@pytest.mark.slow
@pytest.mark.parametrize("matmul", ["", ",m=fp8"])
def test_diagnose_sees_the_same_products(matmul):
    w, b, v = 0.1 * array(1, 64, 64), array(2, 64), 0.1 * array(3, 64, 64)
    x = array(4, 64, 64)

    def loss(w, b, v, x):
        return jnp.mean(jnp.tanh(jnp.tanh(x @ w.T + b[None]) @ v) ** 2)

    policies = (f"{HALF}{matmul}", f"{REDUCED}{matmul}")
    diagnoses = [amp.diagnose(loss, policy)(w, b, v, x) for policy in policies]
    half, found = (
        [
            (site.operation, site.direction, site.identity, site.shape, site.zeros)
            for site in diagnosis.sites
            if site.operation in ("dot_general", "quantise", "tanh")
        ]
        for diagnosis in diagnoses
    )
    assert half == found
    assert len([each for each in found if each[1] == "backward"]) >= 2
    # Each cast is one of the equation that reads it.
    assert all(site.identity for site in diagnoses[1].sites)
