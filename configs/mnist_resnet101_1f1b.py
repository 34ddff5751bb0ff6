"""A narrow ResNet-101 on handwritten digits, 1F1B, 4 stages.

    python train/train.py --config configs/mnist_resnet101_1f1b.py

RECORD
"""

from models import ResNet
from train.config import OptimizerConfig, PipelineConfig, TrainConfig
from train.mnist import MNIST


def get_config() -> TrainConfig:
    return TrainConfig(
        model=ResNet.of_depth(
            101,
            num_channels=1,
            widths=(8, 16, 32, 64),
            stem="small",
            stem_stride=2,
            norm="group",
            num_classes=10,
        ),
        data=MNIST(max_shift=2),
        pipeline=PipelineConfig(
            schedule="one_f_one_b", num_stages=4, num_microbatches=8
        ),
        optimizer=OptimizerConfig(
            learning_rate=5e-3, warmup_steps=20, weight_decay=5e-2, b2=0.99
        ),
        batch_size=64,
        num_steps=60,
        log_every=20,
    )
