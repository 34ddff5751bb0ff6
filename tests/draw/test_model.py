"""Pictures of models: every layer is there, with the numbers of an independent count."""

import itertools
import re
import xml.etree.ElementTree as ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import refused

import jpipe
from jpipe import draw
from jpipe.draw import LayerRecord, ModelPicture
from models import Transformer

ROWS, LENGTH, DIM, VOCAB = 2, 5, 8, 16  # of one microbatch
BATCH = {"inputs": jax.ShapeDtypeStruct((4 * ROWS, LENGTH), jnp.int32)}
HIDDEN_BYTES, LOGITS_BYTES = ROWS * LENGTH * DIM * 4, ROWS * LENGTH * VOCAB * 4


class Block(nnx.Module):
    def __init__(self, *, rngs):
        self.up, self.down = nnx.Linear(DIM, 4 * DIM, rngs=rngs), nnx.Linear(4 * DIM, DIM, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


class Language(nnx.Module):
    def __init__(self, *, rngs):
        self.embed = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.blocks = nnx.List([Block(rngs=rngs) for _ in range(6)])
        self.norm = nnx.LayerNorm(DIM, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


def num_parameters(module: nnx.Module) -> int:
    return sum(a.size for a in jax.tree.leaves(nnx.state(module, nnx.Param)))


def make(layers, schedule=None, **options) -> jpipe.Pipeline:
    schedule = schedule or jpipe.schedules.gpipe(2, 4)
    loss = options.pop("loss", lambda outputs, batch: outputs.mean())
    return jpipe.Pipeline(layers, loss=loss, optimizer=optax.sgd(0.1), schedule=schedule, **options)


@pytest.fixture(scope="module")
def model() -> Language:
    return Language(rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def pipe(model) -> jpipe.Pipeline:
    return make(model, boundaries=["blocks.4"])


@pytest.fixture(scope="module")
def picture(pipe) -> ModelPicture:
    return draw.model(pipe, BATCH)


def skipping() -> jpipe.Pipeline:
    """Skips of 3 and 5 numbers per row, past a stage and within one; copies of a stage."""
    layers = [
        jpipe.skip(jpipe.Function(lambda x: (jnp.tanh(x), x[:, :3])), stash="long"),
        jpipe.skip(jpipe.Function(lambda x: (jnp.tanh(x), x[:, :5])), stash="short"),
        jpipe.skip(jpipe.Function(lambda x, kept: x + kept.sum()), pop="short"),
        *[jnp.tanh] * 3,
        jpipe.skip(jpipe.Function(lambda x, kept: x + kept.sum()), pop="long"),
    ]
    return make(layers, jpipe.schedules.gpipe(3, 4), boundaries=[1, 4])


SKIPPING_BATCH = {"inputs": np.ones((8, 6), np.float32)}


def test_records_of_a_whole_model_agree_with_its_tree_and_its_shapes(model, pipe, picture):
    block, embed = num_parameters(model.blocks[0]), VOCAB * DIM
    names = ["embed", *(f"blocks.{i}" for i in range(6)), "embed, norm"]
    assert [layer.name for layer in picture.layers] == names
    assert [layer.stage for layer in picture.layers] == [0] * 5 + [1] * 3
    assert [layer.num_parameters for layer in picture.layers] == [embed, *[block] * 6, embed + 2 * DIM]
    assert [layer.num_tied for layer in picture.layers] == [0] * 7 + [embed]
    assert f": {num_parameters(model):,} parameters, " in picture.headline
    assert [layer.output_bytes for layer in picture.layers] == [HIDDEN_BYTES] * 7 + [LOGITS_BYTES]
    assert picture.devices == ((0,), (1,))
    for record in pipe.partition(BATCH):
        layers = picture.layers[slice(*record.layers)]
        assert sum(layer.flops for layer in layers) == record.flops > 0
        assert sum(layer.num_parameters for layer in layers) == record.num_parameters


def test_skips_are_at_the_layers_that_stash_them():
    pipe = skipping()
    picture = draw.model(pipe, SKIPPING_BATCH)
    skips = {i: layer.skips for i, layer in enumerate(picture.layers) if layer.skips}
    assert skips == {0: (("long", 6, 2 * 3 * 4),), 1: (("short", 2, 2 * 5 * 4),)}
    cuts = [line.strip("- ") for line in str(picture).splitlines() if line.startswith("--")]
    assert cuts == ["cut: 48 B to stage 1, beside it skips of 24 B", "cut: 48 B to stage 2, beside it skips of 24 B"]
    sent = {(m.what, m.source, m.target): m.num_bytes for m in pipe.messages(SKIPPING_BATCH)}
    assert sent["activation", 0, 1] == sent["activation", 1, 2] == 48
    assert sent["skip0", 0, 2] == 24


def layers_alike() -> ModelPicture:
    """Folded, apart because of a skip that begins or ends, tied weights, copies of a stage, and layers that all stages run together."""
    block = LayerRecord("", 0, 1200, 0, 4e6, 2048, (), 1)
    layers = [
        LayerRecord("embed", None, 512, 0, 0.0, 2048, (), 0),
        *(block._replace(name=f"blocks.{i}") for i in range(3)),
        block._replace(name="blocks.3", skips=(("long", 6, 3 * 2**20),)),
        *(block._replace(name=f"blocks.{i}", stage=1) for i in range(4, 7)),
        LayerRecord("head", None, 530, 512, 999999.0, 2**20, (), 2),
    ]
    return ModelPicture("the model Tiny, 9 segments", tuple(layers), ((0, 2), (1,)))


TEXT = """\
the model Tiny, 9 segments in 2 stages: 8,930 parameters, 29M FLOPs for a microbatch

     name                   parameters  FLOPs  share      out
all stages together: 512 parameters, 0 FLOPs (0.0%)
  0  embed                         512      0   0.0%  2.0 KiB
stage 0 on devices 0, 2: 4,800 parameters, 16M FLOPs (55.2%)
1-3  blocks.0 ... blocks.2       3,600    12M  41.4%  2.0 KiB  sum of 3 alike
  4  blocks.3                    1,200     4M  13.8%  2.0 KiB  skip long to 6: 3.0 MiB
-- cut: 2.0 KiB to stage 1, beside it skips of 3.0 MiB ------
stage 1 on device 1: 3,600 parameters, 12M FLOPs (41.4%)
  5  blocks.4                    1,200     4M  13.8%  2.0 KiB
  6  blocks.5                    1,200     4M  13.8%  2.0 KiB
  7  blocks.6                    1,200     4M  13.8%  2.0 KiB
all stages together: 530 parameters, 1M FLOPs (3.4%)
  8  head                          530     1M   3.4%  1.0 MiB  512 parameters tied
"""


def test_text():
    picture = layers_alike()
    assert picture.text() == TEXT
    assert str(picture) == TEXT.rstrip()


def test_what_differs_is_not_folded(picture):
    assert re.search(r"^1-4  blocks.0 ... blocks.3  .* sum of 4 alike$", picture.text(), re.M)
    apart = picture.text(fold=False)
    assert "alike" not in apart
    assert all(re.search(rf"^{i}  {re.escape(layer.name)} ", apart, re.M) for i, layer in enumerate(picture.layers))
    first, second, third, *others = picture.layers
    for other in (
        second._replace(kind=9),
        second._replace(num_parameters=1),
        second._replace(flops=1.0),
        second._replace(output_bytes=1),
        second._replace(num_tied=1),
    ):
        assert "alike" not in picture._replace(layers=(first, second, other, third)).text()


def test_layers_that_all_stages_run_together():
    model = Transformer(vocab_size=50, seq_len=8, dim=16, num_heads=2, num_blocks=2)
    rules = (("vocab", "stage"), *jpipe.AXIS_RULES)
    pipe = make(model.layers(), loss=model.loss(), has_aux=True, axis_rules=rules)
    tokens = jax.ShapeDtypeStruct((8, 8), jnp.int32)
    batch = {"inputs": tokens, "labels": tokens}
    picture = draw.model(pipe, batch)
    assert picture.layers[0].stage is picture.layers[-1].stage is None
    assert {layer.stage for layer in picture.layers[1:-1]} == {0, 1}
    flops = sum(record.flops for record in pipe.partition(batch))  # these share the layers out
    assert sum(layer.flops for layer in picture.layers) == pytest.approx(flops)
    assert picture.text().count("all stages together") == 2
    assert picture.text().count("-- cut") == 1


def test_a_picture_is_made_under_a_mesh_of_the_user(model, picture):
    with jax.set_mesh(jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])):
        assert draw.model(make(model, boundaries=["blocks.4"]), BATCH).layers == picture.layers


def test_nothing_is_compiled(model):
    compiled: list[str] = []

    def listen(event, *_, **__):
        compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        draw.model(make(model, jpipe.schedules.gpipe(3, 4)), BATCH)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled  # tracing is counted
    assert not [name for name in compiled if "backend_compile" in name]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((jpipe.schedules.gpipe(2, 2), BATCH), r"a `jpipe.Pipeline`, got an object of Schedule.* by `jpipe.draw.text`"),
        ((jpipe.Pipeline, BATCH), "got the class Pipeline"),
        ((None, BATCH), "got an object of NoneType"),
    ],
)
def test_only_pipelines_are_drawn(arguments, message):
    with refused(message):
        draw.model(*arguments)


def test_a_batch_is_needed(pipe):
    with refused("needs a batch, got None: .* follow from its shapes"):
        draw.model(pipe, None)
    with refused("a batch of 7 cannot be cut into 4 equal microbatches"):
        draw.model(pipe, {"inputs": jax.ShapeDtypeStruct((7, LENGTH), jnp.int32)})


# -- Figures --------------------------------------------------------------------------


def many() -> ModelPicture:
    """A hundred segments that differ, with long names and notes, in six stages."""
    layers = [
        LayerRecord(
            name=f"decoder.blocks.{i}" if i % 9 else f"embed_tokens_and_positions.blocks.{i}.attention.norm",
            stage=i // 17,
            num_parameters=123_456_789 + i,
            num_tied=123_456_789 * (i == 99),
            flops=1e9 * (1 + i % 7),
            output_bytes=2**20 + 2**17 * i,
            skips=(("a_long_name_of_a_skip_between_far_blocks", 60, 4096),) if i == 3 else (),
            kind=i,
        )
        for i in range(100)
    ]
    return ModelPicture("the model Large, 100 segments", tuple(layers), ((0, 6), *((s,) for s in range(1, 6))))


def svg_texts(picture: ModelPicture, path, **options) -> list[str]:
    picture.save(path, **options)
    root = ElementTree.parse(path).getroot()
    return ["".join(element.itertext()) for element in root.iter() if element.tag.endswith("}text")]


def test_an_svg_has_every_segment_with_its_numbers(picture, tmp_path):
    pytest.importorskip("matplotlib")
    words = svg_texts(picture, tmp_path / "model.svg", fold=False)
    assert [word for word in words if word.startswith("stage")] == ["stage 0 on device 0", "stage 1 on device 1"]
    boxes = [f"{i}  {layer.name}" for i, layer in enumerate(picture.layers)]
    assert [word for word in words if re.match(r"\d+  ", word)] == boxes
    numbers = [word for word in words if re.match(r"[\d,]+ parameters, .*FLOPs \(", word)]
    counts = [int(word.split()[0].replace(",", "")) for word in numbers]
    of_stages = [sum(layer.num_parameters for layer in picture.layers if layer.stage == s) for s in (0, 1)]
    assert counts == [
        of_stages[0],
        *(layer.num_parameters for layer in picture.layers[:5]),
        of_stages[1],
        *(layer.num_parameters for layer in picture.layers[5:]),
    ]
    assert words.count(f"{HIDDEN_BYTES} B") == 6
    assert words.count(f"cut: {HIDDEN_BYTES} B to stage 1") == 1
    folded = svg_texts(picture, tmp_path / "folded.svg")
    assert {"1-4  blocks.0 ... blocks.3", "sum of 4 alike"} <= set(folded)
    assert f"<title>{picture.headline}</title>" in (tmp_path / "model.svg").read_text()


def test_a_bar_is_as_long_as_the_flops():
    pytest.importorskip("matplotlib")
    from matplotlib.colors import to_hex

    from jpipe.draw._model_figure import COLORS

    picture = many()
    filled = [patch for patch in picture.figure().axes[0].patches if patch.get_facecolor()[3]]
    lengths = np.array([patch.get_width() for patch in filled])
    flops = np.array([layer.flops for layer in picture.layers])
    (box,) = {patch.get_width() for patch in picture.figure().axes[0].patches if not patch.get_facecolor()[3]}
    np.testing.assert_allclose(lengths, box * flops / flops.max())
    assert [to_hex(patch.get_facecolor()) for patch in filled] == [COLORS[layer.stage] for layer in picture.layers]


@pytest.mark.parametrize("case", [layers_alike, many])
def test_words_neither_overlap_nor_leave_their_box(case):
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = case().figure()
    renderer = FigureCanvasAgg(figure).get_renderer()
    (axes,) = figure.axes
    words = [text for text in axes.texts if text.get_text()]
    extents = [text.get_window_extent(renderer) for text in words]
    for (a, first), (b, second) in itertools.combinations(zip(words, extents, strict=True), 2):
        assert not first.overlaps(second), (a.get_text(), b.get_text())
    boxes = [p.get_window_extent(renderer) for p in axes.patches if not p.get_facecolor()[3]]
    for text, extent in zip(words, extents, strict=True):
        assert figure.bbox.containsx(extent.x0) and figure.bbox.containsx(extent.x1), text.get_text()
        assert figure.bbox.containsy(extent.y0) and figure.bbox.containsy(extent.y1), text.get_text()
        for box in boxes:
            if box.overlaps(extent):
                assert box.x0 < extent.x0 and extent.x1 < box.x1, text.get_text()
                assert box.y0 < extent.y0 and extent.y1 < box.y1, text.get_text()


def test_a_file_is_the_same_every_time(tmp_path):
    pytest.importorskip("matplotlib")
    picture = layers_alike()
    for suffix in ("svg", "png", "pdf"):
        first, second = tmp_path / f"first.{suffix}", tmp_path / f"second.{suffix}"
        picture.save(first)
        picture.save(str(second))
        assert first.read_bytes() == second.read_bytes()
    with pytest.raises(ValueError, match=r"suffix '\.gif' is none of \.pdf, \.png, \.svg"):
        picture.save(tmp_path / "model.gif")
