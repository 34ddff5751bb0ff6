"""A narrow Inception-v3 on handwritten digits, 1F1B, 4 stages.

    python train/train.py --config configs/mnist_inception_1f1b.py

RECORD
"""

from models import Inception
from train.config import OptimizerConfig, PipelineConfig, TrainConfig
from train.mnist import MNIST


def get_config() -> TrainConfig:
    return TrainConfig(
        model=Inception(
            num_channels=1, width=4, stem="small", dropout=0.2, num_classes=10
        ),
        data=MNIST(max_shift=2),
        pipeline=PipelineConfig(
            schedule="one_f_one_b", num_stages=4, num_microbatches=4
        ),
        optimizer=OptimizerConfig(
            learning_rate=5e-3, warmup_steps=20, weight_decay=5e-2, b2=0.99
        ),
        batch_size=64,
        num_steps=60,
        log_every=20,
    )
