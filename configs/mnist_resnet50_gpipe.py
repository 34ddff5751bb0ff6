"""ResNet-50 with batch norm on handwritten digits, GPipe, 4 stages: the hands-on.

    python train/train.py --config configs/mnist_resnet50_gpipe.py

96.05 % of the 2,000 held-out digits are right after 100 steps, 1.5 epochs of 8,572, at 35
to 42 images/s. That took 471 s, 43 s of it compilation, on a 2-core x86-64 CPU that was
shared with other work (2026-11-21, Python 3.11, JAX 0.10.2). A device allocates 386 MiB
(2026-11-29).

`docs/hands_on.md` explains the usual things to change, among them
--config.pipeline.num_stages=1 (no pipeline) and --config.pipeline.balance=memory. In a
hurry: --config.num_steps=9 --config.log_every=3.
"""

from models import ResNet
from train.config import OptimizerConfig, PipelineConfig, TrainConfig
from train.mnist import MNIST


def get_config() -> TrainConfig:
    return TrainConfig(
        model=ResNet.of_depth(50, num_channels=1, num_classes=10),
        data=MNIST(max_shift=2),
        pipeline=PipelineConfig(schedule="gpipe", num_stages=4, num_microbatches=8),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=20, weight_decay=5e-2),
        batch_size=128,
        num_steps=100,
        log_every=10,
    )
