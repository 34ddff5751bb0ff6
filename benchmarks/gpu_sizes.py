"""Sizes of the model of `gpu.py`, its FLOPs, and the peak rates of devices. It needs no JAX."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the model, of the minibatch and of the measurement."""

    dim: int = 1024
    heads: int = 16
    blocks: int = 24
    vocab: int = 32768
    positions: int = 1024
    microbatches: int = 4
    microbatch_size: int = 4
    rounds: int = 8
    steps: int = 4
    """Timed steps per round."""

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.positions * self.microbatches * self.microbatch_size


REHEARSAL = Sizes(
    dim=64,
    heads=4,
    blocks=2,
    vocab=128,
    positions=32,
    microbatches=2,
    microbatch_size=2,
    rounds=2,
    steps=2,
)


def model_flops(sizes: Sizes) -> int:
    """FLOPs of the model per step, without those of recomputation.

    The formula per token is 6 N + 12 L D T, with L blocks, the width D and T positions:

    - N counts the weights of matrix products: 12 D^2 per block, and D V in the head of V tokens.
      Each weight is multiplied and added once in the forward and twice in the backward. Embeddings,
      biases and norms take part in no product.
    - Attention multiplies queries with keys, and probabilities with values. Both products together
      are 2 T D multiplications and additions per block in the forward, and twice as many in the
      backward. The half that the causal mask hides is counted, as in the source.

    Args:
      sizes: of the model and of the minibatch.

    Returns:
      The FLOPs of all microbatches.

    Example:
      >>> round(model_flops(Sizes()) / 1e12, 1)
      37.9

    References:
      Chowdhery et al., PaLM, 2022, arXiv:2204.02311, appendix B.
    """
    weights = 12 * sizes.dim**2 * sizes.blocks + sizes.dim * sizes.vocab
    attention = 12 * sizes.blocks * sizes.dim * sizes.positions
    return sizes.tokens * (6 * weights + attention)


# -- Devices

# Dense bfloat16 products with sums in float32, FLOPs per second, by the name of the device. Another
# name may be another chip, or a part of one, so it has no entry. Sources: the white paper "NVIDIA
# H100 Tensor Core GPU Architecture", table of peak rates (A100, H100 SXM5, H100 PCIe), and the data
# sheet of the H200, whose 1,979 TFLOPS "with sparsity" are twice the dense rate.
PEAK_FLOPS = {
    "NVIDIA H200": 989.4e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,  # SXM5
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
}


def peak_flops(device: str) -> float | None:
    """FLOPs per second of dense bfloat16 products; None for an unknown device.

    Example:
      >>> peak_flops("NVIDIA H100 80GB HBM3") / 1e12, peak_flops("NVIDIA H100 NVL")
      (989.4, None)
    """
    return PEAK_FLOPS.get(device)
