"""``TrainingEvents``: arguments, state and control of a Trainer, and the callbacks that receive all three."""

from __future__ import annotations

from typing import Any

import torch

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.callbacks.protocol import CallbackHandler
from ds_trainer.callbacks.state import TrainerControl, TrainerState
from ds_trainer.utils import distributed

_DECISIONS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class TrainingEvents:
    """Notifies callbacks, and keeps their decisions.

    A callback may return another control object, so read :attr:`control` again after each notification.

    Args:
        args: arguments that callbacks receive.
        state: state that callbacks receive.
        handler: the callbacks.

    Attributes:
        args, state, control, handler: ``args``, ``state``, ``control`` and ``callback_handler`` of the Trainer.
        user_callbacks: whether any rank has callbacks besides the default ones. The default ones decide by step
            numbers, which are the same on all ranks.
    """

    def __init__(self, args: TrainingArguments, state: TrainerState, handler: CallbackHandler) -> None:
        self.args = args
        self.state = state
        self.control = TrainerControl()
        self.handler = handler
        self.user_callbacks = False

    def notify(self, event: str, *content: Any) -> None:
        """Call ``handler.<event>``, and keep the control that the last callback returned.

        Args:
            event: name of an event of :class:`~ds_trainer.callbacks.protocol.TrainerCallback`.
            content: metrics of ``on_evaluate`` and ``on_predict``, logs of ``on_log``.
        """
        self.control = getattr(self.handler, event)(self.args, self.state, self.control, *content)

    def notify_with(self, state: TrainerState, event: str) -> None:
        """:meth:`notify` with another state: that of a checkpoint, from an earlier step."""
        self.control = getattr(self.handler, event)(self.args, state, self.control)

    def agree_on_decisions(self) -> None:
        """Make a decision of one rank a decision of all ranks, so that no rank enters a collective alone.

        Collective if there are user callbacks and several ranks. Uses the hosts only, not the device.
        """
        if not (self.user_callbacks and distributed.world_size() > 1):
            return
        votes = distributed.agree(torch.tensor([int(getattr(self.control, name)) for name in _DECISIONS]))
        for name, vote in zip(_DECISIONS, votes, strict=True):
            setattr(self.control, name, bool(vote))

    def agree_on_user_callbacks(self) -> None:
        """Determine whether any rank has user callbacks. Collective."""
        self.user_callbacks = bool(distributed.agree(torch.tensor([int(self.user_callbacks)]))[0])
