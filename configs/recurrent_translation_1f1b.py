"""An LSTM encoder and decoder with attention that translate byte by byte, 1F1B, 2 stages.

    python train/train.py --config configs/recurrent_translation_1f1b.py --config.data.path=FILE.tsv

RECORD
"""

from models import RecurrentTranslation
from train.config import MeshConfig, OptimizerConfig, PipelineConfig, TrainConfig
from train.pairs import VOCAB_SIZE, Pairs


def get_config() -> TrainConfig:
    return TrainConfig(
        model=RecurrentTranslation(
            vocab_size=VOCAB_SIZE, dim=64, num_layers=2, dropout=0.0
        ),
        data=Pairs(seq_len=64),
        pipeline=PipelineConfig(
            schedule="one_f_one_b", num_stages=2, num_microbatches=8
        ),
        mesh=MeshConfig(rules={"vocab": "stage"}),
        optimizer=OptimizerConfig(
            learning_rate=5e-3, warmup_steps=40, weight_decay=1e-2, clip_norm=1.0
        ),
        batch_size=64,
        num_steps=150,
        log_every=25,
        eval_every=75,
        eval_batches=4,
    )
