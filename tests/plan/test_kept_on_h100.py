"""What a training step needs on an H100 under each word of `Policy.saved`.

The programs are compiled for a described H100; a bound is a ratio to `saved="all"`.
"""

import functools

import pytest
from benchmarks import compare_precision, kept_for_backward, roofline

from tests import h100, kept
from tests.zoo.on_h100 import counted_figures

WORDS = ("all", "auto", "least")
MODELS = ("gpt_scanned", "llama_scanned", "gpt_unrolled", "mlp_unrolled")


def read(program):
    modelled = roofline.totals(roofline.schedule(program.as_text()).kernels)
    return {
        "temp": h100.temp_bytes(program),
        "ms": modelled["ms"],
        "products": counted_figures(program)["products"],
    }


@functools.cache
def figures(model):
    size = kept_for_backward.MODELS[model].large
    programs = size.programs()
    return {
        word: kept.figures(
            f"saved={word}: {model}",
            compare_precision.training_step(programs[word]),
            *size.abstract(),
            read=read,
            donate_argnums=0,
        )
        for word in WORDS
    }


def ratio(model, word, figure):
    found = figures(model)
    return found[word][figure] / found["all"][figure]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_the_products_are_those_of_all(model):
    found = figures(model)
    assert found["all"]["products"]
    assert found["auto"]["products"] == found["all"]["products"]
    assert found["least"]["products"] == found["all"]["products"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "word", "temp", "time"),
    [
        ("gpt_scanned", "auto", 0.45, 0.85),
        ("llama_scanned", "auto", 0.53, 0.88),
        ("gpt_unrolled", "auto", 0.93, 0.98),
        ("mlp_unrolled", "auto", 0.83, 0.98),
        ("gpt_unrolled", "least", 0.62, 1.15),
        ("mlp_unrolled", "least", 0.62, 1.15),
    ],
)
def test_memory_and_modelled_time_are_bounded(model, word, temp, time):
    assert ratio(model, word, "temp") <= temp
    assert ratio(model, word, "ms") <= time
