"""A small transformer that translates sentences byte by byte, 1F1B, 2 stages.

    python train/train.py --config configs/translation_1f1b.py --config.data.path=FILE.tsv

`FILE.tsv` (or .tsv.gz) holds one pair per line: a sentence, a tab, its translation.

1.887 nats per token (46.74 % of the tokens right, given those before) on 723 held-out
pairs after 400 steps, 0.9 epochs of 13,658 pairs of English and German software help with
at most 95 bytes per sentence. That took 410 s, 55 s of it compilation, on a
2-core x86-64 CPU that was busy with other work (2026-11-23, Python 3.11, JAX 0.10.2).
Useful translations need far more pairs and far longer training.

Three blocks of the encoder take as long as two of the decoder, and both stages share
embedding and head, so the stages are equal.

The usual things to change: --config.data.test_path=FILE.tsv for held-out pairs of their
own, --config.data.seq_len=64 for short sentences, --config.model.num_encoder_blocks=6
--config.model.num_decoder_blocks=4 --config.pipeline.num_stages=4 for four equal stages. In
a hurry: --config.num_steps=50.
"""

from models import Translation
from train.config import MeshConfig, OptimizerConfig, PipelineConfig, TrainConfig
from train.pairs import VOCAB_SIZE, Pairs


def get_config() -> TrainConfig:
    return TrainConfig(
        model=Translation(
            vocab_size=VOCAB_SIZE,
            dim=64,
            num_heads=4,
            mlp_dim=256,
            num_encoder_blocks=3,
            num_decoder_blocks=2,
            norm="pre",
            dropout=0.0,
        ),
        data=Pairs(seq_len=96),
        pipeline=PipelineConfig(schedule="one_f_one_b", num_stages=2, num_microbatches=8),
        mesh=MeshConfig(rules={"vocab": "stage"}),
        optimizer=OptimizerConfig(
            learning_rate=3e-3,
            warmup_steps=50,
            weight_decay=1e-2,
            b2=0.98,
            clip_norm=1.0,
        ),
        batch_size=32,
        num_steps=400,
        log_every=50,
        eval_every=200,
        eval_batches=4,
    )
