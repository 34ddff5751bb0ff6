"""A byte-level GPT by PipeDream-2BW with Muon and error feedback: the published method, scaled to one device.

    python train/train.py --config configs/gpt_2bw_muon.py

2.579 bits per byte (51.92 % of the bytes right) on the 46,619 bytes held out, after 1,000 steps (1.2 epochs). That took
6.6 min, 4.4 min of it compilation, on a 2-core x86-64 CPU that was busy with other work (2026-11-29, JAX 0.10.2, Python
3.11, whose reference is the text).

The method is that of Zmushko et al., One-Step Gradient Delay is Not a Barrier for Large-Scale Asynchronous Pipeline
Parallel LLM Pretraining, arXiv:2606.30634, who train models of up to 10 billion weights. Scaled to one device by this
rule: what the delay depends on stays, and what only costs time goes down. So the schedule stays, with a delay of one
update on every stage, and Muon, and error feedback at full strength; the device stands for all 8 stages and reads the
weights that they would read. Width, depth, sequence and data are as small as a CPU wants. Rates and the momentum are
not those of the paper, which belong to its sizes: `docs/asynchronous_winners.md` has found them at this one.

The usual things to change: --config.optimizer.error_feedback=none for Muon alone; --config.asynchronous=none
--config.pipeline.schedule=gpipe for the synchronous run; --config.pipeline.emulate=false for a pipeline of 8 devices;
--config.data.path=FILE for a text of your own. In a hurry: --config.num_steps=100.
"""

from models import Transformer
from train.asynchronous import applied
from train.config import OptimizerConfig, PipelineConfig, TrainConfig
from train.text import Text


def get_config() -> TrainConfig:
    config = TrainConfig(
        model=Transformer(seq_len=64, dim=32, num_heads=4, num_blocks=8),
        data=Text(seq_len=64),
        pipeline=PipelineConfig(num_stages=8, num_microbatches=8, emulate=True),
        # The rate is that of AdamW, from which the method takes that of Muon.
        optimizer=OptimizerConfig(learning_rate=9e-3, warmup_steps=50, b2=0.95, clip_norm=1.0),
        batch_size=8,
        num_steps=1000,
        log_every=100,
    )
    return applied(config, "2bw-muon")
