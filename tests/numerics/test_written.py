"""What a constant wrote, such as a mask's -1e9, is nothing that a program computes."""

import dataclasses
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_amp as amp
from tests.numerics.counting import of
from tests.numerics.made import diagnosis, site

ALLOWED = np.tri(8, dtype=bool)
X = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((16, 16)).astype(np.float32)


def chosen(scores, fill):
    return jnp.where(ALLOWED, scores, fill)


def added(scores, fill):
    return scores + (1 - jnp.asarray(ALLOWED, scores.dtype)) * fill


def in_a_loop(scores, fill):
    def turn(row, allowed):
        return row, jnp.where(allowed[0], allowed[1], fill)

    return jax.lax.scan(turn, 0.0, (jnp.asarray(ALLOWED), scores))[1]


def attention(mask, fill):
    def fn(w, x):
        with jax.named_scope("attention"):
            weights = jax.nn.softmax(mask(x @ w @ x.T, fill))
        return jnp.mean(weights @ x)

    return fn


F32_MIN = float(jnp.finfo(jnp.float32).min)


@pytest.mark.parametrize(
    ("mask", "fill", "policy"),
    [
        (chosen, -1e9, "mixed_float16"),
        (added, -1e9, "mixed_bfloat16"),
        (in_a_loop, -1e9, "float32"),
        (chosen, F32_MIN, "mixed_float16"),
        (added, -1e4, "mixed_float16"),
    ],
)
def test_the_constant_of_a_mask_is_not_the_largest_value_of_its_module(
    mask, fill, policy
):
    scores = np.abs(X.astype(np.float64) @ W @ X.T).max()
    d = amp.diagnose(attention(mask, fill), policy)(W, X)
    largest = max(site.amax for site in d.sites)
    assert largest >= 0.99 * min(-fill, 65504.0)
    numbers = d.modules["attention"]
    # A softmax takes the largest score of a row from the others.
    assert 0.9 * scores < numbers.amax < 2.5 * scores
    text = str(d)
    assert "amax: without constants of the program" in text
    assert "(constant)" in d.drill_down("attention")


def test_a_large_value_beside_a_constant_is_shown():
    d = amp.diagnose(attention(chosen, -1e9), "float32")(W, 40 * X)
    scores = 1600 * np.abs(X.astype(np.float64) @ W @ X.T).max()
    assert 0.9 * scores < d.modules["attention"].amax < 2.5 * scores


@pytest.mark.parametrize(
    "fn", [jnp.square, jnp.exp, lambda x: x @ x, lambda x: x / 7.0]
)
def test_what_is_computed_of_data_is_no_constant(fn):
    d = amp.diagnose(lambda x: fn(jnp.minimum(x, 1e9)), "float32")(
        jnp.full((2, 2), 80.0)
    )
    assert not any(site.is_constant for site in d.sites)
    assert "constants of the program" not in str(d)


def test_a_constant_that_is_computed_with_is_none_any_more():
    d = amp.diagnose(lambda x: jnp.sum((x + 1e9) * 0.5), "float32")(jnp.ones(4))
    (add,), (sum_,) = of(d.sites, "add"), of(d.sites, "reduce_sum")
    assert add.is_constant and not sum_.is_constant


def test_two_masks_that_are_added_write_their_sum():
    def fn(x):
        masks = [jnp.where(m, 0.0, -1e9) for m in (ALLOWED, ALLOWED.T)]
        return jnp.max(x + (masks[0] + masks[1] * 1.0 + masks[0]), axis=-1)

    d = amp.diagnose(fn, "float32")(jnp.ones((8, 8)))
    assert all(site.is_constant for site in of(d.sites, "add"))


def test_a_small_constant_is_a_value_as_any_other():
    d = amp.diagnose(lambda x: jnp.maximum(x, 4.0), "float32")(jnp.ones(4))
    assert d.modules[""].amax == 4.0


def test_the_backward_pass_has_no_constants():
    d = amp.diagnose(lambda w: jnp.sum(w * 1e9), "float32")(jnp.ones(4))
    backward = [site for site in d.sites if not site.is_forward]
    assert backward and not any(site.is_constant for site in backward)


def test_the_map_of_a_plot_has_no_bar_of_a_constant():
    pytest.importorskip("matplotlib")
    values = [1.0, 2.0, *[1e9] * 8]
    masked = site(values, module="up", is_constant=True)
    shares = {}
    for made in (masked, dataclasses.replace(masked, is_constant=False)):
        figure = amp.plots.diagnose(diagnosis([made], [made]))
        figure.savefig(io.BytesIO(), format="png")
        (image,) = figure.axes[2].images
        first = round(image.get_extent()[0] + 0.5)
        row = np.square(image.get_array()[0])
        shares[made.is_constant] = {
            int(i) + first: float(row[i]) for i in np.flatnonzero(row)
        }
    assert shares[True] == pytest.approx({0: 0.5, 1: 0.5})
    assert shares[False] == pytest.approx({0: 0.1, 1: 0.1, 29: 0.8})


def test_a_diagnosis_with_constants_reads_back():
    d = amp.diagnose(attention(chosen, -1e9))(W, X)
    assert any(site.is_constant for site in d.sites)
    assert amp.Diagnosis.from_json(d.to_json()) == d
