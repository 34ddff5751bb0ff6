"""Mixtures of experts: a router sends each position to a few of many MLPs.

`Mixture` takes the place of an MLP. Where the axes of a mesh split both the rows and the dims named "expert", each
device has some of the experts. It sends a position to the devices of its experts, and gets their results back: two
all-to-alls in the forward, and two in the backward. The layer's weights are never gathered. `MixtureTransformer` is the
transformer of `models/transformer.py` with mixtures.

Letters: B batch, T positions, D width, F hidden units of an expert, E experts, K experts of a position, P devices that
exchange, n positions of a device.

References:
  Shazeer et al., "Outrageously Large Neural Networks", 2017, arXiv:1701.06538.
  Lepikhin et al., "GShard", 2020, arXiv:2006.16668 (capacity, groups).
  Fedus et al., "Switch Transformers", 2021, arXiv:2101.03961 (the loss that balances loads).
  Zoph et al., "ST-MoE", 2022, arXiv:2202.08906 (z-loss).
  Gale et al., "MegaBlocks", 2022, arXiv:2211.15841 (no position is dropped).
  Wang et al., "Auxiliary-Loss-Free Load Balancing", 2024, arXiv:2408.15664 (the bias).
  DeepSeek-AI, "DeepSeek-V3", 2024, arXiv:2412.19437, section 2.1.2 (shared experts, the loss of each sequence).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

import jpipe
from models import checks, experts
from models.losses import CrossEntropy, Mean
from models.sharding import axes_of, if_divides, named
from models.sublayers import FeedForward
from models.transformer import _KERNEL, Block, Transformer


class RouterState(nnx.Variable):
    """State of a router that moves once per minibatch."""


class Statistics(NamedTuple):
    """What a router did with each sequence.

    Attributes:
      load: `[B, E]`, the share of the choices of a sequence that went to each expert. Their sum is 1.
      score: `[B, E]`, the mean share of each expert in the scores.
      z: `[B]`, the mean of the squared log of the sum of all exponentials of logits.
      dropped: `[B]`, the share of the choices that was dropped.
    """

    load: jax.Array
    score: jax.Array
    z: jax.Array
    dropped: jax.Array

    def mean_over(self, axes: tuple[str, ...]) -> "Statistics":
        """The means over axes of a mesh that split the positions."""
        return self if not axes else Statistics(*(lax.pmean(value, axes) for value in self))


@dataclasses.dataclass(frozen=True)
class Router:
    """How the experts of a position are chosen.

    Attributes:
      num_chosen: K.
      scores: "softmax" over all experts, or "sigmoid" of each logit.
    """

    num_chosen: int
    scores: Literal["softmax", "sigmoid"]

    def __call__(
        self, x: jax.Array, kernel: jax.Array, bias: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, Statistics]:
        """The experts of each position.

        All is computed in float32: in bfloat16 scores of many experts are equal after rounding.

        Args:
          x: `[B, T, D]`.
          kernel: `[D, E]`.
          bias: `[E]`, is added to the scores for the choice alone; None for none.

        Returns:
          `chosen` `[B, T, K]` int32, the best first; `gates` `[B, T, K]`, the weights of their results; statistics.
        """
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        logits = jnp.einsum("btd,de->bte", x.astype(dtype), kernel.astype(dtype), precision=lax.Precision.HIGHEST)
        scores = jax.nn.softmax(logits) if self.scores == "softmax" else jax.nn.sigmoid(logits)
        preferred = scores if bias is None else scores + bias.astype(dtype)[None, None]
        _, chosen = lax.top_k(lax.stop_gradient(preferred), self.num_chosen)
        gates = jnp.take_along_axis(scores, chosen, axis=-1)
        if self.num_chosen > 1:  # the gate of one expert would be 1, and the router would learn nothing
            gates = gates / gates.sum(-1, keepdims=True)
        share = scores / scores.sum(-1, keepdims=True)
        load = jax.nn.one_hot(chosen, kernel.shape[1], dtype=dtype).mean((1, 2))
        z = jnp.square(jax.nn.logsumexp(logits, axis=-1)).mean(1)
        return chosen, gates, Statistics(load, share.mean(1), z, jnp.zeros_like(z))


class Mixture(nnx.Module):
    """A mixture of experts in the place of an MLP. An expert is two matrices with GELU between.

    With a capacity an expert takes at most `ceil(capacity * K * T / E)` choices of a *group*. A group is one sequence
    (with an axis of the mesh for positions: its part on one device), so what is dropped does not depend on
    microbatches, replicas or devices. Earlier positions come first, and of one position its better choices, so no
    position depends on a later one. A dropped choice adds nothing to the result.

    In training it reports (`jpipe.report`), each as a mean over the sequences of a microbatch:

    - `router_balance`: E times the sum over experts of the load and the mean score of a sequence, 1 at best;
    - `router_z`: the squared log of the sum of exponentials;
    - `router_dropped`: the share of the choices that was dropped;
    - `router_excess`: the largest load of an expert in a microbatch, divided by the mean load, minus 1.

    Attributes:
      load: `[E]`, the share of the choices of the last minibatch that went to each expert.
      bias: `[E]`, what is added to the scores for the choice; None without `bias_rate`. After each minibatch it grows
        by the rate for experts with less than the mean load, and shrinks by it for those with more.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        num_experts: int,
        num_chosen: int,
        *,
        capacity: float | None = None,
        num_shared: int = 0,
        scores: Literal["softmax", "sigmoid"] = "softmax",
        bias_rate: float = 0.0,
        kernel_init: nnx.Initializer = _KERNEL,
        out_init: nnx.Initializer = _KERNEL,
        rngs: nnx.Rngs,
    ):
        """
        Args:
          dim: D.
          hidden: F.
          num_experts: E.
          num_chosen: K.
          capacity: the capacity factor; None: no choice is dropped.
          num_shared: experts that every position goes to, as one MLP of so many times F hidden units.
          scores: see `Router`.
          bias_rate: see above.
          kernel_init, out_init: of the first matrix of an expert and the router, and of the second one.
          rngs: the random keys.
        """
        self.router = Router(num_chosen, scores)
        self.num_experts, self.capacity, self.bias_rate = num_experts, capacity, bias_rate
        self.deterministic = False

        def weight(init: nnx.Initializer, shape: tuple[int, ...], *names: str | None) -> nnx.Param:
            return nnx.Param(named(init, *names)(rngs.params(), shape, jnp.float32))

        self.kernel = weight(kernel_init, (dim, num_experts), None, None)
        self.experts_in = weight(kernel_init, (num_experts, dim, hidden), "expert", "embed", "mlp")
        self.experts_out = weight(out_init, (num_experts, hidden, dim), "expert", "mlp", "embed")
        self.shared = (
            FeedForward(dim, num_shared * hidden, nnx.gelu, kernel_init=kernel_init, rngs=rngs) if num_shared else None
        )
        self.load = RouterState(jnp.full(num_experts, 1 / num_experts))
        self.bias = RouterState(jnp.zeros(num_experts)) if bias_rate else None

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, D]
        weights = self.kernel[...], self.experts_in[...], self.experts_out[...]
        bias = None if self.bias is None else self.bias[...]
        split = Split.of(x.shape, self.experts_in.shape)
        y, statistics = split.mapped(self._routed)(x, *weights, bias)
        load = statistics.load.mean(0)
        balance = self.num_experts * (statistics.load * statistics.score).sum(-1).mean()
        jpipe.report("router_balance", balance)
        jpipe.report("router_z", statistics.z.mean())
        jpipe.report("router_dropped", statistics.dropped.mean())
        jpipe.report("router_excess", lax.stop_gradient(load.max() * self.num_experts - 1))
        if not self.deterministic:
            self._move(load)
        return y if self.shared is None else y + self.shared(x)

    def _routed(self, split: "Split", x: jax.Array, *weights: Any) -> tuple[jax.Array, Statistics]:
        """The routed experts, on the positions `[b, t, D]` of a device."""
        kernel, experts_in, experts_out, bias = weights
        chosen, gates, statistics = self.router(x, kernel, bias)
        run = functools.partial(experts.dropless, exchange=split.expert)
        if self.capacity is not None:
            most = math.ceil(self.capacity * chosen.shape[1] * chosen.shape[2] / self.num_experts)
            run = functools.partial(experts.with_capacity, exchange=split.expert, most=most)
        y, dropped = run(x, chosen, gates.astype(x.dtype), experts_in, experts_out)
        if split.hidden:  # a device has a part of the hidden units of each expert
            y = lax.psum(y, split.hidden)
        statistics = statistics._replace(dropped=dropped.astype(statistics.z.dtype))
        return y, statistics.mean_over(split.length)

    def _move(self, load: jax.Array) -> None:
        """Moves the state after a minibatch."""
        load = jpipe.minibatch_mean(load).astype(self.load.dtype)
        self.load[...] = load
        if self.bias is not None:
            self.bias[...] += self.bias_rate * jnp.sign(1 / self.num_experts - load)


class Split(NamedTuple):
    """The axes of a mesh that split a mixture, by the names of the dims.

    Attributes:
      batch, length, expert, hidden: of rows, positions, experts and hidden units.
    """

    batch: tuple[str, ...]
    length: tuple[str, ...]
    expert: tuple[str, ...]
    hidden: tuple[str, ...]

    @classmethod
    def of(cls, shape: tuple[int, ...], experts: tuple[int, ...]) -> "Split":
        """The axes by the rules that are in force. A dim that its axes do not divide is whole.

        Args:
          shape: `[B, T, D]` of the positions.
          experts: `[E, D, F]` of the first matrices.

        Raises:
          ValueError: if experts are split over axes that split no rows.
        """
        batch, length, expert, hidden = map(axes_of, ("batch", "length", "expert", "mlp"))
        hidden = tuple(name for name in hidden if name not in expert)
        # Devices that have parts of the hidden units of an expert need the same positions.
        length = tuple(name for name in length if name not in (*hidden, *batch))
        alone = [name for name in expert if name not in (*batch, *length)]
        if alone:
            raise ValueError(
                f'the rules split experts over {alone[0]!r}, which splits no rows: the devices of "expert" exchange '
                'rows. Split experts over "expert", or over "fsdp" by the rule `("expert", "fsdp")`.'
            )
        split = cls(*(if_divides(*pair) for pair in zip((batch, length, expert, hidden), (*shape[:2], *experts[::2]))))
        if not set(split.expert) <= {*split.batch, *split.length}:
            split = split._replace(expert=())
        return split

    def mapped(self, run: Callable) -> Callable:
        """`run(split, x, kernel, experts_in, experts_out, bias)` for each device; as it is without a split."""
        run = functools.partial(run, self)
        if not any(self):
            return run
        batch, length, expert, hidden = (axes or None for axes in self)
        weights = PartitionSpec(expert, None, hidden), PartitionSpec(expert, hidden, None)
        rows = PartitionSpec(batch)
        return jax.shard_map(
            run,
            in_specs=(PartitionSpec(batch, length), PartitionSpec(), *weights, PartitionSpec()),
            out_specs=(PartitionSpec(batch, length), Statistics(rows, rows, rows, rows)),
        )


# -- A transformer


class MixtureBlock(Block):
    """A block of the transformer whose MLP is a mixture.

    Its `mixture` is given as a factory: `mixture(dim, out_init=..., rngs=...)`.
    """

    def __init__(self, mixture: Callable[..., Mixture], *args: Any, rngs: nnx.Rngs):
        self._mixture = mixture
        super().__init__(*args, rngs=rngs)

    def _make_mlp(self, dim: int, residual: nnx.Initializer, rngs: nnx.Rngs) -> None:
        self.mixture = self._mixture(dim, out_init=residual, rngs=rngs)

    def _mlp(self, x: jax.Array) -> jax.Array:
        return self.mixture(x)


@dataclasses.dataclass(frozen=True)
class MixtureLoss(CrossEntropy):
    """Cross-entropy, plus the losses of the routers; reports the accuracy and the statistics of the routers.

    The statistics are means over the mixtures. An evaluation has none.
    """

    num_mixtures: int = 1
    balance_weight: float = 0.0
    z_weight: float = 0.0

    def __call__(
        self, outputs: jax.Array, batch: Mapping[str, Any], *, reported: Mapping[str, jax.Array]
    ) -> tuple[Mean, dict[str, jax.Array]]:
        mean, values = super().__call__(outputs, batch)
        means = {name: value / self.num_mixtures for name, value in reported.items()}
        added = self.balance_weight * means["router_balance"] + self.z_weight * means["router_z"]
        if isinstance(mean, tuple):
            return (mean[0] + added, mean[1]), values | means
        return mean + added, values | means

    def statistics(self, averages: Mapping[str, Any]) -> dict[str, float]:
        return {name: float(value) for name, value in averages.items() if name.startswith("router_")}


@dataclasses.dataclass(frozen=True)
class MixtureTransformer(Transformer):
    """A decoder-only transformer whose MLPs are mixtures of experts."""

    num_experts: int = 8
    """Experts E of each block."""
    num_chosen: int = 2
    """Experts K that each position goes to."""
    expert_dim: int = 256
    """Hidden units F of an expert."""
    num_shared: int = 0
    """Experts that every position goes to, beside those that are chosen."""
    capacity: float | None = None
    """The capacity factor: an expert takes at most this times the mean number of choices of a
    sequence, and others are dropped. None: none is dropped."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """Scores of the experts: a softmax over all, or a sigmoid for each."""
    balance_weight: float = 0.01
    """Weight of the loss that balances the loads of experts."""
    z_weight: float = 0.001
    """Weight of the loss that keeps the logits of routers small."""
    bias_rate: float = 0.0
    """What the bias of an expert moves by after each minibatch, against its load. 0: no bias."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.at_least_one(self, "num_experts", "num_chosen", "expert_dim")
        checks.one_of(self, "scores")
        if self.num_chosen > self.num_experts:
            raise ValueError(
                f"`num_chosen` must be at most `num_experts` ({self.num_experts}), got {self.num_chosen}. Change "
                "either."
            )
        if self.capacity is not None and self.capacity <= 0:
            raise ValueError(f"`capacity` must be above 0, got {self.capacity}. 1.25 is usual; none drops nothing.")
        for name in ("num_shared", "balance_weight", "z_weight", "bias_rate"):
            if getattr(self, name) < 0:
                raise ValueError(f"`{name}` must be at least 0, got {getattr(self, name)}.")

    def layers(self) -> list[Callable[..., nnx.Module]]:
        """One factory per layer: the embedding, each block, the head."""
        first, *blocks, last = super().layers()
        mixture = functools.partial(
            Mixture,
            hidden=self.expert_dim,
            num_experts=self.num_experts,
            num_chosen=self.num_chosen,
            capacity=self.capacity,
            num_shared=self.num_shared,
            scores=self.scores,
            bias_rate=self.bias_rate,
        )
        block = functools.partial(MixtureBlock, mixture, self.dim, self.num_heads, self.num_blocks, self.dropout)
        return [first, *[block] * len(blocks), last]

    def loss(self) -> MixtureLoss:
        """Cross-entropy of the next tokens, and the losses of the routers."""
        return MixtureLoss(self.num_blocks, self.balance_weight, self.z_weight)
