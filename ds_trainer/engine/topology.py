"""Sets DeepSpeed's process groups from the layout, and verifies the engine's topology afterwards.

DeepSpeed 0.19.8 keeps its groups in globals of ``deepspeed.utils.groups`` that outlive an engine. Its AutoTP replaces
the ``mpu`` argument with that module. So both are set for every engine, and after construction the engine's sizes and
groups are compared with the layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.engine.expert_parallel import EXPERTS
from ds_trainer.parallel.batch_plan import BatchPlan
from ds_trainer.parallel.groups import Mpu, ParallelGroups, group_along
from ds_trainer.utils.errors import ConfigError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def set_deepspeed_groups(parallel: ParallelGroups, config: CompiledConfig) -> Mpu:
    """Sets DeepSpeed's global groups and returns the ``mpu`` for ``deepspeed.initialize``. Collective."""
    from deepspeed.utils import groups

    reset_deepspeed_groups()
    groups._TENSOR_MODEL_PARALLEL_GROUP = parallel.tp
    groups._MODEL_PARALLEL_GROUP = parallel.tp
    groups._DATA_PARALLEL_GROUP = parallel.seq_data_parallel
    groups._EXPERT_PARALLEL_GROUP = {EXPERTS: parallel.experts}
    groups._EXPERT_DATA_PARALLEL_GROUP = {EXPERTS: parallel.expert_replicas}
    second = config.hpz_partition_size
    # hpZ: DeepSpeed would create the groups of all ranks on every rank. It may do so if there is only one group: given
    # the default group, it would count ranks in an endless loop (get_all_ranks_from_group).
    if 1 < second < parallel.layout.seq_data_parallel_size or second > 1 < parallel.layout.tp:
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = group_along(((parallel.layout.tp, second),))
    return Mpu(parallel)


def reset_deepspeed_groups() -> None:
    """Clears DeepSpeed's global groups, mpu and secondary partition (hpZ) for the next engine."""
    from deepspeed.utils import groups

    groups._TENSOR_MODEL_PARALLEL_GROUP = groups._MODEL_PARALLEL_GROUP = groups._DATA_PARALLEL_GROUP = None
    groups._EXPERT_PARALLEL_GROUP, groups._EXPERT_DATA_PARALLEL_GROUP = {}, {}
    groups.mpu = groups.mesh_device = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


def install_mpu(engine: DeepSpeedEngine, mpu: Mpu) -> None:
    """Makes ``engine`` use ``mpu``, also if AutoTP has replaced it with DeepSpeed's groups module."""
    from deepspeed.utils import groups

    engine.mpu = groups.mpu = mpu
    engine.dp_world_size = mpu.get_data_parallel_world_size()


def verify_engine_topology(engine: DeepSpeedEngine, parallel: ParallelGroups, plan: BatchPlan) -> None:
    """Compares the engine's sizes and groups with the layout and the batch plan.

    Raises:
        ConfigError: with each difference.
    """
    import torch.distributed as dist
    from deepspeed.utils import groups

    layout = parallel.layout

    def ranks(group: Any) -> list[int]:
        return sorted(dist.get_process_group_ranks(group))

    def members(axes: tuple[str, ...]) -> list[int]:
        return layout.group_of(layout.rank_at(*parallel.coordinates), axes)

    seq_data_parallel = members(("dp", "cp", "sp"))
    compared: dict[str, tuple[Any, Any]] = {
        "data-parallel size": (engine.dp_world_size, layout.dp),
        "seq_data_parallel size": (engine.seq_dp_world_size, layout.seq_data_parallel_size),
        "seq_data_parallel ranks": (ranks(engine.seq_data_parallel_group), seq_data_parallel),
        "tensor-parallel size": (engine.mp_world_size, layout.tp),
        "tensor-parallel ranks": (ranks(groups.get_tensor_model_parallel_group()), members(("tp",))),
        "tensor-parallel rank": (groups.get_tensor_model_parallel_rank(), parallel.coordinates.tp),
        "size of DeepSpeed's own sequence parallelism": (engine.sequence_parallel_size, 1),
        "samples per micro-batch": (engine.train_micro_batch_size_per_gpu(), plan.micro_batch),
        "micro-batches per step": (engine.gradient_accumulation_steps(), plan.accumulation),
        "samples per step": (engine.train_batch_size(), plan.global_batch_size),
    }
    zero_group = getattr(engine.optimizer, "dp_process_group", None)
    if zero_group is not None:
        compared["ranks that ZeRO shards over"] = (ranks(zero_group), seq_data_parallel)
    parameters = [p for p in engine.module.parameters() if hasattr(p, "ds_process_group")]
    for parameter in parameters[:1]:
        compared["ranks that hold a parameter"] = (ranks(parameter.ds_process_group), seq_data_parallel)
    differences = [
        f"DeepSpeed's {name}: {actual}. The layout's ({layout.describe()}): {expected}."
        for name, (actual, expected) in compared.items()
        if actual != expected
    ]
    if differences:
        raise ConfigError(
            [*differences, "Training would compute wrong gradients: report this with your configuration."]
        )
