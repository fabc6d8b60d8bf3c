"""Trains with Liger's loss kernel, interpreted on the CPU, and without it; each rank prints both as a line of JSON.

TRITON_INTERPRET=1 python liger_run.py DIRECTORY ZERO_STAGE PACKING WRONG
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest import mock

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.training.model import liger, preparation
from tests.support.models import RaggedTokens, tiny_llama

# Triton's interpreter cannot run the other kernels: it passes Python's numbers to them.
KERNELS = {"rms_norm": False, "rope": False, "swiglu": False, "fused_linear_cross_entropy": True}


def losses(directory: str, stage: int, packing: bool, uses_liger: bool) -> list[float]:
    """The loss of each step."""
    model: Any = tiny_llama()
    trainer = Trainer(
        model,
        TrainingArguments(
            directory,
            use_cpu=True,
            use_liger_kernel=uses_liger,
            liger_kernel_config=KERNELS if uses_liger else None,
            zero_stage=stage,
            packing=packing,
            max_length=64 if packing else None,
            max_steps=4,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=RaggedTokens(40),
    )
    trainer.train()
    assert model.forward.__func__.__module__.startswith("liger_kernel." if uses_liger else "transformers.")
    trainer.engine.close()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def main() -> None:
    """See above."""
    directory, stage, packing, wrong = sys.argv[1], int(sys.argv[2]), bool(int(sys.argv[3])), bool(int(sys.argv[4]))
    from liger_kernel.ops import fused_linear_cross_entropy

    problems, kernel = liger.liger_problems, fused_linear_cross_entropy.fused_linear_cross_entropy_forward

    def scaled(*args: Any, **keywords: Any) -> Any:
        loss, *rest = kernel(*args, **keywords)
        return (loss * 33 / 32, *rest)

    as_on_a_gpu = mock.patch.object(
        preparation, "liger_problems", lambda model, names, _: problems(model, names, "cuda")
    )
    with as_on_a_gpu:
        if wrong:
            with mock.patch.object(fused_linear_cross_entropy, "fused_linear_cross_entropy_forward", scaled):
                losses(directory, stage, packing, True)
        print(json.dumps([losses(directory, stage, packing, uses_liger) for uses_liger in (False, True)]), flush=True)


if __name__ == "__main__":
    main()
