"""Plans with a strategy of `jpipe.soap` inside each stage: the devices of a stage split every operator.

profile, layers ── search ──> strategy for T devices ──> profile of a group of T devices ──┐
                                                                                           ├──> choose ──> Ranking
profile ───────────────────────────────────────────────────────────────────────────────────┘
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jpipe import soap
from jpipe.plan import _choose
from jpipe.plan._choose import Ranking
from jpipe.plan._groups import groups
from jpipe.plan._loops import PROGRAMS, Seconds
from jpipe.plan._machine import fit_positive
from jpipe.plan._parts import parts, scaled, with_parts_of_weights
from jpipe.plan._profile import LayerProfile, Profile
from jpipe.soap.layers import LayersGraph
from jpipe.soap.tasks import Tasks
from jpipe.solvers import Machine


class LayerShare(NamedTuple):
    """The costs of a split layer, or of the loss, on the busiest of its devices.

    Attributes:
      forward, backward: seconds of computing, divided by those on one device.
      forward_messages: seconds of messages of a forward.
      backward_messages: seconds of messages of a backward, without those of weights.
      weight_messages: seconds in which gradients of weights are added up, per microbatch.
    """

    forward: float = 1.0
    backward: float = 1.0
    forward_messages: float = 0.0
    backward_messages: float = 0.0
    weight_messages: float = 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """A strategy for the layers of a profile.

    Attributes:
      strategy: a configuration per operator.
      graph: the operators of a microbatch.
      num_devices: T, devices that split every operator.
      profile: the costs of the layers on each of T devices, while as many devices compute as when they were measured.
    """

    strategy: soap.Strategy
    graph: soap.OperatorGraph
    num_devices: int
    profile: Profile

    @property
    def microbatch_size(self) -> int:
        """Samples per microbatch."""
        return self.profile.microbatch_size

    def on_groups(self, machine: Machine) -> Profile:
        """The profile for `groups(machine, T)`.

        With fewer cores than devices, `jpipe.plan.predict` takes a share of what was measured. For groups, whose cores
        are T times as large, it would take another one; the seconds are changed by as much.
        """
        cores, profile = machine.num_cores, self.profile
        if cores is None:
            return profile
        share, group_share = (min(number / profile.num_devices, 1.0) for number in (cores, cores / self.num_devices))

        def changed(layer: LayerProfile) -> LayerProfile:
            seconds: dict[str, Any] = {
                program: scaled(getattr(layer, program), share / group_share) for program in PROGRAMS
            }
            return dataclasses.replace(layer, **seconds)

        layers = tuple(map(changed, profile.layers))
        return dataclasses.replace(profile, layers=layers, loss=changed(profile.loss))


def search(
    profile: Profile,
    traced: LayersGraph,
    machine: Machine,
    num_devices: int,
    *,
    num_proposals: int = 200,
    seed: int = 0,
) -> Split:
    """Searches for a strategy that splits the layers over devices, and that a mesh can run.

    The rates of a device are those with which FLOPs and bytes of the layers explain the measured seconds best, and the
    links are those of `machine`. Memory does not limit the search; `choose` counts the bytes.

    Args:
      profile: the measured costs of the layers.
      traced: the operators of the layers, for one microbatch of the profile.
      machine: the devices and links.
      num_devices: T.
      num_proposals: number of changes that are tried by chance, and as many after that. So the seed alone decides.
      seed: the seed of the random numbers.
    """
    graph = traced.graph
    group = soap_machine(profile, traced, machine, num_devices)
    space = soap.Space(graph, num_devices, in_stages=True)
    result = soap.search(
        graph,
        group,
        space=space,
        starts=soap.starts_of(space, seed),
        max_proposals=num_proposals,
        max_polish_proposals=num_proposals,
        seed=seed,
    )
    return split(profile, traced, group, result.strategy)


def split(
    profile: Profile,
    traced: LayersGraph,
    machine: soap.Machine,
    strategy: soap.Strategy,
) -> Split:
    """The costs of layers that a strategy splits.

    - A program takes its measured seconds times the share of `layer_shares`, plus the seconds of its messages. The loss
      is computed whole, because a pipeline leaves it to the compiler.
    - A weight, and the optimizer state of its shape, takes the bytes of the largest part. An update takes the measured
      seconds times the layer's share of these bytes.
    - Everything else (stashes, messages between stages, temporaries) counts whole, which is an upper bound. Stages
      split their stashes as the compiler decides for each layer (`jpipe.layers.sharding.stash_specs`), and a profile
      does not say which value of a layer a stash is. Activations between stages are whole, because only a model's
      annotations split them (`jpipe.layers.sharding.ValueSplit`).

    Args:
      profile: the measured costs of the layers.
      traced: the operators of the layers, for one microbatch of the profile.
      machine: the devices that split every operator.
      strategy: a configuration per operator.

    Raises:
      ValueError: if weights are frozen.
    """
    if any(layer.frozen for layer in profile.layers):
        raise ValueError(
            "the search for tensor splits counts gradients of all weights, and `trainable` freezes some. Search with a "
            "profile of a pipeline without it."
        )
    T = machine.num_devices
    shares = layer_shares(traced, machine, strategy)
    sizes = {"model": T}
    specs = [layer_split.parameter_specs for layer_split in traced.splits(strategy, sizes)]
    layers = [
        _split_layer(layer, share, parts(layer.parameters, spec, sizes))
        for layer, share, spec in zip(profile.layers, shares[:-1], specs, strict=True)
    ]
    whole_loss = shares[-1]._replace(forward=1.0, backward=1.0)
    kinds: dict[LayerProfile, int] = {}
    # Layers of one kind that are split differently compute differently.
    numbered = [
        dataclasses.replace(
            layer,
            kind=kinds.setdefault(dataclasses.replace(layer, name=""), len(kinds)),
        )
        for layer in layers
    ]
    on_group = dataclasses.replace(
        profile,
        layers=tuple(numbered),
        loss=_split_layer(profile.loss, whole_loss, ()),
    )
    return Split(tuple(strategy), traced.graph, T, on_group)


def choose(
    profiles: Sequence[Profile],
    machine: Machine,
    batch_size: int,
    splits: Iterable[Split],
    **options: Any,
) -> Ranking:
    """Prices every plan without and with strategies inside of its stages, and ranks them together.

    `jpipe.plan.choose` plans for the devices, and for D / T groups of T devices with the profiles of each T. A plan of
    one stage on one group of all devices is a strategy without a pipeline. So no plan of either kind is predicted
    faster than the first of the ranking.

    Gathering an activation that is split at the end of a stage is not counted.

    Args:
      profiles: see `jpipe.plan.choose`.
      machine: all devices, D.
      batch_size: samples per minibatch.
      splits: strategies for some of the profiles, each for a divisor of D devices.
      options: the options of `jpipe.plan.choose`.

    Returns:
      A `Ranking` whose candidates name T as `num_tensor_devices`.

    Raises:
      ValueError: see `jpipe.plan.choose`; or if T does not divide D.
    """
    ranking = _choose.choose(profiles, machine, batch_size, **options)
    candidates, skipped = list(ranking), list(ranking.skipped)
    by_devices: dict[int, list[Profile]] = {}
    for tensor_split in splits:
        profile = tensor_split.on_groups(machine)
        by_devices.setdefault(tensor_split.num_devices, []).append(profile)
    for T, on_groups in by_devices.items():
        ranking = _choose.choose(on_groups, groups(machine, T), batch_size, **options)
        candidates += (dataclasses.replace(c, num_tensor_devices=T) for c in ranking)
        skipped += (dataclasses.replace(c, num_tensor_devices=T) for c in ranking.skipped)
    return _choose.ranked(candidates, skipped, machine.memory_limit)


def soap_machine(profile: Profile, traced: LayersGraph, machine: Machine, num_devices: int) -> soap.Machine:
    """A group of devices of a machine, with rates that explain the measured seconds of a profile.

    Seconds per FLOP and seconds per byte are fitted to the forwards and backwards of all layers by least squares;
    neither is negative.

    Args:
      profile, traced, machine, num_devices: see `search`.
    """
    unit_machine = soap.Machine("one", (soap.Level(1, 1.0),), 1.0, math.inf, overhead=0.0)
    counted = [_whole_seconds(traced, machine) for machine in (unit_machine, _only_memory(unit_machine))]
    flops, num_bytes = (costs[: len(profile.layers)].sum(axis=1) for costs in counted)
    seconds = [
        forward + backward
        for forward, backward in zip(
            (_median(layer.forward) for layer in profile.layers),
            (_median(layer.backward) for layer in profile.layers),
        )
    ]
    rows = np.stack([flops, num_bytes], axis=1)
    # In equal units, so that FLOPs do not drown bytes.
    scale = np.maximum(rows.max(axis=0), 1.0)
    per_flop, per_byte = fit_positive(rows / scale, np.array(seconds)) / scale
    per_server = math.gcd(machine.server_size, num_devices)
    group = dataclasses.replace(
        machine,
        num_devices=num_devices,
        devices_per_server=per_server,
        memory_limit=math.inf,
    )
    fastest = 1e-18  # seconds per FLOP and byte of what takes no time
    measured = soap.measured(
        group,
        flops=1 / max(per_flop, fastest),
        memory_bandwidth=1 / max(per_byte, fastest),
        device_kind=profile.device_kind,
    )
    return dataclasses.replace(measured, overhead=0.0)


def layer_shares(traced: LayersGraph, machine: soap.Machine, strategy: soap.Strategy) -> list[LayerShare]:
    """The costs of each layer that a strategy splits, and last of the loss.

    Operators run one after the other, as in one program for all devices: each takes as long as on its busiest device,
    and its messages as long as on the busiest link. Messages between two operators, and between two layers, belong to
    the one that reads. Nothing is computed while messages travel. An operator of several layers belongs to each of them
    by its share of the equations.

    Args:
      traced: the operators of the layers.
      machine: the devices that split every operator.
      strategy: a configuration per operator.
    """
    graph = traced.graph
    costs = soap.Analytic(machine)
    both, forward = (Tasks(part, machine, costs, strategy) for part in (graph, _forwards(graph)))
    D = machine.num_devices
    num_operators = len(graph.operators)
    weights = _layer_weights(traced)
    # Per layer: seconds of forward, backward, messages of both, messages of weights.
    used = np.zeros((weights.shape[1], 5))

    def count(number: int, readers: Sequence[int]) -> None:
        loads = forward.blocks[number].load, both.blocks[number].load
        for k, load in enumerate((loads[0], loads[1] - loads[0])):
            seconds = load[1 : 1 + D].max(), load[1 + D :].max(initial=0.0)
            for column, value in zip((k, 2 + k), seconds):
                used[:, column] += value * weights[list(readers)].mean(axis=0)

    for i in range(num_operators):
        count(i, [i])
    for e, (_, target, _) in enumerate(graph.edges):
        count(num_operators + e, [target])
    trained = [w for w in graph.weights if graph.tensors[w].has_gradient]
    first = num_operators + len(graph.edges)
    for w, weight in enumerate(trained):
        readers = [i for i, _ in graph.readers_of_weight[weight]]
        # Without the update, which is priced by the measured one.
        seconds = both.blocks[first + w].load[1 + D :].max(initial=0.0)
        used[:, 4] += seconds * weights[readers].mean(axis=0)
    whole = _whole_seconds(traced, machine)
    ratio = np.divide(used[:, :2], whole, out=np.ones_like(whole), where=whole > 0)
    return [LayerShare(*map(float, (*share, *messages))) for share, messages in zip(ratio, used[:, 2:])]


def _only_memory(machine: soap.Machine) -> soap.Machine:
    return dataclasses.replace(machine, flops=math.inf, memory_bandwidth=1.0)


def _whole_seconds(traced: LayersGraph, machine: soap.Machine) -> np.ndarray:
    """`[layers + 1, 2]`: seconds of forward and backward of each layer, and last of the loss, on one device."""
    graph = traced.graph
    costs = soap.Analytic(machine)
    seconds = [
        costs.seconds(graph, i, tuple(loop.size for loop in operator.loops))
        for i, operator in enumerate(graph.operators)
    ]
    return _layer_weights(traced).T @ np.array(seconds)


def _layer_weights(traced: LayersGraph) -> np.ndarray:
    """`[operators, layers + 1]`: the share of the equations of an operator that belong to each layer, and last to the
    loss.
    """
    num_layers = len(traced.num_parameters)
    weights = np.zeros((len(traced.graph.operators), num_layers + 1))
    for i, operator in enumerate(traced.graph.operators):
        for member in operator.equations:
            # Each layer is a call of the traced function, in order. The rest is the loss.
            layer = min(member.equation.place[0], num_layers)
            weights[i, layer] += 1 / len(operator.equations)
    return weights


def _forwards(graph: soap.OperatorGraph) -> soap.OperatorGraph:
    """The graph without its backward."""
    return soap.OperatorGraph(
        tuple(dataclasses.replace(o, backward_factor=0.0) for o in graph.operators),
        tuple(dataclasses.replace(t, has_gradient=False) for t in graph.tensors),
        graph.results,
    )


def _median(seconds: Seconds | None) -> float:
    return 0.0 if seconds is None else seconds.median


def _split_layer(
    layer: LayerProfile,
    share: LayerShare,
    parameters: tuple[jax.ShapeDtypeStruct, ...],
) -> LayerProfile:
    split = with_parts_of_weights(layer, parameters)
    all_messages = share.backward_messages + share.weight_messages
    kept = split.parameter_bytes / max(layer.parameter_bytes, 1)
    return dataclasses.replace(
        split,
        forward=scaled(layer.forward, share.forward, share.forward_messages),
        forward_and_stash=scaled(layer.forward_and_stash, share.forward, share.forward_messages),
        backward=scaled(layer.backward, share.backward, all_messages),
        input_grad=scaled(layer.input_grad, share.backward, share.backward_messages),
        weight_grad=scaled(layer.weight_grad, share.backward, share.weight_messages),
        update=scaled(layer.update, kept),
    )
