"""The names of recipes in other systems and their meaning: data.

Sources: apex/amp/frontend.py; paddle/amp/auto_cast.py and amp_lists.py;
mindspore/train/amp.py; colossalai/booster/mixed_precision; keras/src/dtype_policies.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jmp_amp.policies.dtypes import BF16, F16
from jmp_amp.policies.patterns import GlobIfPresent, IfPresent, ModuleInfo


class Level(NamedTuple):
    """The meaning of a name.

    Attributes:
      system: the system that the name is from.
      scaler: the system whose loss scaler it has, for `loss_scale_preset`.
      half: the half dtype, if the name says which.
      by_operation: f32 parameters, half precision operation by operation.
      stored_half: half-precision parameters.
      keep_batchnorm_fp32: whether norm parameters stay f32 then.
      master_weights: whether the optimizer has f32 masters.
      scaled: the loss scale is dynamic in f16.
      products_only: only matrix products and convolutions are in half.
      fp8: matrix products are of 8-bit floats, except those of `HEADS`.
    """

    system: str
    scaler: str
    half: np.dtype | None = None
    by_operation: bool = False
    stored_half: bool = False
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    scaled: bool = True
    products_only: bool = False
    fp8: bool = False


_F32 = Level("Apex", "apex", master_weights=False, scaled=False)
_HALF = Level(
    "Apex", "apex", stored_half=True, keep_batchnorm_fp32=True, master_weights=True
)

LEVELS = {
    "O0": _F32,
    "O1": Level("Apex", "apex", by_operation=True),
    "O2": _HALF,
    "O3": _HALF._replace(keep_batchnorm_fp32=False, master_weights=False, scaled=False),
    "OD": Level("Paddle", "paddle", by_operation=True, products_only=True),
    "auto": Level("MindSpore", "mindspore", by_operation=True),
    "fp16": Level("Colossal-AI", "torch", F16, by_operation=True),
    "bf16": Level("Colossal-AI", "torch", BF16, by_operation=True),
    "fp8": Level("Colossal-AI", "torch", BF16, by_operation=True, fp8=True),
    "fp16_apex": Level("Colossal-AI", "apex", F16, by_operation=True),
    "fp16_naive": _HALF._replace(system="Colossal-AI", scaler="colossalai", half=F16),
    "mixed_float16": Level("Keras", "keras", F16, by_operation=True),
    "mixed_bfloat16": Level("Keras", "keras", BF16, by_operation=True),
    "float32": _F32._replace(system="Keras", scaler="keras"),
}


def attend_of_embedding(info: ModuleInfo) -> bool:
    """Whether a module is an embedding that makes logits, called so.

    `nn.Embed` and `nnx.Embed` are; so are classes of others that are named alike.
    """
    return info.method == "attend" and "embed" in info.cls.__name__.lower()


# What makes logits, and runs in bf16 in "fp8". In 8 bits it makes the error of the
# gradient of a small GPT half as large again, .068 in place of .045.
HEADS = (
    *map(GlobIfPresent, ("**/lm_head", "**/head", "**/logits", "**/classifier")),
    IfPresent(attend_of_embedding),
)

# Paddle's names of operations that have another name here.
PADDLE_NAMES: dict[str, str] = {
    **dict.fromkeys(("conv2d", "conv3d", "conv1d"), "conv_general_dilated"),
    **dict.fromkeys(("matmul", "matmul_v2", "bmm", "einsum"), "dot_general"),
    **{f"elementwise_{name}": name for name in ("add", "sub", "mul", "div", "pow")},
    **{"sigmoid": "logistic", "erfinv": "erf_inv", "reduce_mean": "mean"},
}

# Second names of properties.
ALIASES = {
    "master_weight": "master_weights",
    "patch_torch_functions": "patch_functions",
}

PROPERTIES = tuple(
    "loss_scale keep_batchnorm_fp32 master_weights cast_model_type cast_model_outputs "
    "patch_functions num_losses enabled custom_white_list custom_black_list "
    "excluded_layers master_grad save_dtype saved reduce_dtype".split()
)

# Options of other systems that print; nothing is printed here.
PRINTING = ("verbosity", "verbose", "log_num_zeros_in_grad")

# Words that are close to the spelling of another name than the one they mean.
MEANT = {
    **dict.fromkeys(("float16", "f16", "half", "torch", "mixed"), "fp16"),
    "bfloat16": "bf16",
    **dict.fromkeys(("fp32", "f32", "none", "no"), "O0"),
    **dict.fromkeys(("float8", "f8", "e4m3"), "fp8"),
}
