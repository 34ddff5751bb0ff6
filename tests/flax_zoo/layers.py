"""A small example of every layer class that `flax.nnx` and `flax.linen` export, and how it is called."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from flax import linen, nnx

DIM = 4


@dataclasses.dataclass(frozen=True)
class Example:
    """How a class is built and called.

    Attributes:
      make: the layer of a dtype: a factory of NNX modules, or a Linen module.
      shape: of the inputs of a row; a tuple of shapes is a tuple of inputs.
      num_tokens: inputs are integers below it; None: numbers of the dtype.
      keeps_shape: whether outputs have the shape of inputs, so that two of the layers follow each other.
      train, evaluate: further arguments of a Linen module's call.
      is_batch_norm: whether its state is statistics of rows.
      rate: the learning rate.
      complex: whether it takes complex numbers.
      bfloat16: whether it is compared in bfloat16.
      refused: what the pipeline says if it does not take the layer.
    """

    make: Callable[[Any], Any]
    shape: tuple = (DIM,)
    num_tokens: int | None = None
    keeps_shape: bool = True
    train: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    evaluate: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    is_batch_norm: bool = False
    rate: float = 0.5
    complex: bool = False
    bfloat16: bool = True
    refused: str | None = None


def exported(module, base: type) -> list[str]:
    """The names of the classes of `base` that a module exports."""
    return [
        name
        for name, value in sorted(vars(module).items())
        if not name.startswith("_") and inspect.isclass(value) and issubclass(value, base)
    ]


CLASSES = [f"nnx.{name}" for name in exported(nnx, nnx.Module)] + [
    f"linen.{name}" for name in exported(linen, linen.Module)
]

NO_LAYERS = {
    "nnx.Module": "the base class",
    "nnx.RNNCellBase": "the base class of cells",
    "nnx.List": "a container, which cannot be called",
    "nnx.Dict": "a container, which cannot be called",
    "linen.Module": "the base class",
    "linen.RNNCellBase": "the base class of cells",
}
"""Classes that compute nothing by themselves."""


def dtypes(dtype) -> dict[str, Any]:
    return dict(dtype=dtype, param_dtype=dtype)


def recurrent(dtype) -> dict[str, Any]:
    """Orthogonal weights cannot be made in low precision."""
    return dict(dtype=dtype, param_dtype=jnp.promote_types(dtype, jnp.float32))


def of_nnx(name: str, *arguments: Any, **options: Any) -> Callable[[Any], Any]:
    """`make` of a class of NNX that takes its dtypes and `rngs`."""
    return lambda dtype: functools.partial(getattr(nnx, name), *arguments, **dtypes(dtype), **options)


def of_linen(name: str, *arguments: Any, **options: Any) -> Callable[[Any], Any]:
    return lambda dtype: getattr(linen, name)(*arguments, **dtypes(dtype), **options)


# -- Layers around what takes more than an activation ------------------------------------


class Unpacked(nnx.Module):
    """A cell whose activation is a pair of carry and inputs."""

    def __init__(self, make, *, rngs):
        self.cell = make(rngs=rngs)

    def __call__(self, pair):
        return self.cell(*pair)


def nnx_cell(name: str) -> Callable[[Any], Any]:
    cell = getattr(nnx, name)
    return lambda dtype: functools.partial(Unpacked, functools.partial(cell, DIM, DIM, **recurrent(dtype)))


class UnpackedLinen(linen.Module):
    cell: linen.Module

    def __call__(self, pair):
        return self.cell(*pair)


def linen_cell(name: str, **options: Any) -> Callable[[Any], Any]:
    cell = getattr(linen, name)
    return lambda dtype: UnpackedLinen(cell(DIM, **recurrent(dtype), **options))


CARRY = ((DIM,), (DIM,))
TWO_CARRIES = (CARRY, (DIM,))
SEQUENCE = (3, DIM)


def nnx_rnn(dtype, *, rngs):
    return nnx.RNN(nnx.GRUCell(DIM, DIM, **recurrent(dtype), rngs=rngs))


def nnx_bidirectional(dtype, *, rngs):
    return nnx.Bidirectional(
        nnx.RNN(nnx.GRUCell(DIM, DIM, **recurrent(dtype), rngs=rngs)),
        nnx.RNN(nnx.GRUCell(DIM, DIM, **recurrent(dtype), rngs=rngs)),
        merge_fn=lambda a, b: a + b,
    )


def nnx_sequential(dtype, *, rngs):
    return nnx.Sequential(
        nnx.Linear(DIM, DIM, **dtypes(dtype), rngs=rngs),
        jnp.tanh,
        nnx.Linear(DIM, DIM, **dtypes(dtype), rngs=rngs),
    )


def nnx_around(name: str, dtype, *, rngs):
    linear = nnx.Linear(DIM, DIM, **dtypes(dtype), rngs=rngs)
    return getattr(nnx, name)(linear, **dtypes(dtype), rngs=rngs)


def nnx_lora(dtype, *, rngs):
    return nnx.LoRA(
        DIM,
        2,
        DIM,
        base_module=nnx.Linear(DIM, DIM, **dtypes(dtype), rngs=rngs),
        **dtypes(dtype),
        b_initializer=nnx.initializers.normal(0.2),
        rngs=rngs,
    )


def nnx_lora_linear(dtype, *, rngs):
    return nnx.LoRALinear(
        DIM,
        DIM,
        lora_rank=2,
        **dtypes(dtype),
        lora_dtype=dtype,
        lora_param_dtype=dtype,
        b_initializer=nnx.initializers.normal(0.2),
        rngs=rngs,
    )


def partial(make):
    return lambda dtype: functools.partial(make, dtype)


class Fp8Product(linen.Module):
    """A product of the rows with a weight by `Fp8Einsum`."""

    @linen.compact
    def __call__(self, x):
        kernel = self.param("kernel", linen.initializers.lecun_normal(), (DIM, DIM))
        return linen.Fp8Einsum()("bi,io->bo", x, kernel)


WRITES = "it writes to its own parameter"
FP8 = "has a collection .*, whose new value is a gradient"


def fp8(name: str) -> Example:
    return Example(
        lambda dtype: linen.Dense(DIM, **dtypes(dtype), dot_general_cls=getattr(linen, name)),
        refused=FP8,
    )


ALL_EXAMPLES: dict[str, Example] = {
    "nnx.BatchNorm": Example(of_nnx("BatchNorm", DIM, momentum=0.9), is_batch_norm=True),
    "nnx.Bidirectional": Example(partial(nnx_bidirectional), SEQUENCE),
    "nnx.Conv": Example(of_nnx("Conv", DIM, DIM, (3,)), SEQUENCE, complex=True),
    "nnx.ConvTranspose": Example(of_nnx("ConvTranspose", DIM, DIM, (3,)), SEQUENCE, complex=True),
    "nnx.Dropout": Example(lambda dtype: functools.partial(nnx.Dropout, 0.0), complex=True),
    "nnx.Einsum": Example(of_nnx("Einsum", "bi,io->bo", (DIM, DIM), (DIM,)), complex=True),
    "nnx.Embed": Example(of_nnx("Embed", 7, DIM), (), num_tokens=7, keeps_shape=False, complex=True),
    "nnx.GRUCell": Example(nnx_cell("GRUCell"), CARRY),
    "nnx.GroupNorm": Example(of_nnx("GroupNorm", DIM, num_groups=2), SEQUENCE),
    "nnx.InstanceNorm": Example(of_nnx("InstanceNorm", DIM), SEQUENCE),
    "nnx.LSTMCell": Example(nnx_cell("LSTMCell"), TWO_CARRIES),
    "nnx.LayerNorm": Example(of_nnx("LayerNorm", DIM)),
    "nnx.Linear": Example(of_nnx("Linear", DIM, DIM), complex=True),
    "nnx.LinearGeneral": Example(
        of_nnx("LinearGeneral", (2, DIM), (2, DIM), axis=(-2, -1)),
        (2, DIM),
        complex=True,
    ),
    "nnx.LoRA": Example(partial(nnx_lora), rate=0.1, complex=True),
    "nnx.LoRALinear": Example(partial(nnx_lora_linear), rate=0.1, complex=True),
    "nnx.MultiHeadAttention": Example(of_nnx("MultiHeadAttention", 2, DIM, decode=False), SEQUENCE),
    "nnx.OptimizedLSTMCell": Example(nnx_cell("OptimizedLSTMCell"), TWO_CARRIES),
    "nnx.PReLU": Example(lambda dtype: lambda rngs: nnx.PReLU(0.1, **dtypes(dtype))),
    "nnx.RMSNorm": Example(of_nnx("RMSNorm", DIM)),
    "nnx.RNN": Example(partial(nnx_rnn), SEQUENCE),
    "nnx.RoPE": Example(  # from Flax 0.12.12 on
        lambda dtype: lambda rngs: nnx.RoPE(embedding_size=DIM, max_seq_len=3), SEQUENCE
    ),
    "nnx.Sequential": Example(partial(nnx_sequential), complex=True),
    "nnx.SimpleCell": Example(nnx_cell("SimpleCell"), CARRY),
    "nnx.SpectralNorm": Example(partial(functools.partial(nnx_around, "SpectralNorm")), refused=WRITES),
    "nnx.WeightNorm": Example(partial(functools.partial(nnx_around, "WeightNorm")), refused=WRITES),
    "linen.BatchNorm": Example(
        of_linen("BatchNorm", momentum=0.9),
        train=dict(use_running_average=False),
        evaluate=dict(use_running_average=True),
        is_batch_norm=True,
    ),
    "linen.Bidirectional": Example(
        lambda dtype: linen.Bidirectional(
            linen.RNN(linen.GRUCell(DIM, **recurrent(dtype))),
            linen.RNN(linen.GRUCell(DIM, **recurrent(dtype))),
            merge_fn=lambda a, b: a + b,
        ),
        SEQUENCE,
    ),
    "linen.Conv": Example(of_linen("Conv", DIM, (3,)), SEQUENCE, complex=True),
    "linen.ConvLSTMCell": Example(linen_cell("ConvLSTMCell", kernel_size=(3,)), ((SEQUENCE, SEQUENCE), SEQUENCE)),
    "linen.ConvLocal": Example(of_linen("ConvLocal", DIM, (3,)), SEQUENCE),
    "linen.ConvTranspose": Example(of_linen("ConvTranspose", DIM, (3,)), SEQUENCE, complex=True),
    "linen.Dense": Example(of_linen("Dense", DIM), complex=True),
    "linen.DenseGeneral": Example(of_linen("DenseGeneral", (2, DIM), axis=(-2, -1)), (2, DIM), complex=True),
    "linen.Dropout": Example(
        lambda dtype: linen.Dropout(0.0),
        train=dict(deterministic=False),
        evaluate=dict(deterministic=True),
        complex=True,
    ),
    "linen.Einsum": Example(of_linen("Einsum", (DIM, DIM), "bi,io->bo"), complex=True),
    "linen.Embed": Example(of_linen("Embed", 7, DIM), (), num_tokens=7, keeps_shape=False, complex=True),
    "linen.Fp8DirectDotGeneralOp": fp8("Fp8DirectDotGeneralOp"),
    "linen.Fp8DotGeneral": fp8("Fp8DotGeneral"),
    "linen.Fp8DotGeneralOp": fp8("Fp8DotGeneralOp"),
    "linen.Fp8Einsum": Example(lambda dtype: Fp8Product(), refused=FP8),
    "linen.GRUCell": Example(linen_cell("GRUCell"), CARRY),
    "linen.GroupNorm": Example(of_linen("GroupNorm", 2), SEQUENCE),
    "linen.InstanceNorm": Example(of_linen("InstanceNorm"), SEQUENCE),
    "linen.LSTMCell": Example(linen_cell("LSTMCell"), TWO_CARRIES),
    "linen.LayerNorm": Example(of_linen("LayerNorm")),
    "linen.MGUCell": Example(linen_cell("MGUCell"), CARRY),
    "linen.MultiHeadAttention": Example(of_linen("MultiHeadAttention", 2), SEQUENCE),
    "linen.MultiHeadDotProductAttention": Example(of_linen("MultiHeadDotProductAttention", 2), SEQUENCE),
    "linen.NANOOFp8DotGeneralOp": fp8("NANOOFp8DotGeneralOp"),
    "linen.OptimizedLSTMCell": Example(linen_cell("OptimizedLSTMCell"), TWO_CARRIES),
    "linen.PReLU": Example(lambda dtype: linen.PReLU(dtype, 0.1)),
    "linen.RMSNorm": Example(of_linen("RMSNorm")),
    "linen.RNN": Example(lambda dtype: linen.RNN(linen.GRUCell(DIM, **recurrent(dtype))), SEQUENCE),
    "linen.SelfAttention": Example(of_linen("SelfAttention", 2), SEQUENCE),
    "linen.Sequential": Example(
        lambda dtype: linen.Sequential(
            [
                linen.Dense(DIM, **dtypes(dtype)),
                jnp.tanh,
                linen.Dense(DIM, **dtypes(dtype)),
            ]
        ),
        complex=True,
    ),
    "linen.SimpleCell": Example(linen_cell("SimpleCell"), CARRY),
    "linen.SpectralNorm": Example(
        lambda dtype: linen.SpectralNorm(linen.Dense(DIM, **dtypes(dtype)), **dtypes(dtype)),
        train=dict(update_stats=True),
        evaluate=dict(update_stats=False),
    ),
    "linen.WeightNorm": Example(lambda dtype: linen.WeightNorm(linen.Dense(DIM, **dtypes(dtype)), **dtypes(dtype))),
}
"""Of every class of every release but `NO_LAYERS`."""

EXAMPLES = {name: e for name, e in ALL_EXAMPLES.items() if name in CLASSES}
