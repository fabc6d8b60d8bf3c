"""Model states of a rank, as DeepSpeed allocates them: weights, gradients, masters, optimizer states, buckets.

Sources (DeepSpeed 0.19.8): ``runtime/engine.py`` (which optimizer wraps), ``runtime/fp16/unfused_optimizer.py`` and
``fused_optimizer.py`` (stage 0 in 16 bits), ``runtime/bf16_optimizer.py`` (stage 1 with float32 accumulation),
``runtime/zero/stage_1_and_2.py``, ``runtime/zero/stage3.py`` and ``partition_parameters.py``. Compared with the
tensors of real engines in ``tests/planner/memory``.
"""

from __future__ import annotations

from dataclasses import dataclass

FP32_BYTES = 4


@dataclass(frozen=True)
class StateSettings:
    """What decides the size of the model states, from the compiled configuration.

    Attributes:
        zero_stage: 0 to 3.
        partitions: ranks over which ZeRO shards: data, context and sequence parallelism together.
        weight_bytes: bytes of a weight in the forward pass: 2 (bf16, fp16) or 4.
        accumulation_bytes: bytes of a gradient while it is summed over micro-batches.
        accumulation_steps: micro-batches of an optimizer step.
        moments: optimizer states per weight: 2 for Adam, 1 for SGD with momentum and Lion, 0 for SGD.
        reduce_bucket: ``reduce_bucket_size``, in elements.
        overlap: whether ``overlap_comm`` makes a second bucket (stages 1 and 2).
    """

    zero_stage: int
    partitions: int
    weight_bytes: int = 2
    accumulation_bytes: int = 2
    accumulation_steps: int = 1
    moments: int = 2
    reduce_bucket: int = 0
    overlap: bool = False

    @property
    def has_masters(self) -> bool:
        """Whether there is a float32 copy of the weights: in 16 bits, and where ZeRO has its own partition."""
        return self.zero_stage > 0 or self.weight_bytes < FP32_BYTES

    @property
    def sums_whole_gradients(self) -> bool:
        """Whether DeepSpeed's ``BF16_Optimizer`` is used, which sums whole gradients in float32."""
        return self.zero_stage == 1 and self.weight_bytes == 2 and self.accumulation_bytes == FP32_BYTES


@dataclass(frozen=True)
class ModelStates:
    """Bytes of a rank.

    Attributes:
        weights: trainable and frozen weights in the format of the forward pass.
        masters: float32 weights of the optimizer.
        optimizer: its states, which exist from the first step on.
        persistent_gradients: buffers of gradients that always exist.
        gradients: gradients at the end of the last backward pass of a step, buffers included.
        between: gradients between two micro-batches, buffers included.
        bucket: buckets of gradients that are reduced; at stage 3 always, else during the backward pass.
    """

    weights: float
    masters: float
    optimizer: float
    persistent_gradients: float
    gradients: float
    between: float
    bucket: float


def model_states(trainable: float, frozen: float, settings: StateSettings, whole: float = 0) -> ModelStates:
    """The model states of a rank that holds ``trainable + frozen`` elements before ZeRO shards them.

    Args:
        trainable: elements of trainable weights; with tensor parallelism those of the rank.
        frozen: elements of frozen weights.
        settings: the engine.
        whole: elements, of those, that stage 3 does not shard (``stage3_param_persistence_threshold``).
    """
    stage, ranks, width = settings.zero_stage, settings.partitions, settings.weight_bytes
    shard = trainable / ranks if stage else trainable
    weights = (trainable + frozen) * width
    if stage == 3:
        weights = ((trainable + frozen - whole) / ranks + whole) * width
    masters = FP32_BYTES * shard if settings.has_masters else 0.0
    optimizer = settings.moments * FP32_BYTES * shard
    bucket = settings.reduce_bucket * width if stage else 0.0
    if stage in (1, 2) and settings.overlap:
        bucket *= 2
    always, last, between = _gradients(trainable, shard, settings)
    return ModelStates(weights, masters, optimizer, always, last, between, float(bucket))


def _gradients(trainable: float, shard: float, settings: StateSettings) -> tuple[float, float, float]:
    """Bytes of gradients: always, at the end of a step's last backward pass, and between micro-batches."""
    width = settings.accumulation_bytes
    if settings.sums_whole_gradients:
        sums = float(FP32_BYTES * trainable)
        return sums, sums + settings.weight_bytes * trainable, sums + settings.weight_bytes * trainable
    if settings.zero_stage == 3:
        return width * shard, width * shard, width * shard
    if settings.zero_stage == 2:
        return 0.0, width * shard, width * shard
    if settings.zero_stage == 1:
        whole = settings.weight_bytes * trainable
        return 0.0, width * shard, whole
    return 0.0, float(width * trainable), float(width * trainable)
