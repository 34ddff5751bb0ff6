"""Flax models as lists of layers, for the scripts in `train/`.

A model is a frozen dataclass of options with a method `layers()`: the list that
`jpipe.Pipeline` takes. Nothing here knows about stages or devices. Each entry is a
factory, called as `factory(rngs=nnx.Rngs(...))`, so that every layer can be made on
the device that will hold it; each layer maps one activation (an array, or a dict of
arrays where later layers need more than one) to the next, the leading axis being the
batch, so the plain single-device model is

    layers = [factory(rngs=rngs) for factory in model.layers()]
    for layer in layers:
      x = layer(x)

Models whose layers may share a matrix have a method `ties()` as well. Each tie is a
tuple of places, `(layer, path)`, whose parameters are one and the same; the first is
the owner, whose initial value holds. `[((0, "token.embedding"), (-1, "embedding"))]`
is in the plain model

    layers[-1].embedding = layers[0].token.embedding

`UNet` alone has connections past the next layer: its `parts()` says which.

To add a model, write such a dataclass and list it in `Model`: configs and the
command line (`--config.model=ResNet`) then know it by its class name.
"""

from models.bert import BERT
from models.mlp import MLP
from models.resnet import ResNet
from models.transformer import Transformer
from models.translation import Translation
from models.unet import UNet
from models.vgg import VGG

Model = MLP | ResNet | VGG | UNet | Transformer | BERT | Translation

__all__ = [
    "BERT",
    "MLP",
    "Model",
    "ResNet",
    "Transformer",
    "Translation",
    "UNet",
    "VGG",
]
