"""A layer's forward, input-gradient and weight-gradient programs, out of `jax.vjp`.

A layer is traced once. Its forward and the backward that `jax.vjp` returns become two flat lists of
equations (calls are inlined), and everything else is read off those lists:

    parameters, inputs ──> forward ──> outputs
                              │ residuals
        ┌─────────────────────┴──────────────────────┐
        stash: depends on the inputs,                rebuilt: depends on the parameters alone,
        kept once per microbatch                     computed again from whichever weights the backward reads

    stash, rebuilt, output gradient ──> input_grad ──> input gradient
                                            │ crossing values
                                            └──> weight_grad ──> parameter gradients

`input_grad` holds exactly the backward equations that the input gradient needs, `weight_grad` the rest of
those the parameter gradients need, so no equation runs twice and both together are the whole backward; what
depends on the parameters alone is rebuilt by each half that reads it.

Under a checkpoint policy the residuals are what the policy saves and the layer's inputs, and the backward
begins with the forward equations that it runs again: of those too, none runs in both halves.

References: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, arXiv:2401.10241, section 2 (the split).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

# Calls, and the parameter that holds what they call. Nothing is differentiated after tracing, so custom
# derivative rules, which name Python functions by their address, and checkpoints have done their work.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "remat2": "jaxpr",
}


class OffloadError(ValueError):
    """A checkpoint policy would keep values in the memory of the host."""


def is_inexact(aval) -> bool:
    """Whether a leaf has a gradient."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)


@dataclasses.dataclass(frozen=True)
class Equations:
    """A straight-line piece of a jaxpr: evaluated, sliced and asked what depends on what."""

    constants: dict[Any, Any]
    inputs: tuple[Any, ...]
    equations: tuple[Any, ...]
    outputs: tuple[Any, ...]

    @classmethod
    def trace(cls, function: Callable, *avals) -> "Equations":
        """Traces `function`, of and to flat lists of arrays, with every call inlined."""
        closed = jax.make_jaxpr(function)(*avals)
        closed = jax.make_jaxpr(
            lambda *args: _inline(closed.jaxpr, closed.consts, args)
        )(*avals)
        jaxpr = closed.jaxpr
        constants = dict(zip(jaxpr.constvars, closed.consts))
        return cls(
            constants, tuple(jaxpr.invars), tuple(jaxpr.eqns), tuple(jaxpr.outvars)
        )

    def __call__(self, *args):
        env = {**self.constants, **dict(zip(self.inputs, args, strict=True))}
        for eqn in self.equations:
            env.update(
                zip(eqn.outvars, _bind(eqn, [_read(env, v) for v in eqn.invars]))
            )
        return [_read(env, v) for v in self.outputs]

    def slice(self, inputs: Sequence, outputs: Sequence) -> "Equations":
        """The equations that `outputs` need, computed from `inputs`."""
        needed, kept = set(_variables(outputs)) - set(inputs), []
        for eqn in reversed(self.equations):
            if needed.intersection(eqn.outvars):
                needed.difference_update(eqn.outvars)
                needed.update(set(_variables(eqn.invars)) - set(inputs))
                kept.append(eqn)
        constants = {v: c for v, c in self.constants.items() if v in needed}
        assert needed == set(constants), (
            f"{needed - set(constants)} cannot be computed from the inputs given"
        )
        return Equations(
            constants, tuple(inputs), tuple(reversed(kept)), tuple(outputs)
        )

    def parts(self, shared: Sequence[int]) -> list["Part"]:
        """Cut into programs that have no inputs in common but `shared`, so that each can be run by itself.

        Args:
          shared: positions of inputs that every part may read.
        """
        program = self.slice(self.inputs, self.outputs)
        common = {self.inputs[i] for i in shared} | set(program.constants)
        parent = {v: v for v in program.inputs if v not in common}

        def find(v):
            while parent[v] is not v:
                parent[v] = parent[parent[v]]
                v = parent[v]
            return v

        for eqn in program.equations:
            read = [find(v) for v in _variables(eqn.invars) if v in parent]
            for v in read:
                parent[v] = read[0]
            parent |= {v: read[0] for v in eqn.outvars if read}

        def part_of(atom):
            """Stands for the part; None where shared inputs are all that is needed."""
            return find(atom) if _in(atom, parent) else None

        outputs: dict[Any, list[int]] = {}
        for i, atom in enumerate(program.outputs):
            outputs.setdefault(part_of(atom), []).append(i)
        inputs: dict[Any, list[int]] = {}
        for i, v in enumerate(program.inputs):
            inputs.setdefault(part_of(v), []).append(i)
        equations: dict[Any, list] = {}
        for eqn in program.equations:
            equations.setdefault(part_of(eqn.outvars[0]), []).append(eqn)
        before = equations.get(None, [])
        found = []
        for part, wanted in outputs.items():
            own = [] if part is None else inputs[part]
            at = [*own, *shared]
            mine = before if part is None else [*before, *equations.get(part, [])]
            variables = [program.inputs[i] for i in at]
            results = [program.outputs[i] for i in wanted]
            piece = Equations(program.constants, (), tuple(mine), ())
            found.append(Part(piece.slice(variables, results), at, wanted))
        return found

    def read(self) -> set:
        """The variables that are read."""
        return set(_variables(self.outputs)).union(
            *(_variables(e.invars) for e in self.equations)
        )

    def depending_on(self, inputs: Sequence) -> set:
        """The variables whose value depends on any of `inputs`."""
        return _depending_on(self.equations, inputs)

    def text(self) -> str:
        """What is computed: equal texts are equal programs. Constants are named by content."""
        names = {v: f"v{i}" for i, v in enumerate((*self.constants, *self.inputs))}
        lines = [f"{names[v]} = {_content(c)}" for v, c in self.constants.items()]
        lines += [f"{names[v]}: {v.aval}" for v in self.inputs]

        def name(atom):
            return (
                f"{atom.val!r}:{atom.aval}"
                if isinstance(atom, jex.Literal)
                else names[atom]
            )

        for eqn in self.equations:
            operands = " ".join(name(v) for v in eqn.invars)
            for v in eqn.outvars:
                names[v] = f"v{len(names)}"
            results = " ".join(f"{names[v]}:{v.aval}" for v in eqn.outvars)
            params = {k: v for k, v in eqn.params.items() if k != "name"}
            lines.append(f"{results} = {eqn.primitive.name} {params} {operands}")
        return "\n".join([*lines, " ".join(name(v) for v in self.outputs)])

    def expressions(self, names: Sequence, numbers: dict) -> list[int]:
        """A number for each output: equal numbers are equal expressions of inputs of equal names.

        Whatever else is computed, and in which order, does not matter.

        Args:
          names: one name an input.
          numbers: of the expressions met so far, added to; the same dict for all that are compared.
        """
        known = {
            v: _number(numbers, "input", name, str(v.aval))
            for v, name in zip(self.inputs, names, strict=True)
        }
        known |= _constants(self.constants, self.constants.values(), numbers)
        return _numbered(self.equations, self.outputs, known, numbers)


class Part(NamedTuple):
    """A part of a program: its equations, and positions of its inputs and outputs in the whole."""

    equations: Equations
    inputs: Sequence[int]
    outputs: Sequence[int]


def _depending_on(equations: Sequence, inputs: Sequence) -> set:
    found = set(inputs)
    for eqn in equations:
        if found.isdisjoint(_variables(eqn.invars)):
            continue
        if eqn.primitive.name == "cond" and not _in(eqn.invars[0], found):
            for branch in eqn.params["branches"]:  # branches pass most values through
                jaxpr = branch.jaxpr
                operands = dict(zip(jaxpr.invars, eqn.invars[1:]))
                taken = [v for v, a in operands.items() if _in(a, found)]
                inner = _depending_on(jaxpr.eqns, taken)
                results = dict(zip(eqn.outvars, jaxpr.outvars))
                found.update(v for v, a in results.items() if _in(a, inner))
        else:
            found.update(eqn.outvars)
    return found


def _in(atom, variables: set) -> bool:
    return not isinstance(atom, jex.Literal) and atom in variables


def _variables(atoms) -> list:
    return [a for a in atoms if not isinstance(a, jex.Literal)]


def _read(env: dict, atom):
    return atom.val if isinstance(atom, jex.Literal) else env[atom]


def _bind(eqn, values: Sequence) -> list:
    with eqn.ctx.manager:
        out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def _inline(jaxpr, constants: Sequence, args: Sequence) -> list:
    env = {
        **dict(zip(jaxpr.constvars, constants)),
        **dict(zip(jaxpr.invars, args, strict=True)),
    }
    for eqn in jaxpr.eqns:
        values = [_read(env, v) for v in eqn.invars]
        if eqn.primitive.name in _CALLS:
            inner = eqn.params[_CALLS[eqn.primitive.name]]
            # Without constants it may be an open jaxpr.
            constants = getattr(inner, "consts", ())
            out = _inline(getattr(inner, "jaxpr", inner), constants, values)
        elif eqn.primitive.name == "name":  # read by checkpoint policies, now done
            out = values
        else:
            out = _bind(eqn, values)
        env.update(zip(eqn.outvars, out))
    return [_read(env, v) for v in jaxpr.outvars]


def jaxpr_text(function: Callable, *avals) -> str:
    """What `function`, of and to flat lists of arrays, computes, as text: equal texts are equal programs."""
    return Equations.trace(function, *avals).text()


def _number(numbers: dict, *expression) -> int:
    return numbers.setdefault(expression, len(numbers))


def _content(constant) -> tuple:
    """What tells a constant from others."""
    if jnp.issubdtype(jnp.result_type(constant), jax.dtypes.extended):  # a random key
        constant = jax.random.key_data(constant)
    array = np.asarray(constant)
    return str(array.dtype), array.shape, array.tobytes()


def _constants(variables, values, numbers: dict) -> dict:
    return {
        v: _number(numbers, "constant", *_content(value))
        for v, value in zip(variables, values)
    }


def _numbered(equations, outputs, known: dict, numbers: dict) -> list[int]:
    known = dict(known)

    def of(atom) -> int:
        if isinstance(atom, jex.Literal):
            return _number(numbers, "literal", repr(atom.val), str(atom.aval))
        return known[atom]

    for eqn in equations:
        name, operands = eqn.primitive.name, [of(v) for v in eqn.invars]
        if name in _CALLS:
            results = _numbered_call(eqn.params[_CALLS[name]], operands, numbers)
        elif name == "cond":  # a choice for each result by itself
            branches = [
                _numbered_call(branch, operands[1:], numbers)
                for branch in eqn.params["branches"]
            ]
            results = [
                _number(numbers, "cond", operands[0], *choice)
                for choice in zip(*branches, strict=True)
            ]
        else:
            params = [(k, _content_of_param(v, numbers)) for k, v in eqn.params.items()]
            results = [
                _number(numbers, name, *sorted(params), *operands, i)
                for i, _ in enumerate(eqn.outvars)
            ]
        known.update(zip(eqn.outvars, results))
    return [of(v) for v in outputs]


def _numbered_call(called, operands: Sequence[int], numbers: dict) -> list[int]:
    """The results of a jaxpr, open or closed."""
    jaxpr = getattr(called, "jaxpr", called)
    known = _constants(jaxpr.constvars, getattr(called, "consts", ()), numbers)
    known |= dict(zip(jaxpr.invars, operands, strict=True))
    return _numbered(jaxpr.eqns, jaxpr.outvars, known, numbers)


def _content_of_param(value, numbers: dict) -> Any:
    """What tells a parameter of an equation from others: of a loop's body, its results."""
    if isinstance(value, (tuple, list)):
        return str([_content_of_param(v, numbers) for v in value])
    jaxpr = getattr(value, "jaxpr", value)
    if not hasattr(jaxpr, "eqns"):
        return str(value)
    inputs = [
        _number(numbers, "argument", i, str(v.aval)) for i, v in enumerate(jaxpr.invars)
    ]
    return str(_numbered_call(value, inputs, numbers))


@dataclasses.dataclass(frozen=True)
class LayerProgram:
    """The programs of one kind of layer, all of and to flat lists of arrays.

    Attributes:
      forward: `(parameters, inputs, extra) -> (outputs, aux)`.
      forward_and_stash: `(parameters, inputs, extra) -> (outputs, stash, aux)`.
      backward: `(parameters, stash, output_grads) -> (parameter_grads, input_grads)`: the whole backward.
      input_grad: `(parameters, stash, output_grads) -> (input_grads, crossing)`; reads only `input_stash`.
      weight_grad: `(parameters, stash, crossing) -> parameter_grads`; reads only `weight_stash`.
      parameters, inputs, extra, outputs, aux, stash, crossing: abstract values of those lists.
      reads_extra: for each leaf of `extra`, whether anything reads it; outputs_read_extra: whether outputs or
        gradients do.
      input_stash, weight_stash: disjoint positions in the stash: read by `input_grad` alone, and read by
        `weight_grad` (and perhaps by `input_grad` before it).
      output_tree, aux_tree: the tree structures of outputs and aux.
      text: what the layer computes; kinds are told apart by it.
    Only inexact leaves of inputs and outputs have gradients: `output_grads` and `input_grads` list those.
    """

    forward: Callable
    forward_and_stash: Callable
    backward: Callable
    input_grad: Callable
    weight_grad: Callable
    parameters: tuple
    inputs: tuple
    extra: tuple
    outputs: tuple
    aux: tuple
    stash: tuple
    crossing: tuple
    input_stash: tuple[int, ...]
    weight_stash: tuple[int, ...]
    reads_extra: tuple[bool, ...]
    outputs_read_extra: tuple[bool, ...]
    output_tree: Any
    aux_tree: Any
    text: str


def _aval(v) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)


def trace_layer(
    function: Callable,
    parameters,
    inputs,
    extra=(),
    *,
    has_aux: bool = False,
    input_grads: bool = True,
    policy: Callable | None = None,
) -> LayerProgram:
    """Traces `function(parameters, inputs, extra) -> outputs` into its programs.

    Args:
      function: the layer, of pytrees.
      parameters: pytree of abstract arrays, all inexact.
      inputs: pytree of abstract arrays; the inexact leaves are differentiated.
      extra: pytree of abstract arrays that are never differentiated (the loss's batch, a layer's state and key).
      has_aux: the function returns `(outputs, aux)`; aux is a pytree of arrays that are not differentiated.
      input_grads: False drops the gradient of the inputs and whatever only it needs (a model's first layer).
      policy: one of `jax.checkpoint_policies`: beside its inputs the layer stashes what the policy saves, and its
        backward computes the rest again. None stashes every residual.
    Returns: The `LayerProgram`.
    """
    p_flat, p_tree = jax.tree.flatten(parameters)
    x_flat, x_tree = jax.tree.flatten(inputs)
    e_flat, e_tree = jax.tree.flatten(extra)
    num_p, num_x = len(p_flat), len(x_flat)
    wanted = [i for i, x in enumerate(x_flat) if input_grads and is_inexact(x)]
    trees = {}

    def split(args):
        return args[:num_p], args[num_p : num_p + num_x], args[num_p + num_x :]

    def call(ps, xs, es):
        out = function(p_tree.unflatten(ps), x_tree.unflatten(xs), e_tree.unflatten(es))
        out, aux = out if has_aux else (out, ())
        flat, trees["output"] = jax.tree.flatten(out)
        flat_aux, trees["aux"] = jax.tree.flatten(aux)
        return [jnp.asarray(y) for y in flat], [jnp.asarray(a) for a in flat_aux]

    if policy is not None:
        call = jax.checkpoint(call, policy=policy)

    def with_residuals(*args):
        ps, xs, es = split(args)

        def of_differentiated(ps, ds):
            xs_ = list(xs)
            for i, d in zip(wanted, ds):
                xs_[i] = d
            return call(ps, xs_, es)

        ys, vjp, aux = jax.vjp(
            of_differentiated, list(ps), [xs[i] for i in wanted], has_aux=True
        )
        residuals, trees["vjp"] = jax.tree.flatten(vjp)
        trees["outputs"] = [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in ys]
        return [*ys, *aux, *residuals]

    forward = Equations.trace(with_residuals, *p_flat, *x_flat, *e_flat)
    outputs = trees["outputs"]
    num_y = len(outputs)
    num_results = num_y + trees["aux"].num_leaves
    aux, residuals = forward.outputs[num_y:num_results], forward.outputs[num_results:]
    for v in _variables(residuals):
        if v.aval.memory_space == jax.memory.Space.Host:
            raise OffloadError(
                f"the policy of `recompute` offloads {v.aval.dtype}{list(v.aval.shape)} to the "
                "memory of the host, and what is in flight stays on its device. Use a policy that saves or "
                "recomputes it, such as `jax.checkpoint_policies.save_only_these_names(...)`."
            )

    def backward_of(*args):
        leaves, given = args[: len(residuals)], iter(args[len(residuals) :])
        gys = [
            next(given) if is_inexact(y) else np.zeros(y.shape, jax.dtypes.float0)
            for y in outputs
        ]
        gps, gxs = jax.tree.unflatten(trees["vjp"], leaves)(gys)
        return [*gps, *gxs]

    gy_avals = [y for y in outputs if is_inexact(y)]
    backward = Equations.trace(backward_of, *[_aval(v) for v in residuals], *gy_avals)
    text = "\n".join(
        [
            forward.text(),
            backward.text(),
            str(p_tree),
            str(x_tree),
            str(trees["output"]),
            str(trees["aux"]),
        ]
    )

    # Residuals that depend on the inputs are stashed, each variable once; the others are rebuilt.
    varying = forward.depending_on(forward.inputs[num_p:])
    stash = list(dict.fromkeys(v for v in _variables(residuals) if v in varying))
    position = {v: i for i, v in enumerate(stash)}
    results = forward.outputs[:num_results]
    run_forward = forward.slice(forward.inputs, results)
    run_and_stash = forward.slice(forward.inputs, (*results, *stash))
    extra_inputs = forward.inputs[num_p + num_x :]
    read = run_and_stash.read()
    for_outputs = forward.slice(forward.inputs, (*results[:num_y], *stash)).read()

    leaf_of = dict(
        zip(backward.inputs, residuals)
    )  # the backward's residual inputs -> the forward's variables
    residual_inputs, gradient_inputs = (
        backward.inputs[: len(residuals)],
        backward.inputs[len(residuals) :],
    )
    gp_vars, gx_vars = backward.outputs[:num_p], backward.outputs[num_p:]

    def reading(equations: Equations):
        """Backward equations with their residual inputs read from the stash or rebuilt, and what they stash-read."""
        used = equations.read()
        leaves = [leaf_of[v] for v in residual_inputs if v in used]
        rebuilt = list(
            dict.fromkeys(v for v in _variables(leaves) if v not in position)
        )
        rebuild = forward.slice(forward.inputs[:num_p], rebuilt)

        def run(parameters, stash_values, others):
            env = dict(zip(rebuilt, rebuild(*parameters)))
            env |= {v: stash_values[i] for v, i in position.items()}
            return equations(
                *[
                    _read(env, leaf_of[v]) if v in used else None
                    for v in residual_inputs
                ],
                *others,
            )

        return run, {position[v] for v in _variables(leaves) if v in position}

    run_backward, _ = reading(backward.slice(backward.inputs, backward.outputs))
    for_inputs = backward.slice(backward.inputs, gx_vars)
    known = {v for eqn in for_inputs.equations for v in eqn.outvars}.union(
        gradient_inputs
    )
    # What a policy has the backward compute from the parameters alone is rebuilt too and does not cross.
    stashed = [v for v in residual_inputs if _in(leaf_of[v], varying)]
    known &= backward.depending_on([*stashed, *gradient_inputs])
    for_weights = backward.slice((*residual_inputs, *known), gp_vars)
    used = dict.fromkeys(
        v for eqn in for_weights.equations for v in _variables(eqn.invars)
    )
    crossing = [v for v in (*used, *dict.fromkeys(_variables(gp_vars))) if v in known]
    crossing = list(dict.fromkeys(crossing))
    for_weights = backward.slice((*residual_inputs, *crossing), gp_vars)
    run_input, input_reads = reading(
        backward.slice(backward.inputs, (*gx_vars, *crossing))
    )
    run_weight, weight_reads = reading(for_weights)

    def whole(parameters, stash_values, output_grads):
        out = run_backward(parameters, stash_values, output_grads)
        return out[:num_p], out[num_p:]

    def input_part(parameters, stash_values, output_grads):
        out = run_input(parameters, stash_values, output_grads)
        return out[: len(gx_vars)], out[len(gx_vars) :]

    def only_forward(parameters, inputs, extra=()):
        out = run_forward(*parameters, *inputs, *extra)
        return out[:num_y], out[num_y:]

    def and_stash(parameters, inputs, extra=()):
        out = run_and_stash(*parameters, *inputs, *extra)
        return out[:num_y], out[num_results:], out[num_y:num_results]

    return LayerProgram(
        forward=only_forward,
        forward_and_stash=and_stash,
        backward=whole,
        input_grad=input_part,
        weight_grad=lambda parameters, stash_values, crossing_values: run_weight(
            parameters, stash_values, crossing_values
        ),
        parameters=tuple(jax.ShapeDtypeStruct(p.shape, p.dtype) for p in p_flat),
        inputs=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in x_flat),
        extra=tuple(jax.ShapeDtypeStruct(e.shape, e.dtype) for e in e_flat),
        outputs=tuple(outputs),
        aux=tuple(_aval(v) for v in aux),
        stash=tuple(_aval(v) for v in stash),
        crossing=tuple(_aval(v) for v in crossing),
        input_stash=tuple(sorted(input_reads - weight_reads)),
        weight_stash=tuple(sorted(weight_reads)),
        reads_extra=tuple(v in read for v in extra_inputs),
        outputs_read_extra=tuple(v in for_outputs for v in extra_inputs),
        output_tree=trees["output"],
        aux_tree=trees["aux"],
        text=text,
    )
