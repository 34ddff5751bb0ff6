"""A byte-level GPT with the delays of 8 stages: the best asynchronous method of a comparison.

    python train/train.py --config configs/asynchronous_gpt.py

3.070 bits per byte on the 46,619 bytes held out, after 1,000 steps. That took 50 s, half of
it compilation, on a 2-core x86-64 CPU that was busy with other work (2026-11-25, JAX
0.10.2, Python 3.11, whose reference is the text).

One device stands for a pipeline of 8 stages with one microbatch per update: the six layers
read weights that are 7, 6, 4, 3, 1 and 0 updates old. `docs/asynchronous_winners.md` has the
comparison.

The delays of 100 stages, which end at 3.324 bits per byte, need a rate that is divided by the
delay for the whole run: --config.pipeline.delays=99,79,59,40,20,0
--config.optimizer.learning_rate=0.081 --config.optimizer.annealing_steps=1000000.

The usual things to change: --config.pipeline.delays=0,0,0,0,0,0 for the synchronous run;
--config.data.path=FILE for a text of your own. In a hurry: --config.num_steps=100.
"""

from models import Transformer
from train.config import OptimizerConfig, PipelineConfig, TrainConfig
from train.text import Text


def get_config() -> TrainConfig:
    return TrainConfig(
        model=Transformer(seq_len=64, dim=32, num_heads=4, num_blocks=4),
        data=Text(seq_len=64),
        pipeline=PipelineConfig(num_stages=6, num_microbatches=1, delays=(7, 6, 4, 3, 1, 0)),
        optimizer=OptimizerConfig(
            name="muon",
            learning_rate=2.7e-2,
            adam_rate=0.3,
            warmup_steps=50,
            momentum=0.8,
            b2=0.95,
            clip_norm=1.0,
            annealing_steps=1000,
        ),
        batch_size=4,
        num_steps=1000,
        log_every=100,
    )
