"""DeepSpeed's default sizes of sub-groups and of the buffers of offload to NVMe (``runtime/zero/config.py``,
``offload_config.py``).
"""

SUB_GROUP = 10**9
"""DeepSpeed's default of ``sub_group_size``: ZeRO 3 updates that many elements at a time."""
OPTIMIZER_BUFFERS = 4
"""``offload_optimizer.buffer_count``: masters, gradients and two states of Adam."""
PARAM_BUFFERS = 5
"""``offload_param.buffer_count``, DeepSpeed's default. A module needs one for each of its own weights: decoders were
measured to use one at a time, if weights are released after each use and nothing is prefetched."""
PARAM_BUFFER = 10**8
"""DeepSpeed's default of ``offload_param.buffer_size``, in elements: for a model whose shape is not known."""
_SMALLEST_PARAM_BUFFER = 2**20
PARAMS_IN_HOST = 10**9
"""``offload_param.max_in_cpu``: elements of a rank's shards that stay in host memory."""


def param_buffer(largest: int, shards: int) -> int:
    """``offload_param.buffer_size`` of the compiled configuration.

    Args:
        largest: elements of the largest matrix; 0 if it is not known.
        shards: ranks that share it.
    """
    if not largest:
        return PARAM_BUFFER
    shard = max(-(-largest // shards), _SMALLEST_PARAM_BUFFER)
    return shard + shard % 2
