"""The timeline of any jitted function, from its compiled program."""

import dataclasses
from typing import Any

import jax

from jpipe._util.hlo import Allocation, HloProgram, HloValue, program_of, short
from jpipe.memory._block import Access, Block
from jpipe.memory._timeline import Timeline, idle_blocks


def memory_timeline(f: Any, *args: Any, **kwargs: Any) -> Timeline:
    """Every array of one call of a function: arguments, results and temporaries. Runs nothing.

    The axis counts instructions in the order in which the compiled program runs them. The body of a loop and the
    branches of a conditional stand in it once each.

    Args:
      f: a function of `jax.jit`, or a function that is then jitted.
      *args: its arguments, or abstract arrays.
      **kwargs: its keyword arguments, or abstract arrays.

    Returns:
      A `Timeline`. The name of a temporary has the operation and the line of code that it comes from.

    Raises:
      ValueError: if the compiler of the platform does not say where it puts values. XLA for CPUs does, libtpu does not.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
      >>> timeline = memory_timeline(lambda x: jnp.tanh(x @ x) @ x, x)
      >>> timeline.peak_used  # the argument, the product, the result
      786432
    """
    jitted = f if hasattr(f, "lower") else jax.jit(f)
    compiled = jitted.lower(*args, **kwargs).compile()
    program = program_of(compiled)
    if program is None:
        shardings = jax.tree.leaves(compiled.output_shardings)
        platforms = {d.platform for s in shardings for d in s.device_set}
        raise ValueError(
            "`memory_timeline` needs to know where the compiler puts every value, and the compiler for "
            f"{', '.join(sorted(platforms))} does not say. "
            'Compile for CPUs: `with jax.default_device(jax.devices("cpu")[0]):` around the call.'
        )
    blocks: list[Block] = []
    period = float(len(program.order))
    for number, allocation in enumerate(program.allocations):
        if allocation.parameter is not None:
            blocks.append(_argument(allocation, program))
        elif allocation.is_result:
            blocks += _result_blocks(allocation, number, period)
        elif allocation.is_temporary:
            listed = [_block(v, "temporary") for v in allocation.values if v.num_bytes]
            free = idle_blocks(f"temporaries {number}", allocation.num_bytes, listed, period)
            blocks += [*listed, *free]
    name = getattr(f, "__name__", type(f).__name__)
    return Timeline(tuple(blocks), period, "instructions", name)


def _argument(allocation: Allocation, program: HloProgram) -> Block:
    """An argument lives all the time; a donated one holds a result in the end."""
    entry = [
        instruction
        for instruction in program.order
        if instruction.opcode == "parameter"
        and instruction.parameter == allocation.parameter
        and not program.enclosing(program.position[instruction.id])
    ]
    name = entry[0].op_name or entry[0].name if entry else f"{allocation.parameter}"
    accesses = {
        (float(t), kind)
        for value in allocation.values
        for kind, times in (("write", value.writes), ("read", value.reads))
        for t in times
    }
    return Block(
        f"argument {name}",
        "argument",
        allocation.num_bytes,
        0.0,
        float(len(program.order)),
        tuple(Access(*a) for a in sorted(accesses)),
    )


def _result_blocks(allocation: Allocation, number: int, period: float) -> list[Block]:
    """The values in an allocation that leaves the function: it may hold temporaries before the result."""
    listed = [_block(value, "temporary") for value in allocation.values]
    last = max(range(len(listed)), key=lambda i: listed[i].freed)
    listed[last] = dataclasses.replace(listed[last], use="result", freed=period)
    free = idle_blocks(f"result {number}", allocation.num_bytes, listed, period)
    return [*listed, *free]


def _block(value: HloValue, use: str) -> Block:
    instruction = value.instruction
    name = f"{short(instruction.op_name)} ({instruction.name})"
    if instruction.source:
        name += f" at {instruction.source}"
    accesses = [(float(t), "write") for t in value.writes]
    accesses += [(float(t), "read") for t in value.reads]
    return Block(
        name,
        use,
        value.num_bytes,
        float(value.start),
        float(value.end),
        tuple(Access(*a) for a in sorted(accesses)),
    )
