"""Draws a schedule or a model: text for a terminal, SVG, PNG or PDF, JSON, or a trace for Perfetto.

    python -m jpipe.draw one_f_one_b --stages 4 --microbatches 8
    python -m jpipe.draw one_f_one_b --stages 4 --microbatches 8 --option ticks=unit
    python -m jpipe.draw gpipe --stages 4 --microbatches 8 --out pipe.svg
    python -m jpipe.draw gpipe --stages 4 --microbatches 8 --trace pipe.json
    python -m jpipe.draw --file table.txt --json

Stages run downward from 0 and ticks rightward. A cell holds the number of a microbatch.
Forward and backward differ in hue and in lightness. An asynchronous schedule is drawn from
an empty pipeline to the end of its first full round, which is the round that repeats.

`model` draws the layers of a pipeline, or the segments of a whole model, and the cut into stages:

    print(jpipe.draw.model(pipe, batch))
    jpipe.draw.model(pipe, batch).save("model.svg")
"""

from jpipe.draw._command import main as main
from jpipe.draw._export import summary as summary
from jpipe.draw._export import trace as trace
from jpipe.draw._figure import figure as figure
from jpipe.draw._figure import save as save
from jpipe.draw._model import LayerRecord as LayerRecord
from jpipe.draw._model import ModelPicture as ModelPicture
from jpipe.draw._model import model as model
from jpipe.draw._text import text as text

__all__ = ["LayerRecord", "ModelPicture", "figure", "main", "model", "save", "summary", "text", "trace"]
