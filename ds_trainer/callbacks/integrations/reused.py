"""Callbacks of transformers for other trackers, with the failure policy of this package."""

from __future__ import annotations

from typing import Any

from ds_trainer.callbacks.integrations.tracker import import_tracker, switched_off
from ds_trainer.utils.errors import ConfigError

_MODULE = "transformers.integrations.integration_utils"


class Guarded:
    """Mixin for a callback class: an error while logging, saving or ending disables the tracker."""

    name: str
    _off = False

    def on_train_begin(self, *arguments: Any, **kwargs: Any) -> None:
        """Open the run."""
        self._off = False
        super().on_train_begin(*arguments, **kwargs)  # type: ignore[misc]

    def on_log(self, *arguments: Any, **kwargs: Any) -> None:
        """Record the logs."""
        self._guarded("on_log", *arguments, **kwargs)

    def on_train_end(self, *arguments: Any, **kwargs: Any) -> None:
        """Finish the run."""
        self._guarded("on_train_end", *arguments, **kwargs)

    def on_save(self, *arguments: Any, **kwargs: Any) -> None:
        """Record the checkpoint."""
        self._guarded("on_save", *arguments, **kwargs)

    def on_predict(self, *arguments: Any, **kwargs: Any) -> None:
        """Record the metrics of a prediction."""
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
    """A guarded instance of transformers' callback for the tracker ``name``.

    Raises:
        ConfigError: transformers or the tracker's library cannot be imported, or the callback refuses to start.
    """
    integrations = import_tracker(name, _MODULE, "transformers")
    import_tracker(name, package, install)
    original = getattr(integrations, class_name)
    try:
        return type(class_name, (Guarded, original), {"name": name})()
    except (ImportError, RuntimeError) as error:  # a missing API key, for example
        raise ConfigError(f"report_to={name}: {error} Otherwise take {name} out of report_to.") from error
