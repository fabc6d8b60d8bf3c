"""The class of a model that is named: what is asked for, else what its configuration says."""

from __future__ import annotations

from typing import Any

from ds_trainer.utils.errors import ConfigError, did_you_mean

_COMMON = "AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification ..."


def class_of(config: Any, auto_class: Any, where: str, trust_remote_code: bool = False) -> Any:
    """The class to build ``config`` with: an auto class of transformers, or a model class.

    Args:
        config: the configuration.
        auto_class: the class or its name in transformers; None for the first of ``config.architectures``.
        where: the directory or hub name, for messages.
        trust_remote_code: classes in the repository's own code may be used.

    Raises:
        ConfigError: there is no such class, or it is not for models of this type.
    """
    import transformers

    if auto_class is not None:
        asked = _named(auto_class, where) if isinstance(auto_class, str) else auto_class
        return _fitting(asked, config, where, trust_remote_code)
    names = list(getattr(config, "architectures", None) or ())
    if not names:
        raise ConfigError(
            f"{where}: its configuration names no class (architectures). Pass auto_class (model_init_kwargs), one of "
            f"{_COMMON}"
        )
    found = getattr(transformers, names[0], None)
    wanted = getattr(found, "config_class", None)
    if found is not None and (not isinstance(wanted, type) or isinstance(config, wanted)):
        return found
    remote = _remote_auto_class(config)
    if remote is not None and trust_remote_code:
        return remote
    if remote is not None:
        raise ConfigError(
            f"{where}: {names[0]} is code of its repository, not of transformers. Pass trust_remote_code=True if you "
            "have read that code."
        )
    if found is not None:
        raise ConfigError(
            f"{where}: its config.json says model_type {config.model_type}, and architectures {names[0]}, which is for "
            f"{getattr(wanted, 'model_type', wanted)} models. Correct one of them, or pass auto_class."
        )
    raise ConfigError(
        f"{where}: transformers {transformers.__version__} has no {names[0]} (architectures in config.json). Pass "
        f"auto_class, one of {_COMMON}"
    )


def _named(name: str, where: str) -> Any:
    import transformers

    found = getattr(transformers, name, None)
    if found is None:
        known = [known for known in dir(transformers) if known.startswith("AutoModel")]
        raise ConfigError(f"{where}: auto_class={name!r} is not in transformers.{did_you_mean(name, known)}")
    return found


def _fitting(asked: Any, config: Any, where: str, trust_remote_code: bool) -> Any:
    from transformers import PreTrainedModel

    name = getattr(asked, "__name__", repr(asked))
    if isinstance(asked, type) and issubclass(asked, PreTrainedModel):
        wanted = getattr(asked, "config_class", None)
        if wanted is not None and not isinstance(config, wanted):
            raise ConfigError(
                f"{where}: auto_class={name} is for {getattr(wanted, 'model_type', wanted.__name__)} models, and this "
                f"is one of type {config.model_type}."
            )
        return asked
    mapping = getattr(asked, "_model_mapping", None)
    if mapping is None or not callable(getattr(asked, "from_config", None)):
        raise ConfigError(f"{where}: auto_class={name} is no model class of transformers. Pass one of {_COMMON}")
    remote = name in (getattr(config, "auto_map", None) or {})
    if type(config) not in mapping and not (remote and trust_remote_code):
        hint = " Its repository has code for it: pass trust_remote_code=True if you have read it." if remote else ""
        own = ", ".join(getattr(config, "architectures", None) or ()) or "no class"
        raise ConfigError(
            f"{where}: transformers has no {name} for models of type {config.model_type}; its config.json names "
            f"{own}.{hint}"
        )
    return asked


def _remote_auto_class(config: Any) -> Any:
    import transformers

    for name in getattr(config, "auto_map", None) or {}:
        if name.startswith("AutoModel") and name != "AutoModel":
            return getattr(transformers, name, None)
    return None
