"""Strict JAX for the whole suite, set before JAX is imported anywhere."""

import os

# CPU only: with the CUDA plugin installed and no driver, JAX would look for a GPU,
# and the ahead-of-time GPU compiler of `tests/h100.py` would not be registered.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
