"""Hooks of modules that are removed for a while and put back where they were."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any


class SavedHooks:
    """Functions and positions of module hooks.

    Args:
        handles: what ``register_forward_hook`` and its like returned.
    """

    def __init__(self, handles: Sequence[Any]) -> None:
        self._ids = {handle.id for handle in handles}
        registries = {id(hooks): hooks for handle in handles if (hooks := handle.hooks_dict_ref()) is not None}
        self._before = [(hooks, OrderedDict(hooks)) for hooks in registries.values()]
        # How a hook is called (with keyword arguments, always), which is stored apart from the function.
        options = [(options, handle.id) for handle in handles for ref in handle.extra_dict_ref if (options := ref())]
        self._options = [(found, key, found[key]) for found, key in options if key in found]

    def remove(self) -> None:
        """Remove the hooks. Their options stay."""
        for hooks, _ in self._before:
            for key in self._ids & hooks.keys():
                del hooks[key]

    def restore(self) -> None:
        """Put the hooks back at their positions, before hooks that were added since."""
        for hooks, old in self._before:
            added = {key: hook for key, hook in hooks.items() if key not in old}
            restored = {key: hook for key, hook in old.items() if key in hooks or key in self._ids}
            hooks.clear()
            hooks.update({**restored, **added})
        for options, key, value in self._options:
            options[key] = value
