"""A small ResNet on handwritten digits, PipeMare: asynchronous, 8 stages, one microbatch.

    python train/train.py --config configs/mnist_pipemare.py

RECORD

The usual things to change: --config.pipeline.schedule=pipedream, or gpipe for the
synchronous run; --config.optimizer.annealing_steps=none and
--config.optimizer.discrepancy_decay=none for asynchrony without corrections.
"""

from models import ResNet
from train.config import OptimizerConfig, PipelineConfig, TrainConfig
from train.mnist import MNIST


def get_config() -> TrainConfig:
    return TrainConfig(
        model=ResNet(
            num_channels=1, widths=(8, 16, 32), num_blocks=(2, 2, 2), stem_stride=2
        ),
        data=MNIST(max_shift=2),
        pipeline=PipelineConfig(schedule="pipemare", num_stages=8, num_microbatches=1),
        optimizer=OptimizerConfig(
            name="sgd",
            learning_rate=0.1,
            momentum=0.9,
            weight_decay=5e-4,
            annealing_steps=200,
            discrepancy_decay=0.5,
        ),
        batch_size=64,
        num_steps=804,  # 6 epochs
        log_every=67,
        eval_every=134,
    )
