"""LSTM layers that tell packages of Python's standard library apart, 1F1B, 4 stages.

    python train/train.py --config configs/recurrent_classifier_1f1b.py

RECORD
"""

from models import RecurrentClassifier
from train.config import OptimizerConfig, PipelineConfig, TrainConfig
from train.text import LabeledText


def get_config() -> TrainConfig:
    return TrainConfig(
        model=RecurrentClassifier(embed_dim=32, dim=64, num_layers=4, num_classes=8),
        data=LabeledText(seq_len=64),
        pipeline=PipelineConfig(
            schedule="one_f_one_b", num_stages=4, num_microbatches=8
        ),
        optimizer=OptimizerConfig(
            learning_rate=3e-3, warmup_steps=40, weight_decay=1e-2, clip_norm=1.0
        ),
        batch_size=128,
        num_steps=500,
        log_every=100,
        eval_every=250,
    )
