"""Cuts a layer that is a whole model into the layers of a pipeline."""

import bisect
import itertools
from collections.abc import Sequence
from typing import Any

import jax

from jpipe._util.warn import warn
from jpipe.layers.avals import shapes_text
from jpipe.layers.layer import Layer, LayerOptions
from jpipe.layers.model_tree import Path, Turn, path_text
from jpipe.layers.report import report
from jpipe.segments.forced import ForcedPlaces
from jpipe.segments.leaves import ModelLeaves
from jpipe.segments.model_loss import ModelLoss
from jpipe.segments.placement import Placement, StepGraph
from jpipe.segments.places import CutError, CutPlace, DataFlow, narrow
from jpipe.segments.repeated import check_repeated
from jpipe.segments.segment_program import SegmentProgram, inside_of_writes, owners_of_state, ports_past_others
from jpipe.segments.trace import Trace, Tracing
from jpipe.segments.turns import in_turns, stacked


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
    matched = _matched(*(trace.flow.places(trained.flow.read_and_written) for trace in (trained, evaluated)))
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
        owners = owners_of_state(trained.flow, places)
        parts = [
            (SegmentProgram(trained, places, k, owners), SegmentProgram(evaluated, places_there, k, owners))
            for k in range(len(places) + 1)
        ]
        inside = inside_of_writes(trained.flow.roles, parts, owners)
        if not inside:
            break
        of_one_state += [places[k] for k in inside]
        places = [place for k, place in enumerate(places) if k not in inside]
    if marks is not None and len(places) + 1 != len(marks):
        raise CutError(
            f"the model ({model.name}) computes otherwise for inputs of {shapes_text(args)} than for those that it was "
            "cut for: it has other places to cut at. Make a pipeline for these shapes."
        )
    ports = ports_past_others((trained, evaluated), (places, places_there), parts)
    if ports is not None:
        parts = [
            (
                SegmentProgram(trained, places, k, owners, ports[0][k]),
                SegmentProgram(evaluated, places_there, k, owners, ports[1][k]),
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
    message += f"Places are between products, and the model has {f'{len(steps)}: {shown}' if steps else 'none'}. "
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
    flow = _traces(model, args, tracing, loss)[0].flow
    marks = ForcedPlaces(()).places(flow, ())
    if marks:
        warn(
            f"the model marks {len(marks)} ends of stages by `jpipe.stage_end`, and they do not count: with "
            '`boundaries="placement"` a solver chooses the stage of each product. Give other `boundaries` for stages '
            "that end at the marks."
        )
    return StepGraph(flow)


def _traces(
    model: Layer, args: tuple, tracing: Tracing, loss: ModelLoss | None, is_checked: bool = False
) -> tuple[Trace, Trace, "ModelLeaves"]:
    """The model in training and in evaluation, and its leaves, with loops over stacked weights as their turns.

    Raises:
      ValueError: if `is_checked`, and the model computes otherwise at a second call.
    """
    trained, leaves = tracing.training(model, args), ModelLeaves.of(model)
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


def _matched(
    here: Sequence[tuple[CutPlace, ...]], there: Sequence[tuple[CutPlace, ...]]
) -> list[tuple[tuple[CutPlace, CutPlace], ...]]:
    """The places in training, each with the same place in evaluation; of equal ones all."""
    marked = {place.mark: place for places in there for place in places}
    matched = [tuple((place, marked[place.mark]) for place in places if place.mark in marked) for places in here]
    return [pairs for pairs in matched if pairs]


def _named_places(
    forced: ForcedPlaces | Placement, leaves: "ModelLeaves", trained: Trace, evaluated: Trace
) -> list[tuple[CutPlace, CutPlace]]:
    """The places that the user or a placement names, in training and in evaluation."""
    paths, state_paths = ([path_text(path) for path in paths] for paths in leaves.paths)
    here, there = (forced.places(trace.flow, paths, state_paths) for trace in (trained, evaluated))
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
        return SegmentProgram(trace, chosen, k, ()).text

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


def _segment(
    model: Layer,
    leaves: ModelLeaves,
    k: int,
    mark: tuple,
    trained: SegmentProgram,
    evaluated: SegmentProgram,
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
        init=None if init is None else lambda key: chosen(leaves.leaves(init(key))),
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
