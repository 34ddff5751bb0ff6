"""A byte-level GPT whose MLPs are mixtures of 8 experts, on the Python language reference, 1F1B, 2 stages x 2 devices
that share the experts.

    python train/train.py --config configs/mixture_1f1b.py
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
