"""Convolution and pooling whose gradients stay fast inside control flow on CPU.

The two gradients of a convolution are convolutions as well, and JAX writes them with
permuted dimension numbers. In the top level of a program XLA:CPU turns those into its
fast form; inside the body of a `scan` or the branch of a `cond`, where a pipeline
does its work, it does not, and runs a scalar loop: 18 against 1.2 ms for the input
gradient and 42 against 1.6 ms for the weight gradient of a 3x3 convolution (32 images of
28x28, 16 to 16 channels; 2-core x86-64 CPU, JAX 0.10.2). Here they are written as
the plain convolutions that they are, the transposes beside them. On other backends the
compiler folds the transposes back, so nothing is lost. The gradient of `nnx.max_pool` is
slow there anywhere: 5.6 ms for 2x2 windows of 16 images of 56x56 with 16 channels, where
the one here takes 1.3 ms.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

_IMAGES = ("NHWC", "HWIO", "NHWC")


class Conv(nnx.Module):
    """2-D convolution, zero padded to the image's size over `stride`.

    The same numbers and the same parameters as
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

    def __call__(self, x):  # [B, H, W, num_inputs] -> [B, H', W', num_outputs]
        kernel = self.kernel[...]
        strides = (self.stride, self.stride)
        padding = lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], strides, "SAME")
        y = _conv(x, kernel, strides, tuple(padding))
        return y + self.bias[None, None, None] if self.use_bias else y


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _conv(x, kernel, strides, padding):
    return lax.conv_general_dilated(
        x, kernel, strides, padding, dimension_numbers=_IMAGES
    )


def _conv_forward(x, kernel, strides, padding):
    return _conv(x, kernel, strides, padding), (x, kernel)


def _conv_backward(strides, padding, residuals, g):
    x, kernel = residuals
    image, size, out = x.shape[1:3], kernel.shape[:2], g.shape[1:3]
    # How far the windows reach past the image's end, in its own coordinates.
    ends = [
        (o - 1) * s + k - low - n
        for o, s, k, (low, _), n in zip(out, strides, size, padding, image)
    ]
    # dx: the gradient, spread out by the strides, under the kernel turned by 180 degrees.
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
    # dw: the image under the gradient, the batch taking the place of the channels.
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

    Equal numbers in a window share its gradient; `nnx.max_pool` gives it to the first.
    """
    batch, height, width, channels = x.shape
    x = x[:, : height // 2 * 2, : width // 2 * 2]
    return x.reshape(batch, height // 2, 2, width // 2, 2, channels).max(axis=(2, 4))
