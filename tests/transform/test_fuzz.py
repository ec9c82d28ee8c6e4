"""Random programs: `autocast` keeps their signature, and only rounds.

A program is a seeded chain of operations on a matrix, with calls, masks, constants of
every size and custom rules in it. How much rounding may change is not guessed: the same
program in f32, with every intermediate value and every cotangent disturbed by one
rounding of the half dtype, tells how sensitive it is.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_amp as amp

ROWS, COLUMNS = 6, 8
KEY = jax.random.key(0)
HALF = {"mixed_bfloat16": jnp.bfloat16, "mixed_float16": jnp.float16}
# A planned program rounds a value when it is stored, and again when it is read in
# another dtype: a few roundings for each of the disturbed program's one.
ROUNDINGS = 8

# Custom rules, recognisable by a factor that is not the derivative's


@jax.custom_jvp
def odd_sine(x, y):
    return jnp.sin(x) * y


@odd_sine.defjvp
def _odd_sine_jvp(primals, tangents):
    x, y = primals
    return odd_sine(x, y), 3 * tangents[0] * jnp.cos(x) * y + tangents[1]


@jax.custom_vjp
def odd_tanh(x):
    return jnp.tanh(x)


odd_tanh.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (3 * g / jnp.cosh(x),))


def attention(h, w):
    scores = (h @ w) @ h.T / 3
    causal = jnp.tril(jnp.ones(scores.shape, bool))
    return jax.nn.softmax(jnp.where(causal, scores, -1e9)) @ h


def standardized(h):
    mean = jnp.mean(h, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(h - mean), axis=-1, keepdims=True)
    return (h - mean) / jnp.sqrt(variance + 1e-5)


def convolved(h, w):
    kernel = w[:3, :3][None, None]
    return lax.conv_general_dilated(h[None, None], kernel, (1, 1), "SAME")[0, 0]


def masked(value):
    """A softmax whose additive mask is `value` above the diagonal."""

    def step(h, p):
        return jax.nn.softmax(h + value * (1 - jnp.tri(ROWS, COLUMNS)), axis=-1)

    return step


# Each takes the matrix `h` and the parameters `p`; the matrix stays of order one.
OPERATIONS = {
    "dense": lambda h, p: jnp.tanh(h @ p["w"] + p["b"]),
    "residual": lambda h, p: 0.7 * h + jnp.tanh(h @ p["w"]) @ p["v"],
    "gated": lambda h, p: jax.nn.sigmoid(h @ p["w"]) * (h @ p["v"]),
    "attention": lambda h, p: attention(h, p["w"]),
    "convolution": lambda h, p: convolved(h, p["w"]),
    "einsum": lambda h, p: jnp.einsum("ij,jk,lk->il", h, p["w"], p["v"]),
    "norm": lambda h, p: standardized(h) * (1 + p["b"]),
    "rms_norm": lambda h, p: h * lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6),
    "unit": lambda h, p: h / (jnp.linalg.norm(h, axis=-1, keepdims=True) + 1e-8),
    "softmax": lambda h, p: 3 * jax.nn.softmax(h, axis=0),
    "log_softmax": lambda h, p: jax.nn.log_softmax(h) / 3,
    "logsumexp": lambda h, p: h - jax.nn.logsumexp(h, axis=1, keepdims=True),
    "relu": lambda h, p: jax.nn.relu(h) + 0.1 * h,
    "gelu": lambda h, p: jax.nn.gelu(h),
    "silu": lambda h, p: jax.nn.silu(h),
    "softplus": lambda h, p: jax.nn.softplus(h) - 1,
    "gaussian": lambda h, p: jnp.exp(-jnp.square(h)),
    "log": lambda h, p: jnp.log(jnp.square(h) + 0.5),
    "log1p": lambda h, p: jnp.log1p(jnp.abs(h)),
    "sqrt": lambda h, p: jnp.sqrt(jnp.square(h) + 0.1),
    "power": lambda h, p: (jnp.square(h) + 0.1) ** 0.7,
    "divide": lambda h, p: h / (1 + jnp.abs(h)),
    "arcsinh": lambda h, p: jnp.arcsinh(h * p["b"]),
    "cumsum": lambda h, p: jnp.cumsum(h, axis=1) / COLUMNS,
    "center": lambda h, p: h - jnp.mean(h, axis=0, keepdims=True),
    "highest": lambda h, p: h - jnp.max(h, axis=1, keepdims=True) + 1,
    "sort": lambda h, p: jnp.sort(h, axis=0),
    "lookup": lambda h, p: h + p["w"][jnp.array([1, 0, 3, 3, 2, 7])],
    "rows": lambda h, p: h[jnp.array([5, 0, 0, 1, 2, 4])],
    "outside": lambda h, p: jnp.maximum(
        h.at[jnp.array([0, 1, 9, 3, 4, 9])].get(mode="fill", fill_value=-1e9), -1.0
    ),
    "set": lambda h, p: h.at[1].set(0.5).at[:, 2].multiply(0.3),
    "scatter": lambda h, p: h.at[jnp.array([0, 0, 2])].add(0.3 * h[3:]),
    "segments": lambda h, p: jax.ops.segment_sum(h, jnp.arange(ROWS) // 2, ROWS),
    "swap": lambda h, p: jnp.concatenate([h[:, 3:], h[:, :3]], axis=1),
    "reshape": lambda h, p: h.T.reshape(COLUMNS // 2, -1).T.reshape(ROWS, COLUMNS),
    "split": lambda h, p: sum(jnp.split(jnp.tile(h, (2, 1)), 2)) / 2,
    "where": lambda h, p: jnp.where(jnp.arange(COLUMNS)[None] % 3 == 0, h, 0.25),
    "far_mask": lambda h, p: jnp.maximum(
        jnp.where(jnp.arange(COLUMNS)[None] % 3 == 0, h, -1e30), -1.0
    ),
    "mask_1e9": masked(-1e9),
    "mask_1e5": masked(-1e5),
    "mask_min": masked(float(np.finfo(np.float32).min)),
    "no_row_left": lambda h, p: jax.nn.softmax(jnp.where(h > 1e6, h, -1e9)) + h,
    "clip": lambda h, p: jnp.clip(h, -1e6, 1e6),
    "tiny": lambda h, p: jnp.square(h) / (jnp.square(h) + 1e-8 + jnp.exp(-h)),
    "huge": lambda h, p: (h * 3e5) * 1e-6,
    "floor": lambda h, p: jnp.log(jnp.maximum(jnp.square(h), 1e-9) + 1e-1),
    "table": lambda h, p: h * jnp.cos(1e4 ** -(jnp.arange(COLUMNS) / COLUMNS))[None],
    "bf16": lambda h, p: h.astype(jnp.bfloat16).astype(jnp.float32),
    "f16": lambda h, p: (h.astype(jnp.float16) * 2).astype(jnp.float32) / 2,
    "products_f32": lambda h, p: lax.dot(
        h.astype(jnp.bfloat16),
        p["w"].astype(jnp.bfloat16),
        preferred_element_type=jnp.float32,
    ),
    "integers": lambda h, p: h * (jnp.arange(COLUMNS)[None] % 3).astype(h.dtype),
    "complex": lambda h, p: jnp.real(jnp.fft.ifft(jnp.fft.fft(h) * 0.5j)),
    "gradient": lambda h, p: jax.grad(lambda x: jnp.sum(jnp.tanh(x @ p["w"])))(h),
    "tangent": lambda h, p: jax.jvp(lambda x: jnp.sin(x @ p["w"]), (h,), (h,))[1],
    "barrier": lambda h, p: functools.reduce(
        jnp.add, lax.optimization_barrier((h, p["w"][:ROWS]))
    ),
    "odd_sine": lambda h, p: odd_sine(h, p["b"] + h),
    "odd_tanh": lambda h, p: odd_tanh(h),
}


# The ways to run `body(h, p)`
CALLS = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "jit_checkpoint": lambda body: jax.jit(jax.checkpoint(body)),
    "dots": lambda body: jax.checkpoint(
        body, policy=jax.checkpoint_policies.dots_saveable
    ),
    "vmap": lambda body: (
        lambda h, p: jax.vmap(body, (0, None))(jnp.stack([h, -h]), p)[0]
    ),
    "scan": lambda body: (
        lambda h, p: lax.scan(lambda c, _: (body(c, p), None), h, None, 2)[0]
    ),
    "layers": lambda body: (
        lambda h, p: lax.scan(
            lambda c, w: (body(c, p | {"w": w}), jnp.mean(c)),
            h,
            jnp.stack([p["w"], p["v"]]),
            reverse=True,
        )[0]
    ),
    "remat_layers": lambda body: (
        lambda h, p: lax.scan(
            jax.checkpoint(lambda c, w: (0.7 * c + body(c, p | {"w": w}) / 2, None)),
            h,
            jnp.stack([p["w"], p["v"]]),
        )[0]
    ),
    "accumulated": lambda body: (
        lambda h, p: lax.scan(
            lambda total, k: (total + k * body(k * h, p), total[:1]),
            jnp.zeros_like(h),
            jnp.array([0.5, -0.5]),
            unroll=2,
        )[0]
    ),
    "fori": lambda body: lambda h, p: lax.fori_loop(0, 2, lambda i, c: body(c, p), h),
    # Its derivative is forward-mode only: here it has none.
    "while": lambda body: (
        lambda h, p: (
            h
            + 0.1
            * lax.while_loop(
                lambda c: c[0] < 2,
                lambda c: (c[0] + 1, body(c[1], lax.stop_gradient(p))),
                (0, lax.stop_gradient(h)),
            )[1]
        )
    ),
    "map": lambda body: (
        lambda h, p: lax.map(lambda x: body(x, p), jnp.stack([h, -h]))[0]
    ),
    "cond": lambda body: (
        lambda h, p: lax.cond(p["b"][0, 0] > 9, lambda a, _: a, body, h, p)
    ),
    "switch": lambda body: (
        lambda h, p: lax.switch(
            jnp.argmax(p["b"]) % 3,
            [lambda a, _: jnp.exp(-jnp.abs(a)), body, lambda a, _: jnp.sin(a)],
            h,
            p,
        )
    ),
    "full_precision": amp.full_precision,
    "bfloat16": amp.with_policy("mixed_bfloat16"),
}
LOOPS = ("scan", "layers", "remat_layers", "accumulated", "fori", "while", "map")


def random_program(rng, length, depth=2, avoid=()):
    """A program as data: (operation or (call, program), whether it joins) for each."""
    operations = [name for name in OPERATIONS if name not in avoid]
    steps = []
    for _ in range(length):
        if depth and rng.random() < 0.25:
            call = str(rng.choice(list(CALLS)))
            # XLA's CPU loops have no half products with an f32 result.
            without = ("products_f32",) if call in LOOPS else avoid
            inner = random_program(rng, int(rng.integers(1, 4)), depth - 1, without)
            step = call, inner
        else:
            step = str(rng.choice(operations))
        steps.append((step, rng.random() < 0.3))
    return steps


def has(steps, names):
    """Whether one of the operations or calls `names` is somewhere in the program."""
    return any(
        step in names
        if isinstance(step, str)
        else step[0] in names or has(step[1], names)
        for step, _ in steps
    )


def function_of(steps, disturb):
    """Returns the program as a function; `disturb` is applied to every value."""
    built = [
        (
            OPERATIONS[step]
            if isinstance(step, str)
            else CALLS[step[0]](function_of(step[1], disturb)),
            joins,
        )
        for step, joins in steps
    ]

    def body(h, p):
        earlier = h
        for run, joins in built:
            h = disturb(run(h, p))
            if joins:
                h, earlier = (h + earlier) / 2, h
        return h

    return body


def rounding(rng, eps):
    """Returns what changes each element by at most `eps[0]` or `eps[1]`, relatively.

    These are traced: one is a rounding, the other is 0, and each has its noise.
    """

    def disturb(x):
        first, second = rng.uniform(-1, 1, (2, *x.shape)).astype(np.float32)
        return x * (1 + (eps[0] * first + eps[1] * second))

    return disturb


def arguments(rng):
    def normal(*shape, scale):
        return jnp.asarray(rng.normal(size=shape) * scale, jnp.float32)

    square = COLUMNS, COLUMNS
    parameters = {
        "w": normal(*square, scale=COLUMNS**-0.5),
        "v": normal(*square, scale=COLUMNS**-0.5),
        "b": normal(1, COLUMNS, scale=0.5),
    }
    return parameters, normal(ROWS, COLUMNS, scale=1.0)


def differentiated(body, weights, transform=lambda fn: fn):
    """Returns a function that gives what `body` returns, and its gradients."""

    def outputs(p, h):
        out = body(h, p)
        return {"out": out, "mean": jnp.mean(out), "given": (h, KEY), "none": None}

    transformed = transform(outputs)

    def loss(p, h):
        results = transformed(p, h)
        return jnp.sum(results["out"] * weights) + results["mean"], results

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)


def program_of(seed):
    """The random program of a seed, and the generator to go on with."""
    rng = np.random.default_rng((seed, 0))
    return random_program(rng, 8 if seed < 100 else 16), rng


def run(seed):
    """A random program in f32, under each policy, and with roundings in f32."""
    steps, rng = program_of(seed)
    p, h = arguments(rng)
    weights = rng.normal(size=(ROWS, COLUMNS)).astype(np.float32)
    body = function_of(steps, lambda x: x)
    transforms = {
        policy: functools.partial(amp.autocast, policy=policy)
        for policy in ("float32", *HALF)
    }

    jitted = functools.partial(
        jax.jit, compiler_options={"xla_allow_excess_precision": False}
    )

    @jitted
    def disturbed(eps, p, h):
        disturb = rounding(rng, eps)
        fn = differentiated(function_of(steps, disturb), weights)
        return fn(jax.tree.map(disturb, p), disturb(h))

    @jitted
    def everything(p, h):
        return differentiated(body, weights)(p, h), {
            policy: differentiated(body, weights, transform)(p, h)
            for policy, transform in transforms.items()
        }

    plain, found = everything(p, h)
    moved = {
        policy: [
            disturbed(float(jnp.finfo(half).eps) * np.eye(2, dtype=np.float32)[i], p, h)
            for i in range(2)
        ]
        for policy, half in HALF.items()
    }
    for mixed in found.values():
        chex.assert_trees_all_equal_shapes_and_dtypes(mixed, plain)
    return plain, found, moved


def compared(seed, plain, found, moved):
    """For each leaf under each policy: where, how far it is off, what is allowed."""
    # A rounding that makes it NaN, as of a logarithm at 0, tells nothing of autocast:
    # use another seed.
    assert amp.all_finite((plain, moved))
    steps, rows = program_of(seed)[0], []
    for policy, mixed in found.items():
        label = policy
        if has(steps, ("bfloat16",)) or (
            # It rounds by itself, and a sum in another order rounds the other way.
            policy == "float32" and has(steps, ("bf16", "f16", "products_f32"))
        ):
            policy = "mixed_bfloat16"
        eps = float(jnp.finfo(HALF.get(policy, jnp.float32)).eps)
        rows += leaves(label, mixed, plain, moved.get(policy, []), eps)
    return rows


def leaves(label, mixed, plain, disturbed, eps):
    """What is allowed is what rounding explains."""
    rows = []
    largest = max(norm(x) for x in jax.tree.leaves(plain[1]))
    paths = jax.tree_util.tree_leaves_with_path(plain)
    columns = (jax.tree.leaves(tree) for tree in (mixed, *disturbed))
    for (path, expected), found, *moved in zip(paths, *columns, strict=True):
        where = f"{label}: {jax.tree_util.keystr(path)}"
        if not jnp.issubdtype(expected.dtype, jnp.floating):
            rows.append([where, float(not jnp.array_equal(found, expected)), 0.0])
            continue
        sensitivity = max((norm(x - expected) for x in moved), default=0.0)
        allowed = ROUNDINGS * (
            sensitivity + eps * (norm(expected) + 0.1 * min(largest, 1.0))
        )
        off = norm(found - expected) if np.isfinite(found).all() else np.inf
        rows.append([where, off, allowed])
    return rows


def norm(x):
    return float(np.linalg.norm(np.asarray(x, np.float64)))


# Those from 100 on are long.
FAST, SLOW = (0, 1, 2), (*range(3, 8), 14, 103, 105, 108, 110, 111)


def test_each_operation_and_each_call_is_in_one_of_the_programs():
    programs = [program_of(seed)[0] for seed in FAST + SLOW]
    for name in (*OPERATIONS, *CALLS):
        assert any(has(steps, (name,)) for steps in programs), name


@pytest.mark.parametrize(
    "seed", [*FAST, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW)]
)
def test_a_random_program_is_only_rounded(seed):
    rows = compared(seed, *run(seed))
    assert not [row for row in rows if row[1] > row[2]], program_of(seed)[0]
