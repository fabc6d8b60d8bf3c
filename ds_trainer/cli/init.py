"""``ds-trainer init``: writes a commented recipe for a model, data and machine."""
