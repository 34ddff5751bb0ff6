"""A small U-Net that separates handwritten digits from noise, 1F1B, 3 stages.

    python train/train.py --config configs/unet_1f1b.py

RECORD

The usual things to change: --config.data.noise=1.0 for more noise,
--config.pipeline.num_stages=6 for one layer per stage, --config.data.dir=DIR for all
60,000 digits. In a hurry: --config.num_steps=100.
"""

from models import UNet
from train.config import OptimizerConfig, PipelineConfig, TrainConfig
from train.mnist import MNISTPixels


def get_config() -> TrainConfig:
    return TrainConfig(
        model=UNet(width=8, num_levels=2, num_classes=2),
        data=MNISTPixels(max_shift=2),
        pipeline=PipelineConfig(
            schedule="one_f_one_b", num_stages=3, num_microbatches=4
        ),
        optimizer=OptimizerConfig(
            learning_rate=3e-3, warmup_steps=40, weight_decay=1e-2, b2=0.99
        ),
        batch_size=64,
        num_steps=300,
        log_every=50,
        eval_every=100,
        eval_batches=8,
    )
