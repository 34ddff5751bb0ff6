"""Cuts a layer that is a whole model into the layers of a pipeline."""

import bisect
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
from flax import nnx
from jax.sharding import PartitionSpec

from jpipe.layers.avals import shapes_text
from jpipe.layers.equations import variables
from jpipe.layers.layer import Layer, LayerOptions
from jpipe.layers.model_tree import Path, Turn, path_text, unflattened
from jpipe.layers.report import report
from jpipe.segments.forced import ForcedPlaces
from jpipe.segments.model_loss import ModelLoss
from jpipe.segments.passages import passages
from jpipe.segments.placement import Placement, StepGraph
from jpipe.segments.places import CutError, CutPlace, DataFlow, Roles, narrow
from jpipe.segments.repeated import check_repeated
from jpipe.segments.trace import Trace, Tracing
from jpipe.segments.turns import in_turns, stacked, turns_of


def layers_of_model(
    model: Layer,
    args: tuple,
    tracing: Tracing,
    *,
    num_stages: int,
    forced: ForcedPlaces | Placement,
    marks: Sequence | None = None,
    loss: ModelLoss | None = None,
) -> list[Layer]:
    """Cuts a model at its narrow places, or those of a placement.

    Args:
      model: a whole model, bound to `args`.
      args: the abstract arguments of its call, of one microbatch.
      tracing: how it is traced.
      num_stages: S. Segments that repeat in turns, such as the halves of a block, become one if S segments are left.
      forced: the places that the user names, or where a solver has placed the products of the model.
      marks: of the places, as the layers of the model for another shape have them; None: all narrow places.
      loss: gets the end of a model that returns its loss; None: the model returns outputs.

    Returns:
      One `Layer` per segment. What crosses a place is the activation: an array, or a tuple of them. The parameters
      and the state of a segment have the paths that they have in the model. A parameter that several segments read is
      in each of them.
    """
    trained, evaluated, leaves = _traces(model, args, tracing, loss, is_checked=marks is None)
    paths = [path_text(path) for path in leaves.paths[0]]
    trained, evaluated = forced.arranged(trained, evaluated)
    named = _named_places(forced, leaves, trained, evaluated)
    matched = _matched(trained.flow.places, evaluated.flow.places)
    there = {here.mark: place for pairs in (*matched, named) for here, place in pairs}
    here = [tuple(place for place, _ in pairs) for pairs in matched]
    fixed = [place for place, _ in named]
    if marks is None:
        places = fixed if forced.are_all(fixed, num_stages) else _chosen(trained, here, fixed, num_stages)
    else:
        places = _merged([place for equal in here for place in equal if place.mark in marks], fixed)
    of_one_state: list[CutPlace] = []
    while True:
        places_there = [there[place.mark] for place in places]
        owners = _owners_of_state(trained.flow, places)
        parts = [
            (_SegmentProgram(trained, places, k, owners), _SegmentProgram(evaluated, places_there, k, owners))
            for k in range(len(places) + 1)
        ]
        inside = _inside_of_writes(trained.flow.roles, parts, owners)
        if not inside:
            break
        of_one_state += [places[k] for k in inside]
        places = [place for k, place in enumerate(places) if k not in inside]
    if marks is not None and len(places) + 1 != len(marks):
        raise CutError(
            f"the model ({model.name}) computes otherwise for inputs of {shapes_text(args)} than for those that it was "
            "cut for: it has other places to cut at. Make a pipeline for these shapes."
        )
    ports = _ports_past_others((trained, evaluated), (places, places_there), parts)
    if ports is not None:
        parts = [
            (
                _SegmentProgram(trained, places, k, owners, ports[0][k]),
                _SegmentProgram(evaluated, places_there, k, owners, ports[1][k]),
            )
            for k in range(len(parts))
        ]
    ends = [*(place.mark for place in places), ()]
    read = {i for part, there_too in parts for i in (*part.parameters, *there_too.parameters)}
    # What the model never reads has no gradient, and a weight decay all the same.
    unread = [i for i in range(len(leaves.paths[0])) if i not in read]
    layers = [_segment(model, leaves, k, ends[k], *parts[k], unread if k == 0 else ()) for k in range(len(parts))]
    if len(layers) < num_stages:
        raise CutError(_too_few(model.name, layers, num_stages, trained.flow, paths, of_one_state))
    return layers


def _too_few(
    name: str,
    layers: Sequence[Layer],
    num_stages: int,
    flow: DataFlow,
    paths: Sequence[str],
    of_one_state: Sequence[CutPlace],
) -> str:
    """The message for a model with fewer segments than stages; `paths` of its parameters."""
    names = " | ".join(layer.name for layer in layers)
    where = f"only into {len(layers)} segments: {names}" if len(layers) > 1 else "at no place"
    message = f"the model ({name}) can be cut {where}, and the schedule has {num_stages} stages. "
    modules = [path.rpartition(".")[0] or path for path in paths]
    read: dict[int, list[str]] = {}
    for v, i in flow.first_reads.items():
        read.setdefault(i, []).append(modules[flow.roles.parameters.index(v)])
    steps = []
    for i in flow.steps:
        inside = f" ({', '.join(dict.fromkeys(read[i]))})" if i in read else ""
        steps.append(flow.program.equations[i].primitive.name + inside)
    shown = ", ".join([*steps[:6], "..."] if len(steps) > 6 else steps)
    message += f"Places are between products, and the model has {len(steps)}: {shown}. "
    if of_one_state:
        crossing = shapes_text([v.aval for v in of_one_state[0].crossing])
        before = max((i for i in read if i < of_one_state[0].position), default=None)
        after = f" after {read[before][-1]}, where {crossing} crosses" if before is not None else ""
        message += (
            f"{len(of_one_state)} of the places are none, the first{after}: equations before and after them read or "
            "write the same mutable state, which one stage must hold. "
        )
    return message + "Use fewer stages, or give the model as a list of layers."


def steps_of_model(model: Layer, args: tuple, tracing: Tracing, loss: ModelLoss | None = None) -> StepGraph:
    """The steps of a model in training, which a solver places; for the arguments see `layers_of_model`."""
    return StepGraph(_traces(model, args, tracing, loss)[0].flow)


def _traces(
    model: Layer, args: tuple, tracing: Tracing, loss: ModelLoss | None, is_checked: bool = False
) -> tuple[Trace, Trace, "_ModelLeaves"]:
    """The model in training and in evaluation, and its leaves, with loops over stacked weights as their turns.

    Raises:
      ValueError: if `is_checked`, and the model computes otherwise at a second call.
    """
    trained, leaves = tracing.training(model, args), _ModelLeaves.of(model)
    if is_checked:
        paths = [path_text(path) for path in leaves.paths[0]]
        check_repeated(trained, lambda: tracing.training(model, args), model.name, paths)
    evaluated = tracing.evaluation(model, args)
    if loss is not None:
        trained, evaluated = loss.heads(tracing, args, trained, evaluated)
    both = [
        {i: axis for i, axis in here.items() if there.get(i) == axis}
        for here, there in zip(stacked(trained), stacked(evaluated), strict=True)
    ]
    if any(both):
        trained, evaluated, leaves = in_turns(trained, *both), in_turns(evaluated, *both), leaves.in_turns(*both)
    return trained, evaluated, leaves


class _Ports(NamedTuple):
    """The variables that enter and leave a segment in one trace.

    Attributes:
      data: the activation that it gets, or the inputs of the model.
      passed_on: the activation that it passes on, or what the model returns and reports.
      pop: name of a skip connection -> the variable that it gets by it.
      stash: name of a skip connection -> the variable that it sends by it.
    """

    data: tuple
    passed_on: tuple
    pop: Mapping[str, Any]
    stash: Mapping[str, Any]

    @classmethod
    def between(cls, roles: Roles, places: Sequence[CutPlace], k: int) -> "_Ports":
        """The ports of segment number `k` if all that crosses its places is its activation."""
        data = places[k - 1].crossing if k else roles.data
        return cls(data, places[k].crossing if k < len(places) else roles.results, {}, {})


def _ports_past_others(
    traces: tuple[Trace, Trace],
    places: tuple[Sequence[CutPlace], Sequence[CutPlace]],
    parts: Sequence[tuple["_SegmentProgram", "_SegmentProgram"]],
) -> list[list[_Ports]] | None:
    """For training and for evaluation the ports of each segment, where values go past segments that do not read them.

    Returns:
      None if there are no such values, or others cross in evaluation than in training.
    """
    known = [list(dict.fromkeys(v for place in here for v in place.crossing)) for here in places]
    numbers = [{v: n for n, v in enumerate(variables_here)} for variables_here in known]
    crossing, crossing_there = (
        [[number[v] for v in place.crossing] for place in here] for here, number in zip(places, numbers, strict=True)
    )
    if crossing != crossing_there:
        return None
    reads = [
        {number[v] for part, number in zip(pair, numbers, strict=True) for v in part.read_values if v in number}
        for pair in parts
    ]
    ways = passages(crossing, reads)
    if not any(way.stash for way in ways):
        return None

    def ports(trace: Trace, variables_here: Sequence, k: int) -> _Ports:
        roles, way = trace.flow.roles, ways[k]
        return _Ports(
            tuple(variables_here[n] for n in ways[k - 1].activation) if k else roles.data,
            tuple(variables_here[n] for n in way.activation) if k + 1 < len(ways) else roles.results,
            {name: variables_here[n] for name, n in way.pop.items()},
            {name: variables_here[n] for name, n in way.stash.items()},
        )

    return [
        [ports(trace, variables_here, k) for k in range(len(ways))]
        for trace, variables_here in zip(traces, known, strict=True)
    ]


def _inside_of_writes(
    roles: Roles, parts: Sequence[tuple["_SegmentProgram", "_SegmentProgram"]], owners: Sequence[int]
) -> set[int]:
    """The numbers of places that separate the segment that writes a leaf of the state from one that reads it."""
    inside: set[int] = set()
    for i, (old, new) in enumerate(zip(roles.state, roles.new_state)):
        if new is not old:
            touching = [k for k, segment in enumerate(parts) if any(i in part.state for part in segment)]
            inside.update(range(min(touching + [owners[i]]), max(touching + [owners[i]])))
    return inside


def _matched(
    here: Sequence[tuple[CutPlace, ...]], there: Sequence[tuple[CutPlace, ...]]
) -> list[tuple[tuple[CutPlace, CutPlace], ...]]:
    """The places in training, each with the same place in evaluation; of equal ones all."""
    marked = {place.mark: place for places in there for place in places}
    matched = [tuple((place, marked[place.mark]) for place in places if place.mark in marked) for places in here]
    return [pairs for pairs in matched if pairs]


def _named_places(
    forced: ForcedPlaces | Placement, leaves: "_ModelLeaves", trained: Trace, evaluated: Trace
) -> list[tuple[CutPlace, CutPlace]]:
    """The places that the user or a placement names, in training and in evaluation."""
    paths = [path_text(path) for path in leaves.paths[0]]
    here, there = (forced.places(trace.flow, paths) for trace in (trained, evaluated))
    pairs = [pair for pairs in _matched([(place,) for place in here], [(place,) for place in there]) for pair in pairs]
    if len(pairs) < len(here):
        raise CutError(
            f"the model has {len(here)} places that are marked by `jpipe.stage_end` or named by `boundaries` in "
            f"training, and {len(there)} in evaluation. Mark the same places in both."
        )
    return pairs


def _merged(places: Sequence[CutPlace], fixed: Sequence[CutPlace]) -> list[CutPlace]:
    """All places in order, with one at each position."""
    at = {place.position: place for place in (*places, *fixed)}
    return [at[position] for position in sorted(at)]


def _chosen(
    trace: Trace, places: Sequence[tuple[CutPlace, ...]], fixed: Sequence[CutPlace], num_stages: int
) -> list[CutPlace]:
    """The places at which the model is cut: the fixed ones, and narrow ones between them."""
    steps = trace.flow.steps
    taken = {bisect.bisect_left(steps, place.position) for place in fixed}
    narrow_places = narrow(places, num_stages - 1 - len(fixed))
    others = [equal for equal in narrow_places if bisect.bisect_left(steps, equal[0].position) not in taken]
    candidates = sorted([*others, *((place,) for place in fixed)], key=lambda equal: equal[0].position)
    return _merged(_alike(trace, candidates, num_stages), fixed)


def _alike(trace: Trace, places: Sequence[tuple[CutPlace, ...]], num_stages: int) -> list[CutPlace]:
    """Chooses among equal places so that segments are alike."""
    chosen = [first for first, *_ in places]

    def text(k: int) -> str:
        return _SegmentProgram(trace, chosen, k, ()).text

    texts = [text(k) for k in range(len(chosen) + 1)]
    for k, (_, *others) in enumerate(places):
        for other in others:
            if texts.count(texts[k]) > 1 or texts.count(texts[k + 1]) > 1:
                break
            before = chosen[k]
            chosen[k] = other
            here = [text(k), text(k + 1)]
            if texts.count(here[0]) or texts.count(here[1]):
                texts[k : k + 2] = here
            else:
                chosen[k] = before
    in_periods = _in_periods(chosen, texts)
    return in_periods if len(in_periods) + 1 >= num_stages else chosen


def _in_periods(places: list[CutPlace], texts: Sequence[str]) -> list[CutPlace]:
    """The places without those inside of a sequence of segments that repeats, such as the halves of a block.

    Stages run equal layers in a loop.
    """
    number = len(texts)
    best: tuple[int, int, int] = (0, 0, 0)  # segments that repeat, minus the period, the first
    for period in range(2, number // 2 + 1):
        same = [texts[i] == texts[i + period] for i in range(number - period)]
        start = 0
        for equal, run in itertools.groupby(same):
            length = len(list(run))
            repeated = (length + period) // period * period
            if equal and length >= period and len({*texts[start : start + period]}) > 1:
                best = max(best, (repeated, -period, -start))
            start += length
    repeated, period, start = best[0], -best[1], -best[2]
    inside = {k for k in range(start, start + repeated - 1) if (k - start + 1) % period} if repeated else set()
    return [place for k, place in enumerate(places) if k not in inside]


def _owners_of_state(flow: DataFlow, places: Sequence[CutPlace]) -> list[int]:
    """The segment that has each leaf of the state: that which computes its new value, or the first that reads it."""
    if not flow.roles.state:
        return []
    stops = [place.position for place in places]
    computed_at = {v: i for i, eqn in enumerate(flow.program.equations) for v in eqn.outvars}
    reading = []
    for k in range(len(places) + 1):
        ports = _Ports.between(flow.roles, places, k)
        reading.append(flow.program.part((*flow.roles.held, *ports.data), ports.passed_on).read())
    owners = []
    for old, new in zip(flow.roles.state, flow.roles.new_state):
        if not isinstance(new, jex.Literal) and new in flow.varying and new in computed_at:
            owners.append(bisect.bisect_right(stops, computed_at[new]))
        else:
            owners.append(next((k for k, read in enumerate(reading) if old in read), 0))
    return owners


class _SegmentProgram:
    """A segment in one trace of the model.

    Attributes:
      trace: of the model.
      program: of the segment, from all parameters, all of the state, keys, and what crosses the place before it.
      parameters, state: numbers of those that it reads.
      ports: what enters and leaves it.
      written: number of a leaf of the state that it moves -> its new value.
    """

    def __init__(
        self,
        trace: Trace,
        places: Sequence[CutPlace],
        k: int,
        owners: Sequence[int],
        ports: _Ports | None = None,
    ):
        roles, equations = trace.flow.roles, trace.flow.program.equations
        self.trace, self._is_first, self.is_last = trace, k == 0, k == len(places)
        self.ports = ports or _Ports.between(roles, places, k)
        positions = [0, *(place.position for place in places), len(equations)]
        effects = [eqn for eqn in equations[positions[k] : positions[k + 1]] if eqn.effects]
        self.written = {i: new for i, (new, owner) in enumerate(zip(roles.new_state, owners)) if owner == k}
        given = (*roles.held, *self.ports.data, *self.ports.pop.values())
        outputs = [*self.ports.passed_on, *self.ports.stash.values(), *self.written.values()]
        self.program = trace.flow.program.part(given, outputs, effects)
        read = self.program.read()
        self.parameters = [i for i, v in enumerate(roles.parameters) if v in read]
        self.state = [i for i, v in enumerate(roles.state) if v in read]

    @property
    def read_values(self) -> set:
        """The variables that its equations read, and that the last segment returns."""
        read = {v for eqn in self.program.equations for v in variables(eqn.invars)}
        return read | set(variables(self.program.outputs)) if self.is_last else read

    @functools.cached_property
    def text(self) -> str:
        """Segments with equal texts compute the same."""
        read = self.program.read()
        inputs = [v for v in self.program.inputs if v in read]
        return self.program.part(inputs, self.program.outputs).text()

    @property
    def form(self) -> tuple[int, ...]:
        """The numbers of values that it gets and passes on, in each way."""
        data, passed_on, pop, stash = map(len, self.ports)
        return data, passed_on, pop, stash

    def values(self, parameters: Sequence, state: Sequence, keys: Sequence, args: tuple) -> tuple:
        """Runs the segment: `(outputs, *stashed)`, what the model reports, and the new state by number.

        Args:
          parameters: of the whole model, None where the segment reads nothing.
          state: the same of the state.
          keys: random keys.
          args: the activation, and the values of skip connections.
        """
        activation, *popped = args
        data = jax.tree.leaves(activation) if self._is_first or len(self.ports.data) != 1 else [activation]
        results = iter(self.program(*parameters, *state, *keys, *data, *popped))
        passed_on = list(itertools.islice(results, len(self.ports.passed_on)))
        stashed = list(itertools.islice(results, len(self.ports.stash)))
        written = dict(zip(self.written, results, strict=True))
        reported: dict = {}
        if self.is_last:
            outputs, reported = self.trace.results.unflatten(passed_on)
        else:
            outputs = passed_on[0] if len(passed_on) == 1 else tuple(passed_on)
        return (outputs, *stashed) if stashed else outputs, reported, written


class _ModelLeaves(NamedTuple):
    """The leaves of a model, parameters and then state.

    Attributes:
      paths: path of each leaf.
      values: abstract arrays.
      given: the values that the user gave, or None.
      specs: names of dims, see `Layer`; None if nothing is named.
      variables: NNX variables, see `Layer`; None if the model has none.
      cut: cuts lists of values of a model into their turns.
    """

    paths: tuple[list[Path], list[Path]]
    values: tuple[list, list]
    given: tuple[list, list] | None
    specs: list | None
    variables: list | None
    cut: Callable[[tuple[list, list]], tuple[list, list]] = lambda lists: lists

    @classmethod
    def of(cls, model: Layer) -> "_ModelLeaves":
        """The leaves of a bound model."""
        trees = model.parameters, model.state
        paths, unnamed = ([p for p, _ in jax.tree.leaves_with_path(tree)] for tree in trees)
        specs = jax.tree.leaves(model.specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
        given = None if model.given is None else _lists(model.given)
        variables = jax.tree.leaves(model.variables, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
        return cls((paths, unnamed), _lists(trees), given, specs or None, variables or None)

    def in_turns(self, parameters: Mapping[int, int], state: Mapping[int, int]) -> "_ModelLeaves":
        """The leaves, some of them cut into their turns: number of a leaf -> axis."""
        axes = parameters, state
        turns = [
            {i: turns_of(values[i], axis) for i, axis in role_axes.items()}
            for values, role_axes in zip(self.values, axes)
        ]
        cut = functools.partial(_cut_leaves, turns)
        paths, unnamed = (
            [
                path
                for i, whole in enumerate(role_paths)
                for path in ([(*whole, turn.key) for turn in role_turns[i]] if i in role_turns else [whole])
            ]
            for role_paths, role_turns in zip(self.paths, turns)
        )
        specs = None
        if self.specs is not None:
            specs = [spec for i, spec in enumerate(self.specs) for spec in _specs_of_turns(spec, turns[0].get(i))]
        variables = None
        if self.variables is not None:
            variables = [v for i, v in enumerate(self.variables) for _ in turns[0].get(i, [None])]
        given = None if self.given is None else cut(self.given)
        return _ModelLeaves((paths, unnamed), cut(self.values), given, specs, variables, cut)

    def chosen(self, leaves: Sequence, role: int, numbers: Sequence[int]) -> dict:
        """Some of the leaves of a role, as a nested dict."""
        return unflattened((self.paths[role][i], leaves[i]) for i in numbers)


def _cut_leaves(turns: Sequence[Mapping[int, list[Turn]]], lists: tuple[list, list]) -> tuple[list, list]:
    """The parts of the leaves that have turns, and the others as they are."""
    first, second = (
        [part for i, leaf in enumerate(leaves) for part in ([t.part(leaf) for t in of[i]] if i in of else [leaf])]
        for leaves, of in zip(lists, turns)
    )
    return first, second


def _specs_of_turns(spec: PartitionSpec, turns: Sequence[Turn] | None) -> list[PartitionSpec]:
    """The names of the dims of each turn of a leaf: a turn has one row."""
    if turns is None:
        return [spec]
    return [PartitionSpec(*(None if dim == turn.axis else name for dim, name in enumerate(spec))) for turn in turns]


def _lists(trees: tuple[Any, Any]) -> tuple[list, list]:
    parameters, state = map(jax.tree.leaves, trees)
    return parameters, state


def _segment(
    model: Layer,
    leaves: _ModelLeaves,
    k: int,
    mark: tuple,
    trained: _SegmentProgram,
    evaluated: _SegmentProgram,
    unread: Sequence[int],
) -> Layer:
    """Segment number `k` as a layer, which also has the parameters `unread`."""
    numbers = (
        sorted({*trained.parameters, *evaluated.parameters, *unread}),
        sorted({*trained.state, *evaluated.state, *trained.written}),
    )

    def chosen(lists: tuple[Sequence, Sequence]) -> tuple[dict, dict]:
        parameters, state = (leaves.chosen(lists[role], role, numbers[role]) for role in range(2))
        return parameters, state

    def spread(tree: Any, role: int) -> list:
        """The leaves of the whole model, None where the segment has none."""
        values: list = [None] * len(leaves.paths[role])
        for i, value in zip(numbers[role], jax.tree.leaves(tree), strict=True):
            values[i] = value
        return values

    def train(parameters: Any, state: Any, key: jax.Array, args: tuple) -> tuple[Any, Any]:
        before = spread(state, 1)
        outputs, reported, written = trained.values(spread(parameters, 0), before, [key], args)
        for name, value in reported.items():
            report(name, value)
        return outputs, leaves.chosen([written.get(i, a) for i, a in enumerate(before)], 1, numbers[1])

    def evaluate(parameters: Any, state: Any, args: tuple) -> Any:
        outputs, _, _ = evaluated.values(spread(parameters, 0), spread(state, 1), [], args)
        return outputs

    init = model.init
    parameters, state = chosen(leaves.values)
    return Layer(
        _name([leaves.paths[0][i] for i in numbers[0]]) or f"{model.name}, segment {k}",
        parameters,
        state,
        train,
        evaluate,
        init=None if init is None else lambda key: chosen(leaves.cut(_lists(init(key)))),
        given=None if leaves.given is None else chosen(leaves.given),
        options=LayerOptions(segment=mark, stash=tuple(trained.ports.stash), pop=tuple(trained.ports.pop)),
        # The tracer traces equal segments once. The last one returns the outputs in the structure of the model's.
        alike=None if model.state else (trained.text, evaluated.text, trained.is_last, trained.form),
        specs={} if leaves.specs is None else leaves.chosen(leaves.specs, 0, numbers[0]),
        variables={} if leaves.variables is None else leaves.chosen(leaves.variables, 0, numbers[0]),
        has_batch_norm=model.has_batch_norm,
    )


def _name(paths: Sequence[Path]) -> str:
    """Names the modules that have parameters: "blocks.3", or "embed, positions"."""
    modules = [_module(path) for path in paths]
    if len(set(modules)) == 1:
        return ".".join(modules[0])
    # A member of a list is a module of its own.
    numbered = [next((i for i, part in enumerate(m) if part.isdecimal()), 0) for m in modules]
    names = [".".join(m[: i + 1]) for m, i in zip(modules, numbered)]
    first, *others = dict.fromkeys(names) or [""]
    return ", ".join([first, *others[:2]]) + (", ..." if len(others) > 2 else "")


def _module(path: Path) -> tuple[str, ...]:
    """The names along the path of the module that has a parameter; the turns of a loop are a list of modules."""
    turn = Turn.at(path)
    if turn is not None:
        first, *others = _module(path[:-1])
        return first, str(turn.number), *others
    return tuple(str(key.key) for key in path[:-1] or path)


def shared_parameters(layers: Sequence[Layer]) -> list[list[tuple[int, str]]]:
    """Ties between segments that read one parameter: `(layer, "dotted.path")` pairs."""
    places: dict[Path, list[tuple[int, str]]] = {}
    for i, layer in enumerate(layers):
        for path, _ in jax.tree.leaves_with_path(layer.parameters):
            places.setdefault(path, []).append((i, path_text(path)))
    return [copies for copies in places.values() if len(copies) > 1]
