"""What the arguments do to a model, one file a topic; :mod:`ds_trainer.training.model.preparation` calls them."""
