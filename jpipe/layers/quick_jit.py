"""Programs that run a few times: XLA compiles them quickly rather than well."""

from collections.abc import Callable
from typing import Any

import jax
import jaxlib

from jpipe.layers.equations import Equations

_HAS_OLDER_EMITTERS = jaxlib.version.__version_info__ < (0, 11)
"""Whether XLA for CPUs can still emit kernels without MLIR."""


def quick_options(platform: str) -> dict[str, Any] | None:
    """Options of XLA for a program that takes longer to compile than to run, for `jax.jit`.

    XLA for CPUs takes up to ten times longer to optimise random initialisers than to run them. Its older emitters
    take half the time of those with MLIR. The results differ by rounding at most.

    Args:
      platform: of the devices that run it.
    """
    if platform != "cpu":
        return None
    options: dict[str, Any] = {"xla_backend_optimization_level": 0}
    if _HAS_OLDER_EMITTERS:  # later versions refuse the option
        options["xla_cpu_use_fusion_emitters"] = False
    return options


def shared_jit(platform: str) -> Callable[[Callable, Any], Any]:
    """A function `(function, argument) -> function(argument)` that compiles equal programs once.

    Programs are equal if they do the same with the leaves of their arguments, whatever the trees are.

    Args:
      platform: of the devices that run it.
    """
    compiled: dict[str, Callable] = {}
    options = quick_options(platform)

    def call(function: Callable, argument: Any) -> Any:
        trees = []
        leaves, tree = jax.tree.flatten(argument)

        def flat(*leaves: jax.Array) -> list:
            results, of_results = jax.tree.flatten(function(tree.unflatten(leaves)))
            trees.append(of_results)
            return results

        equations = Equations.trace(flat, *leaves)  # traces `function` once
        text = equations.text()
        if text not in compiled:
            compiled[text] = jax.jit(equations.__call__, compiler_options=options)
        return trees[0].unflatten(compiled[text](*leaves))

    return call
