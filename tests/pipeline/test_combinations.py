"""The table of docs/how_to/combinations.md: what it names is refused before a compile, and all other pairs are
accepted.
"""

import functools
import itertools
import pathlib

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import refused

import jpipe

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "how_to" / "combinations.md"
BATCH = {"inputs": np.zeros((16, 3), np.int32)}
SCHEDULES = jpipe.schedules


class Embed(nnx.Module):
    """Vectors of 8 tokens."""

    def __init__(self, rngs):
        names = nnx.with_partitioning(nnx.initializers.normal(), ("vocab", None))
        self.table = nnx.Param(names(rngs.params(), (8, 4)))

    def __call__(self, tokens):
        return jpipe.vocabulary.lookup(self.table[...], tokens)


class Head(Embed):
    """Logits of 8 tokens."""

    def __call__(self, x):
        return jpipe.vocabulary.logits(x, self.table[...])


class Inner(nnx.Module):
    """A dense layer, which may report or have running statistics."""

    def __init__(self, rngs, reports, has_state):
        self.dense, self.reports = nnx.Linear(4, 4, rngs=rngs), reports
        self.norm = nnx.BatchNorm(4, rngs=rngs) if has_state else lambda x: x

    def __call__(self, x):
        x = self.norm(self.dense(x))
        if self.reports:
            jpipe.report("size", x.mean())
        return x


def cross_entropy(outputs, batch):
    return jnp.mean(jpipe.vocabulary.cross_entropy(outputs, batch["inputs"]))


def with_reports(outputs, batch, reported):
    return cross_entropy(outputs, batch) + reported["size"]


OFFLOADS = {
    "`Offload(optimizer=)`": dict(optimizer=1.0),
    "`Offload(activations=)`": dict(activations=3),
    "`Offload(weights=)`": dict(weights=1.0),
    "`Offload(gradients=)`": dict(gradients=1.0),
}
AXES = {'axis "data"': "data", 'axis "fsdp"': "fsdp", 'axis "expert"': "expert", 'axis "model"': "model"}
OPTIONS = {
    "`shard_optimizer`": dict(shard_optimizer=True),
    "`compress_messages`": dict(compress_messages=jpipe.compress.Quantize(8)),
    "`compress_gradients`": dict(compress_gradients=jpipe.compress.TopK(0.5)),
    "`accumulate_gradients`": dict(accumulate_gradients=jpipe.compress.StreamingPCA(1)),
    "`local_steps`": dict(local_steps=jpipe.LocalSteps(optax.sgd(1.0))),
    '`recompute="full"`': dict(recompute="full"),
    "a loss scale that moves": dict(loss_scale=jpipe.LossScale()),
    "`forward_params`": dict(forward_params=jpipe.optim.predicted_params),
    "Muon, Adafactor": dict(optimizer=optax.contrib.muon(0.1)),
    "`device_memory`": dict(device_memory="1GiB"),
    "`strategy`": dict(strategy="strategy.json"),
}
COPIES, ASYNCHRONOUS, RHYTHMS = "copies of a stage", "asynchronous schedule", "`update_every`"
TIES, REPORTS, STATE = "ties across stages", "`jpipe.report`", "mutable state"
VOCABULARY, WHOLE = "vocabulary layers", "`WholeBatchLoss`"
ALONE = (COPIES, ASYNCHRONOUS, RHYTHMS, TIES, REPORTS, STATE, VOCABULARY, WHOLE)
FEATURES = [*AXES, *OPTIONS, *OFFLOADS, *ALONE]
PAIRS = list(itertools.combinations(FEATURES, 2))


def check(*features):
    """Makes a pipeline with these features, and its programs without compiling one."""
    layers = [
        Embed,
        *[functools.partial(Inner, reports=REPORTS in features, has_state=STATE in features)] * 2,
        Head,
    ]
    options = {"optimizer": optax.adam(0.1)}
    for feature in features:
        options |= OPTIONS.get(feature, {})
    if "forward_params" in options:
        prediction = jpipe.optim.predict_weights()
        options["optimizer"] = optax.chain(options["optimizer"], prediction)
    offload = {}
    for feature in features:
        offload |= OFFLOADS.get(feature, {})
    if offload:
        options["offload"] = jpipe.Offload(**offload)
    sizes = {AXES[feature]: 2 for feature in features if feature in AXES}
    needs_replicas = {"shard_optimizer", "compress_gradients", "local_steps"} & options.keys()
    if needs_replicas and COPIES not in features:
        sizes["data"] = 2
    replicas = {"replicas": (1, 2)} if COPIES in features else {}
    make = SCHEDULES.pipedream if {ASYNCHRONOUS, RHYTHMS} & {*features} else SCHEDULES.gpipe
    rhythms = {"update_every": (4, 2)} if RHYTHMS in features else {}
    schedule = make(2, 4, **replicas, **rhythms)
    ties = [[(0, "table"), (3, "table")]] if TIES in features else []
    rules = [("vocab", "stage")] if VOCABULARY in features else []
    loss = with_reports if REPORTS in features else cross_entropy
    pipe = jpipe.Pipeline(
        layers,
        loss=jpipe.WholeBatchLoss(loss) if WHOLE in features else loss,
        schedule=schedule,
        boundaries=[2],
        mesh=jpipe.make_mesh(stage=schedule.num_devices, **sizes),
        ties=ties,
        axis_rules=rules or None,
        **options,
    )
    if not {"device_memory", "strategy"} & options.keys():  # these compile, and read a file
        pipe.partition(BATCH)


def table():
    """The pairs that the page says are refused, and the words for the reason and the remedy."""
    rows = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or len(cells) != 4 or set(line) <= set("|-"):
            continue
        for other in cells[1].split(" · "):
            if cells[0] in FEATURES:
                assert other in FEATURES, f"{other} of the page is no feature"
                assert frozenset((cells[0], other)) not in rows
                rows[frozenset((cells[0], other))] = cells[2:]
    return rows


REFUSED = table()


@pytest.mark.parametrize("pair", [p for p in PAIRS if frozenset(p) in REFUSED], ids=" x ".join)
def test_refused_pairs(pair):
    with refused(r"(?i)leave|exclude|without|choose|use|take"):
        check(*pair)


def test_the_table_has_known_features_only():
    assert len(REFUSED) == sum(frozenset(p) in REFUSED for p in PAIRS) > 20


@pytest.mark.sampled(25)
@pytest.mark.parametrize("pair", [p for p in PAIRS if frozenset(p) not in REFUSED], ids=" x ".join)
def test_all_other_pairs_are_accepted(pair):
    check(*pair)
