"""Flax models as lists of layers, for the scripts in `train/`.

A model is a frozen dataclass of options with one method, `layers()`: the list
that `jpipe.Pipeline` takes. Nothing here knows about pipelines. Each entry is a
factory, called as `factory(rngs=nnx.Rngs(...))`, so that every layer can be made on
the device that will hold it; each layer maps one array to the next, the leading
axis being the batch, so the plain single-device model is

    for layer in [factory(rngs=rngs) for factory in model.layers()]:
      x = layer(x)

To add a model, write such a dataclass and list it in `Model`: configs and the
command line (`--config.model=ResNet`) then know it by its class name.
"""

from models.mlp import MLP
from models.resnet import ResNet
from models.transformer import Transformer

Model = MLP | ResNet | Transformer

__all__ = ["MLP", "Model", "ResNet", "Transformer"]
