"""A jaxpr as a flat list of equations that can be evaluated, sliced and compared.

Two programs are compared by `Equations.text` (equal texts are equal programs) or by
`Equations.expressions` (equal numbers are equal mathematics, whatever else is computed around them).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpipe.layers import collectives, constraint, convolution, indexing, kernels, mapped
from jpipe.layers.expressions import (
    CALLS,
    CHECKPOINT,
    content,
    number,
    number_constants,
    numbered,
    param_text,
)
from jpipe.layers.mesh_free import (
    NO_MESH,
    aval_without_mesh,
    context_without_mesh,
    is_on_mesh,
    lies_on_mesh,
    params_without_mesh,
    value_without_mesh,
)


@dataclasses.dataclass(frozen=True)
class Equations:
    """A straight-line piece of a jaxpr.

    Attributes:
      constants: variable -> array.
      inputs: variables.
      equations: the equations in the order of evaluation.
      outputs: variables or literals.
      has_checkpoint: whether `jax.checkpoint` called some of the equations.
    """

    constants: dict[Any, Any]
    inputs: tuple[Any, ...]
    equations: tuple[Any, ...]
    outputs: tuple[Any, ...]
    has_checkpoint: bool = False

    @classmethod
    def trace(cls, function: Callable[..., Sequence], *avals: Any) -> "Equations":
        """Traces `function`, from and to flat lists of arrays, and inlines every call."""
        return cls.of(jax.make_jaxpr(function)(*avals))

    @classmethod
    def of(cls, closed: jex.ClosedJaxpr) -> "Equations":
        """The equations of a jaxpr, and of the jaxprs that it calls."""
        inliner = _Inliner({}, [], {}, set())
        inputs = [jex.Var(aval_without_mesh(v.aval)) for v in closed.jaxpr.invars]
        outputs = inliner.inline(closed.jaxpr, closed.consts, inputs)
        return cls(
            inliner.constants,
            tuple(inputs),
            tuple(inliner.equations),
            tuple(outputs),
            has_checkpoint=CHECKPOINT in inliner.calls,
        )

    @classmethod
    def held(cls, closed: jex.ClosedJaxpr) -> "Equations":
        """The equations of a jaxpr that an equation of a program holds, which are without a mesh already."""
        jaxpr = closed.jaxpr
        constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        return cls(constants, tuple(jaxpr.invars), tuple(jaxpr.eqns), tuple(jaxpr.outvars))

    def _in(self, jaxpr: Any) -> jex.ClosedJaxpr:
        """These equations in the place of those of `jaxpr`."""
        changed = jaxpr.replace(
            constvars=list(self.constants),
            invars=list(self.inputs),
            eqns=list(self.equations),
            outvars=list(self.outputs),
        )
        return jex.ClosedJaxpr(changed, list(self.constants.values()))

    def __call__(self, *args: Any) -> list:
        """Evaluates the equations; also under a JAX transformation."""
        env = {**self.constants, **dict(zip(self.inputs, args, strict=True))}
        for eqn in self.equations:
            values = bind(eqn, [value_of(env, v) for v in eqn.invars])
            env.update(zip(eqn.outvars, values))
        return [_array(v) if isinstance(v, jex.Literal) else env[v] for v in self.outputs]

    def holds(self, names: Collection[str]) -> bool:
        """Returns whether any primitive of these names is among the equations, or in a jaxpr that one of them holds."""

        def is_in(equations: Iterable) -> bool:
            return any(eqn.primitive.name in names or any(is_in(j.eqns) for j in jaxprs_in(eqn)) for eqn in equations)

        return is_in(self.equations)

    def slice(self, inputs: Sequence, outputs: Sequence, *, effects: bool = False) -> "Equations":
        """The equations that compute the variables `outputs` from the variables `inputs`.

        Args:
          inputs: variables.
          outputs: variables or literals.
          effects: whether to keep equations with side effects, such as `jax.debug.print`, although
            no output needs them.
        """
        given, kept = set(inputs), []
        needed = set(variables(outputs)) - given
        for eqn in reversed(self.equations):
            if needed.intersection(eqn.outvars) or (effects and eqn.effects):
                needed.difference_update(eqn.outvars)
                needed.update(set(variables(eqn.invars)) - given)
                kept.append(eqn)
        constants = {v: c for v, c in self.constants.items() if v in needed}
        assert needed == set(constants), f"{needed - set(constants)} cannot be computed from the inputs of the slice"
        return Equations(constants, tuple(inputs), tuple(reversed(kept)), tuple(outputs))

    def parts(self, shared: Sequence[int]) -> list["Part"]:
        """Cuts the program into parts that can each run alone.

        Two parts have no inputs in common except the shared ones.

        Args:
          shared: positions of the inputs that every part may read.
        """
        program = self.slice(self.inputs, self.outputs)
        part_of = _connected(program, {program.inputs[i] for i in shared})

        def positions(atoms: Sequence) -> dict[Any, list[int]]:
            """Part -> positions of its atoms. Part None needs only shared inputs."""
            grouped: dict[Any, list[int]] = {}
            for i, atom in enumerate(atoms):
                grouped.setdefault(part_of(atom), []).append(i)
            return grouped

        inputs, outputs = positions(program.inputs), positions(program.outputs)
        equations: dict[Any, list] = {}
        for eqn in program.equations:
            equations.setdefault(part_of(eqn.outvars[0]), []).append(eqn)
        common = equations.pop(None, [])
        parts = []
        for part, output_positions in outputs.items():
            private_inputs = [] if part is None else inputs[part]
            input_positions = [*private_inputs, *shared]
            all_equations = (*common, *equations.get(part, []))
            piece = Equations(program.constants, (), all_equations, ()).slice(
                [program.inputs[i] for i in input_positions],
                [program.outputs[i] for i in output_positions],
            )
            parts.append(Part(piece, input_positions, output_positions))
        return parts

    def read(self) -> set:
        """The variables that are read."""
        return set(variables(self.outputs)).union(*(variables(e.invars) for e in self.equations))

    def effects(self) -> set:
        """The side effects of all equations, as JAX names them."""
        return set().union(*(eqn.effects for eqn in self.equations))

    def depending_on(self, inputs: Iterable) -> set:
        """The variables that cannot be computed without `inputs`, these included."""
        dependent = set(inputs)
        for eqn in self.equations:
            if not dependent.isdisjoint(variables(eqn.invars)):
                dependent.update(eqn.outvars)
        return dependent

    def text(self) -> str:
        """The program as text: equal texts are equal programs. Constants are named by content."""
        names = {v: f"v{i}" for i, v in enumerate((*self.constants, *self.inputs))}
        lines = [f"{names[v]} = {content(c)}" for v, c in self.constants.items()]
        lines += [f"{names[v]}: {v.aval}" for v in self.inputs]

        def name(atom: Any) -> str:
            if not isinstance(atom, jex.Literal):
                return names[atom]
            # The number: NumPy takes long to write an array of one.
            value = atom.val.item() if hasattr(atom.val, "item") else atom.val
            return f"{value!r}:{atom.aval}"

        for eqn in self.equations:
            operands = " ".join(name(v) for v in eqn.invars)
            for v in eqn.outvars:
                names[v] = f"v{len(names)}"
            results = " ".join(f"{names[v]}:{v.aval}" for v in eqn.outvars)
            params = {k: param_text(v) for k, v in eqn.params.items() if k != "name"}
            lines.append(f"{results} = {eqn.primitive.name} {params} {operands}")
        return "\n".join([*lines, " ".join(name(v) for v in self.outputs)])

    def expressions(self, names: Sequence, numbers: dict) -> list[int]:
        """A number per output. Equal numbers are equal expressions of inputs with equal names.

        Other outputs and the order of the equations do not matter.

        Args:
          names: one name per input.
          numbers: expression -> number, of all expressions seen so far; the method adds to it. Pass
            one dict for all programs that are compared.
        """
        known = {v: number(numbers, "input", name, str(v.aval)) for v, name in zip(self.inputs, names, strict=True)}
        known |= number_constants(self.constants, self.constants.values(), numbers)
        return numbered(self.equations, self.outputs, known, numbers)


class Part(NamedTuple):
    """A part of a program: its equations, and positions of its inputs and outputs in the whole."""

    equations: Equations
    inputs: Sequence[int]
    outputs: Sequence[int]


# -- Variables and values


def loop_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """The numbers of constant and of carried operands of a `scan`. Since JAX 0.12.0.1 it has them as trees."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    num_consts, num_carry, _ = (len(list(tree.vals)) for tree in params["ft_in"].unpack())
    return num_consts, num_carry


def contains(group: Any, atom: Any) -> bool:
    """Returns whether the variable `atom` is in the set or dict `group`; a literal never is."""
    return not isinstance(atom, jex.Literal) and atom in group


def variables(atoms: Iterable) -> list:
    """The atoms without literals."""
    return [a for a in atoms if not isinstance(a, jex.Literal)]


def _array(literal: Any) -> np.ndarray:
    """A literal as an array; its value may be a number of Python."""
    return np.asarray(literal.val, literal.aval.dtype)


def value_of(env: dict, atom: Any) -> Any:
    """The value of a variable or literal."""
    return atom.val if isinstance(atom, jex.Literal) else env[atom]


def bind(eqn: Any, values: Sequence) -> list:
    """The results of an equation for these operands."""
    if eqn.primitive is constraint.constrain_p:
        return [constraint.constrain(*values, **eqn.params)]
    if eqn.primitive is mapped.mapped_p:
        jaxpr, *params = (eqn.params[name] for name in ("jaxpr", "in_specs", "out_specs", "sizes"))
        return mapped.mapped(Equations.held(jaxpr), values, *params)
    if eqn.primitive.name == "axis_index":  # of the mesh that the equation runs on
        return [lax.axis_index(**eqn.params)]
    if (replaced := collectives.replaced(eqn.primitive.name, eqn.params)) is not None:
        return replaced(*values)
    if (pick := indexing.replaced(eqn)) is not None:
        return [pick(*values)]
    values = indexing.whole(eqn, values)
    eqn = _on_surroundings(eqn)
    compute = functools.partial(eqn.primitive.bind, **eqn.primitive.get_bind_params(eqn.params))
    with eqn.ctx.manager:
        out = collectives.run_each_alone(eqn.primitive.name, compute)(*values)
    return list(out) if eqn.primitive.multiple_results else [out]


_ON_A_MESH = (constraint.constrain_p.name, mapped.mapped_p.name, *collectives.NAMES)
"""The names of what depends on the mesh that an equation runs on."""


def _on_surroundings(eqn: Any) -> Any:
    """A loop or branch, traced on the mesh of the surroundings if an equation in it depends on that."""

    def holds(closed: jex.ClosedJaxpr) -> bool:
        return any(e.primitive.name in _ON_A_MESH or any(map(holds, _jaxprs_of(e))) for e in closed.jaxpr.eqns)

    def traced(value: Any) -> Any:
        if type(value) is tuple:
            return tuple(map(traced, value))
        if not isinstance(value, jex.ClosedJaxpr) or not holds(value):
            return value
        return jax.make_jaxpr(Equations.held(value).__call__)(*map(_without_sharding, value.in_avals))

    if not any(map(holds, _jaxprs_of(eqn))):
        return eqn
    return eqn.replace(params={name: traced(value) for name, value in eqn.params.items()})


class _Inliner(NamedTuple):
    """Collects the equations of jaxprs, on variables of its own.

    Attributes:
      constants: variable -> array, of all jaxprs so far.
      equations: the equations of all jaxprs so far.
      variable_of: the identity of a constant -> its variable.
      calls: the primitives of `CALLS` that were inlined.
    """

    constants: dict[Any, Any]
    equations: list
    variable_of: dict[int, Any]
    calls: set[str]

    def inline(
        self,
        jaxpr: Any,
        constants: Sequence,
        operands: Sequence,
        *,
        replaces: bool = True,
    ) -> list:
        """Adds the equations of a jaxpr, and of the jaxprs that it calls.

        Args:
          jaxpr: the jaxpr.
          constants: arrays.
          operands: atoms, its inputs.
          replaces: whether equations that cannot stay as they are give way to others.

        Returns:
          The atoms of its results.
        """
        env = self._bound(jaxpr, constants, operands)
        for eqn in jaxpr.eqns:
            atoms = [_atom(env, v) for v in eqn.invars]
            if eqn.primitive.name in CALLS:
                self.calls.add(eqn.primitive.name)
                inner = eqn.params[CALLS[eqn.primitive.name]]
                # An open jaxpr has no constants.
                inner_constants = getattr(inner, "consts", ())
                inner = getattr(inner, "jaxpr", inner)
                out = self.inline(inner, inner_constants, atoms, replaces=replaces)
            elif eqn.primitive.name in ("name", mapped.NO_OPERATION):  # only checkpoint policies read names
                out = atoms
            elif not eqn.effects and all(map(_is_empty, eqn.outvars)):
                out = [self._empty(v) for v in eqn.outvars]
            elif replaces and _is_slow_convolution(eqn):
                out = self._convolved(eqn, atoms)
            else:
                out = [jex.Var(aval_without_mesh(v.aval)) for v in eqn.outvars]
                self.equations.append(_without_mesh(eqn).replace(invars=atoms, outvars=out))
            env.update(zip(eqn.outvars, out))
        return [_atom(env, v) for v in jaxpr.outvars]

    def _convolved(self, eqn: Any, atoms: Sequence) -> list:
        """The results of a convolution in its fast form."""
        with eqn.ctx.manager, jax.sharding.use_abstract_mesh(NO_MESH):
            convolve = functools.partial(convolution.convolve, eqn.params)
            closed = jax.make_jaxpr(convolve)(*(_without_sharding(v.aval) for v in atoms))
        return self.inline(closed.jaxpr, closed.consts, atoms, replaces=False)

    def _empty(self, v: Any) -> Any:
        """A constant in the place of a result without elements, which nobody computes or keeps."""
        constant = jex.Var(aval_without_mesh(v.aval))
        self.constants[constant] = np.zeros(v.aval.shape, v.aval.dtype)
        return constant

    def _bound(self, jaxpr: Any, constants: Sequence, operands: Sequence) -> dict:
        """Variable of a jaxpr -> its atom here, for its constants and inputs."""
        env = dict(zip(jaxpr.invars, operands, strict=True))
        for v, constant in zip(jaxpr.constvars, constants, strict=True):
            if id(constant) not in self.variable_of:
                variable = jex.Var(aval_without_mesh(v.aval))
                self.variable_of[id(constant)] = variable
                self.constants[variable] = value_without_mesh(constant)
            env[v] = self.variable_of[id(constant)]
        return env


def _atom(env: dict, atom: Any) -> Any:
    """The atom in the place of another one, without the mesh on which a literal was traced."""
    if not isinstance(atom, jex.Literal):
        return env[atom]
    if not is_on_mesh(atom.aval):
        return atom
    # The value itself also knows the mesh.
    return jex.Literal(_array(atom), aval_without_mesh(atom.aval))


def _is_empty(v: Any) -> bool:
    """Returns whether an array of numbers has no elements."""
    is_key = jnp.issubdtype(v.aval.dtype, jax.dtypes.extended)
    return not is_key and math.prod(v.aval.shape) == 0


def _is_slow_convolution(eqn: Any) -> bool:
    if eqn.primitive.name != convolution.NAME:
        return False
    return convolution.is_slow(eqn.params, *(v.aval.shape for v in eqn.invars))


def _without_mesh(eqn: Any) -> Any:
    """The equation without a mesh, and without slow convolutions in its jaxprs, such as the body of a loop."""

    def inner(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
        return Equations.of(closed)._in(closed.jaxpr)

    if eqn.primitive.name == "sharding_constraint":
        eqn = constraint.without_mesh(eqn)
    elif eqn.primitive.name == mapped.NAME:
        eqn = mapped.without_mesh(eqn, inner)
    elif kernels.is_kernel(eqn):
        eqn = kernels.without_mesh(eqn, inner)
    elif eqn.primitive is not mapped.mapped_p and eqn.primitive is not constraint.constrain_p and _changes(eqn):
        eqn = mapped.with_plain_collective(eqn)
        eqn = eqn.replace(params=params_without_mesh(eqn.params, inner))
    if not eqn.ctx.cur_abstract_mesh.empty:
        eqn = eqn.replace(ctx=context_without_mesh(eqn.ctx))
    return eqn


def _changes(eqn: Any) -> bool:
    """Returns whether an equation knows a mesh, or holds one that does, or a slow convolution."""
    if not eqn.ctx.cur_abstract_mesh.empty or any(is_on_mesh(v.aval) for v in (*eqn.invars, *eqn.outvars)):
        return True
    return any(
        any(map(lies_on_mesh, closed.consts)) or any(_is_slow_convolution(e) or _changes(e) for e in closed.jaxpr.eqns)
        for closed in _jaxprs_of(eqn)
    )


def off_mesh(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function without the mesh of the arrays in its surroundings. The function is not differentiated."""

    def call(*args: Any) -> Any:
        avals = jax.tree.map(lambda a: _without_sharding(jax.typeof(a)), args)
        closed, results = jax.make_jaxpr(function, return_shape=True)(*avals)
        if not is_traced_on_mesh(closed):
            return function(*args)
        values = Equations.of(closed)(*jax.tree.leaves(args))
        return jax.tree.structure(results).unflatten(values)

    return call


def is_traced_on_mesh(closed: jex.ClosedJaxpr) -> bool:
    """Returns whether a jaxpr was traced on a mesh, or with constants that lie on one."""
    jaxpr = closed.jaxpr
    results = itertools.chain(jaxpr.invars, *(e.outvars for e in jaxpr.eqns))
    return any(is_on_mesh(v.aval) for v in results) or any(map(lies_on_mesh, closed.consts))


def _without_sharding(aval: Any) -> Any:
    weak_type = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak_type)


def jaxprs_in(eqn: Any) -> list:
    """The jaxprs among the parameters of an equation, without their constants."""
    return [j.jaxpr if isinstance(j, jex.ClosedJaxpr) else j for j in held_jaxprs(eqn)]


def held_jaxprs(eqn: Any) -> list:
    """The jaxprs among the parameters of an equation, closed or not."""
    values = [v for p in eqn.params.values() for v in (p if isinstance(p, tuple | list) else (p,))]
    return [v for v in values if isinstance(v, jex.ClosedJaxpr | jex.Jaxpr)]


def _jaxprs_of(eqn: Any) -> list:
    """The closed jaxprs among the parameters of an equation."""
    return [jaxpr for jaxpr in held_jaxprs(eqn) if isinstance(jaxpr, jex.ClosedJaxpr)]


# -- Dependence


def _connected(program: Equations, shared: set) -> Callable[[Any], Any]:
    """Finds parts by union-find: a function from an atom to a variable that stands for its part.

    The function returns None for atoms that need only shared inputs and constants.
    """
    common = shared | set(program.constants)
    parent = {v: v for v in program.inputs if v not in common}

    def root(v: Any) -> Any:
        while parent[v] is not v:
            parent[v] = parent[parent[v]]
            v = parent[v]
        return v

    for eqn in program.equations:
        roots = [root(v) for v in variables(eqn.invars) if v in parent]
        for v in roots:
            parent[v] = roots[0]
        parent |= {v: roots[0] for v in eqn.outvars if roots}
    return lambda atom: root(atom) if contains(parent, atom) else None
