"""``Candidate``: one way to run a training: ZeRO stage, offload, parallel sizes, batch, activation checkpointing."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

from ds_trainer.utils.units import counted

FLOAT32_SUMS = {"bf16": 64, "fp16": 512}
"""From this number of terms on, the compiled configuration adds gradients in float32."""

NVME_PATH = "/local_nvme"
"""Directory of a plan for offload to NVMe; each machine has its own."""

CHUNK_TOKENS = 1024
"""Tokens of a rank whose logits exist at a time with a chunked loss."""

FEATURES: dict[str, dict[str, Any]] = {
    "chunked_loss": {"loss_chunk_tokens": CHUNK_TOKENS},
    "tiled_mlp": {"tiled_mlp": True},
    "offload_activations": {"activation_offload": True},
}
"""What saves activations at little or no cost in time: field of :class:`Candidate`, and arguments that turn it on."""

SEARCHED_FEATURES: tuple[str, ...] = tuple(FEATURES)
"""Those of :data:`FEATURES` that ``TrainingArguments`` has."""

_FEATURE_NAMES = {
    "chunked_loss": "chunked loss",
    "tiled_mlp": "tiled MLP",
    "offload_activations": "offload activations",
}


@dataclass(frozen=True)
class Candidate:
    """One way to run.

    Args:
        world_size: ranks.
        length: tokens of a sequence.
        stage: ZeRO stage.
        micro_batch: sequences of a replica in a micro-batch.
        accumulation: micro-batches of a step.
        tp: tensor-parallel size.
        cp: context-parallel size.
        sp: sequence-parallel size.
        ep: ranks, of those that see different tokens, that divide the experts.
        offload_optimizer: optimizer states are in host memory.
        offload_param: ZeRO-3 shards are in host memory.
        optimizer_on_nvme: offloaded optimizer states are on a disk, with buffers in host memory.
        param_on_nvme: so are offloaded shards.
        hpz: ranks of ZeRO++'s second partition of the weights (hpZ), within a machine; 1 without it.
        checkpointing: activations of layers are recomputed.
        every_n_layers: with ``checkpointing``, those of the first of so many layers; the others keep theirs.
        precision: ``bf16``, ``fp16`` or ``fp32``.
        attention: ``sdpa`` (also FlashAttention) or ``eager``.
        state_bytes: bytes of optimizer states of an element: 8 for Adam.
        eval_micro_batch: sequences of a replica in a batch of evaluation; None is ``micro_batch``.
        float32_sums: gradients of micro-batches are added in float32; None follows the compiled configuration.
        chunked_loss: logits exist for some tokens at a time, in the forward and again in the backward pass.
        one_pass: with ``chunked_loss``, they are not made again: the gradient of the LM head, made with them, is in
            float32 between the passes. A run does this where there is room.
        tiled_mlp: so do MLPs and norms: on as many tokens as the model is wide.
        offload_activations: with ``checkpointing``, the inputs of layers are kept in host memory.
    """

    world_size: int
    length: int
    stage: int = 3
    micro_batch: int = 1
    accumulation: int = 1
    tp: int = 1
    cp: int = 1
    sp: int = 1
    ep: int = 1
    offload_optimizer: bool = False
    offload_param: bool = False
    optimizer_on_nvme: bool = False
    param_on_nvme: bool = False
    hpz: int = 1
    checkpointing: bool = False
    every_n_layers: int = 1
    precision: str = "bf16"
    attention: str = "sdpa"
    state_bytes: float = 8
    eval_micro_batch: int | None = None
    float32_sums: bool | None = None
    chunked_loss: bool = False
    one_pass: bool = False
    tiled_mlp: bool = False
    offload_activations: bool = False

    @property
    def replicas(self) -> int:
        """Ranks or groups of ranks that read different samples."""
        return self.world_size // (self.tp * self.cp * self.sp)

    @property
    def shards(self) -> int:
        """Ranks among which ZeRO divides the model states: data, context and sequence parallel."""
        return self.world_size // self.tp

    @property
    def zero_shards(self) -> int:
        """Ranks among which ZeRO divides optimizer states: 1 without ZeRO."""
        return self.shards if self.stage else 1

    @property
    def gradient_shards(self) -> int:
        """Ranks among which ZeRO divides accumulated gradients: 1 below stage 2."""
        return self.shards if self.stage >= 2 else 1

    @property
    def tokens(self) -> float:
        """Tokens of a rank in a micro-batch."""
        return self.micro_batch * self.length / (self.cp * self.sp)

    @property
    def global_batch(self) -> int:
        """Sequences of a step: ``get_total_train_batch_size`` of the run."""
        return self.micro_batch * self.accumulation * self.replicas

    @property
    def uses_nvme(self) -> bool:
        """Whether something is offloaded to a disk."""
        return self.optimizer_on_nvme or self.param_on_nvme

    def checkpointed_layers(self, layers: int) -> int:
        """How many of ``layers`` layers are recomputed."""
        return -(-layers // self.every_n_layers) if self.checkpointing else 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight in the model."""
        return 4 if self.precision == "fp32" else 2

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an accumulated gradient."""
        if self.float32_sums is None:
            return 4 if self.accumulation >= FLOAT32_SUMS.get(self.precision, inf) else self.weight_bytes
        return 4 if self.float32_sums else self.weight_bytes

    @property
    def number_format(self) -> str:
        """Key of the formulas of activations."""
        return "fp32" if self.precision == "fp32" else "bf16"

    def arguments(self) -> dict[str, Any]:
        """The arguments of ``TrainingArguments`` that give this run."""
        arguments: dict[str, Any] = {
            "zero_stage": self.stage,
            "per_device_train_batch_size": self.micro_batch,
            "gradient_accumulation_steps": self.accumulation,
            "activation_checkpointing": self.checkpointing,
        }
        if self.eval_micro_batch is not None:
            arguments["per_device_eval_batch_size"] = self.eval_micro_batch
        if self.precision != "fp32":
            arguments[self.precision] = True
        for name, size in (("tensor", self.tp), ("context", self.cp), ("sequence", self.sp), ("expert", self.ep)):
            if size > 1:
                arguments[f"{name}_parallel_size"] = size
        if self.checkpointing and self.every_n_layers > 1:
            arguments["activation_checkpointing_kwargs"] = {"every_n_layers": self.every_n_layers}
        if self.offload_optimizer:
            arguments["offload_optimizer"] = "nvme" if self.optimizer_on_nvme else "cpu"
        if self.offload_param:
            arguments["offload_param"] = "nvme" if self.param_on_nvme else "cpu"
        if self.uses_nvme:
            arguments["nvme_path"] = NVME_PATH
        if self.hpz > 1:
            arguments["deepspeed"] = {"zero_optimization": {"zero_hpz_partition_size": self.hpz}}
        for name in SEARCHED_FEATURES:
            if getattr(self, name):
                arguments.update(FEATURES[name])
        return arguments

    def describe(self) -> str:
        """In one line."""
        axes = ("tp", "cp", "sp", "ep")
        sizes = [f"{axis} {getattr(self, axis)}" for axis in axes if getattr(self, axis) > 1]
        names = {"optimizer": self.offload_optimizer, "param": self.offload_param}
        on_disk = {"optimizer": self.optimizer_on_nvme, "param": self.param_on_nvme}
        host = [name for name, is_offloaded in names.items() if is_offloaded and not on_disk[name]]
        disk = [name for name, is_offloaded in names.items() if is_offloaded and on_disk[name]]
        parts = [
            f"ZeRO {self.stage}",
            *([f"hpZ {self.hpz}"] if self.hpz > 1 else []),
            *[
                *([f"offload {' and '.join(host)}"] if host else []),
                *([f"{' and '.join(disk)} on NVMe"] if disk else []),
            ],
            *sizes,
            f"micro-batch {self.micro_batch}",
            *([f"accumulate {self.accumulation}"] if self.accumulation > 1 else []),
            *self._recomputed(),
            *(text for name, text in _FEATURE_NAMES.items() if getattr(self, name)),
        ]
        return ", ".join(parts)

    def _recomputed(self) -> list[str]:
        if not self.checkpointing:
            return []
        which = "" if self.every_n_layers == 1 else f" of 1 in {counted(self.every_n_layers, 'layer')}"
        return [f"activation checkpointing{which}"]


ADAM = 8.0
"""Bytes of an element for Adam: two numbers in float32."""

_STATE_BYTES = (("8bit", 2.0), ("adafactor", 0.0), ("lion", 4.0), ("adagrad", 4.0), ("rmsprop", 4.0), ("sgd", 0.0))


def state_bytes(optimizer: str) -> float:
    """Bytes of optimizer states of an element, by the name of the optimizer: Adam's for one that is not known."""
    name = optimizer.lower().replace("_", "")
    return next((size for part, size in _STATE_BYTES if part in name), ADAM)
