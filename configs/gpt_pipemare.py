"""A byte-level GPT on the Python language reference, PipeMare: asynchronous, 8 stages.

    python train/train.py --config configs/gpt_pipemare.py

RECORD

The usual things to change: --config.data.path=FILE for a text of your own,
--config.pipeline.synchronous_steps=0 to begin asynchronously.
"""

from models import Transformer
from train.config import OptimizerConfig, PipelineConfig, TrainConfig
from train.text import Text


def get_config() -> TrainConfig:
    return TrainConfig(
        model=Transformer(seq_len=64, dim=64, num_heads=4, num_blocks=6),
        data=Text(seq_len=64),
        pipeline=PipelineConfig(
            schedule="pipemare",
            num_stages=8,
            num_microbatches=1,
            synchronous_steps=100,
        ),
        optimizer=OptimizerConfig(
            learning_rate=3e-3,
            warmup_steps=50,
            weight_decay=0.1,
            b2=0.95,
            clip_norm=1.0,
            annealing_steps=250,
            discrepancy_decay=0.1,
        ),
        batch_size=32,
        num_steps=800,
        log_every=50,
        eval_every=200,
        eval_batches=20,
    )
