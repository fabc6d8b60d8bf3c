"""GRPO of TRL, which generates inside the loop: layouts it cannot have.

Run with ``tools/test_clients.sh``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.runs import with_ds_trainer
from tests.clients.test_clients import CLIENTS


@pytest.mark.parametrize("axis", ["sequence_parallel_size", "tensor_parallel_size"])
def test_a_replica_of_several_ranks_is_refused(axis: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"GRPOTrainer of TRL takes the rewards of a rank by accelerator"):
        with_ds_trainer(CLIENTS["TRL GRPO"], tmp_path, 2, settings=[f"{axis}=2", "per_device_train_batch_size=4"])
