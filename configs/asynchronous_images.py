"""A small ResNet on handwritten digits with the delays of 8 stages: the best asynchronous method of a comparison.

    python train/train.py --config configs/asynchronous_images.py

95.85 % of the 2,000 held-out digits are right after 1,000 steps, 3.7 epochs of 8,572; their
loss is 0.1442. That took 67 s, most of it compilation, on a 2-core x86-64 CPU that was busy
with other work (2026-11-25, Python 3.11, JAX 0.10.2).

One device stands for a pipeline of 8 stages with one microbatch per update: the 13 layers,
of which each is a convolution, a norm or the head, read weights that are 7 to 0 updates old.
`docs/asynchronous_winners.md` has the comparison, on images of clothes of 14 x 14 pixels.

The delays of 100 stages, which end at 82.05 % of the digits, need another optimizer, and a rate
that is divided by the delay for the whole run:
--config.pipeline.delays=99,91,82,74,66,58,50,41,33,25,16,8,0 --config.optimizer.name=muon
--config.optimizer.momentum=0.8 --config.optimizer.adam_rate=0.3
--config.optimizer.learning_rate=0.243 --config.optimizer.annealing_steps=1000000.

The usual things to change: --config.pipeline.delays=0,0,0,0,0,0,0,0,0,0,0,0,0 for the
synchronous run; --config.data.dir=DIRECTORY for all of MNIST. In a hurry:
--config.num_steps=100.
"""

from models import ResNet
from train.config import OptimizerConfig, PipelineConfig, TrainConfig
from train.mnist import MNIST


def get_config() -> TrainConfig:
    return TrainConfig(
        model=ResNet(
            num_channels=1,
            widths=(8, 16),
            num_blocks=(1, 1),
            stem_stride=2,
            fine_grained=True,
        ),
        data=MNIST(),
        pipeline=PipelineConfig(
            num_stages=13,
            num_microbatches=1,
            delays=(7, 6, 6, 5, 5, 4, 4, 3, 2, 2, 1, 1, 0),
        ),
        optimizer=OptimizerConfig(
            name="basis_rotation",
            learning_rate=2.7e-2,
            warmup_steps=50,
            b2=0.95,
            clip_norm=1.0,
            annealing_steps=1000,
        ),
        batch_size=32,
        num_steps=1000,
        log_every=100,
    )
