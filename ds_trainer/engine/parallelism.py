"""What DeepSpeed is told of the layout, and what it made of it.

DeepSpeed 0.19.8 keeps its groups in globals of ``deepspeed.utils.groups`` that outlive an engine. Its AutoTP puts that
very module in the place of the ``mpu`` that was handed in. So both are set for every engine, and after construction the
engine is asked what it believes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.parallel.groups import Mpu, ParallelGroups, group_along
from ds_trainer.utils.errors import ConfigError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def tell_deepspeed(parallel: ParallelGroups, config: CompiledConfig) -> Mpu:
    """Put our groups where DeepSpeed looks for them; returns the ``mpu`` for ``deepspeed.initialize``. Collective."""
    from deepspeed.utils import groups

    forget_layout()
    groups._TENSOR_MODEL_PARALLEL_GROUP = parallel.tp
    groups._MODEL_PARALLEL_GROUP = parallel.tp
    groups._DATA_PARALLEL_GROUP = parallel.gradient
    second = int(config.get("zero_optimization.zero_hpz_partition_size") or 1)
    # hpZ: DeepSpeed would make the groups of all ranks on every rank. Where there is only one, it may: handed the
    # default group, it would count ranks without end (get_all_ranks_from_group).
    if 1 < second < parallel.layout.gradient_ranks or second > 1 < parallel.layout.tp:
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = group_along(((parallel.layout.tp, second),))
    return Mpu(parallel)


def forget_layout() -> None:
    """Leave nothing of an engine to the next one, which may be somebody else's: groups, mpu, second partition (hpZ)."""
    from deepspeed.utils import groups

    groups._TENSOR_MODEL_PARALLEL_GROUP = groups._MODEL_PARALLEL_GROUP = groups._DATA_PARALLEL_GROUP = None
    groups.mpu = groups.mesh_device = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


def take_over(engine: DeepSpeedEngine, mpu: Mpu) -> None:
    """Make ``mpu`` what the engine asks from now on, also where AutoTP has put DeepSpeed's own in its place."""
    from deepspeed.utils import groups

    engine.mpu = groups.mpu = mpu
    engine.dp_world_size = mpu.get_data_parallel_world_size()


def check_beliefs(engine: DeepSpeedEngine, parallel: ParallelGroups, micro_batch: int, accumulation: int) -> None:
    """Refuse to train when the engine's picture of the ranks is not the layout's.

    Raises:
        ConfigError: names each difference.
    """
    import torch.distributed as dist
    from deepspeed.utils import groups

    layout = parallel.layout

    def ranks(group: Any) -> list[int]:
        return sorted(dist.get_process_group_ranks(group))

    def members(axes: tuple[str, ...]) -> list[int]:
        return layout.group_of(layout.rank_at(*parallel.place), axes)

    replicas_and_sequence = ("dp", "cp", "sp")
    believed: dict[str, tuple[Any, Any]] = {
        "replicas": (engine.dp_world_size, layout.dp),
        "gradient ranks": (engine.seq_dp_world_size, layout.gradient_ranks),
        "ranks of the gradient group": (ranks(engine.seq_data_parallel_group), members(replicas_and_sequence)),
        "tensor-parallel size": (engine.mp_world_size, layout.tp),
        "tensor-parallel ranks": (ranks(groups.get_tensor_model_parallel_group()), members(("tp",))),
        "tensor-parallel place": (groups.get_tensor_model_parallel_rank(), parallel.place.tp),
        "DeepSpeed's own sequence parallelism": (engine.sequence_parallel_size, 1),
        "samples of a micro-batch": (engine.train_micro_batch_size_per_gpu(), micro_batch),
        "micro-batches of a step": (engine.gradient_accumulation_steps(), accumulation),
        "samples of a step": (engine.train_batch_size(), micro_batch * accumulation * layout.dp),
    }
    sharded_over = getattr(engine.optimizer, "dp_process_group", None)
    if sharded_over is not None:
        believed["ranks that ZeRO shards over"] = (ranks(sharded_over), members(replicas_and_sequence))
    parameters = [p for p in engine.module.parameters() if hasattr(p, "ds_process_group")]
    for parameter in parameters[:1]:
        held_by = (ranks(parameter.ds_process_group), members(replicas_and_sequence))
        believed["ranks that hold a parameter"] = held_by
    wrong = [
        f"DeepSpeed believes {what} to be {found}, the layout ({layout.describe()}) says {wanted}."
        for what, (found, wanted) in believed.items()
        if found != wanted
    ]
    if wrong:
        raise ConfigError([*wrong, "Training would compute wrong gradients: report this with your configuration."])
