"""A byte-level LSTM language model on the Python language reference, 1F1B, 2 stages.

    python train/train.py --config configs/recurrent_lm_1f1b.py

RECORD
"""

from models import RecurrentLM
from train.config import MeshConfig, OptimizerConfig, PipelineConfig, TrainConfig
from train.text import Text


def get_config() -> TrainConfig:
    return TrainConfig(
        model=RecurrentLM(embed_dim=32, dim=128, num_layers=2),
        data=Text(seq_len=64),
        pipeline=PipelineConfig(
            schedule="one_f_one_b", num_stages=2, num_microbatches=8
        ),
        mesh=MeshConfig(rules={"vocab": "stage"}),
        optimizer=OptimizerConfig(
            learning_rate=5e-3, warmup_steps=40, weight_decay=1e-2, clip_norm=1.0
        ),
        batch_size=64,
        num_steps=500,
        log_every=100,
        eval_every=250,
        eval_batches=8,
    )
