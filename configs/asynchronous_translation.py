"""A small translator with the delays of 8 stages: the best asynchronous method of a comparison.

    python train/train.py --config configs/asynchronous_translation.py --config.data.path=FILE.tsv

`FILE.tsv` (or .tsv.gz) holds one pair per line: a sentence, a tab, its translation.

1.685 nats per token (52.70 % of the tokens right, given those before) on 304 held-out pairs
after 1,000 steps, 2.9 epochs of 5,515 pairs of English and German software help with at most
47 bytes per sentence. That took 98 s on a 2-core x86-64 CPU that was busy with other work
(2026-11-25, Python 3.11, JAX 0.10.2).

One device stands for a pipeline of 8 stages with one microbatch per update: the 18 layers,
of which each is a norm or the matrices of one place, read weights that are 7 to 0 updates old.
`docs/asynchronous_winners.md` has the comparison.

The delays of 100 stages, which end at 2.057 nats per token, need a rate that is divided by a
power of the delay to the end:
--config.pipeline.delays=99,93,87,82,76,70,64,58,52,47,41,35,29,23,17,12,6,0
--config.optimizer.annealing_steps=2000.

The usual things to change: as many zeros for the synchronous run; --config.data.test_path=FILE.tsv
for held-out pairs of their own. In a hurry: --config.num_steps=100.
"""

from models import Translation
from train.config import OptimizerConfig, PipelineConfig, TrainConfig
from train.pairs import VOCAB_SIZE, Pairs


def get_config() -> TrainConfig:
    return TrainConfig(
        model=Translation(
            vocab_size=VOCAB_SIZE,
            dim=32,
            num_heads=4,
            mlp_dim=64,
            num_encoder_blocks=1,
            num_decoder_blocks=1,
            norm="pre",
            dropout=0.0,
            # Copies of a tied matrix on stages with delays would be updated at different times.
            tie_embeddings=False,
            fine_grained=True,
        ),
        data=Pairs(seq_len=48),
        pipeline=PipelineConfig(
            num_stages=18,
            num_microbatches=1,
            delays=(7, 7, 6, 6, 5, 5, 5, 4, 4, 3, 3, 2, 2, 2, 1, 1, 0, 0),
        ),
        optimizer=OptimizerConfig(
            name="muon",
            learning_rate=8.1e-2,
            adam_rate=0.3,
            warmup_steps=50,
            momentum=0.8,
            b2=0.95,
            clip_norm=1.0,
            annealing_steps=1000,
        ),
        batch_size=16,
        num_steps=1000,
        log_every=100,
    )
