"""An LSTM encoder and decoder with attention that translate byte by byte, 1F1B, 2 stages.

    python train/train.py --config configs/recurrent_translation_1f1b.py --config.data.path=FILE.tsv

`FILE.tsv` (or .tsv.gz) holds one pair per line: a sentence, a tab, its translation.

3.437 nats per token (13.36 % of the tokens right, given those before) on held-out pairs after
150 steps, of English and German software help with at most 63 bytes per sentence. That took
58 s on a 2-core x86-64 CPU that was busy with other work (2026-11-24, JAX 0.10.2, Python
3.11). So few steps show that the loss falls; useful translations need far longer training.

Both stages share the embeddings and the head (`mesh.rules.vocab`).

The usual things to change: --config.num_steps=5000, --config.model.dim=256,
--config.data.test_path=FILE.tsv for held-out pairs of their own. In a hurry:
--config.num_steps=50.
"""

from models import RecurrentTranslation
from train.config import MeshConfig, OptimizerConfig, PipelineConfig, TrainConfig
from train.pairs import VOCAB_SIZE, Pairs


def get_config() -> TrainConfig:
    return TrainConfig(
        model=RecurrentTranslation(vocab_size=VOCAB_SIZE, dim=64, num_layers=2, dropout=0.0),
        data=Pairs(seq_len=64),
        pipeline=PipelineConfig(schedule="one_f_one_b", num_stages=2, num_microbatches=8),
        mesh=MeshConfig(rules={"vocab": "stage"}),
        optimizer=OptimizerConfig(learning_rate=5e-3, warmup_steps=40, weight_decay=1e-2, clip_norm=1.0),
        batch_size=64,
        num_steps=150,
        log_every=25,
        eval_every=75,
        eval_batches=4,
    )
