"""Flax models as lists of layers, for the scripts in `train/`.

A model is a frozen dataclass of options with two methods:

    layers()   the list that `jpipe.Pipeline` takes as `layers`
    loss()     a loss of `models/losses.py`, for `jpipe.Pipeline(..., has_aux=True)`

Nothing here knows about stages or devices. The dims of weights and activations have names
(`models/sharding.py`), which a mesh may split. Each layer is given as a factory, called as
`factory(rngs=nnx.Rngs(...))`, so that a pipeline can make every layer on the device that
will hold it. A layer maps one activation to the next: an array, or a dict of arrays
where later layers need more than one. The leading axis is the batch. The same model on
a single device is

    layers = [factory(rngs=rngs) for factory in model.layers()]
    for layer in layers:
        x = layer(x)

A model whose layers may share a matrix also has a method `ties()`. A tie is a tuple of
places, `(layer, path)`, that hold the same parameter. The first place is the owner: its
initial value is used. On a single device, the tie
`((0, "token.embedding"), (-1, "embedding"))` means

    layers[-1].embedding = layers[0].token.embedding

`Whole` is no list: it names one module, of any package, which the pipeline cuts by itself. `Llama` and `GPT2` are no
lists either. Their methods `names()` and `published()` say how their weights are published.

Only `UNet` has connections that skip layers: its method `parts()` lists them.

To add a model, write such a dataclass and add it to `Model` below. Configurations and
the command line (`--config.model=ResNet`) then know it by its class name.
"""

from models.alexnet import AlexNet
from models.bert import BERT
from models.gpt2 import GPT2
from models.inception import Inception
from models.llama import Llama
from models.losses import CrossEntropy, Loss, Segmentation
from models.mixture import MixtureTransformer
from models.mlp import MLP
from models.recurrent import RecurrentClassifier, RecurrentLM
from models.recurrent_translation import RecurrentTranslation
from models.resnet import ResNet
from models.transformer import Transformer
from models.translation import Translation
from models.unet import UNet
from models.vgg import VGG
from models.whole import Whole

Model = (
    MLP
    | AlexNet
    | VGG
    | ResNet
    | Inception
    | UNet
    | RecurrentLM
    | RecurrentClassifier
    | RecurrentTranslation
    | Transformer
    | MixtureTransformer
    | BERT
    | Translation
    | Llama
    | GPT2
    | Whole
)

__all__ = [
    "BERT",
    "GPT2",
    "MLP",
    "AlexNet",
    "CrossEntropy",
    "Inception",
    "Llama",
    "Loss",
    "MixtureTransformer",
    "Model",
    "RecurrentClassifier",
    "RecurrentLM",
    "RecurrentTranslation",
    "ResNet",
    "Segmentation",
    "Transformer",
    "Translation",
    "UNet",
    "VGG",
    "Whole",
]
