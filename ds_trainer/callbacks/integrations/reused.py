"""Trackers for which transformers' own callback is used as it is, with our failure policy around it."""

from __future__ import annotations

from typing import Any

from ds_trainer.callbacks.integrations.tracker import import_tracker, switched_off
from ds_trainer.utils.errors import ConfigError

_MODULE = "transformers.integrations.integration_utils"


class Guarded:
    """Mixin in front of a callback class: an error of :meth:`on_log` or at the end switches the tracker off."""

    name: str
    _off = False

    def on_train_begin(self, *arguments: Any, **kwargs: Any) -> None:
        self._off = False
        super().on_train_begin(*arguments, **kwargs)  # type: ignore[misc]

    def on_log(self, *arguments: Any, **kwargs: Any) -> None:
        self._guarded("on_log", *arguments, **kwargs)

    def on_train_end(self, *arguments: Any, **kwargs: Any) -> None:
        self._guarded("on_train_end", *arguments, **kwargs)

    def on_save(self, *arguments: Any, **kwargs: Any) -> None:
        self._guarded("on_save", *arguments, **kwargs)

    def on_predict(self, *arguments: Any, **kwargs: Any) -> None:
        self._guarded("on_predict", *arguments, **kwargs)

    def _guarded(self, event: str, *arguments: Any, **kwargs: Any) -> None:
        if self._off:
            return
        try:
            getattr(super(), event)(*arguments, **kwargs)
        except Exception as error:
            switched_off(self.name, error)
            self._off = True


def reused_callback(name: str, class_name: str, package: str, install: str) -> Any:
    """An instance of transformers' callback for the tracker ``name``, guarded.

    Raises:
        ConfigError: transformers or the tracker's library cannot be imported, or the callback refuses to start.
    """
    integrations = import_tracker(name, _MODULE, "transformers")
    import_tracker(name, package, install)
    original = getattr(integrations, class_name)
    try:
        return type(class_name, (Guarded, original), {"name": name})()
    except (ImportError, RuntimeError) as error:  # no API key, say
        raise ConfigError(f"report_to={name}: {error} Otherwise take {name} out of report_to.") from error
