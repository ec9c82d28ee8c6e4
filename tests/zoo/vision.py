"""Vision models: ViT, ResNet, the U-Net of a diffusion model, a convolutional VAE.

All are linen models with Flax's own field `dtype`: `None` is the f32 model, a half
dtype the twin. Norms are those of Flax: statistics in f32, the result in `dtype`. Where
a line says `astype` or `wide`, it does nothing in the f32 model.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from tests.zoo.case import Case, Loss
from tests.zoo.hand_written import attention_with_float32_softmax
from tests.zoo.language import attend, linen_case, wide

Dtype = Any


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean cross entropy; computed in f32."""
    return optax.softmax_cross_entropy_with_integer_labels(wide(logits), labels).mean()


def random_images(key: jax.Array, *shape: int) -> dict[str, jax.Array]:
    for_image, for_label = jax.random.split(key)
    return {
        "image": jax.random.normal(for_image, shape, jnp.float32),
        "label": jax.random.randint(for_label, shape[:1], 0, 10, jnp.int32),
    }


class ViT(nn.Module):
    """Patches and a class token through pre-norm layers, with Flax's own attention."""

    patch: int
    width: int
    heads: int
    layers: int
    dtype: Dtype = None

    @nn.compact
    def __call__(self, batch: Any) -> jax.Array:
        patches = (self.patch, self.patch)
        x = nn.Conv(self.width, patches, patches, "VALID", dtype=self.dtype)(
            batch["image"]
        )
        x = x.reshape(x.shape[0], -1, self.width)
        token = self.param("class", nn.initializers.normal(0.02), (1, 1, self.width))
        token = jnp.broadcast_to(token.astype(x.dtype), (x.shape[0], 1, self.width))
        x = jnp.concatenate([token, x], axis=1)
        position = self.param(
            "position", nn.initializers.normal(0.02), (1, *x.shape[1:])
        )
        x = x + position.astype(x.dtype)
        attention_fn = nn.dot_product_attention
        if self.dtype is not None:
            attention_fn = attention_with_float32_softmax
        for _ in range(self.layers):
            y = nn.LayerNorm(dtype=self.dtype)(x)
            x = x + nn.MultiHeadDotProductAttention(
                self.heads, dtype=self.dtype, attention_fn=attention_fn
            )(y)
            y = nn.LayerNorm(dtype=self.dtype)(x)
            y = nn.gelu(nn.Dense(4 * self.width, dtype=self.dtype)(y))
            x = x + nn.Dense(self.width, dtype=self.dtype)(y)
        x = nn.LayerNorm(dtype=self.dtype)(x[:, 0])
        return nn.Dense(10, dtype=self.dtype)(x)


def vit(patch: int, width: int, heads: int, layers: int, *shape: int) -> Case:
    return linen_case(
        ViT(patch, width, heads, layers),
        lambda key: random_images(key, *shape),
        lambda logits, batch: cross_entropy(logits, batch["label"]),
    )


class ResNet(nn.Module):
    """Bottleneck blocks as in the ImageNet example of Flax, in training mode.

    Each stage but the first halves the image in its first block, whose shortcut is a
    projection.
    """

    widths: tuple[int, ...]
    blocks: int
    activation: Callable[[jax.Array], jax.Array] = nn.relu
    pool: Callable[..., jax.Array] = nn.max_pool
    dtype: Dtype = None

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(
            nn.BatchNorm, False, momentum=0.9, epsilon=1e-5, dtype=self.dtype
        )
        x = conv(self.widths[0], (7, 7), (2, 2))(image)
        x = self.activation(norm()(x))
        x = self.pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for stage, width in enumerate(self.widths):
            for block in range(self.blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                y = self.activation(norm()(conv(width, (1, 1))(x)))
                y = conv(width, (3, 3), (stride, stride))(y)
                y = self.activation(norm()(y))
                y = norm()(conv(4 * width, (1, 1))(y))
                if x.shape != y.shape:
                    x = norm()(conv(4 * width, (1, 1), (stride, stride))(x))
                x = self.activation(x + y)
        return nn.Dense(10, dtype=self.dtype)(x.mean(axis=(1, 2)))


def resnet(model: ResNet, *shape: int) -> Case:
    """Its batch statistics are part of the batch, and what it makes of them is lost."""

    def sample(key: jax.Array) -> tuple[Any, Any]:
        for_params, for_batch = jax.random.split(key)
        batch = random_images(for_batch, *shape)
        with jax.numpy_dtype_promotion("standard"):
            variables = model.init(for_params, batch["image"])
        return variables["params"], {**batch, "state": variables["batch_stats"]}

    def loss(model: nn.Module) -> Loss:
        def loss(params: Any, batch: Any) -> jax.Array:
            # Norms and pools of Flax mix dtypes, which strict JAX refuses.
            with jax.numpy_dtype_promotion("standard"):
                logits, _ = model.apply(
                    {"params": params, "batch_stats": batch["state"]},
                    batch["image"],
                    mutable=["batch_stats"],
                )
                return cross_entropy(logits, batch["label"])

        return loss

    return Case(sample, loss(model), lambda dtype: loss(model.clone(dtype=dtype)))


class UNetBlock(nn.Module):
    """Two convolutions around which the time is told, and a shortcut."""

    width: int
    groups: int
    dtype: Dtype = None

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        y = nn.silu(nn.GroupNorm(self.groups, dtype=self.dtype)(x))
        y = nn.Conv(self.width, (3, 3), dtype=self.dtype)(y)
        y = y + nn.Dense(self.width, dtype=self.dtype)(nn.silu(time))[:, None, None]
        y = nn.silu(nn.GroupNorm(self.groups, dtype=self.dtype)(y))
        y = nn.Conv(self.width, (3, 3), dtype=self.dtype)(y)
        if x.shape[-1] != self.width:
            x = nn.Conv(self.width, (1, 1), dtype=self.dtype)(x)
        return x + y


class UNet(nn.Module):
    """The noise predictor of DDPM (arXiv:2006.11239): attention at its lowest level.

    The embedding of the time is computed in f32, as in diffusers, whose twin casts it
    before the first product.
    """

    widths: tuple[int, ...]
    groups: int
    heads: int
    dtype: Dtype = None

    @nn.compact
    def __call__(self, batch: Any) -> jax.Array:
        clean, noise = batch["image"], batch["noise"]
        signal = jnp.cos(batch["time"] * (math.pi / 2))[:, None, None, None]
        x = signal * clean + jnp.sqrt(1 - signal**2) * noise
        time = self.embedded_time(batch["time"])

        block = functools.partial(UNetBlock, groups=self.groups, dtype=self.dtype)
        conv = functools.partial(nn.Conv, kernel_size=(3, 3), dtype=self.dtype)
        x = conv(self.widths[0])(x)
        skipped = [x]
        for level, width in enumerate(self.widths):
            if level > 0:
                x = conv(width, strides=(2, 2))(x)
                skipped.append(x)
            x = block(width)(x, time)
            skipped.append(x)
        x = block(self.widths[-1])(x, time)
        x = x + self.attention(x)
        x = block(self.widths[-1])(x, time)
        for level, width in reversed(list(enumerate(self.widths))):
            for _ in range(2):
                x = block(width)(jnp.concatenate([x, skipped.pop()], -1), time)
            if level > 0:
                batch_size, height, breadth, channels = x.shape
                doubled = (batch_size, 2 * height, 2 * breadth, channels)
                x = conv(width)(jax.image.resize(x, doubled, "nearest"))
        x = nn.silu(nn.GroupNorm(self.groups, dtype=self.dtype)(x))
        return conv(clean.shape[-1])(x)

    def embedded_time(self, time: jax.Array) -> jax.Array:
        width = self.widths[0]
        steps = jnp.arange(width // 2, dtype=time.dtype)
        frequencies = jnp.exp(-math.log(10_000) / (width // 2) * steps)
        angles = 1000 * time[:, None] * frequencies[None]
        x = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        x = nn.silu(nn.Dense(4 * width, dtype=self.dtype)(x))
        return nn.Dense(4 * width, dtype=self.dtype)(x)

    def attention(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        y = nn.GroupNorm(self.groups, dtype=self.dtype)(x)
        joint = nn.Dense(3 * width, dtype=self.dtype)(y)
        joint = joint.reshape(x.shape[0], -1, 3 * self.heads, width // self.heads)
        query, key, value = jnp.split(joint, 3, axis=2)
        mixed = attend(query, key, value).reshape(x.shape)
        return nn.Dense(width, dtype=self.dtype)(mixed)


def unet(model: UNet, *shape: int) -> Case:
    def inputs(key: jax.Array) -> Any:
        for_image, for_noise, for_time = jax.random.split(key, 3)
        return {
            "image": jax.random.normal(for_image, shape, jnp.float32),
            "noise": jax.random.normal(for_noise, shape, jnp.float32),
            "time": jax.random.uniform(
                for_time, shape[:1], jnp.float32, minval=0.05, maxval=0.95
            ),
        }

    return linen_case(
        model,
        inputs,
        lambda found, batch: jnp.mean((wide(found) - batch["noise"]) ** 2),
    )


class VAE(nn.Module):
    """The latent and its divergence from the prior are computed in f32."""

    widths: tuple[int, ...]
    latent: int
    dtype: Dtype = None

    @nn.compact
    def __call__(self, batch: Any) -> tuple[jax.Array, jax.Array]:
        image = batch["image"]
        strided = {"kernel_size": (4, 4), "strides": (2, 2), "dtype": self.dtype}
        x = image
        for width in self.widths:
            x = nn.gelu(nn.Conv(width, **strided)(x))
        shape = x.shape
        x = nn.Dense(2 * self.latent, dtype=self.dtype)(x.reshape(shape[0], -1))
        mean, log_variance = jnp.split(wide(x), 2, axis=-1)
        # Drawn in f32 in any case: f64 numbers would be others.
        noise = jax.random.normal(batch["key"], mean.shape, jnp.float32)
        x = mean + jnp.exp(0.5 * log_variance) * noise.astype(mean.dtype)
        divergence = 0.5 * jnp.sum(
            mean**2 + jnp.exp(log_variance) - 1 - log_variance, axis=-1
        )
        x = nn.Dense(math.prod(shape[1:]), dtype=self.dtype)(x).reshape(shape)
        for width in reversed(self.widths[:-1]):
            x = nn.ConvTranspose(width, **strided)(nn.gelu(x))
        # No bias: see `tests/zoo/sequences.py`.
        x = nn.ConvTranspose(image.shape[-1], use_bias=False, **strided)(nn.gelu(x))
        return x, divergence


def negative_evidence(outputs: Any, batch: Any) -> jax.Array:
    logits, divergence = outputs
    misfit = optax.sigmoid_binary_cross_entropy(wide(logits), batch["image"])
    # By the number of pixels, so that f16 needs no other loss scale than elsewhere.
    return (misfit.sum(axis=(1, 2, 3)) + divergence).mean() / misfit[0].size


def vae(widths: tuple[int, ...], latent: int, *shape: int) -> Case:
    def inputs(key: jax.Array) -> Any:
        for_image, for_noise = jax.random.split(key)
        image = jax.random.uniform(for_image, shape, jnp.float32)
        return {"image": image, "key": for_noise}

    return linen_case(VAE(widths, latent), inputs, negative_evidence)


CASES: dict[tuple[str, str], Case] = {
    ("vit", "small"): vit(4, 32, 4, 2, 16, 16, 16, 3),
    ("vit", "large"): vit(16, 384, 6, 3, 32, 160, 160, 3),
    ("resnet", "small"): resnet(
        ResNet((8, 16), 2, nn.silu, nn.avg_pool), 16, 32, 32, 3
    ),
    ("resnet", "large"): resnet(ResNet((64, 128, 256), 2), 32, 112, 112, 3),
    ("unet", "small"): unet(UNet((8, 16), 4, 2), 4, 8, 8, 3),
    ("unet", "large"): unet(UNet((64, 128, 256), 32, 4), 8, 64, 64, 3),
    ("vae", "small"): vae((8, 16), 8, 16, 16, 16, 3),
    ("vae", "large"): vae((64, 128, 256), 128, 64, 64, 64, 3),
}
