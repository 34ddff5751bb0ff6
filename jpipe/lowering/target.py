"""The facts of a platform: one named fact for each difference of a step, and its reason.

A decision about a platform stands here and nowhere else. To try another one, change a fact and compare what
`benchmarks/program_text.py --guard` prints.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

_GRAPH_COMMANDS = (
    "FUSION",
    "CUBLAS",
    "CUBLASLT",
    "CUDNN",
    "CONVOLUTION",
    "CUSTOM_CALL",
    "CONDITIONAL",
    "DYNAMIC_SLICE_FUSION",
    "WHILE",
)
# JAX 0.12 and later exchange small arrays in a kernel of XLA, which is a command of its own; others are NCCL's.
_COLLECTIVE_COMMANDS = ("COLLECTIVES", *["COLLECTIVES_KERNEL"] * (jax.__version_info__ >= (0, 12)))


@dataclasses.dataclass(frozen=True)
class Target:
    """The facts of a platform.

    Attributes:
      switches: whether a device chooses between the programs of an operation, and an idle branch, by one `lax.switch`.
        Else each program has a `lax.cond`, which keeps buffers in place on CPUs and TPUs. See `jpipe.engine.guard`.
      touches_idle: whether a branch writes an element of each large buffer that it does not change, because XLA would
        copy the buffer.
      loops_in_branches: whether branches hold loops. A GPU waits for the host before every turn.
      joins_writes: whether small values that lie side by side are written at once. A GPU starts a kernel for each
        write.
      indices_outside: whether branches get indices from outside. XLA for GPUs adds in place only at an index that it
        does not know.
      updates_between_ticks: whether a tick begins with the update of the tick before. XLA for GPUs begins no transfer
        before an update that most ticks leave out.
      updates_in_every_tick: whether a small update runs in all ticks, where a branch cannot hold its sum. The host
        decides about a conditional with a collective that is not part of a CUDA graph.
      holds_small_sums: whether a branch can hold the sum of a few numbers over devices of one node. XLA has a kernel
        for such sums, which is part of a CUDA graph as other kernels are.
      drops_branches: whether a lane that is busy in all ticks has no branch. On CPUs and TPUs the branch keeps buffers
        in place.
      casts_once: whether weights are cast once for all microbatches between two updates, and not in each forward and
        backward. A GPU runs casts as kernels of their own. XLA for TPUs moves them out of the loop over layers: each
        forward and backward casts the weights of the whole stage, in all versions.
      orders_weights: whether each of these copies has the order of dims in which layers read the weight, see
        `jpipe.layers.read_orders`. A GPU transposes others by kernels of their own, in each forward and backward.
      gathers_first_once: whether those of these copies that a pass reads first are whole along the axis "fsdp". XLA for
        GPUs begins no gather before the branch that needs it, and so computes nothing meanwhile.
      sums_apart: whether the sum of the gradient of each large weight is an array of its own between updates. cuBLAS
        adds a product to a whole array in place.
      few_arrays: whether leaves of one dtype share an array if they can. A branch has to touch each array that only
        other branches write.
      ends_apart: whether the first and the last stage have programs of their own, so that no branch handles messages
        that it does not have.
      pairs_passes: whether the forward and the backward of a tick run in one branch, if the table lets them and layers
        communicate. XLA moves a collective under the products of its own branch alone.
      hides_sums: whether XLA also moves sums under products. For a TPU it writes them as one operation.
      receives_in_branches: whether a device leaves out the messages of a tick that are for others, if they are many. A
        GPU starts a kernel for each.
      flops_per_byte: the FLOPs that take as long as a byte that is written to or read from memory: see
        `jpipe.layers.residuals`.
      compares_results: whether the derivative of a ReLU reads its result, see `jpipe.layers.rectified`. A GPU computes
        the result of another stash again by a kernel of its own.
      sums_by_permutes: whether copies of a stage add up in a ring of permutes, which a TPU sends between neighbours.
      compiler_options: options of XLA, for `jax.jit`.
      pair_options: options that come on top of them where both passes run in one branch.
      collective_options: options that come on top of them where branches hold collectives.
      profiled_options: options that come on top of them in a step that a profiler watches.
    """

    switches: bool = False
    touches_idle: bool = False
    loops_in_branches: bool = True
    joins_writes: bool = False
    indices_outside: bool = False
    updates_between_ticks: bool = False
    updates_in_every_tick: bool = False
    holds_small_sums: bool = False
    drops_branches: bool = False
    casts_once: bool = False
    orders_weights: bool = False
    gathers_first_once: bool = False
    sums_apart: bool = False
    few_arrays: bool = False
    ends_apart: bool = False
    receives_in_branches: bool = False
    sums_by_permutes: bool = False
    pairs_passes: bool = False
    hides_sums: bool = True
    flops_per_byte: float = 0.0
    compares_results: bool = False
    compiler_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    pair_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    collective_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    profiled_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


# Measured with attention of 512 positions in float32, which then keeps a third less: a step takes as long with 64
# numbers per head, and 2 % longer with 128.
CPU = Target(flops_per_byte=200)

# Products in bfloat16, of v4 to v5e: 275 TFLOPS at 1.2 TB/s, 197 TFLOPS at 0.8 TB/s.
TPU = Target(
    sums_by_permutes=True,
    casts_once=True,
    flops_per_byte=240,
    pairs_passes=True,
    hides_sums=False,
    # By default an all-to-all of a TPU has no start and no done.
    pair_options={"xla_tpu_enable_async_all_to_all": True},
)

GPU = Target(
    switches=True,
    # Products in bfloat16 of an H100: 989 TFLOPS at 3.35 TB/s.
    flops_per_byte=300,
    compares_results=True,
    # XLA copies every buffer that a branch passes through.
    touches_idle=jax.__version_info__ < (0, 12),
    loops_in_branches=False,
    joins_writes=True,
    indices_outside=True,
    updates_between_ticks=True,
    updates_in_every_tick=True,
    holds_small_sums=jax.__version_info__ >= (0, 12),
    drops_branches=True,
    casts_once=True,
    orders_weights=True,
    gathers_first_once=True,
    # A branch that touches all of its arrays would touch each of these.
    sums_apart=jax.__version_info__ >= (0, 12),
    few_arrays=True,
    ends_apart=True,
    receives_in_branches=True,
    pairs_passes=True,
    compiler_options={
        # Buffers stay in place where live ranges are analysed by region.
        "xla_gpu_copy_insertion_use_region_analysis": True,
        # A conditional is one command. By default XLA makes no CUDA graph of so few.
        "xla_gpu_graph_min_graph_size": 1,
        # All messages of a tick travel at the same time.
        "xla_gpu_collective_permute_combine_threshold_bytes": 0,
        "xla_gpu_experimental_parallel_collective_overlap_limit": 8,
        # XLA's default, and WHILE and CONVOLUTION: an update is a conditional with loops inside, and stages
        # have convolutions.
        "xla_gpu_enable_command_buffer": ",".join(_GRAPH_COMMANDS),
    },
    # The host decides about a branch that is not part of a CUDA graph, and so is one with a collective that is not. The
    # messages of a tick are part of its graph then, beside the operations that they travel under.
    collective_options={
        "xla_gpu_enable_command_buffer": ",".join([*_GRAPH_COMMANDS, *_COLLECTIVE_COMMANDS]),
        # Sums of gradients that XLA combines wait for the last of these, and for room for all of them.
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**23,
        # XLA counts those of a branch too, and begins no message beside a branch that holds more than the limit.
        "xla_gpu_experimental_parallel_collective_overlap_limit": 1024,
    },
    # The kernels of a CUDA graph have no names of instructions in a profile.
    profiled_options={"xla_gpu_enable_command_buffer": ""},
)

TARGETS = {"cpu": CPU, "tpu": TPU, "gpu": GPU}
"""Platform -> its facts."""


def target_of(platform: str) -> Target:
    """The facts of a platform. Platforms other than CPUs and TPUs, such as "cuda" and "rocm", have those of GPUs."""
    return TARGETS.get(platform, TARGETS["gpu"])
