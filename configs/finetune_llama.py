"""Fine-tunes a published Llama, Mistral, Qwen, Gemma or GPT-2 on instructions, 1F1B, 2 stages, bfloat16.

    python train/train.py --config configs/finetune_llama.py --config.init=FOLDER --config.data.path=FILE.jsonl
    python train/train.py --config configs/finetune_llama.py --config.init=FOLDER --config.lora.rank=8

Without `init` a tiny Llama of bytes is trained from its first weights on 48 questions that ship with the project, so
that every command has something to begin with:

    python train/train.py --config configs/finetune_llama.py

The loss of the answers falls from 5.6 to 0.93 nats in 200 steps, 100 times over 44 questions. The 4 held-out
answers have 2.166 nats, 3.188 bits per byte. That took 3.2 min, 69 s of it compilation, on a 2-core x86-64 CPU that was
shared with other work (2026-11-29, JAX 0.10.2, Python 3.11).

Weights are in bfloat16. The optimizer updates a copy of them in float32, and gradients are summed in float32. At the
end the folder `model` of the run has the weights, `config.json` and the tokenizer as they are published; matrices of
LoRA are added to the weights.

The usual things to change: --config.lora.rank=8 --config.lora.targets=q_proj,v_proj for LoRA, which wants a learning
rate of about ten times that of all weights; --config.pipeline.num_stages=4; --config.data.seq_len=1024;
--config.data.template for the marks of turns that the model was trained with. In a hurry: --config.num_steps=20.
"""

from models import Llama
from train.config import OptimizerConfig, PipelineConfig, TrainConfig
from train.instructions import Instructions


def get_config() -> TrainConfig:
    return TrainConfig(
        model=Llama(vocab_size=258),
        data=Instructions(seq_len=256),
        pipeline=PipelineConfig(
            schedule="one_f_one_b",
            num_stages=2,
            num_microbatches=4,
            compute_dtype="bfloat16",
            weights_dtype="bfloat16",
            accumulate_dtype="float32",
        ),
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=20, b2=0.95, clip_norm=1.0),
        batch_size=8,
        num_steps=200,
        log_every=20,
    )
