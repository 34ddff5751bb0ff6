"""A byte-level GPT on the Python language reference, 1F1B, 4 stages.

    python train/train.py --config configs/gpt_1f1b.py

2.290 bits per byte on the 46,619 bytes held out, from 1,668,352 parameters after 600
steps (6 epochs). That took 10.6 min, 18 s of it compilation, on a 2-core x86-64 CPU that
was shared with other work (2026-11-21, JAX 0.10.2, Python 3.11, whose reference is the
text).

All stages share the embedding and the head (`mesh.rules.vocab`). The run above had them on
the first and the last stage; sharing them changes rounding alone.

The usual things to change: --config.data.path=FILE for a text of your own,
--config.pipeline.options.ticks=unit for 4 instead of 7 microbatches in flight. In a
hurry: --config.num_steps=100.
"""

from models import Transformer
from train.config import MeshConfig, OptimizerConfig, PipelineConfig, TrainConfig
from train.text import Text


def get_config() -> TrainConfig:
    return TrainConfig(
        model=Transformer(seq_len=128, dim=128, num_heads=4, num_blocks=8),
        data=Text(seq_len=128),
        pipeline=PipelineConfig(schedule="one_f_one_b", num_stages=4, num_microbatches=8),
        mesh=MeshConfig(rules={"vocab": "stage"}),
        optimizer=OptimizerConfig(
            learning_rate=2e-3,
            warmup_steps=50,
            weight_decay=0.1,
            b2=0.95,
            clip_norm=1.0,
        ),
        batch_size=32,
        num_steps=600,
        eval_every=100,
    )
