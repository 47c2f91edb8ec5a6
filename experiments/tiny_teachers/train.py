"""Trains the tiny teachers that come with the package, on the embedded text.

python experiments/tiny_teachers/train.py [llama qwen2 qwen3]

Letters: B batch, T tokens.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tc.config import DataConfig, DataKind
from tc.data.packing import pack
from tc.data.splits import load_splits
from tc.data.window import windows
from tc.evaluate import perplexity

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "tc" / "teacher" / "tiny"

END = "<|endoftext|>"
VOCABULARY = 1024
SEED = 0
SEQUENCE, BATCH, STEPS, WARMUP = 512, 8, 600, 40
TOKENS = 2_000_000
LEARNING_RATE = 4e-3

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 8,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
SHAPES: dict[str, dict[str, Any]] = {
    # Scaled rotary frequencies, six heads of 16 dims on two of keys and values.
    "llama": {"num_attention_heads": 6, "num_key_value_heads": 2, "rope_parameters": SCALED},
    # Biases on q, k and v, and heads of 24 dims.
    "qwen2": {"num_attention_heads": 4, "num_key_value_heads": 2},
    # Norms on the queries and keys of each head, which are wider than hidden / heads.
    "qwen3": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
}


class LanguageModel(L.LightningModule):
    """Next-token cross entropy with AdamW, a linear warm-up and a cosine to a tenth."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        ids, positions = batch
        loss = self.model(input_ids=ids, position_ids=positions, labels=ids).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() == 1]
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def factor(step: int) -> float:
    """The share of the learning rate."""
    decay = 0.55 + 0.45 * math.cos(math.pi * min(1.0, step / STEPS))
    return min(1.0, (step + 1) / WARMUP) * decay


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE; id 0 ends a text and pads."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(END, normalized=False, special=True)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=END,
        model_max_length=COMMON["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
    )


def train(architecture: str) -> dict[str, Any]:
    """Trains one, saves it into the package, and says how well it reads."""
    start = time.perf_counter()
    splits = load_splits(DataConfig(name="speeches", kind=DataKind.speeches), SEED)
    tokenizer = train_tokenizer([document.text for document in splits.parts["training"]])
    packed = pack(splits.parts["training"], tokenizer, SEQUENCE, TOKENS, SEED, "training")
    L.seed_everything(SEED, verbose=False)
    config = AutoConfig.for_model(architecture, **COMMON, **SHAPES[architecture])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    data = TensorDataset(packed.input_ids, packed.position_ids)
    order = torch.Generator().manual_seed(SEED)
    loader = DataLoader(data, BATCH, shuffle=True, drop_last=True, generator=order)
    trainer = L.Trainer(
        accelerator="auto",
        devices=1,
        max_steps=STEPS,
        max_epochs=-1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(LanguageModel(model), loader)
    # Kept in half precision; what is measured is what is kept.
    model = model.to(torch.bfloat16)
    folder = PACKAGE / architecture
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    held_out = windows(splits.parts["evaluation"], tokenizer, 8192, SEQUENCE, SEQUENCE, SEED)
    return {
        "architecture": architecture,
        "parameters": model.num_parameters(),
        "bytes": sum(path.stat().st_size for path in folder.iterdir()),
        "training_tokens": STEPS * BATCH * SEQUENCE,
        "perplexity": perplexity(model.float().eval(), held_out, 4).perplexity,
        "seconds": round(time.perf_counter() - start),
    }


def main() -> None:
    """Trains those that are named, or all, and writes `result.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("architectures", nargs="*", metavar="architecture", default=list(SHAPES))
    wanted = parser.parse_args().architectures
    unknown = sorted({*wanted} - {*SHAPES})
    if unknown:
        parser.error(f"unknown {', '.join(unknown)}; allowed: {', '.join(SHAPES)}")
    path = HERE / "result.json"
    rows = json.loads(path.read_text())["rows"] if path.is_file() else []
    for architecture in wanted:
        row = train(architecture)
        print(row)
        rows = [old for old in rows if old["architecture"] != architecture] + [row]
        rows.sort(key=lambda r: r["architecture"])
        result = {"date": datetime.date.today().isoformat(), "rows": rows}
        path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
