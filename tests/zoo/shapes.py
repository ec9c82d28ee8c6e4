"""The models of the zoo in other shapes: wide, deep, long, few examples, unbatched.

A bound that holds for one shape of a model may hold because something else needs the
memory. Here another part of the model needs it in each shape: the weights, the layers,
the scores of attention, the edges of a graph.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

import jmp_amp as amp
from tests.zoo.case import Case, Loss
from tests.zoo.hand_written import (
    CNN,
    MLP,
    Classifier,
    Transformer,
    random_images,
    random_tokens,
)
from tests.zoo.language import gpt, llama
from tests.zoo.rules_models import custom_rules
from tests.zoo.sequences import gcn, lstm, mamba
from tests.zoo.transformers import encoder_decoder, experts, towers
from tests.zoo.vision import ResNet, UNet, resnet, unet, vae, vit


def classifier(model: nn.Module, inputs: Any) -> Case:
    return Classifier(model, inputs).case()


def unbatched(case: Case, examples: int) -> Case:
    """Returns a case of a batch of one, mapped over `examples` batches.

    `wrapped` wraps what is mapped: it sees no axis of examples.
    """

    def sample(key: jax.Array) -> tuple[Any, Any]:
        batches = [case.sample(k)[1] for k in jax.random.split(key, examples)]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
        return case.sample(key)[0], stacked

    def mapped(loss: Loss) -> Loss:
        each = jax.vmap(loss, in_axes=(None, 0))
        return lambda params, batches: jnp.mean(each(params, batches))

    return Case(
        sample,
        mapped(case.loss),
        lambda dtype: mapped(case.twin(dtype)),
        lambda wrap: mapped(wrap(case.loss)),
    )


SHAPES: dict[tuple[str, str], Case] = {
    ("mlp", "wide"): classifier(MLP(4096), random_images(512, 784)),
    ("mlp", "unbatched"): unbatched(classifier(MLP(1024), random_images(1, 784)), 64),
    ("cnn", "deep"): classifier(CNN((32, 64, 128, 256)), random_images(64, 32, 32, 3)),
    ("cnn", "small batch"): classifier(CNN((64, 128)), random_images(4, 64, 64, 3)),
    ("transformer", "long"): classifier(
        Transformer(1024, 256, 4), random_tokens(1024, 1, 2048)
    ),
    ("transformer", "unbatched"): unbatched(
        classifier(Transformer(1024, 256, 4), random_tokens(1024, 1, 256)), 8
    ),
    ("gpt", "deep"): gpt(1024, 256, 4, 6, 4, 256, scanned=False),
    ("gpt", "long"): gpt(1024, 256, 4, 1, 1, 2048, scanned=False),
    ("gpt_scan", "deep"): gpt(1024, 256, 4, 16, 4, 256, scanned=True),
    ("gpt_scan", "wide"): gpt(1024, 1024, 16, 2, 1, 512, scanned=True),
    ("llama", "wide"): llama(1024, 1024, 16, 4, 1, 4, 256),
    ("llama", "unbatched"): unbatched(llama(1024, 256, 4, 2, 1, 1, 512), 8),
    ("encoder_decoder", "long"): encoder_decoder(1024, 256, 4, 1, 1, 2048),
    ("encoder_decoder", "small batch"): encoder_decoder(1024, 256, 4, 1, 2, 1024),
    ("encoder_decoder", "wide"): encoder_decoder(1024, 1024, 16, 1, 4, 128),
    ("moe", "long"): experts(1024, 256, 4, 1, 8, 1, 2048),
    ("moe", "wide"): experts(1024, 1024, 8, 1, 8, 2, 256),
    ("clip", "small batch"): towers(1024, 32, 512, 8, 1, 4, 224, 64),
    ("clip", "wide"): towers(1024, 16, 1024, 16, 1, 16, 64, 32),
    ("custom_rules", "deep"): custom_rules(256, 8, 256, 1024, amp.cast_inputs),
    ("custom_rules", "large batch"): custom_rules(128, 1, 64, 32768, amp.cast_inputs),
    ("lstm", "long"): lstm(256, 1, 256, 16, 512),
    ("lstm", "wide"): lstm(1024, 1, 512, 64, 16),
    ("mamba", "long"): mamba(1024, 128, 4, 1, 1, 2048),
    ("mamba", "states"): mamba(1024, 128, 16, 1, 2, 512),
    ("gcn", "many edges"): gcn(256, 3, 256, 8192, 65536, residual=True),
    ("gcn", "deep"): gcn(128, 8, 64, 16384, 32768, residual=True),
    ("vit", "small batch"): vit(8, 256, 4, 2, 2, 192, 192, 3),
    ("vit", "wide"): vit(16, 1024, 16, 1, 16, 128, 128, 3),
    ("resnet", "small batch"): resnet(ResNet((32, 64, 128), 1), 2, 160, 160, 3),
    ("resnet", "deep"): resnet(ResNet((32, 64), 4), 32, 64, 64, 3),
    ("unet", "small batch"): unet(UNet((32, 64), 8, 2), 1, 128, 128, 3),
    ("unet", "wide"): unet(UNet((128, 256), 32, 4), 4, 32, 32, 3),
    ("vae", "small"): vae((32, 64), 32, 64, 32, 32, 1),
    ("vae", "wide"): vae((128, 256), 64, 32, 32, 32, 3),
}
