"""A narrow ResNet-101 on handwritten digits, 1F1B, 4 stages.

    python train/train.py --config configs/mnist_resnet101_1f1b.py

56.45 % of the 2,000 held-out digits are right after 60 steps, 0.4 epochs of 8,572; their
loss is 1.2950. That took 130 s, 89 s of it compilation, on a 2-core x86-64 CPU that was busy
with other work (2026-11-24, JAX 0.10.2, Python 3.11). It shows that the depth trains, not how
well.

The usual things to change: --config.num_steps=600 for a useful model,
--config.pipeline.num_stages=2. `ResNet.of_depth(101)` has the sizes for ImageNet. In a hurry:
--config.num_steps=20.
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
        pipeline=PipelineConfig(schedule="one_f_one_b", num_stages=4, num_microbatches=8),
        optimizer=OptimizerConfig(learning_rate=5e-3, warmup_steps=20, weight_decay=5e-2, b2=0.99),
        batch_size=64,
        num_steps=60,
        log_every=20,
    )
