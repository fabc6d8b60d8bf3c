"""DeepSpeed's default sizes of sub-groups and of the buffers of offload to NVMe (``runtime/zero/config.py``,
``offload_config.py``).
"""

SUB_GROUP = 10**9
"""DeepSpeed's default of ``sub_group_size``: ZeRO 3 updates that many elements at a time."""
OPTIMIZER_BUFFERS = 4
"""``offload_optimizer.buffer_count``: masters, gradients and two states of Adam."""
PARAM_BUFFERS, PARAM_BUFFER = 5, 10**8
"""``offload_param.buffer_count`` and ``buffer_size``, in elements; the compiler gives larger shards larger buffers."""
PARAMS_IN_HOST = 10**9
"""``offload_param.max_in_cpu``: elements of a rank's shards that stay in host memory."""
