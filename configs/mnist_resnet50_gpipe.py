"""ResNet-50 with batch norm on handwritten digits, GPipe, 4 stages: the hands-on.

python train/train.py --config configs/mnist_resnet50_gpipe.py
"""

from models import ResNet
from train.config import OptimizerConfig, PipelineConfig, TrainConfig
from train.mnist import MNIST


def get_config() -> TrainConfig:
    return TrainConfig(
        model=ResNet.of_depth(50, num_channels=1, num_classes=10),
        data=MNIST(max_shift=2),
        pipeline=PipelineConfig(schedule="gpipe", num_stages=4, num_microbatches=8),
        optimizer=OptimizerConfig(
            learning_rate=1e-3, warmup_steps=20, weight_decay=5e-2
        ),
        batch_size=128,
        num_steps=100,
        log_every=10,
    )
