"""A byte-level GPT on 8 stages by PipeDream with basis rotation: the published setting, scaled to one device.

    python train/train.py --config configs/gpt_basis_rotation.py

3.770 bits per byte (37.83 % of the bytes right) on the 46,619 bytes held out, after 400 steps (0.24 epochs). That took
13.5 min, 3 min of it compilation, on a 2-core x86-64 CPU that was busy with other work (2026-11-29, JAX 0.10.2, Python
3.11, whose reference is the text).

The method is that of Jung et al., Mitigating Staleness in Asynchronous Pipeline Parallelism via Basis Rotation, ICML
2026, arXiv:2602.03515. The command that its authors publish trains 32 blocks on 32 stages, of width 384 and 6 heads on
512 tokens, at a rate of 1e-3 with a rise and a cosine, gradients clipped to norm 1, bases of both sides from the
second moments, turned every 10 updates, and weight stashing with one microbatch per update. Scaled to one device by
this rule: method, optimizer and schedule stay, with about a block a stage, and the size goes down. Width is divided by
12 and the rate of Adam multiplied by it (maximal update parametrization, arXiv:2203.03466). There are 8 stages, so the
longest delay is 7 updates in place of 31. One device stands for all stages and reads the weights that they would read.

The usual things to change: --config.optimizer.annealing_steps=400 for T1, which the paper does not have;
--config.asynchronous=none --config.pipeline.schedule=gpipe for the synchronous run; --config.pipeline.num_stages=32
--config.model.num_blocks=32 for the delays of the paper; --config.data.path=FILE for a text of your own. In a hurry:
--config.num_steps=100.
"""

from models import Transformer
from train.asynchronous import applied
from train.config import OptimizerConfig, PipelineConfig, TrainConfig
from train.text import Text


def get_config() -> TrainConfig:
    config = TrainConfig(
        model=Transformer(seq_len=64, dim=32, num_heads=2, num_blocks=8),
        data=Text(seq_len=64),
        pipeline=PipelineConfig(num_stages=8, num_microbatches=1, emulate=True),
        optimizer=OptimizerConfig(learning_rate=1.2e-2, warmup_steps=40, clip_norm=1.0, annealing_steps=None),
        batch_size=4,
        num_steps=400,
        log_every=40,
    )
    # The paper has no T1.
    return applied(config, "pipedream-basis-rotation", given={"optimizer": {"annealing_steps": None}})
