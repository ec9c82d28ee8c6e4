"""Sites and diagnoses made by hand, of numbers that are known."""

import math

import jax.numpy as jnp
import numpy as np

import jmp_amp as amp
from jmp_amp.numerics.diagnose.diagnosis import Diagnosis
from jmp_amp.numerics.locate.sites import Gradient, Site


def site(values=(1.0,), **fields):
    """The site of some values, in f32; other fields as they are given."""
    values = np.abs(np.asarray(values, np.float64)).ravel()
    finite = values[np.isfinite(values)]
    nonzero = finite[finite > 0]
    powers, counts = np.unique(np.frexp(nonzero)[1] - 1, return_counts=True)
    made = {
        "module": "",
        "operation": "mul",
        "source": "/home/me/model.py:7",
        "direction": "forward",
        "dtype": "f32",
        "shape": (values.size,),
        "size": int(values.size),
        "times": 1,
        "amax": float(finite.max(initial=0.0)),
        "amin": float(nonzero.min(initial=math.inf)) if nonzero.size else 0.0,
        "zeros": int(finite.size - nonzero.size),
        "nonfinite": int(values.size - finite.size),
        "turn": None,
        "exponents": dict(zip(powers.tolist(), counts.tolist(), strict=True)),
        "error": None,
        "amplification": None,
        "makes_nonfinite": False,
        "path": None,
        "identity": "0",
    }
    return Site(**(made | fields))


def gradient(values=(1.0,), error=0.0):
    made = site(values)
    numbers = (made.amax, made.amin, made.zeros, made.nonfinite, made.size)
    return Gradient(*numbers, error)


def diagnosis(sites=(), reference=(), **fields):
    made = {
        "function": "loss",
        "given": "p=f32,c=f16,o=f32",
        "value": jnp.float32(1.5),
        "gradients": {},
        "loss_scale": 1.0,
        "policy": amp.PolicyMap("mixed_float16"),
        "advice": (),
    }
    return Diagnosis(sites=tuple(sites), reference=tuple(reference), **(made | fields))
