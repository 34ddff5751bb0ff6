"""A byte-level GPT whose MLPs are mixtures of 8 experts, on the Python language reference, 1F1B, 2 stages x 2 devices
that share the experts.

    python train/train.py --config configs/mixture_1f1b.py

3.197 bits per byte on the 46,619 bytes held out, from 635,008 parameters after 200 steps (2
epochs). The loss falls from 5.57 to 2.47, and the busiest expert of a microbatch has 1.16
times the mean load. That took 14.5 min on a 2-core x86-64 CPU that
was shared with much other work (2026-11-29, JAX 0.10.2, Python 3.11, whose reference is the
text).

The usual things to change: --config.mesh.expert=4, --config.model.capacity=1.25 (fewer FLOPs
on CPUs), --config.model.num_shared=1. In a hurry: --config.num_steps=50.
"""

from models import MixtureTransformer
from train.config import MeshConfig, OptimizerConfig, PipelineConfig, TrainConfig
from train.text import Text


def get_config() -> TrainConfig:
    return TrainConfig(
        model=MixtureTransformer(
            seq_len=128,
            dim=64,
            num_heads=4,
            num_blocks=4,
            num_experts=8,
            num_chosen=2,
            expert_dim=128,
            bias_rate=0.001,
        ),
        data=Text(seq_len=128),
        pipeline=PipelineConfig(schedule="one_f_one_b", num_stages=2, num_microbatches=4),
        mesh=MeshConfig(expert=2),
        optimizer=OptimizerConfig(
            learning_rate=2e-3,
            warmup_steps=50,
            weight_decay=0.1,
            b2=0.95,
            clip_norm=1.0,
        ),
        batch_size=32,
        num_steps=200,
        eval_every=100,
    )
