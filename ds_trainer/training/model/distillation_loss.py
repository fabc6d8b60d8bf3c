"""The loss of knowledge distillation: a student learns the distribution of a teacher, token by token.

With the logits ``s`` of the student and ``t`` of the teacher at a token, the temperature ``T`` and the weight ``h``::

    p = softmax(t / T), q = softmax(s / T)
    loss = h * cross_entropy(s, label) + (1 - h) * T^2 * D

where ``D`` is ``KL(p || q)`` (``forward_kl``) or ``KL(q || p)`` (``reverse_kl``). The factor ``T^2`` keeps the size of
the gradient when ``T`` changes. Only tokens with a label count.

If the heads are linear, the logits of both exist for a few tokens at a time only. The gradient of the student's logits
is then computed in the forward pass, because the teacher's weights may be sharded again in the backward pass: between
the passes, the gradients of the head's input and weight are kept, not the logits.

Sources: Hinton et al. 2015, "Distilling the Knowledge in a Neural Network"; reverse KL for language models: Gu et al.
2024, "MiniLLM". Gradients in the forward pass: Hsu et al. 2024, "Liger Kernel".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn import functional as F

from ds_trainer.arguments.checks.value_checks import distillation_problems
from ds_trainer.parallel.deferred_logits import DeferredLogits

Divergence = Literal["forward_kl", "reverse_kl"]
_IGNORED = -100


@dataclass(frozen=True)
class DistillationLoss:
    """The loss of a student.

    Attributes:
        temperature: divides the logits of both.
        hard_loss_weight: weight of the cross-entropy with the labels, 0 to 1; the rest is that of the divergence.
        divergence: ``forward_kl`` (the student covers all that the teacher may say) or ``reverse_kl`` (the student
            says what the teacher finds likely).
        classes: entries of the vocabulary that both have; None: all.
    """

    temperature: float = 1.0
    hard_loss_weight: float = 0.1
    divergence: Divergence = "forward_kl"
    classes: int | None = None

    def problems(self) -> list[str]:
        """What cannot work, as one sentence per problem."""
        return list(distillation_problems(self.temperature, self.hard_loss_weight, self.divergence))

    def of_tokens(self, student: torch.Tensor, teacher: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss of each token: float32 ``[N]``, 0 where there is no target.

        Args:
            student: logits ``[N, V]``.
            teacher: logits ``[N, V']``.
            targets: classes ``[N]``, -100 where there is none.
        """
        student, teacher = student.float(), teacher.float()
        valid = targets != _IGNORED
        total = torch.zeros_like(student[:, 0])
        if self.hard_loss_weight < 1:
            log_q, log_p = (
                F.log_softmax(logits[:, : self.classes] / self.temperature, dim=-1) for logits in (student, teacher)
            )
            first, second = (log_p, log_q) if self.divergence == "forward_kl" else (log_q, log_p)
            divergence = (first.exp() * (first - second)).sum(-1)
            total = (1 - self.hard_loss_weight) * self.temperature**2 * divergence
        if self.hard_loss_weight > 0:
            hard = F.cross_entropy(student, targets, ignore_index=_IGNORED, reduction="none")
            total = total + self.hard_loss_weight * hard
        return torch.where(valid, total, torch.zeros_like(total))

    def total(self, student: torch.Tensor, teacher: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The sum of the losses of all tokens, a float32 scalar.

        Args:
            student: logits ``[..., V]``, perhaps deferred (:mod:`ds_trainer.parallel.deferred_logits`).
            teacher: logits ``[..., V']``, perhaps deferred.
            targets: classes ``[...]``.
        """
        targets = targets.flatten()
        if isinstance(student, DeferredLogits) and isinstance(teacher, DeferredLogits):
            return self._in_heads(student, teacher, targets)
        whole = [value.read() if isinstance(value, DeferredLogits) else value for value in (student, teacher)]
        flat = [logits.reshape(-1, logits.shape[-1]) for logits in whole]
        return self.of_tokens(flat[0], flat[1], targets).sum()

    def _in_heads(self, student: DeferredLogits, teacher: DeferredLogits, targets: torch.Tensor) -> torch.Tensor:
        """Both heads have whole weights inside; the logits are made for ``chunk_tokens`` of the student at a time."""
        hidden = student.hidden.flatten(0, -2)
        of_teacher = teacher.hidden.reshape(1, -1, teacher.hidden.shape[-1])
        functions, chunk = student.functions, student.reader.chunk_tokens

        def compute(terms: Sequence[tuple[torch.Tensor, torch.Tensor]], bias: torch.Tensor | None) -> torch.Tensor:
            def use(logits_of: Callable[[Any], torch.Tensor]) -> torch.Tensor:
                def losses(linear: torch.Tensor, rows: slice) -> torch.Tensor:
                    logits = linear
                    for function in functions:
                        logits = function(logits, slice(0, logits.shape[-1]))
                    with torch.no_grad():
                        known = logits_of(rows)[0]
                    return self.of_tokens(logits, known, targets[rows]).sum()

                tensors = [tensor for pair in terms for tensor in pair]
                total: torch.Tensor = _SumOverChunks.apply(losses, chunk, bias, *tensors)
                return total

            result: torch.Tensor = teacher.reader.pieces(of_teacher, teacher.functions, use)
            return result

        return student.reader.in_head(hidden, compute)


class _SumOverChunks(torch.autograd.Function):
    """``sum(losses(logits of some tokens, these tokens))``, with the gradients computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        losses: Callable[[torch.Tensor, slice], torch.Tensor],
        chunk: int,
        bias: torch.Tensor | None,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        hidden, weights = tensors[0::2], tensors[1::2]
        needs_bias, *needs = ctx.needs_input_grad[2:]
        tokens = hidden[0].shape[0]
        total = torch.zeros((), dtype=torch.float32, device=hidden[0].device)
        of_hidden = [torch.zeros_like(x) if needed else None for x, needed in zip(hidden, needs[0::2], strict=True)]
        of_weights = [
            torch.zeros_like(weight, dtype=torch.float32) if needed else None
            for weight, needed in zip(weights, needs[1::2], strict=True)
        ]
        of_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias and bias is not None else None
        for start in range(0, tokens, chunk):
            rows = slice(start, min(start + chunk, tokens))
            products = [F.linear(x[rows], weight) for x, weight in zip(hidden, weights, strict=True)]
            linear = sum(products[1:], start=products[0])
            linear = linear if bias is None else linear + bias
            if not any(ctx.needs_input_grad):
                total += losses(linear, rows)
                continue
            with torch.enable_grad():
                linear = linear.detach().requires_grad_()
                loss = losses(linear, rows)
            (gradient,) = torch.autograd.grad(loss, linear)
            total += loss.detach()
            for x, weight, whole, sums in zip(hidden, weights, of_hidden, of_weights, strict=True):
                if whole is not None:
                    whole[rows] = gradient.to(weight.dtype) @ weight
                if sums is not None:
                    sums += gradient.t().to(x.dtype) @ x[rows]
            if of_bias is not None:
                of_bias += gradient.sum(0)
        kept = [
            None if sums is None else sums.to(weight.dtype) for sums, weight in zip(of_weights, weights, strict=True)
        ]
        ctx.gradients = (None if of_bias is None or bias is None else of_bias.to(bias.dtype), of_hidden, kept)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, factor: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_bias, of_hidden, of_weights = ctx.gradients
        ctx.gradients = None
        gradients = [of_bias, *(gradient for pair in zip(of_hidden, of_weights, strict=True) for gradient in pair)]
        return (
            None,
            None,
            *(None if gradient is None else gradient.mul_(factor.to(gradient.dtype)) for gradient in gradients),
        )
