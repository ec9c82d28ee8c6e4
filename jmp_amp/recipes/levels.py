"""What the recipes of other systems are called, and what their names mean: data.

Sources: apex/amp/frontend.py; paddle/amp/auto_cast.py and amp_lists.py;
mindspore/train/amp.py; colossalai/booster/mixed_precision; keras/src/dtype_policies.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jmp_amp.policies.dtypes import BF16, F16


class Level(NamedTuple):
    """What a name means.

    Attributes:
      system: whose name it is.
      scaler: whose loss scaler, for `loss_scale_preset`.
      half: the half dtype, if the name says which.
      by_operation: f32 parameters, half precision operation by operation.
      stored_half: half-precision parameters.
      keep_norms: norm parameters stay f32 then.
      masters: the optimizer has f32 masters.
      scaled: the loss scale is dynamic in f16.
      products_only: only matrix products and convolutions are in half.
    """

    system: str
    scaler: str
    half: np.dtype | None = None
    by_operation: bool = False
    stored_half: bool = False
    keep_norms: bool | None = None
    masters: bool | None = None
    scaled: bool = True
    products_only: bool = False


LEVELS = {
    "O0": Level("Apex", "apex", masters=False, scaled=False),
    "O1": Level("Apex", "apex", by_operation=True),
    "O2": Level("Apex", "apex", stored_half=True, keep_norms=True, masters=True),
    "O3": Level(
        *("Apex", "apex"),
        stored_half=True,
        keep_norms=False,
        masters=False,
        scaled=False,
    ),
    "OD": Level("Paddle", "paddle", by_operation=True, products_only=True),
    "auto": Level("MindSpore", "mindspore", by_operation=True),
    "fp16": Level("Colossal-AI", "torch", F16, by_operation=True),
    "bf16": Level("Colossal-AI", "torch", BF16, by_operation=True),
    "fp16_apex": Level("Colossal-AI", "apex", F16, by_operation=True),
    "fp16_naive": Level(
        *("Colossal-AI", "colossalai", F16),
        stored_half=True,
        keep_norms=True,
        masters=True,
    ),
    "mixed_float16": Level("Keras", "keras", F16, by_operation=True),
    "mixed_bfloat16": Level("Keras", "keras", BF16, by_operation=True),
    "float32": Level("Keras", "keras", masters=False, scaled=False),
}

# Names of operations in Paddle's lists that are others here.
PADDLE_NAMES: dict[str, str] = {
    **dict.fromkeys(("conv2d", "conv3d", "conv1d"), "conv_general_dilated"),
    **dict.fromkeys(("matmul", "matmul_v2", "bmm", "einsum"), "dot_general"),
    **{f"elementwise_{name}": name for name in ("add", "sub", "mul", "div", "pow")},
    **{"sigmoid": "logistic", "erfinv": "erf_inv", "reduce_mean": "mean"},
}

# What Apex and Paddle call the same; the first name is that of the field.
ALIASES = {
    "master_weight": "master_weights",
    "patch_torch_functions": "patch_functions",
}

PROPERTIES = (
    "loss_scale",
    "keep_batchnorm_fp32",
    "master_weights",
    "cast_model_type",
    "cast_model_outputs",
    "patch_functions",
    "num_losses",
    "enabled",
    "custom_white_list",
    "custom_black_list",
    "excluded_layers",
    "master_grad",
    "save_dtype",
)

# What other systems print, and this one does not.
PRINTING = ("verbosity", "verbose", "log_num_zeros_in_grad")

# Words that are near to another name than the one that is meant.
MEANT = {
    **dict.fromkeys(("float16", "f16", "half", "torch", "mixed"), "fp16"),
    "bfloat16": "bf16",
    **dict.fromkeys(("fp32", "f32", "none", "no"), "O0"),
}
