"""A model and where it is cut, as text and as a picture."""

import itertools
import math
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jpipe._util.sizes import size_text
from jpipe.draw import _model_figure
from jpipe.draw._figure import check_suffix, write
from jpipe.draw._shared import LayerRow, StageRows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEAST_ALIKE = 3
"""Neighbours of a stage that are alike become one line or box if they are at least as many."""


class LayerRecord(NamedTuple):
    """The costs of one layer, or of one segment of a whole model.

    Attributes:
      name: its name.
      stage: the stage that runs it; None: all stages run it together.
      num_parameters: the number of its weights.
      num_tied: how many of these weights an earlier layer has too.
      flops: floating-point operations of forward and backward of one microbatch, as XLA counts them.
      output_bytes: bytes of its outputs for one microbatch, without skips.
      skips: the skips that it stashes, each as (name, number of the layer that pops it, bytes for one microbatch).
      kind: equal for layers that run one program.
    """

    name: str
    stage: int | None
    num_parameters: int
    num_tied: int
    flops: float
    output_bytes: int
    skips: tuple[tuple[str, int, int], ...]
    kind: int


class ModelPicture(NamedTuple):
    """A model and where it is cut. `print` shows `text()`.

    Attributes:
      model: words for the model.
      layers: one record per layer, or per segment of a whole model.
      devices: the devices of each stage, as positions along the axis "stage".
      seconds: of forward and backward of one microbatch in each stage, where `boundaries="placement"` has measured
        them; `()` elsewhere.
    """

    model: str
    layers: tuple[LayerRecord, ...]
    devices: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...] = ()

    def __str__(self) -> str:
        return self.text().rstrip()

    @property
    def headline(self) -> str:
        """The model and its sizes in words. Tied weights count once."""
        num_parameters = sum(layer.num_parameters - layer.num_tied for layer in self.layers)
        flops = sum(layer.flops for layer in self.layers)
        num_stages = len(self.devices)
        return (
            f"{self.model} in {num_stages} stage{'s' * (num_stages > 1)}: {num_parameters:,} parameters, "
            f"{count_text(flops)} FLOPs for a microbatch"
        )

    def text(self, *, fold: bool = True) -> str:
        """The picture as text: a line per layer, and a line where one stage ends and the next begins.

        Args:
          fold: whether three or more neighbours that are alike share a line, which has their sums.

        Returns:
          Lines, each ended by a newline. "out" is the bytes of the outputs of a layer for one microbatch. FLOPs are
          those of forward and backward.
        """
        header = ["", "name", "parameters", "FLOPs", "share", "out", ""]
        stages = self._stages(fold)
        table = [[self._words(row) for row in stage.rows] for stage in stages]
        widths = [max(map(len, column)) for column in zip(header, *itertools.chain(*table), strict=True)]

        def line(words: Sequence[str]) -> str:
            cells = [
                word.ljust(width) if i in (1, 6) else word.rjust(width)
                for i, (word, width) in enumerate(zip(words, widths, strict=True))
            ]
            return "  ".join(cells).rstrip()

        lines = [self.headline, "", line(header)]
        for stage, rows in zip(stages, table, strict=True):
            lines += [f"{stage.title}: {stage.totals}", *map(line, rows)]
            if stage.cut:
                lines.append(f"-- cut: {', '.join(stage.cut)} ".ljust(sum(widths[:6]) + 10, "-").rstrip())
        return "".join(text + "\n" for text in lines)

    def figure(self, *, fold: bool = True) -> "Figure":
        """The picture as a Matplotlib figure.

        A column of boxes per stage, in the colour of the stage. The bar in a box is as long as the FLOPs of the layer.
        Arrows have the bytes of one microbatch; a thick arrow is a cut. Four stages stand side by side, and more
        continue below.

        Args:
          fold: whether three or more neighbours that are alike share a box, which has their sums.

        Returns:
          A figure that belongs to no window. `save` writes one to a file.

        Raises:
          ImportError: if Matplotlib is not installed.
        """
        return _model_figure.figure(self.headline, self._stages(fold))

    def save(self, path: str | os.PathLike[str], *, fold: bool = True) -> None:
        """Writes `figure()` to a file. The bytes are the same every time.

        Args:
          path: a file whose suffix is .pdf, .png or .svg.
          fold: see `figure`.

        Raises:
          ValueError: if the suffix is another.
          ImportError: if Matplotlib is not installed.
          OSError: if the file cannot be written.
        """
        check_suffix(path)
        write(self.figure(fold=fold), path, self.headline)

    def _stages(self, fold: bool = True) -> list[StageRows]:
        """The lines or boxes of each stage. Layers that all stages run together stand where they run."""
        total = sum(layer.flops for layer in self.layers) or 1.0
        parts = [list(part) for _, part in itertools.groupby(range(len(self.layers)), lambda i: self.layers[i].stage)]
        results = []
        for part, after in itertools.zip_longest(parts, parts[1:]):
            layers = [self.layers[i] for i in part]
            flops, number = sum(layer.flops for layer in layers), layers[0].stage
            title = "all stages together" if number is None else f"stage {number} on {_devices(self.devices[number])}"
            num_parameters = sum(layer.num_parameters for layer in layers)
            totals = f"{num_parameters:,} parameters, {count_text(flops)} FLOPs ({flops / total:.1%})"
            if self.seconds and number is not None:
                totals += f", {1e3 * self.seconds[number]:.3g} ms"
            cut = []
            if after and number is not None and self.layers[after[0]].stage is not None:
                cut = [f"{size_text(layers[-1].output_bytes)} to stage {number + 1}"]
                passing = [
                    num_bytes
                    for i in range(part[-1] + 1)
                    for _, last, num_bytes in self.layers[i].skips
                    if last > part[-1]
                ]
                cut += [f"beside it skips of {size_text(sum(passing))}"] if passing else []
            rows = [self._row(alike, total) for alike in (self._alike(part) if fold else ([i] for i in part))]
            results.append(StageRows(number, title, totals, rows, cut))
        return results

    def _alike(self, part: Sequence[int]) -> Iterable[list[int]]:
        """The layers of a stage, with neighbours that are alike together."""
        pops = {last for layer in self.layers for _, last, _ in layer.skips}

        def key(i: int) -> Any:
            layer = self.layers[i]
            if layer.skips or layer.num_tied or i in pops:
                return i
            return layer._replace(name="", stage=None)

        for _, run in itertools.groupby(part, key):
            alike = list(run)
            yield from [alike] if len(alike) >= LEAST_ALIKE else ([i] for i in alike)

    def _row(self, alike: Sequence[int], total: float) -> LayerRow:
        first, last = self.layers[alike[0]], self.layers[alike[-1]]
        numbers, name = f"{alike[0]}", first.name
        if len(alike) > 1:
            numbers += f"-{alike[-1]}"
            name += f" ... {last.name}" if last.name != name else ""
        flops = sum(self.layers[i].flops for i in alike)
        return LayerRow(
            numbers=numbers,
            name=name,
            num_parameters=sum(self.layers[i].num_parameters for i in alike),
            flops=count_text(flops),
            share=flops / total,
            out=size_text(last.output_bytes),
            notes=[
                *([f"sum of {len(alike)} alike"] if len(alike) > 1 else []),
                *([f"{first.num_tied:,} parameters tied"] if first.num_tied else []),
                *(f"skip {name} to {layer}: {size_text(num_bytes)}" for name, layer, num_bytes in first.skips),
            ],
        )

    def _words(self, row: LayerRow) -> list[str]:
        """The cells of a line."""
        share = f"{row.share:.1%}"
        return [row.numbers, row.name, f"{row.num_parameters:,}", row.flops, share, row.out, "; ".join(row.notes)]


def model(pipe: Any, batch: Any) -> ModelPicture:
    """The layers of a pipeline, or the segments of a whole model, with their costs and the cut into stages.

    Traces the model, and compiles and runs nothing.

    Args:
      pipe: a `jpipe.Pipeline`.
      batch: a minibatch `[batch, ...]`, or abstract arrays.

    Returns:
      The picture: `print` it, or `save` it to a file.

    Raises:
      ValueError: if `pipe` is no pipeline, or cannot take the batch.

    Example:
      >>> import jax.numpy as jnp, jpipe, numpy as np, optax
      >>> pipe = jpipe.Pipeline(
      ...     [jnp.sin, jnp.cos],
      ...     loss=lambda outputs, batch: outputs.mean(),
      ...     optimizer=optax.sgd(0.1),
      ...     schedule=jpipe.schedules.gpipe(2, 2),
      ... )
      >>> picture = model(pipe, {"inputs": np.ones((4, 8), np.float32)})
      >>> [(layer.name, layer.stage, layer.output_bytes) for layer in picture.layers]
      [('sin', 0, 64), ('cos', 1, 64)]
    """
    from jpipe.engine.calls import outside_mesh
    from jpipe.pipeline import Pipeline

    if not isinstance(pipe, Pipeline):
        given = f"the class {pipe.__name__}" if isinstance(pipe, type) else f"an object of {type(pipe).__name__}"
        raise ValueError(
            f"`jpipe.draw.model` draws a `jpipe.Pipeline`, got {given}. Make a pipeline of the model, and give it with "
            "a batch. A schedule is drawn by `jpipe.draw.text` and `jpipe.draw.save`."
        )
    if batch is None:
        raise ValueError(
            "`jpipe.draw.model` needs a batch, got None: parameters, FLOPs and bytes follow from its shapes. Give a "
            "minibatch, or `jax.ShapeDtypeStruct`s."
        )
    return outside_mesh(_picture)(pipe, batch)


def _picture(pipe: Any, batch: Any) -> ModelPicture:
    import jax

    from jpipe.layers.avals import num_bytes

    program = pipe._program(batch)
    stages, traced = program.stages, program.traced
    stage_of = {i: s for s in range(stages.num_stages) for i in stages.layers_of(s)}
    tied = {copy for copies in stages.ties for copy in copies[1:]}
    layers = []
    for i, layer in enumerate(stages.layers):
        sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(layer.parameters)]
        layers.append(
            LayerRecord(
                name=layer.name,
                stage=stage_of.get(i),
                num_parameters=sum(sizes),
                num_tied=sum(size for j, size in enumerate(sizes) if (i, j) in tied),
                flops=traced.flops[i],
                output_bytes=num_bytes(traced.outputs[i]),
                skips=tuple(
                    (name, last, num_bytes(avals)) for name, (first, last, avals) in traced.skips.items() if first == i
                ),
                kind=traced.kind_of_layer[i],
            )
        )
    given = program.settings.model
    words = f"{given}" if given.number is not None else f"{given}, {len(layers)} segments"
    seconds = given.placement.seconds if given.placement else ()
    return ModelPicture(words, tuple(layers), tuple(map(tuple, program.settings.schedule.copies)), seconds)


def count_text(number: float) -> str:
    """Formats a count for people, with three digits.

    Example:
      >>> count_text(734704), count_text(12), count_text(999999)
      ('735k', '12', '1M')
    """
    for unit in ("", "k", "M", "G", "T", "P"):
        if float(f"{number:.3g}") < 1000 or unit == "P":
            break
        number /= 1000
    return f"{number:.3g}{unit}"


def _devices(devices: Sequence[int]) -> str:
    return f"device{'s' * (len(devices) > 1)} {', '.join(map(str, devices))}"
