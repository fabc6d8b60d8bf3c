"""Gradients of stage 0 are reduced while the backward pass runs: a bucket is sent when its last gradient is there.

DeepSpeed 0.19.8 (``DeepSpeedEngine.buffered_allreduce_fallback``) begins after the backward pass, and copies the
gradients into messages of up to 500 million elements and back. Here a bucket is one tensor, of which its gradients
become views: nothing is copied back, and no message exists beside the gradients. The buckets follow from the order of
the parameters in the model, reversed as in :mod:`ds_trainer.engine.reduction_order`, and are sent in this order, so the
results are the same bits as without overlap, which sends all of them at the end. A single rank reduces nothing.

Left to DeepSpeed: gradients of divided experts, sparse gradients, and its bf16 optimizer with float32 gradients.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

BUCKET = 1 << 24
"""Elements of a bucket: 32 MB in 16 bits. A tensor with more has one of its own."""

_TWICE = (
    "The gradient of {name} was computed a second time in one backward pass, after its reduction had begun. With "
    "use_reentrant=True, checkpointing computes the gradients of each block alone; set use_reentrant=False, use the "
    'parameter in one block only, or set "overlap_comm": false in "zero_optimization" of the DeepSpeed file.'
)


class _Sent(NamedTuple):
    """A bucket that is being summed over the ranks.

    Attributes:
        work: the handle of the collective.
        gradients: flat; its parts are the gradients of the parameters.
        message: in the dtype of the communication; ``gradients`` itself if that is theirs.
    """

    work: Any
    gradients: torch.Tensor
    message: torch.Tensor


class WholeReduction:
    """Takes the place of DeepSpeed's reduction of whole gradients.

    Args:
        engine: DeepSpeed's engine, at stage 0.
        ranks: over which gradients are reduced.
        overlaps: whether buckets are sent while the backward pass runs.
    """

    def __init__(self, engine: Any, ranks: int, overlaps: bool) -> None:
        from deepspeed.moe.utils import is_moe_param
        from deepspeed.utils import groups

        self._engine, self._group = engine, groups._get_sequence_data_parallel_group()
        self._averaged_over = ranks / float(engine.sequence_parallel_size)
        self._buckets: list[list[Any]] = []
        self._names: dict[int, str] = {}
        size = 0
        named = list(engine.module.named_parameters())
        tables = (module for module in engine.module.modules() if getattr(module, "sparse", False))
        sparse = {id(parameter) for module in tables for parameter in module.parameters()}
        dense = [(name, p) for name, p in named if p.numel() and id(p) not in sparse and not is_moe_param(p)]
        whole = [(name, p) for name, p in dense if p.requires_grad]
        for name, parameter in reversed(whole):
            self._names[id(parameter)] = name
            last = self._buckets[-1][-1] if self._buckets else None
            like_last = last is not None and (last.dtype, last.device) == (parameter.dtype, parameter.device)
            if not like_last or size + parameter.numel() > BUCKET:
                self._buckets.append([])
                size = 0
            self._buckets[-1].append(parameter)
            size += parameter.numel()
        self._bucket_of = {id(p): index for index, bucket in enumerate(self._buckets) for p in bucket}
        self._others = [p for _, p in named if id(p) not in self._bucket_of]  # a script may train frozen ones later
        self._sent: list[_Sent] = []
        self._restart()
        self._reduces = ranks > 1
        early = whole if overlaps and self._reduces else []
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._arrives) for _, parameter in early]
        self._all_gradients = engine._get_gradients_for_reduction
        engine._get_gradients_for_reduction = self._complete

    def close(self) -> None:
        """Remove the hooks: the module may be trained by another engine."""
        for hook in self._hooks:
            hook.remove()

    def _restart(self) -> None:
        """Wait for the first gradient of a pass."""
        self._missing = [{id(parameter) for parameter in bucket} for bucket in self._buckets]
        self._missing.append({0})  # never complete: it ends the loop over them

    def interrupted(self) -> None:
        """Wait for what was sent by an interrupted pass, and forget it."""
        for sent in self._sent:
            sent.work.wait()
        self._sent.clear()
        self._restart()

    def _arrives(self, parameter: torch.Tensor) -> None:
        """A hook: the gradient of ``parameter`` is there; for each of them, so it is short."""
        if not self._engine._is_gradient_accumulation_boundary:
            return
        index = self._bucket_of[id(parameter)]
        if index < len(self._sent):
            raise RuntimeError(_TWICE.format(name=self._names[id(parameter)]))
        self._missing[index].discard(id(parameter))
        while not self._missing[len(self._sent)]:
            self._send(self._buckets[len(self._sent)])

    def _send(self, bucket: list[Any]) -> None:
        from deepspeed import comm

        engine = self._engine
        for parameter in bucket:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if not self._reduces:
            return
        if len(bucket) == 1 and bucket[0].grad.is_contiguous():
            gradients = bucket[0].grad.view(-1)
        else:
            gradients = torch.cat([parameter.grad.reshape(-1) for parameter in bucket])
            for parameter, part in zip(bucket, gradients.split([one.numel() for one in bucket]), strict=True):
                parameter.grad = part.view(parameter.shape)
        message = gradients.to(engine.communication_data_type)
        if engine.gradient_average:
            before = engine.gradient_predivide_factor() if engine.postscale_gradients() else self._averaged_over
            if before != 1.0:
                message.mul_(1.0 / before)
        self._sent.append(_Sent(comm.all_reduce(message, group=self._group, async_op=True), gradients, message))

    def _complete(self) -> tuple[list[torch.Tensor], Any]:
        """DeepSpeed's ``_get_gradients_for_reduction``, at the end of a step: those that are not reduced here."""
        engine = self._engine
        for bucket in self._buckets[len(self._sent) :]:  # zeros for what this rank has no gradient of
            self._send(bucket)
        after = engine.gradient_predivide_factor() / self._averaged_over if engine.postscale_gradients() else 1.0
        for sent in self._sent:
            sent.work.wait()  # on a GPU the stream waits, not the host
            if engine.gradient_average and after != 1.0:
                sent.message.mul_(after)
            if sent.message is not sent.gradients:
                sent.gradients.copy_(sent.message)
        self._sent.clear()
        self._restart()
        if not any(parameter.requires_grad for parameter in self._others):
            return [], {}
        reduced = {parameter.grad.data_ptr() for bucket in self._buckets for parameter in bucket}
        gradients, of_experts = self._all_gradients()
        left = [one for one in gradients if not isinstance(one, torch.Tensor) or one.data_ptr() not in reduced]
        return left, of_experts
