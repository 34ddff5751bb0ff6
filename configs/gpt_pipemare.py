"""A byte-level GPT on the Python language reference by PipeMare: asynchronous, one stage per layer.

    python train/train.py --config configs/gpt_pipemare.py

2.239 bits per byte on the 46,619 bytes held out, after 6,000 steps (3.7 epochs). That took
3.9 min on a 2-core x86-64 CPU that was shared with other work (2026-11-21, JAX 0.10.2,
Python 3.11, whose reference is the text).

The usual things to change: --config.data.path=FILE for a text of your own,
--config.pipeline.synchronous_steps=0 to begin asynchronously,
--config.pipeline.options.ticks=paired for the delays of PipeMare's paper. In a hurry:
--config.num_steps=200 --config.pipeline.synchronous_steps=50. `docs/asynchronous.md`
compares the choices.
"""

from models import Transformer
from train.config import OptimizerConfig, PipelineConfig, TrainConfig
from train.text import Text


def get_config() -> TrainConfig:
    return TrainConfig(
        model=Transformer(seq_len=64, dim=32, num_heads=4, num_blocks=3),
        data=Text(seq_len=64),
        pipeline=PipelineConfig(
            schedule="pipemare",
            num_stages=5,
            num_microbatches=2,
            synchronous_steps=1200,
        ),
        optimizer=OptimizerConfig(
            learning_rate=8e-3,
            warmup_steps=50,
            weight_decay=0.1,
            b2=0.95,
            clip_norm=1.0,
            annealing_steps=6000,
            discrepancy_decay=0.1,
        ),
        batch_size=4,
        num_steps=6000,
        log_every=200,
        eval_every=1200,
        eval_batches=200,
    )
