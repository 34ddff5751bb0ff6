"""Convolution and pooling whose gradients stay fast inside control flow on CPU.

Both gradients of a convolution are convolutions. JAX writes them with permuted dimension
numbers. At the top level of a program XLA:CPU rewrites these to its fast form. Inside the
body of a `scan` or the branch of a `cond`, where a pipeline computes, it does not, and
runs a scalar loop: 18 against 1.2 ms for the input gradient and 42 against 1.6 ms for the
weight gradient of a 3x3 convolution (32 images of 28x28, 16 to 16 channels; 2-core x86-64
CPU, JAX 0.10.2). Here the gradients are written as plain convolutions with explicit
transposes. On other backends the compiler merges the transposes again, at no cost.

The gradient of `nnx.max_pool` is slow on CPU everywhere: 5.6 ms for 2x2 windows of 16
images of 56x56 with 16 channels. The gradient of `halve` takes 1.3 ms.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

_IMAGES = ("NHWC", "HWIO", "NHWC")


class Conv(nnx.Module):
    """2-D convolution; zero padding keeps the image's size, divided by `stride`.

    The same results and the same parameters as
    `nnx.Conv(..., strides=stride, padding="SAME", use_bias=use_bias)`.
    """

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        size: int,
        *,
        stride: int = 1,
        use_bias: bool = False,
        kernel_init: nnx.Initializer,
        rngs: nnx.Rngs,
    ):
        shape = (size, size, num_inputs, num_outputs)
        self.kernel = nnx.Param(kernel_init(rngs.params(), shape))
        self.use_bias = use_bias
        if use_bias:
            self.bias = nnx.Param(jnp.zeros(num_outputs, self.kernel.dtype))
        self.stride = stride

    def __call__(
        self, x: jax.Array
    ) -> jax.Array:  # [B, H, W, num_inputs] -> [B, H', W', num_outputs]
        kernel = self.kernel[...]
        strides = (self.stride, self.stride)
        padding = lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], strides, "SAME")
        y = _conv(x, kernel, strides, tuple(padding))
        return y + self.bias[None, None, None] if self.use_bias else y


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _conv(
    x: jax.Array,
    kernel: jax.Array,
    strides: tuple[int, int],
    padding: tuple[tuple[int, int], ...],
) -> jax.Array:
    return lax.conv_general_dilated(
        x, kernel, strides, padding, dimension_numbers=_IMAGES
    )


def _conv_forward(x, kernel, strides, padding):
    return _conv(x, kernel, strides, padding), (x, kernel)


def _conv_backward(strides, padding, residuals, g):
    x, kernel = residuals
    image, size, out = x.shape[1:3], kernel.shape[:2], g.shape[1:3]
    # Number of pixels by which the last window exceeds the image.
    ends = [
        (o - 1) * s + k - low - n
        for o, s, k, (low, _), n in zip(out, strides, size, padding, image)
    ]
    # dx: the gradient, dilated by the strides, convolved with the kernel turned by 180
    # degrees.
    dx = lax.conv_general_dilated(
        g,
        kernel[::-1, ::-1].swapaxes(2, 3),
        window_strides=(1, 1),
        padding=[
            (k - 1 - low, k - 1 - end) for k, (low, _), end in zip(size, padding, ends)
        ],
        lhs_dilation=strides,
        dimension_numbers=_IMAGES,
    )
    # dw: the image convolved with the gradient; batch and channels change places.
    dw = lax.conv_general_dilated(
        x.transpose(3, 1, 2, 0),
        g.transpose(1, 2, 0, 3),
        window_strides=(1, 1),
        padding=[(low, end) for (low, _), end in zip(padding, ends)],
        rhs_dilation=strides,
        dimension_numbers=_IMAGES,
    )
    return dx, dw.transpose(1, 2, 0, 3)


_conv.defvjp(_conv_forward, _conv_backward)


def halve(x: jax.Array) -> jax.Array:
    """2x2 max pooling, [B, H, W, C] -> [B, H // 2, W // 2, C].

    Equal maxima in a window share the gradient; `nnx.max_pool` gives it to the first one.
    """
    batch, height, width, channels = x.shape
    x = x[:, : height // 2 * 2, : width // 2 * 2]
    return x.reshape(batch, height // 2, 2, width // 2, 2, channels).max(axis=(2, 4))
