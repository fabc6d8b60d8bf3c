"""Changes that arguments make to a model, one file per topic, used by :mod:`ds_trainer.training.model.preparation`."""
