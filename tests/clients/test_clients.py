"""Libraries whose trainers subclass transformers' Trainer, unchanged on ours: losses, metrics, resume, saved models.

Run with ``tools/test_clients.sh``, which installs the extra ``clients``.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.clients.runs import Client, differences, with_ds_trainer, with_transformers

GENERATION = ("--num_generations", "4", "--max_completion_length", "12", "--temperature", "1.0")
CLIENTS = {
    "TRL SFT": Client("trl_sft.py", ("--gradient_checkpointing", "False")),
    "TRL SFT, accumulation": Client("trl_sft.py", ("--gradient_accumulation_steps", "2")),
    "TRL SFT, LoRA": Client("trl_sft.py", ("--method", "lora", "--gradient_checkpointing", "False")),
    "TRL SFT, packing": Client("trl_sft.py", ("--method", "packing")),
    "TRL SFT, answers only": Client("trl_sft.py", ("--method", "completion")),
    "TRL DPO": Client("trl_dpo.py"),
    "TRL DPO, LoRA": Client("trl_dpo.py", ("--method", "lora")),
    "TRL reward": Client("trl_reward.py"),
    "TRL KTO": Client("trl_kto.py"),
    "TRL GRPO": Client("trl_grpo.py", (*GENERATION, "--eval_strategy", "no")),
    "TRL GRPO, accumulation": Client(
        "trl_grpo.py",
        (*GENERATION, "--eval_strategy", "no", "--gradient_accumulation_steps", "2", "--num_iterations", "2"),
    ),
    "sentence-transformers": Client("sentence_embeddings.py"),
    "sentence-transformers, cross-encoder": Client("cross_encoder.py"),
    "SetFit": Client("setfit_few_shot.py", has_common=False),
}
# Their losses depend on the samples of a rank: negatives in the batch, random numbers of the rank, mismatched pairs.
DEPENDS_ON_RANKS = ("TRL GRPO", "TRL KTO", "sentence-transformers")
AT_TWO_RANKS = [
    *[(name, stage) for name in ("TRL SFT", "TRL DPO", "TRL GRPO", "sentence-transformers") for stage in (2, 3)],
    ("TRL SFT, accumulation", 2),
    ("TRL SFT, LoRA", 3),
    ("TRL SFT, packing", 3),
    ("TRL reward", 3),
    ("TRL KTO", 2),
    ("sentence-transformers, cross-encoder", 3),
]


@functools.cache
def reference(name: str, ranks: int, folder: str) -> dict[str, object]:
    """What the client reports on transformers' Trainer."""
    found = with_transformers(CLIENTS[name], Path(folder) / f"reference-{ranks}", ranks)
    assert found["trainer"] == "transformers"
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """For output of the references."""
    return str(tmp_path_factory.mktemp("references"))


@pytest.mark.parametrize("name", CLIENTS)
def test_one_rank_gives_the_numbers_of_transformers(name: str, folder: str, tmp_path: Path) -> None:
    found = with_ds_trainer(CLIENTS[name], tmp_path)
    assert found["trainer"] == "ds_trainer"
    assert differences(reference(name, 1, folder), found, 1e-5) == []


@pytest.mark.parametrize(("name", "stage"), AT_TWO_RANKS)
def test_two_ranks_give_the_numbers_of_transformers(name: str, stage: int, folder: str, tmp_path: Path) -> None:
    found = with_ds_trainer(CLIENTS[name], tmp_path, 2, settings=[f"zero_stage={stage}"])
    assert differences(reference(name, 2 if name in DEPENDS_ON_RANKS else 1, folder), found, 1e-4) == []


@pytest.mark.parametrize("axis", ["sequence_parallel_size", "tensor_parallel_size"])
def test_fine_tuning_with_ranks_that_share_a_sample(axis: str, folder: str, tmp_path: Path) -> None:
    whole = ["per_device_train_batch_size=4", "per_device_eval_batch_size=16"]
    found = with_ds_trainer(CLIENTS["TRL SFT"], tmp_path, 2, settings=[f"{axis}=2", *whole])
    assert differences(reference("TRL SFT", 1, folder), found, 1e-4) == []


@pytest.mark.parametrize("name", ["TRL SFT", "TRL DPO", "sentence-transformers"])
def test_a_resumed_run_gives_the_losses_of_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    saves = dict(save_strategy="steps", save_steps="2", eval_strategy="no")
    whole = with_ds_trainer(CLIENTS[name], tmp_path, **saves)
    newest = tmp_path / "checkpoint-2"
    assert newest.is_dir()
    resumed = with_ds_trainer(CLIENTS[name], tmp_path, resume_from_checkpoint=str(newest), **saves)
    steps = [{"history": [entry for entry in found["history"] if "loss" in entry]} for found in (whole, resumed)]
    assert len(steps[0]["history"]) == 4
    assert differences(*steps, 1e-6) == []


def test_a_saved_embedding_model_is_complete(tmp_path: Path) -> None:
    """Also where weights were sharded: the library's own files, with the weights of the training."""
    from sentence_transformers import SentenceTransformer

    found = with_ds_trainer(CLIENTS["sentence-transformers"], tmp_path, 2, settings=["zero_stage=3"])
    model = SentenceTransformer(str(tmp_path))
    assert model.encode(["a b c"])[0].tolist() == pytest.approx(found["encoded"], rel=1e-4, abs=1e-5)
