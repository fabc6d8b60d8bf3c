"""Resolves the class of a model from ``auto_class`` or from the model's configuration."""

from __future__ import annotations

from typing import Any

from ds_trainer.utils.errors import ConfigError, did_you_mean

_COMMON = "AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification ..."


def resolve_model_class(config: Any, auto_class: Any, where: str, trust_remote_code: bool = False) -> Any:
    """Returns the class that builds ``config``: an auto class of transformers, or a model class.

    Args:
        config: the configuration.
        auto_class: the class or its name in transformers; None for the first of ``config.architectures``.
        where: the directory or Hub name, for messages.
        trust_remote_code: allow classes defined in the repository's code.

    Raises:
        ConfigError: there is no such class, or it does not support this model type.
    """
    import transformers

    if auto_class is not None:
        requested = _class_by_name(auto_class, where) if isinstance(auto_class, str) else auto_class
        return _checked_class(requested, config, where, trust_remote_code)
    names = list(getattr(config, "architectures", None) or ())
    if not names:
        raise ConfigError(
            f"{where}: architectures in its configuration names no class. Set auto_class (in model_init_kwargs) to one "
            f"of {_COMMON}"
        )
    model_class = getattr(transformers, names[0], None)
    config_class = getattr(model_class, "config_class", None)
    if model_class is not None and (not isinstance(config_class, type) or isinstance(config, config_class)):
        return model_class
    remote = _remote_auto_class(config)
    if remote is not None and trust_remote_code:
        return remote
    if remote is not None:
        raise ConfigError(
            f"{where}: {names[0]} is defined in its repository, not in transformers. Read that code, then pass "
            "trust_remote_code=True."
        )
    if model_class is not None:
        raise ConfigError(
            f"{where}: config.json has model_type {config.model_type}, but its architectures entry {names[0]} is for "
            f"{getattr(config_class, 'model_type', config_class)} models. Correct one of them, or pass auto_class."
        )
    raise ConfigError(
        f"{where}: transformers {transformers.__version__} has no {names[0]} (architectures in config.json). Pass "
        f"auto_class, one of {_COMMON}"
    )


def _class_by_name(name: str, where: str) -> Any:
    import transformers

    cls = getattr(transformers, name, None)
    if cls is None:
        known = [known for known in dir(transformers) if known.startswith("AutoModel")]
        raise ConfigError(f"{where}: auto_class={name!r} is not in transformers.{did_you_mean(name, known)}")
    return cls


def _checked_class(requested: Any, config: Any, where: str, trust_remote_code: bool) -> Any:
    from transformers import PreTrainedModel

    name = getattr(requested, "__name__", repr(requested))
    if isinstance(requested, type) and issubclass(requested, PreTrainedModel):
        config_class = getattr(requested, "config_class", None)
        if config_class is not None and not isinstance(config, config_class):
            raise ConfigError(
                f"{where}: auto_class={name} is for {getattr(config_class, 'model_type', config_class.__name__)} "
                f"models, but this model has type {config.model_type}. Choose another class."
            )
        return requested
    mapping = getattr(requested, "_model_mapping", None)
    if mapping is None or not callable(getattr(requested, "from_config", None)):
        raise ConfigError(f"{where}: auto_class={name} is not a model class of transformers. Pass one of {_COMMON}")
    remote = name in (getattr(config, "auto_map", None) or {})
    if type(config) not in mapping and not (remote and trust_remote_code):
        hint = " Its repository defines one: read that code, then pass trust_remote_code=True." if remote else ""
        listed = ", ".join(getattr(config, "architectures", None) or ()) or "no class"
        raise ConfigError(
            f"{where}: transformers has no {name} for models of type {config.model_type}; its config.json names "
            f"{listed}.{hint}"
        )
    return requested


def _remote_auto_class(config: Any) -> Any:
    import transformers

    for name in getattr(config, "auto_map", None) or {}:
        if name.startswith("AutoModel") and name != "AutoModel":
            return getattr(transformers, name, None)
    return None
