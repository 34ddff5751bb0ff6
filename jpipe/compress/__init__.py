"""Compression of messages: activations between stages, gradients between replicas.

A compressor is a frozen dataclass. `Pipeline(compress_messages=..., compress_gradients=...)` takes it, and
`compress_gradients` makes an Optax transform of it. `Pipeline(accumulate_gradients=...)` takes a `StreamingPCA`.

compressor      what is sent                                                  what is lost
Cast            values in a smaller floating-point type                       rounding
Quantize        codes of 8 or 4 bits, one scale for each block                rounding
Threshold       the entries above a threshold that is computed now and then   the small entries
TopK            the largest entries of each array                             the small entries
PowerSGD        two factors of low rank, by a power iteration                 what is beyond the rank
StreamingPCA    leading singular vectors and values, by streaming updates     what is beyond the rank
"""

from jpipe.compress._cast import Cast
from jpipe.compress._compressor import (
    AlongAxis,
    Compressor,
    Replicas,
    SparseCompressor,
)
from jpipe.compress._optax import CompressionState, compress_gradients
from jpipe.compress._parse import parse
from jpipe.compress._powersgd import PowerSGD
from jpipe.compress._quantize import Quantize
from jpipe.compress._streaming_pca import Factors, StreamingPCA
from jpipe.compress._threshold import Threshold
from jpipe.compress._topk import TopK

__all__ = [
    "AlongAxis",
    "Cast",
    "CompressionState",
    "Compressor",
    "Factors",
    "PowerSGD",
    "Quantize",
    "Replicas",
    "SparseCompressor",
    "StreamingPCA",
    "Threshold",
    "TopK",
    "compress_gradients",
    "parse",
]
