"""What one layer hands to the next: gates, odds, shares, errors and counters.

Every program has products on both sides of elementwise lines whose digits matter: what
is left of a gate, a share of a total, an error, a ratio of neighbours, a decay.
"""

import jax
import jax.numpy as jnp

from tests.idioms.row import both, integers, normals, row, uniform, weights

ROWS = normals(x=(24, 8))
MODEL = weights(w=(8, 16), v=(16, 4))
GATED = weights(w=(8, 16), g=(8, 16), v=(16, 4))
SEQUENCE = normals(x=(4, 12, 8))


@row(GATED, ROWS)
def what_a_nearly_closed_gate_lets_through(p, inputs):
    gate = jax.nn.sigmoid(inputs["x"] @ p["g"] + 6.0)
    return (200.0 * (1.0 - gate) * (inputs["x"] @ p["w"])) @ p["v"]


@row(weights(w=(8, 16), g=(8, 1), v=(16, 4)), ROWS)
def one_gate_for_all_channels(p, inputs):
    keep = jax.nn.sigmoid(inputs["x"] @ p["g"] + 5.0)
    return (100.0 * (1.0 - keep) * jnp.tanh(inputs["x"] @ p["w"])) @ p["v"]


@row(GATED, ROWS)
def odds_that_a_product_reads(p, inputs):
    on = jax.nn.sigmoid(inputs["x"] @ p["w"] + 4.0)
    return jnp.log(on / (1.0 - on)) @ p["v"]


@row(GATED, ROWS)
def uncertainty_that_a_product_reads(p, inputs):
    on = jax.nn.sigmoid(2.0 * (inputs["x"] @ p["w"]) + 3.0)
    entropy = -on * jnp.log(on) - (1 - on) * jnp.log1p(-on)
    return entropy @ p["v"], (on * (1 - on)) @ p["v"]


@row(weights(w=(8, 16), v=(16, 4)), ROWS)
def contrast_of_responses(p, inputs):
    """Divisive normalisation: a neighbour's difference over its sum."""
    h = jax.nn.softplus(inputs["x"] @ p["w"] + 4.0)
    other = jnp.roll(h, 1, axis=1)
    return (50.0 * (h - other) / (h + other)) @ p["v"]


@row(MODEL, normals(x=(4, 8, 8, 2)))
def difference_of_two_blurs(p, inputs):
    k = jnp.ones((3, 3, 1, 1)) / 9
    image = jax.nn.softplus(inputs["x"].reshape(4, 16, 8) @ p["w"] + 4.0)
    image = image.reshape(4, 16, 16, 1)

    def blur(u):
        return jax.lax.conv_general_dilated(
            u, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    once = blur(image)
    return (image - once)[..., 0] @ p["v"], once - blur(once)


@row(weights(w=(8, 16), v=(16, 8)), ROWS)
def cycle_there_and_back(p, inputs):
    code = jnp.tanh(0.5 * (inputs["x"] @ p["w"]))
    back = code @ p["v"]
    return ((back - inputs["x"]) ** 2).mean(), (back - inputs["x"]) @ p["w"]


@row(weights(a=(8, 16), b=(16, 16), c=(16, 4)), ROWS)
def softmax_memory_with_a_usage_counter(p, inputs):
    """What is free is the product of what is not used."""
    used = jnp.zeros(16)
    out = []
    key = inputs["x"] @ p["a"]
    for step in range(6):
        write = jax.nn.softmax(key[step])
        used = used + write - used * write
        free = jnp.log(1.0 - used + 1e-4)
        out.append(free @ p["c"])
    return jnp.stack(out)


@row(weights(w=(8, 1), v=(8, 16), u=(16, 4)), SEQUENCE)
def attention_by_stick_breaking(p, inputs):
    part = jax.nn.sigmoid(inputs["x"] @ p["w"])[..., 0]
    left = jnp.cumprod(1.0 - part, axis=1)
    before = jnp.concatenate([jnp.ones((4, 1)), left[:, :-1]], axis=1)
    mixed = jnp.einsum("bt,btd->bd", part * before, inputs["x"] @ p["v"])
    return jnp.tanh(mixed) @ p["u"], jnp.log(left[:, -1])


@row(weights(w=(8, 1), v=(8, 16), u=(16, 4)), SEQUENCE)
def adaptive_computation_time(p, inputs):
    halt = jax.nn.sigmoid(inputs["x"] @ p["w"] + 0.5)[..., 0]
    left = jnp.maximum(1.0 - jnp.cumsum(0.3 * halt, axis=1), 0.0)
    used = -jnp.diff(left, axis=1, prepend=1.0)
    h = jax.nn.relu(inputs["x"] @ p["v"])
    return (used[..., None] * h).sum(1) @ p["u"], left[:, -1]


@row(weights(w=(8, 16), k=(3, 16, 16), v=(16, 4)), SEQUENCE)
def change_between_frames_in_a_convolution(p, inputs):
    h = jax.nn.softplus(inputs["x"] @ p["w"] + 5.0)
    h = h[:, 1:] - h[:, :-1]
    h = jax.lax.conv_general_dilated(
        h, p["k"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    return jax.nn.relu(h).mean(1) @ p["v"]


@row(weights(w=(8, 16), s=(8, 16), v=(16, 4)), ROWS)
def standard_scores_between_two_layers(p, inputs):
    mean = 20.0 + inputs["x"] @ p["w"]
    scale = jax.nn.softplus(inputs["x"] @ p["s"]) + 0.2
    score = (mean - mean.mean(0, keepdims=True)) / scale
    return jnp.tanh(score) @ p["v"]


@row(weights(w=(8, 12), v=(12, 4)), ROWS)
def centred_log_ratios_of_a_composition(p, inputs):
    """Aitchison 1982."""
    share = jax.nn.softmax(inputs["x"] @ p["w"], axis=1)
    ratio = jnp.log(share) - jnp.log(share).mean(1, keepdims=True)
    return ratio @ p["v"]


@row(weights(w=(8, 12), v=(12, 4)), both(ROWS, normals(base=(24, 12))))
def update_of_a_belief_by_evidence(p, inputs):
    prior = jax.nn.softmax(inputs["base"], axis=1)
    weight = jnp.exp(inputs["x"] @ p["w"])
    posterior = prior * weight / (prior * weight).sum(1, keepdims=True)
    return (posterior - prior) @ p["v"], jnp.log(posterior / prior)


@row(weights(q=(8, 16), k=(8, 16), v=(8, 16), o=(16, 4)), SEQUENCE)
def attention_less_its_uniform_part(p, inputs):
    q, k, v = (inputs["x"] @ p[name] for name in "qkv")
    share = jax.nn.softmax(0.3 * (q @ k.transpose(0, 2, 1)) / 4.0)
    return ((share - 1.0 / 12) @ v) @ p["o"]


@row(weights(q=(8, 16), k=(8, 16), v=(8, 16)), SEQUENCE)
def tokens_kept_by_nobody(p, inputs):
    q, k, v = (inputs["x"] @ p[name] for name in "qkv")
    share = jax.nn.softmax(2.0 * (q @ k.transpose(0, 2, 1)) / 4.0)
    ignored = jnp.prod(1.0 - share, axis=1)
    return jnp.log(ignored), (ignored[..., None] * v).sum(1)


@row(weights(w=(8, 16), v=(16, 8)), normals(x=(24, 8), y=(24, 8)))
def siamese_difference_for_a_head(p, inputs):
    a, b = (jax.nn.softplus(inputs[n] @ p["w"] + 4.0) for n in "xy")
    return jnp.abs(a - b) @ p["v"], jax.nn.sigmoid((a * b) @ p["v"] / 100.0)


@row(weights(w=(8, 16), v=(16, 8)), normals(x=(24, 8), noise=(24, 8)))
def sensitivity_to_a_perturbed_input(p, inputs):
    a = jax.nn.gelu(inputs["x"] @ p["w"])
    b = jax.nn.gelu((inputs["x"] + 0.3 * inputs["noise"]) @ p["w"])
    return (b - a) @ p["v"], jnp.sqrt(((b - a) ** 2).sum(1))


@row(weights(w=(8, 6), v=(6, 8), e=(6, 1)), ROWS)
def hinges_of_a_spline(p, inputs):
    """An additive model of powers of what is left of a distance to a knot."""
    u = 4.0 + jnp.tanh(inputs["x"] @ p["w"])
    knots = jnp.linspace(3.0, 5.0, 6)[None]
    hinge = jnp.maximum(u - knots, 0.0) ** 2 - jnp.maximum(u - knots - 0.1, 0.0) ** 2
    return hinge @ p["v"], jnp.exp(-((u - 4.0) ** 2)) @ p["e"]


@row(weights(w=(8, 16), v=(16, 4)), ROWS)
def chebyshev_features_between_layers(p, inputs):
    """Liu et al. 2024, arXiv:2404.19756, with Chebyshev polynomials."""
    u = jnp.tanh(inputs["x"] @ p["w"])
    terms = [jnp.ones((24, 16)), u]
    for _ in range(4):
        terms.append(2 * u * terms[-1] - terms[-2])
    return sum((t @ p["v"]) / n for n, t in enumerate(terms, 1)), terms[5] - terms[3]


@row(weights(w=(8, 3), v=(3, 16), u=(16, 1)), normals(x=(24, 8), origin=(24, 3)))
def signed_distance_of_points_on_rays(p, inputs):
    way = inputs["x"] @ p["w"]
    way = way / jnp.linalg.norm(way, axis=1, keepdims=True)
    t = jnp.linspace(0.5, 2.0, 8)
    at = inputs["origin"][:, None] + t[None, :, None] * way[:, None]
    bend = (jnp.tanh(at @ p["v"]) @ p["u"])[..., 0]
    distance = jnp.sqrt((at**2).sum(-1)) - 1.0 + 0.1 * bend
    inside = jax.nn.sigmoid(-10.0 * distance)
    hit = 1.0 - jnp.prod(1.0 - inside, axis=1)
    return distance, -jnp.log(1.0 - hit + 1e-3)


@row(
    weights(w=(8, 4), v=(4, 8)),
    both(normals(x=(24, 8)), uniform(0.1, 1.0, dose=(24, 4))),
)
def response_to_two_drugs_beyond_their_sum(p, inputs):
    """Bliss independence: the excess over a + b - ab."""
    slope = jax.nn.softplus(inputs["x"] @ p["w"] + 1.0)
    effect = 1.0 - jnp.exp(-slope * inputs["dose"])
    a, b = effect[:, :2], effect[:, 2:]
    together = 1.0 - jnp.exp(-slope[:, :2] * inputs["dose"][:, :2] * 1.3) * (1 - b)
    return jnp.concatenate([together - (a + b - a * b), effect[:, :2]], 1) @ p["v"]


@row(
    weights(w=(8, 2), k=(4, 16), v=(16, 4)),
    both(normals(x=(10, 8)), integers(10, i=(30,), j=(30,), m=(30,))),
)
def angles_of_triplets_for_a_product(p, inputs):
    """Gasteiger et al. 2020, arXiv:2003.03123."""
    at = 5.0 * (inputs["x"] @ p["w"])
    a, b = at[inputs["i"]] - at[inputs["j"]], at[inputs["m"]] - at[inputs["j"]]
    size = jnp.sqrt(((a**2).sum(1) + 0.1) * ((b**2).sum(1) + 0.1))
    cosine = (a * b).sum(1) / size
    features = jnp.stack([cosine, cosine**2, 1 - cosine, jnp.log(size)], axis=1)
    return jax.nn.silu(features @ p["k"]) @ p["v"]


@row(weights(w=(8, 5), v=(5, 5)), both(normals(x=(12, 8)), integers(12, path=(30,))))
def reward_shaped_by_a_potential(p, inputs):
    """Ng et al. 1999: discounted potential of the next state less that of this one."""
    potential = 20.0 + jnp.tanh(inputs["x"] @ p["w"])
    now, then = potential[inputs["path"][:-1]], potential[inputs["path"][1:]]
    shaped = 0.99 * then - now
    return shaped @ p["v"], shaped.mean(0)


@row(
    weights(w=(8, 3), v=(3, 8)),
    both(normals(x=(12, 8)), integers(12, i=(30,), j=(30,))),
)
def squared_margins_of_ratings(p, inputs):
    rating = 1500.0 + 100.0 * (inputs["x"] @ p["w"])
    gap = (rating[inputs["i"]] - rating[inputs["j"]]) / 400.0
    surprise = 1.0 - jax.nn.sigmoid(gap + 3.0)
    return (20.0 * surprise) @ p["v"], gap


@row(weights(w=(8, 16), v=(16, 1)), normals(x=(24, 8)))
def ranks_of_a_head_with_an_offset(p, inputs):
    value = 40.0 + jax.nn.gelu(inputs["x"] @ p["w"]) @ p["v"]
    best = value.max(0, keepdims=True)
    return value - best, jax.nn.softmax(value[:, 0])


@row(weights(w=(8, 1), v=(8, 6)), ROWS)
def advantages_over_the_mean_action(p, inputs):
    q = 30.0 + inputs["x"] @ p["w"] + inputs["x"] @ p["v"]
    policy = jax.nn.softmax(inputs["x"] @ p["v"])
    return q - (policy * q).sum(1, keepdims=True), q


@row(weights(w=(8, 6), v=(8, 6)), ROWS)
def utilities_of_two_parts_with_a_base(p, inputs):
    utility = -25.0 + inputs["x"] @ p["w"] + jnp.tanh(inputs["x"] @ p["v"])
    gap = utility - utility[:, :1]
    return gap, jnp.log1p(jnp.exp(gap[:, 1:]).sum(1))
