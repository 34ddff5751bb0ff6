"""Programs that run a few times: XLA compiles them quickly rather than well."""

from collections.abc import Callable
from typing import Any

import jax
import jaxlib

from jpipe.layers.equations import Equations, is_traced_on_mesh

_HAS_OLDER_EMITTERS = jaxlib.version.__version_info__ < (0, 11)
"""True if XLA for CPUs can still emit kernels without MLIR."""


_MANY_NUMBERS = 2**21
"""Results of a program from which its optimisation is faster than its run without.

One random number takes 0.2 us without optimisation and 0.03 us at level 1, which compiles 0.4 s longer.
"""


def quick_options(platform: str, num_numbers: int = 0) -> dict[str, Any] | None:
    """Options of XLA for a program that takes longer to compile than to run, for `jax.jit`.

    XLA for CPUs takes up to ten times longer to optimise random initialisers than to run them. Its older emitters
    take half the time of those with MLIR. The results differ by rounding at most.

    Args:
      platform: the platform of the devices that run the function.
      num_numbers: the number of numbers that the function computes.
    """
    if platform != "cpu":
        return None
    level = 0 if num_numbers < _MANY_NUMBERS else 1
    options: dict[str, Any] = {"xla_backend_optimization_level": level}
    if _HAS_OLDER_EMITTERS:  # later versions refuse the option
        options["xla_cpu_use_fusion_emitters"] = False
    return options


def shared_jit(platform: str) -> Callable[[Callable, Any], Any]:
    """A function `(function, argument) -> function(argument)` that compiles equal programs once.

    Programs are equal if they do the same with the leaves of their arguments, whatever the trees are.

    Args:
      platform: the platform of the devices that run the function.
    """
    compiled: dict[tuple, Callable] = {}

    def call(function: Callable, argument: Any) -> Any:
        trees = []
        leaves, tree = jax.tree.flatten(argument)

        def flat(*leaves: jax.Array) -> list:
            results, result_tree = jax.tree.flatten(function(tree.unflatten(leaves)))
            trees.append(result_tree)
            return results

        # JAX uses a trace of a jitted function again only under the same default device.
        with jax.default_device(None):
            traced = jax.jit(flat).trace(*leaves)
        # A compiled program is that of one device.
        equations = Equations.of(traced.jaxpr)
        program = equations.text(), jax.config.jax_default_device
        if program not in compiled:
            size = sum(aval.size for aval in traced.jaxpr.out_avals)
            options = quick_options(platform, size)
            if is_traced_on_mesh(traced.jaxpr):
                traced = jax.jit(equations.__call__).trace(*leaves)
            compiled[program] = traced.lower().compile(compiler_options=options)
        return trees[0].unflatten(compiled[program](*leaves))

    return call
